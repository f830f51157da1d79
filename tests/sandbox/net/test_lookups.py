"""Name look-ups: checklist item 31. Queries are written by hand here, not by the code under test."""

from __future__ import annotations

import struct
from dataclasses import replace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.sandbox.net import dnswire
from proctor.sandbox.net.dnswire import Code, Type
from proctor.sandbox.net.events import NetworkEvent, Recorder
from proctor.sandbox.net.lookups import AddressBook, Answerer, Full
from proctor.sandbox.net.policy import NetworkPolicy, Rule

pytestmark = pytest.mark.anyio


def query(
    name: str, kind: int = 1, *, query_id: int = 7, flags: int = 0x0100, tail: bytes = b"", counts: str = ""
) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
    numbers = [int(part) for part in counts.split()] or [1, 0, 0, 0]
    return struct.pack("!6H", query_id, flags, *numbers) + labels + struct.pack("!2H", kind, 1) + tail


class Directory:
    """What a boundary is to the answerer, with a policy and nothing else."""

    def __init__(self) -> None:
        self.policy = NetworkPolicy("allow", (Rule("one.test"), Rule("*.many.test")))
        self.book = AddressBook()

    def known(self, name: str) -> str | None:
        if self.policy.names_exactly(name):
            return "exact"
        return "wildcard" if self.policy.ports_of(name) else None

    async def open(self, name: str) -> str:
        await anyio.lowlevel.checkpoint()
        return self.book.allot(name)

    def event(self, event: NetworkEvent) -> NetworkEvent:
        return replace(event, phase="agent")


def answerer(clock: list[float] | None = None) -> tuple[Answerer, Recorder]:
    recorder = Recorder()
    ticks = clock if clock is not None else [0.0]
    return Answerer(Directory(), recorder, clock=lambda: ticks[0]), recorder  # type: ignore[arg-type]


def code(reply: bytes | None) -> int:
    assert reply is not None
    return reply[3] & 15


async def test_listed_names_get_an_address_of_loopback_and_keep_it() -> None:
    answer, recorder = answerer()
    for name in ("one.test", "ONE.test", "a.many.test", "one.test"):
        reply = await answer.answer(query(name))
        assert code(reply) == Code.NOERROR
        assert reply is not None
        assert reply[:2] == b"\0\7"
        assert struct.unpack("!4H", reply[4:12]) == (1, 1, 0, 0)
        assert reply[-4:-2] == bytes([127, 64])
    addresses = [event.address for event in recorder.kept]
    assert addresses[0] == addresses[1] == addresses[3] != addresses[2]
    assert {event.phase for event in recorder.kept} == {"agent"}


