"""A guest's end of a channel in the hands of a test, which can say anything."""

from __future__ import annotations

import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox.native.channel import GuestChannel
from proctor.sandbox.native.frames import VERSION, FrameType, frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HELLO = frame(FrameType.HELLO, 0, 0, struct.pack("<II", VERSION, 1))


class Liar:
    """The guest's end of a channel, in the hands of a test."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.received = bytearray()

    async def say(self, *frames: bytes) -> None:
        """Send all of it, whatever it is. A host that hangs up is no error."""
        data = memoryview(b"".join(frames))
        try:
            while data:
                await anyio.wait_writable(self._socket)
                data = data[self._socket.send(data) :]
        except (BrokenPipeError, ConnectionResetError):
            return

    async def hear(self, size: int = 12) -> bytes:
        """Wait until the host has sent something."""
        while len(self.received) < size:
            await anyio.wait_readable(self._socket)
            self.received += self._socket.recv(1 << 20)
        return bytes(self.received)

    def leave(self) -> None:
        """Hang up."""
        self._socket.close()


@asynccontextmanager
async def liar(*, hello: bytes = HELLO) -> AsyncIterator[tuple[Liar, GuestChannel]]:
    """A channel to a liar."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    guest, channel = Liar(theirs), GuestChannel(ours)
    try:
        async with anyio.create_task_group() as tasks:
            await guest.say(hello)
            await tasks.start(channel.run)
            try:
                yield guest, channel
            finally:
                channel.close()
    finally:
        theirs.close()
