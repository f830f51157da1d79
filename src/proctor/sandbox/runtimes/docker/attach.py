"""The guest's channel over an attached container: the engine frames the output, the input goes as it is."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any, Final

import anyio

from proctor.sandbox.native.channel import GuestChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from anyio.abc import TaskStatus

    from proctor.sandbox.native.execs import Attribution

_FRAME: Final = struct.Struct(">BxxxI")
_STDERR: Final = 2
_CHUNK: Final = 1 << 16
_WORDS_MAX: Final = 4096


class AttachedChannel(GuestChannel):
    """A channel that pumps between the engine's socket, which it owns, and its own."""

    def __init__(self, engine: socket.socket, *, attribution: Attribution) -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        super().__init__(ours, attribution=attribution)
        self._engine = engine
        self._pumped = theirs
        self._words = bytearray()
        self.beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else runs as long as the channel does."""
        self.after: Callable[[], Coroutine[Any, Any, None]] | None = None
        """What is found out before the end of the channel is told."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until the guest or `close()` ends it (see GuestChannel.run)."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._pump_in)
                tasks.start_soon(self._pump_out)
                for one in self.beside:
                    tasks.start_soon(one)
                try:
                    await super().run(task_status=task_status)
                finally:
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # One of ours that failed is told by its own name, as without the group.
            raise group.exceptions[0] from None
        finally:
            self._engine.close()
            self._pumped.close()
        if self.after is not None:
            await self.after()

    def said(self) -> str:
        """The last line of the guest's standard error, which only speaks when it cannot start."""
        lines = bytes(self._words).strip().splitlines()
        return lines[-1].decode("utf-8", "replace")[-500:] if lines else ""

    async def _pump_out(self) -> None:
        """From the host to the container."""
        while True:
            data = await _receive(self._pumped)
            if not data or not await _send(self._engine, data):
                return

    async def _pump_in(self) -> None:
        """From the container to the host. Its end is the guest's."""
        buffer = bytearray()
        while data := await _receive(self._engine):
            buffer += data
            while len(buffer) >= _FRAME.size:
                stream, size = _FRAME.unpack_from(buffer)
                if len(buffer) < _FRAME.size + size:
                    break
                payload = bytes(buffer[_FRAME.size : _FRAME.size + size])
                del buffer[: _FRAME.size + size]
                if stream == _STDERR:
                    self._words += payload[: _WORDS_MAX - len(self._words)]
                elif not await _send(self._pumped, payload):
                    return
        self._pumped.shutdown(socket.SHUT_WR)


async def _receive(sock: socket.socket) -> bytes:
    while True:
        try:
            return sock.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            await anyio.wait_readable(sock)
        except OSError:
            return b""


async def _send(sock: socket.socket, data: bytes) -> bool:
    """All of it; False when nobody takes it any more."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except (BlockingIOError, InterruptedError):
            await anyio.wait_writable(sock)
        except OSError:
            return False
    return True
