"""Heads, bodies and paths of HTTP/1.x: checklist item 32. Each refusal is a way to smuggle a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.sandbox.net import httphead, paths
from proctor.sandbox.net.httpbody import Body
from proctor.sandbox.net.httphead import HeadError


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def reason_of(*lines: str) -> str:
    with pytest.raises(HeadError) as caught:
        httphead.request(head(*lines), "one.test", 80)
    return str(caught.value)


HOST = "Host: one.test"


def test_an_ordinary_request_is_written_as_it_was_read() -> None:
    data = head("GET /a/b?c=d HTTP/1.1", "HOST: One.Test:80", "Accept: */*", "X: a:b")
    request = httphead.request(data, "one.test", 80)
    assert (request.method, request.path, request.length, request.closes) == ("GET", "/a/b", 0, False)
    assert request.encode() == data


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("GET http://two.test/ HTTP/1.1", HOST), "http-absolute-form"),
        (("GET http://one.test/ HTTP/1.1", HOST), "http-absolute-form"),
        (("CONNECT two.test:443 HTTP/1.1", HOST), "http-connect"),
        (("connect 10.0.0.1:443 HTTP/1.1", HOST), "http-connect"),
        (("OPTIONS * HTTP/1.1", HOST), "http-asterisk"),
        (("PRI * HTTP/2.0",), "http2-prior-knowledge"),
        (("GET / HTTP/2.0", HOST), "http-request-line"),
        (("GET / HTTP/0.9", HOST), "http-request-line"),
        (("GET /", HOST), "http-request-line"),
        (("GET  / HTTP/1.1", HOST), "http-request-line"),
        (("GET / HTTP/1.1 ", HOST), "http-request-line"),
        (("GET /a b HTTP/1.1", HOST), "http-request-line"),
        (("GET /#x HTTP/1.1", HOST), "http-request-line"),
        (("G\tT / HTTP/1.1", HOST), "http-request-line"),
        (("GET / HTTP/1.1\nHost: two.test", HOST), "http-request-line"),
        (("GET / HTTP/1.1",), "http-no-host"),
        (("GET / HTTP/1.1", HOST, HOST), "http-two-hosts"),
        (("GET / HTTP/1.1", HOST, "host: two.test"), "http-two-hosts"),
        (("GET / HTTP/1.1", "Host: two.test"), "http-other-host"),
        (("GET / HTTP/1.1", "Host: "), "http-other-host"),
        (("GET / HTTP/1.1", "Host: one.test, two.test"), "http-other-host"),
        (("GET / HTTP/1.1", "Host: user@one.test"), "http-other-host"),
        (("GET / HTTP/1.1", "Host: 127.64.0.1"), "http-other-host"),
        (("GET / HTTP/1.1", "Host: one.test:81"), "http-other-port"),
        (("GET / HTTP/1.1", "Host: one.test:80:80"), "http-other-host"),
        (("GET / HTTP/1.1", " Host: two.test", HOST), "http-folded-field"),
        (("GET / HTTP/1.1", "Host:", " two.test"), "http-folded-field"),
        (("GET / HTTP/1.1", "Host : one.test"), "http-malformed-field"),
        (("GET / HTTP/1.1", HOST, "no colon"), "http-malformed-field"),
        (("GET / HTTP/1.1", HOST, "A: b\nHost: two.test"), "http-malformed-field"),
        (("GET / HTTP/1.1", HOST, "A: b\rHost: two.test"), "http-malformed-field"),
        (("GET / HTTP/1.1", HOST, "A: \0"), "http-malformed-field"),
        (("GET / HTTP/1.1", HOST, "\xa0: b"), "http-malformed-field"),
        (("POST / HTTP/1.1", HOST, "Content-Length: 1", "Transfer-Encoding: chunked"), "http-ambiguous-length"),
        (("POST / HTTP/1.1", HOST, "Content-Length: 1", "Content-Length: 1"), "http-ambiguous-length"),
        (("POST / HTTP/1.1", HOST, "Content-Length: 1, 1"), "http-ambiguous-length"),
        (("POST / HTTP/1.1", HOST, "Content-Length: +1"), "http-ambiguous-length"),
        (("POST / HTTP/1.1", HOST, "Content-Length: 0x1"), "http-ambiguous-length"),
        (("POST / HTTP/1.1", HOST, "Transfer-Encoding: identity"), "http-ambiguous-length"),
        (("POST / HTTP/1.1", HOST, "Transfer-Encoding: gzip, chunked"), "http-ambiguous-length"),
        (("POST / HTTP/1.1", HOST, "Transfer-Encoding: \x0bchunked"), "http-malformed-field"),
        (("POST / HTTP/1.1", HOST, "Transfer-Encoding: chunked", "Transfer-Encoding: x"), "http-ambiguous-length"),
        (("POST / HTTP/1.0", HOST, "Transfer-Encoding: chunked"), "http-ambiguous-length"),
        (("GET / HTTP/1.1", HOST, *["A: b"] * 300), "http-too-many-fields"),
        (("POST / HTTP/1.1", HOST, "Content-Length: 1", "Transfer_Encoding: chunked"), "http-malformed-field"),
        (("POST / HTTP/1.1", HOST, "Content_Length: 1"), "http-malformed-field"),
    ],
)
def test_what_has_two_readings_is_refused(lines: tuple[str, ...], reason: str) -> None:
    assert reason_of(*lines) == reason


def test_a_head_without_an_end_is_not_waited_for() -> None:
    assert httphead.end_of(b"GET / HTTP/1.1\r\n") is None
    with pytest.raises(HeadError):
        httphead.end_of(b"A" * (httphead.HEAD_MAX + 1))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    try:
        request = httphead.request(data + b"\r\n\r\n", "one.test", 80)
    except HeadError:
        return
    again = httphead.request(request.encode(), "one.test", 80)
    assert again == request


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.binary(max_size=20), st.data())
def test_chunked_bodies_end_where_they_end(chunks: list[bytes], rest: bytes, data: st.DataObject) -> None:
    wire = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0;x=y\r\nTrailer: t\r\n\r\n"
    stream = wire + rest
    body, at, content = Body(None, chunked=True), 0, b""
    while not body.done:
        size = data.draw(st.integers(1, 50))
        at += body.take(stream[at : at + size])
        content += b"".join(body.content)
    assert stream[at:] == rest
    assert content == b"".join(chunks)


@pytest.mark.parametrize(
    "wire", [b"x\r\n", b"-1\r\n", b"1\nx", b"1\r\nxy\r\n", b"1 \r\nx\r\n0\r\n\n", b"1;\n", b"f" * 5000]
)
def test_malformed_chunks_are_refused(wire: bytes) -> None:
    with pytest.raises(HeadError):
        Body(None, chunked=True).take(wire)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/simple/", True),
        ("/simple/six/", True),
        ("/simple/@a%2fb", True),
        ("/simple", False),
        ("/", False),
        ("/simpleton/", False),
        ("/simple/../secret", False),
        ("/simple/%2e%2e/secret", False),
        ("/simple/.%2E/secret", False),
        ("/simple/%252e%252e/secret", False),
        ("/simple/%25252e%25252e/secret", False),
        ("/simple/..;/secret", False),
        ("/simple/..;a=b/secret", False),
        ("/simple/..%2fsecret", False),
        ("/simple/..\\secret", False),
        ("/simple/%5c..%5csecret", False),
        ("/simple/%00", False),
        ("/simple/%0d%0aX:y", False),
        ("/simple/%zz", False),
        ("//simple/", False),
        ("//two.test/simple/", False),
        ("/secret/../simple/", False),
        ("/%73imple/", False),
        ("/a/%2e%2e/simple/", False),
        ("/upload", True),
        ("/upload/x", True),
        ("/uploads", False),
    ],
)
def test_paths_are_below_a_prefix_in_every_reading_or_not_at_all(path: str, allowed: bool) -> None:
    assert paths.below(path.encode(), ("/simple/", "/upload")) is allowed


@given(st.text(alphabet="/.%25ef2;sab\\", max_size=30))
def test_no_spelling_climbs_out(text: str) -> None:
    """Whatever is let through stays below when decoded once or twice and resolved as a file system would."""
    import posixpath
    from urllib.parse import unquote

    path = "/simple/" + text
    if not paths.below(path.encode(), ("/simple/",)):
        return
    for reading in (path, unquote(path), unquote(unquote(path))):
        assert (posixpath.normpath(reading) + "/").startswith("/simple/")


@pytest.mark.parametrize("size", range(1, 9))
def test_the_end_of_a_head_is_found_however_it_comes_and_each_byte_is_searched_once(size: int) -> None:
    searched = []

    class Watched(bytearray):
        def find(self, what: bytes, start: int = 0, stop: int = 0) -> int:  # type: ignore[override]
            searched.append(len(self) - start)
            return bytearray.find(self, what, start, stop)

    head = b"GET / HTTP/1.1\r\nX: " + b"y" * 3000 + b"\r\n\r\n"
    data, seen, end = Watched(), 0, None
    for at in range(0, len(head) + size, size):
        seen = len(data)
        data += (head + b"rest of it")[at : at + size]
        if (end := httphead.end_of(data, seen)) is not None:
            break
    assert end == len(head)
    assert max(searched) <= size + 3
