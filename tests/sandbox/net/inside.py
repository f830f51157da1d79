"""A boundary with programs at it and no sandbox: look-ups and connections come as the transport would bring them."""

from __future__ import annotations

import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from proctor.sandbox.net.boundary import Boundary, Network
from proctor.sandbox.net.dialer import Dialer
from proctor.sandbox.net.pipes import SocketPipe

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

    from proctor.sandbox.net.events import NetworkEvent
    from proctor.sandbox.net.policy import NetworkPolicy


class Carried(SocketPipe):
    """One end of a socket pair as the transport's stream."""

    def __init__(self, sock: socket.socket, local: tuple[str, int]) -> None:
        super().__init__(sock)
        self.local = local
        self.peer = ("127.0.0.1", 40000)


@dataclass
class Listening:
    """A transport that remembers where it listens."""

    places: set[tuple[str, int]] = field(default_factory=set)

    async def listen(self, address: str, port: int) -> None:
        await anyio.lowlevel.checkpoint()
        assert (address, port) not in self.places
        self.places.add((address, port))

    async def unlisten(self, address: str, port: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.places.remove((address, port))


@dataclass
class Inside:
    """What a program in the sandbox can do."""

    boundary: Boundary
    transport: Listening
    events: list[NetworkEvent]

    async def look_up(self, name: str) -> str | None:
        labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
        query = struct.pack("!6H", 1, 256, 1, 0, 0, 0) + labels + b"\0\1\0\1"
        reply = await self.boundary.dns(query)
        assert reply is not None
        return socket.inet_ntoa(reply[-4:]) if reply[7] else None

    async def dial(self, name: str, port: int = 80) -> SocketPipe:
        address = await self.look_up(name)
        assert address is not None, f"{name} is unknown"
        assert (address, port) in self.transport.places, "connection refused"
        ours, theirs = socket.socketpair()
        self.boundary.accepted(Carried(theirs, (address, port)))
        return SocketPipe(ours)

    async def http(self, name: str, request: bytes, port: int = 80) -> bytes:
        """One request on a connection of its own; everything that comes back."""
        pipe = await self.dial(name, port)
        await pipe.send(request)
        return await drain(pipe)

    async def get(self, name: str, path: str = "/", port: int = 80, *fields: str) -> bytes:
        lines = [f"GET {path} HTTP/1.1", f"Host: {name}", "Connection: close", *fields, "", ""]
        return await self.http(name, "\r\n".join(lines).encode(), port)

    def of(self, kind: str) -> list[NetworkEvent]:
        return [event for event in self.events if event.kind == kind]

    async def last(self, kind: str = "connection") -> NetworkEvent:
        """The record of the last ended connection (or request): written when it has ended, so a moment later."""
        with anyio.fail_after(5):
            while self.boundary.open_connections and kind == "connection":  # noqa: ASYNC110
                await anyio.sleep(0.005)
            while not self.of(kind):  # noqa: ASYNC110
                await anyio.sleep(0.005)
        return self.of(kind)[-1]


async def drain(pipe: Any) -> bytes:
    data = b""
    with anyio.fail_after(10):
        while more := await pipe.receive():
            data += more
    await pipe.aclose()
    return data


@asynccontextmanager
async def inside(
    policy: NetworkPolicy,
    *,
    resolve: Callable[[str], Awaitable[list[str]]] | None = None,
    **network: Any,
) -> AsyncIterator[Inside]:
    """A boundary for the length of a test."""
    events: list[NetworkEvent] = []
    async with anyio.create_task_group() as tasks:
        boundary = Boundary(
            "box-1",
            policy,
            Network(on_network=events.append, **network),
            spawn=tasks.start_soon,
            dialer=Dialer(resolve) if resolve else None,
        )
        transport = Listening()
        boundary.attach(transport)
        try:
            with anyio.fail_after(30):
                yield Inside(boundary, transport, events)
        finally:
            await boundary.aclose()


@asynccontextmanager
async def server(
    handler: Callable[[SocketPipe], Awaitable[None]], context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """A server on this machine's loopback; gives `127.0.0.1:port`."""
    from proctor.sandbox.net.pipes import TlsPipe

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    import asyncio

    async def serve(sock: socket.socket) -> None:
        pipe: Any = SocketPipe(sock)
        try:
            if context is not None:
                pipe = await TlsPipe.wrap(pipe, context, server_side=True)
            await handler(pipe)
        except OSError:
            pass
        finally:
            await pipe.aclose()

    async def accept(tasks: anyio.abc.TaskGroup) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            tasks.start_soon(serve, sock)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(accept, tasks)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            tasks.cancel_scope.cancel()
            listener.close()


def web(*, seen: list[bytes] | None = None, body: bytes = b"hello") -> Callable[[Any], Awaitable[None]]:
    """A server that answers every request of a connection with `body`, and remembers the requests."""

    async def handler(pipe: Any) -> None:
        buffer = b""
        while True:
            while b"\r\n\r\n" not in buffer:
                more = await pipe.receive()
                if not more:
                    return
                buffer += more
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            if seen is not None:
                seen.append(head)
            await pipe.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            if b"connection: close" in head.lower():
                return

    return handler
