"""Differential: a server with other, laxer rules of reading never sees a request that the boundary has not judged."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from proctor.sandbox.net import NetworkPolicy, Rule

from .inside import inside, server

pytestmark = pytest.mark.anyio


def lax(seen: list[str], *, prefers_length: bool) -> Any:
    """A server that takes bare line feeds, any spelling of a length, the last of several, chunks if the word is
    anywhere, and one of the two where both are said: everything that real servers have been caught at."""

    async def handler(pipe: Any) -> None:
        buffer = b""
        while True:
            while (end := re.search(rb"\r?\n\r?\n", buffer)) is None:
                more = await pipe.receive()
                if not more:
                    return
                buffer += more
            head, buffer = buffer[: end.start()], buffer[end.end() :]
            lines = re.split(rb"\r?\n", head)
            seen.append(lines[0].split(b" ")[1].decode("latin-1") if b" " in lines[0] else "?")
            length, chunked = 0, False
            for line in lines[1:]:
                name, _, value = line.strip().partition(b":")
                field = name.strip().lower().replace(b"_", b"-")
                if field == b"content-length" and (found := re.search(rb"\d+", value)):
                    length = int(found[0])
                chunked |= field == b"transfer-encoding" and b"chunked" in value.lower()
            if chunked and not (prefers_length and length):
                while (stop := buffer.find(b"0\r\n\r\n")) < 0 and (more := await pipe.receive()):
                    buffer += more
                buffer = buffer[stop + 5 :] if stop >= 0 else b""
            else:
                while len(buffer) < length and (more := await pipe.receive()):
                    buffer += more
                buffer = buffer[length:]
            await pipe.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    return handler


HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: one.test\r\n\r\n"
_fields = st.sampled_from(
    [
        b"Content-Length: 0",
        b"Content-Length: 5",
        b"Content-Length: %d" % len(HIDDEN),
        b"Content-Length: %d" % (len(HIDDEN) + 5),
        b"Content-Length: 0, %d" % len(HIDDEN),
        b"Content-Length: +5",
        b"Content-Length : 5",
        b"Content_Length: 5",
        b"Content-Length:\t5",
        b" Content-Length: 5",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: Chunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Transfer_Encoding: chunked",
        b"Transfer-Encoding:\r\n chunked",
        b"X: y\nTransfer-Encoding: chunked",
        b"X: y\rTransfer-Encoding: chunked",
        b"Host: two.test",
        b"Connection: content-length",
        b"Expect: 100-continue",
    ]
)
_bodies = st.sampled_from(
    [
        b"",
        b"hello",
        HIDDEN,
        b"0\r\n\r\n",
        b"0\r\n\r\n" + HIDDEN,
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5;\n" + HIDDEN,
        b"\r\n" + HIDDEN,
    ]
)
_ends = st.sampled_from([b"\r\n", b"\n", b"\r"])
_requests = st.builds(
    lambda line, fields, end, body: end.join([line, b"Host: one.test", *fields, b"", b""]) + body,
    st.sampled_from([b"POST /seen HTTP/1.1", b"GET /seen HTTP/1.1", b"POST /seen HTTP/1.0", b"GET /seen\tHTTP/1.1"]),
    st.lists(_fields, max_size=3),
    _ends | st.just(b"\r\n"),
    _bodies,
)


_SEEN = b"POST /seen HTTP/1.1\r\nHost: one.test\r\n"
CL_TE = _SEEN + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (len(HIDDEN) + 5) + HIDDEN
TE_CL = _SEEN + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_requests, min_size=1, max_size=2).map(b"".join), st.booleans())
@example(CL_TE, False)
@example(CL_TE.replace(b"Transfer-", b"Transfer_"), False)
@example(TE_CL, True)
@example(TE_CL.replace(b"Content-", b"Content_"), True)
async def test_a_lax_server_sees_what_was_judged_and_no_more(data: bytes, prefers_length: bool) -> None:
    seen: list[str] = []
    async with server(lax(seen, prefers_length=prefers_length)) as where:
        policy = NetworkPolicy("allow", (Rule("one.test", internal=True, target=where, methods=("GET", "POST")),))
        async with inside(policy) as program:
            pipe = await program.dial("one.test")
            with anyio.move_on_after(0.2):
                try:
                    await pipe.send(data)
                    await pipe.send_eof()
                    while await pipe.receive():
                        pass
                except OSError:
                    pass
            await pipe.aclose()
            judged = [event.path for event in program.of("request") if event.decision != "refused"]
    # A hidden request that was judged as a request of its own (it was pipelined, not smuggled) is no finding.
    assert seen[: len(judged)] == judged[: len(seen)]
    assert len(seen) <= len(judged) + 1
    assert "/hidden" not in seen or "/hidden" in judged
