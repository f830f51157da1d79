"""Byte streams with two halves and a reset: what the transport gives us, what we dial, and TLS over either.

`CarriedStream` of the transport has this shape too, so everything above is tested over a socket pair.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import anyio
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 256 << 10
_LINGER_NONE = struct.pack("ii", 1, 0)
_TLS_CLOSE_S = 2.0


class Pipe(Protocol):
    """One connection."""

    async def receive(self, max_bytes: int = CHUNK) -> bytes:
        """Some bytes; empty at the end of the stream. Raises OSError when it was reset."""
        ...

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of `data`; waits while the other side does not read."""
        ...

    async def send_eof(self) -> None:
        """Say that nothing more will be sent."""
        ...

    def reset(self) -> None:
        """Break the connection off, visibly."""
        ...

    async def aclose(self) -> None:
        """End it in good order. Idempotent."""
        ...


class SocketPipe:
    """A connected stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._closed = False

    async def receive(self, max_bytes: int = CHUNK) -> bytes:
        """Some bytes; empty at the end."""
        self._check()
        return await self._loop.sock_recv(self._socket, max_bytes)

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of `data`."""
        self._check()
        await self._loop.sock_sendall(self._socket, data)

    async def send_eof(self) -> None:
        """Half close."""
        if not self._closed:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with a RST; whoever waits here is woken with an error."""
        if not self._closed:
            if self._socket.family != socket.AF_UNIX:
                with suppress(OSError):
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
            self._close()

    async def aclose(self) -> None:
        """Close."""
        if not self._closed:
            self._close()
        await anyio.lowlevel.checkpoint()

    def _close(self) -> None:
        self._closed = True
        # A task may be waiting in sock_recv: closing alone would leave its descriptor in the selector.
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    def _check(self) -> None:
        if self._closed:
            raise ConnectionResetError("the connection was closed here")


class PrefixedPipe:
    """A pipe whose first bytes have been read already."""

    def __init__(self, pipe: Pipe, prefix: bytes) -> None:
        self._pipe = pipe
        self._prefix = prefix
        self.send = pipe.send
        self.send_eof = pipe.send_eof
        self.reset = pipe.reset
        self.aclose = pipe.aclose

    async def receive(self, max_bytes: int = CHUNK) -> bytes:
        """What was read already, then the rest."""
        if self._prefix:
            data, self._prefix = self._prefix[:max_bytes], self._prefix[max_bytes:]
            return data
        return await self._pipe.receive(max_bytes)


class MeteredPipe:
    """Counts what passes: `received` from the other side, `sent` to it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.sent = 0
        self.received = 0
        self.was_reset = False
        self.send_eof = pipe.send_eof
        self.aclose = pipe.aclose

    async def receive(self, max_bytes: int = CHUNK) -> bytes:
        """Pass on and count."""
        data = await self._pipe.receive(max_bytes)
        self.received += len(data)
        return data

    async def send(self, data: bytes | memoryview) -> None:
        """Pass on and count."""
        await self._pipe.send(data)
        self.sent += len(data)

    def reset(self) -> None:
        """Break it off."""
        self.was_reset = True
        self._pipe.reset()


class _Plain(ByteStream):
    """A pipe as anyio's TLS wants it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def receive(self, max_bytes: int = 65536) -> bytes:
        try:
            data = await self._pipe.receive(max_bytes)
        except OSError as error:
            raise anyio.BrokenResourceError from error
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        try:
            await self._pipe.send(item)
        except OSError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        await self._pipe.send_eof()

    async def aclose(self) -> None:
        await self._pipe.aclose()


class TlsPipe:
    """TLS over a pipe. It has no half close: `send_eof` ends the connection when both directions are done."""

    def __init__(self, pipe: Pipe, stream: TLSStream) -> None:
        self._pipe = pipe
        self._stream = stream
        self.reset: Callable[[], None] = pipe.reset

    @classmethod
    async def wrap(
        cls, pipe: Pipe, context: ssl.SSLContext, *, server_side: bool, hostname: str | None = None
    ) -> TlsPipe:
        """Shake hands. Raises ssl.SSLError, or OSError when the connection breaks."""
        try:
            stream = await TLSStream.wrap(
                _Plain(pipe),
                server_side=server_side,
                hostname=hostname,
                ssl_context=context,
                standard_compatible=False,
            )
        except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise ConnectionResetError("the connection ended during the TLS handshake") from error
        return cls(pipe, stream)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Some bytes; empty at the end."""
        try:
            return await self._stream.receive(max_bytes)
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError) as error:
            raise ConnectionResetError("the TLS connection broke") from error

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of `data`."""
        try:
            await self._stream.send(bytes(data))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError) as error:
            raise ConnectionResetError("the TLS connection broke") from error

    async def send_eof(self) -> None:
        """Nothing: TLS as it is used has no half close."""
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Close TLS and what is below."""
        with anyio.move_on_after(_TLS_CLOSE_S, shield=True), suppress(OSError, ssl.SSLError, anyio.BrokenResourceError):
            await self._stream.aclose()
        await self._pipe.aclose()


async def relay(left: Pipe, right: Pipe) -> None:
    """Carry bytes both ways until both sides have said their last word, or one breaks off; then close both.

    A reset of one side becomes a reset of the other.
    """

    async def pump(source: Pipe, sink: Pipe) -> None:
        while data := await source.receive():
            await sink.send(data)
        await sink.send_eof()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump, left, right)
            tasks.start_soon(pump, right, left)
    except* OSError:
        left.reset()
        right.reset()
    finally:
        with anyio.CancelScope(shield=True):
            await left.aclose()
            await right.aclose()
