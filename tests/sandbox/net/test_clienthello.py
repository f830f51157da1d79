"""Reading the name out of TLS: checklist item 32. Hellos come from OpenSSL, and are then spoilt by hand."""

from __future__ import annotations

import itertools
import ssl
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.sandbox.net import clienthello
from proctor.sandbox.net.clienthello import HelloError


def openssl_hello(name: str | None, alpn: list[str] | None = None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    if alpn:
        context.set_alpn_protocols(alpn)
    out = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return out.read()


HELLO = openssl_hello("one.test", ["h2", "http/1.1"])


def record(body: bytes) -> bytes:
    return b"\x16\x03\x01" + struct.pack("!H", len(body)) + body


def hello_with(*extensions: tuple[int, bytes]) -> bytes:
    packed = b"".join(struct.pack("!HH", kind, len(content)) + content for kind, content in extensions)
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\2\x13\x01" + b"\1\0" + struct.pack("!H", len(packed)) + packed
    return record(b"\x01" + len(body).to_bytes(3, "big") + body)


def names(*entries: tuple[int, bytes]) -> bytes:
    packed = b"".join(bytes([kind]) + struct.pack("!H", len(name)) + name for kind, name in entries)
    return struct.pack("!H", len(packed)) + packed


def reason_of(data: bytes) -> str:
    with pytest.raises(HelloError) as caught:
        clienthello.read(data)
    return str(caught.value)


def test_the_name_and_protocols_of_a_real_hello() -> None:
    found = clienthello.read(HELLO)
    assert found is not None
    assert found.server_name == "one.test"
    assert found.alpn == (b"h2", b"http/1.1")


def test_every_cut_of_it_is_just_not_complete() -> None:
    assert all(clienthello.read(HELLO[:size]) is None for size in range(len(HELLO)))


@given(st.lists(st.integers(1, len(HELLO) - 6), max_size=8))
def test_it_may_be_spread_over_records(cuts: list[int]) -> None:
    body = HELLO[5:]
    edges = [0, *sorted(set(cuts)), len(body)]
    spread = b"".join(record(body[a:b]) for a, b in itertools.pairwise(edges) if b > a)
    found = clienthello.read(spread)
    assert found is not None
    assert found.server_name == "one.test"
    assert clienthello.read(spread[:-1]) is None


def test_hidden_names_are_refused() -> None:
    assert reason_of(openssl_hello(None)) == "tls-no-name"
    visible = (0, names((0, b"one.test")))
    assert reason_of(hello_with(visible, (0xFE0D, b"\0" * 10))) == "tls-encrypted-name"
    assert reason_of(hello_with(visible, (0xFFCE, b""))) == "tls-encrypted-name"


def test_two_readings_are_refused() -> None:
    assert reason_of(hello_with((0, names((0, b"one.test"))), (0, names((0, b"two.test"))))) == "tls-malformed"
    assert reason_of(hello_with((0, names((0, b"one.test"), (0, b"two.test"))))) == "tls-malformed"
    assert reason_of(hello_with((0, names((1, b"one.test"))))) == "tls-malformed"
    assert reason_of(hello_with((0, names((0, b"\xff.test"))))) == "tls-malformed"
    # More handshake data after the hello, in its last record and in one of its own that is not there yet.
    body = HELLO[5:]
    assert reason_of(record(body + b"\x01\0\0\0")) == "tls-malformed"


def test_what_is_no_hello_or_too_long_is_refused_before_it_is_complete() -> None:
    assert reason_of(record(b"\x02\0\0\x10")) == "tls-no-client-hello"
    assert reason_of(b"\x17\x03\x03\0\x05") == "tls-malformed"
    assert reason_of(b"\x16\x02") == "tls-malformed"
    assert reason_of(record(b"")[:5]) == "tls-malformed"
    assert reason_of(record(b"\x01\xff\xff\xff" + bytes(100))) == "tls-hello-too-long"
    # One byte a record: refused long before it is complete, since each look begins at the beginning.
    assert reason_of(b"".join(record(bytes([byte])) for byte in HELLO[5:205])) == "tls-hello-too-long"
    assert reason_of(record(b"\x01") + record(b"\0") + record(b"\x7f") + record(b"\xff") + record(b"x") * 40000)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    for prefix in (b"", HELLO[:5], HELLO[:60], HELLO[:120]):
        with suppress(HelloError):
            clienthello.read(prefix + data)


@given(st.integers(5, len(HELLO) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_gives_another_name_by_accident(at: int, flip: int) -> None:
    spoilt = bytearray(HELLO)
    spoilt[at] ^= flip
    try:
        found = clienthello.read(bytes(spoilt))
    except HelloError:
        return
    if found is not None and found.server_name != "one.test":
        start = HELLO.index(b"one.test")
        assert start <= at < start + 8