@pytest.mark.parametrize(
    ("name", "kind", "expected", "reason"),
    [
        ("one.test", Type.AAAA, Code.NOERROR, "empty"),
        ("one.test", Type.HTTPS, Code.NOERROR, "empty"),
        ("two.test", Type.A, Code.NXDOMAIN, "unlisted"),
        ("two.test", Type.AAAA, Code.NXDOMAIN, "unlisted"),
        ("many.test", Type.A, Code.NXDOMAIN, "unlisted"),
        ("one.test", Type.TXT, Code.REFUSED, "type-TXT"),
        ("one.test", Type.NULL, Code.REFUSED, "type-NULL"),
        ("one.test", Type.ANY, Code.REFUSED, "type-ANY"),
        ("one.test", 252, Code.REFUSED, "type-252"),
        ("x" * 41 + ".many.test", Type.A, Code.REFUSED, "long-label"),
        ("169.254.169.254", Type.A, Code.NXDOMAIN, "not-a-host-name"),
        ("1.0.0.127.in-addr.arpa", Type.PTR, Code.NXDOMAIN, "unlisted"),
    ],
)
async def test_everything_else_is_refused_and_recorded(name: str, kind: int, expected: Code, reason: str) -> None:
    answer, recorder = answerer()
    reply = await answer.answer(query(name, kind))
    assert code(reply) == expected
    assert reply is not None
    assert reply[6:8] == b"\0\0"  # no answers
    assert recorder.kept[-1].reason == reason
    assert recorder.kept[-1].name == name.lower()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 11,
        query("one.test", flags=0x8100),  # a response
        query("one.test", flags=0x2900),  # an update
        query("one.test", flags=0x0300),  # truncated
        query("one.test", counts="2 0 0 0"),
        query("one.test", counts="0 0 0 0"),
        query("one.test", counts="1 1 0 0"),
        query("one.test", tail=b"x"),
        query("one.test", counts="1 0 0 1"),  # no record there
        query("one.test", counts="1 0 0 1", tail=b"\0" + struct.pack("!HHIH", 41, 4096, 0, 9)),  # cut off
        query("one.test", counts="1 0 0 1", tail=b"\0" + struct.pack("!HHIH", 16, 1, 0, 0)),  # not OPT
        query("one.test")[:-3],
        struct.pack("!6H", 7, 256, 1, 0, 0, 0) + b"\xc0\x0c" + b"\0\1\0\1",  # points to itself
        struct.pack("!6H", 7, 256, 1, 0, 0, 0) + b"\x40" + b"x" * 64 + b"\0\0\1\0\1",
        query(".".join(["x" * 62] * 5)),
        query("one.test") + b"\0" * 600,
        query("one.test")[:-1] + b"\3",  # class CHAOS
    ],
)
async def test_malformed_queries_get_no_answer(data: bytes) -> None:
    answer, recorder = answerer()
    reply = await answer.answer(data)
    assert reply is None or code(reply) == Code.FORMERR
    assert recorder.kept[-1].decision == "refused"
    assert recorder.kept[-1].reason.startswith("malformed")


async def test_edns_is_answered_with_edns() -> None:
    answer, _ = answerer()
    reply = await answer.answer(query("one.test", counts="1 0 0 1", tail=b"\0" + struct.pack("!HHIH", 41, 4096, 0, 0)))
    assert reply is not None
    assert struct.unpack("!4H", reply[4:12]) == (1, 1, 0, 1)


async def test_a_flood_is_dropped_counted_and_over_when_it_is_over() -> None:
    clock = [0.0]
    answer, recorder = answerer(clock)
    replies = [await answer.answer(query(f"{number}.evil.test")) for number in range(2000)]
    assert 900 < sum(reply is not None for reply in replies) < 1100
    clock[0] = 10.0
    assert await answer.answer(query("one.test")) is not None
    dropped = recorder.counts.reasons["lookup: flood"]
    assert dropped == sum(reply is None for reply in replies)


def test_a_book_is_full_at_its_capacity() -> None:
    book = AddressBook(300)
    given_out = {book.allot(f"n{number}.test") for number in range(300)}
    assert len(given_out) == 300
    assert all(address.startswith("127.64.") for address in given_out)
    with pytest.raises(Full):
        book.allot("one-more.test")
    assert book.allot("n5.test") in given_out


@given(st.binary(max_size=600))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    try:
        parsed = dnswire.parse(data)
    except dnswire.Malformed as error:
        dnswire.reply_malformed(error)
    else:
        assert data[12:].startswith(parsed.question)
        assert len(parsed.name) <= 253
        dnswire.reply(parsed, Code.NOERROR, "127.64.0.1")


_names = st.lists(st.from_regex(r"[a-z0-9_-]{1,63}", fullmatch=True), min_size=1, max_size=3).map(".".join)


@given(_names, st.integers(0, 65535), st.integers(0, 65535))
def test_a_query_is_read_as_it_was_written(name: str, kind: int, query_id: int) -> None:
    parsed = dnswire.parse(query(name, kind, query_id=query_id))
    assert (parsed.name, parsed.type, parsed.id) == (name, kind, query_id)
