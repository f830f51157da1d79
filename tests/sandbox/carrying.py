"""Hosts for the carried network of a room: handlers of connections, and what a program inside says first."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from proctor.sandbox.native.carried import CarriedStream, Refusals

    from .conftest import Room

WEB = ("127.7.0.1", 80)
DIAL = "import socket, struct, sys, time\ns = socket.create_connection(('127.7.0.1', 80), 20)\n"
# The reset of a connection that nobody wants may come before connect() has returned: it is the same reset.
MEET_RESET = """
import socket
try: socket.create_connection(('127.7.0.1', 80), 20).recv(1)
except ConnectionResetError: print('reset')
"""
HARD_CLOSE = "s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); s.close()\n"


async def no_names(query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
    """A name server that never answers."""
    del query, over
    return None


@asynccontextmanager
async def serving(
    room: Room,
    handler: Callable[[CarriedStream], Awaitable[None]],
    refused: Callable[[Refusals], None] | None = None,
) -> AsyncIterator[list[CarriedStream]]:
    """Serve connections to WEB with `handler`; yields all that came."""
    streams: list[CarriedStream] = []
    async with anyio.create_task_group() as tasks:

        def accepted(stream: CarriedStream) -> None:
            streams.append(stream)
            tasks.start_soon(handler, stream)

        room.channel.carry(accepted, no_names, refused)
        await room.channel.listen(*WEB)
        yield streams
        tasks.cancel_scope.cancel()
    for stream in streams:
        stream.reset()
    if room.channel.lost is None:
        await room.channel.unlisten(*WEB)


async def echo(stream: CarriedStream) -> None:
    """Give back all that comes, then end."""
    while data := await stream.receive():
        await stream.send(data)
    await stream.send_eof()
    await stream.aclose()


async def all_over(room: Room) -> None:
    """Wait until the guest knows of no connection any more."""
    with anyio.fail_after(10):
        while room.channel._streams:
            await room.channel.ping()
