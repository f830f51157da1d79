"""HTTP through the boundary as programs speak it: bodies both ways, interim answers, upgrades, bad servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from proctor.sandbox.net import NetworkPolicy, Rule, Service
from proctor.sandbox.net.faults import RequestFaults
from proctor.sandbox.net.services import Desk, Visit, serve

from .inside import drain, inside, server, web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request

pytestmark = pytest.mark.anyio

BIG = 3_000_000


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def size(request: Request) -> Response:
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
    return PlainTextResponse(f"{request.method} {total} {request.headers.get('upgrade')}")


async def many(_: Request) -> Response:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(BIG // 30_000):
            yield b"x" * 30_000

    return StreamingResponse(chunks())


APP = Starlette(
    routes=[
        Route("/echo", echo, methods=["POST"]),
        Route("/size", size, methods=["GET", "HEAD", "PUT"]),
        Route("/many", many),
        Route("/empty", lambda _: Response(status_code=204)),
    ]
)


def application() -> Callable[[Any], Awaitable[None]]:
    desk = Desk(Visit("x", "x", 80, "", 1, False), lambda _: None, RequestFaults)

    async def handler(pipe: Any) -> None:
        await serve(Service.asgi(APP), pipe, desk)

    return handler


def saying(answer: bytes) -> Callable[[Any], Awaitable[None]]:
    """A server that reads a head and says something, whatever it was asked."""

    async def handler(pipe: Any) -> None:
        await pipe.receive()
        await pipe.send(answer)

    return handler


def policy(where: str) -> NetworkPolicy:
    return NetworkPolicy("allow", (Rule("one.test", internal=True, target=where),))


def request(line: str, *fields: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: one.test", *fields, "", ""]).encode() + body


async def test_bodies_go_both_ways_on_one_connection() -> None:
    """Content-Length, chunks, none, HEAD, 204 and a large one, one after the other and all at once."""
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (b"one", b"twothree")) + b"0\r\n\r\n"
    asked = [
        (request("POST /echo", "Content-Length: 5", body=b"hello"), b"hello"),
        (request("POST /echo", "Transfer-Encoding: chunked", body=chunked), b"onetwothree"),
        (request("GET /size"), b"GET 0 None"),
        (request("HEAD /size"), b""),
        (request("GET /empty"), b""),
        (request("PUT /size", f"Content-Length: {BIG}", body=b"y" * BIG), f"PUT {BIG} None".encode()),
    ]
    async with server(application()) as where, inside(policy(where)) as program:
        pipe = await program.dial("one.test")
        for data, expected in asked:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipe.send, data)
                answer = b""
                while not answer.endswith(b"\r\n\r\n" + expected):
                    answer += await pipe.receive()
        together = b"".join(data for data, _ in asked[:5]) + request("GET /many", "Connection: close")
        await pipe.send(together)
        answer = await drain(pipe)
        assert answer.count(b"HTTP/1.1 200") == 5
        assert answer.count(b"x" * 1000) >= BIG // 30_000
        requests = program.of("request")
        assert len(requests) == 12
        assert {event.decision for event in requests} == {"allowed"}
        assert len({event.connection for event in requests}) == 1


async def test_a_client_that_waits_for_continue_gets_it() -> None:
    async with server(application()) as where, inside(policy(where)) as program:
        pipe = await program.dial("one.test")
        await pipe.send(request("POST /echo", "Content-Length: 5", "Expect: 100-continue", "Connection: close"))
        assert (await pipe.receive()).startswith(b"HTTP/1.1 100 ")
        await pipe.send(b"hello")
        assert (await drain(pipe)).endswith(b"hello")


async def test_an_upgrade_to_http2_is_taken_out_and_websockets_pass() -> None:
    h2c = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    async with server(application()) as where, inside(policy(where)) as program:
        pipe = await program.dial("one.test")
        await pipe.send(request("GET /size", *h2c))
        assert (await pipe.receive()).endswith(b"GET 0 None")
        await pipe.aclose()

    async def socket(pipe: Any) -> None:
        await pipe.receive()
        await pipe.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while data := await pipe.receive():
            await pipe.send(data.upper())

    async with server(socket) as where, inside(policy(where)) as program:
        pipe = await program.dial("one.test")
        await pipe.send(request("GET /chat", "Connection: Upgrade", "Upgrade: websocket"))
        assert (await pipe.receive()).startswith(b"HTTP/1.1 101")
        await pipe.send(b"GET / not http")
        assert await pipe.receive() == b"GET / NOT HTTP"
        await pipe.aclose()
        assert (await program.last("request")).status == 101


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 300 + b"\r\n",
    ],
)
async def test_a_server_that_says_two_things_is_cut_off(answer: bytes) -> None:
    async with server(saying(answer)) as where, inside(policy(where)) as program:
        await program.get("one.test")
        event = await program.last("request")
        assert event.decision == "failed"


async def test_the_end_of_an_idle_server_is_told_to_the_program() -> None:
    """A pool of connections must see that one has ended, as it would without us between."""
    async with server(web()) as where, inside(policy(where)) as program:
        pipe = await program.dial("one.test")
        await pipe.send(request("GET /", "Connection: keep-alive"))
        assert (await pipe.receive()).endswith(b"hello")

    async def once(pipe: Any) -> None:
        await pipe.receive()
        await pipe.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with server(once) as where, inside(policy(where)) as program:
        pipe = await program.dial("one.test")
        await pipe.send(request("GET /"))
        assert (await pipe.receive()).endswith(b"ok")
        with anyio.fail_after(5):
            assert await pipe.receive() == b""
        await pipe.aclose()


async def test_bodies_that_end_with_the_connection() -> None:
    async with server(saying(b"HTTP/1.0 200 OK\r\n\r\nall of it")) as where, inside(policy(where)) as program:
        assert (await program.get("one.test")).endswith(b"all of it")
        assert (await program.last("request")).status == 200


async def test_too_many_connections_are_refused_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.sandbox.net.boundary.CONNECTIONS_MAX", 3)
    async with server(web()) as where, inside(policy(where)) as program:
        pipes = [await program.dial("one.test") for _ in range(3)]
        await drain(await program.dial("one.test"))
        assert program.boundary.decisions()["reasons"] == {"connection: too-many-connections": 1}
        for pipe in pipes:
            await pipe.aclose()
