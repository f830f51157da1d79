"""One carried TCP connection as the host sees it: which frames may still come, and a stream for whoever serves it."""

from __future__ import annotations

import errno
import os
from collections import deque
from typing import Final, Protocol

import anyio

from proctor.sandbox.contract import GuestProtocolError
from proctor.sandbox.native.frames import FIRST_WINDOW, HEADER, PAYLOAD_MAX, U32, WINDOW, Frame, FrameType, frame

_EOF_CLOSE: Final = 1

Address = tuple[str, int]


class StreamReset(ConnectionResetError):
    """The program has reset the connection, we have, or the sandbox is gone."""


class Link(Protocol):
    """What a stream needs of its channel."""

    def _send(self, data: bytes, payload: bytes | memoryview = b"") -> None: ...
    async def _uncongested(self) -> None: ...
    def _widen(self) -> bool: ...
    def _narrow(self) -> None: ...


class CarriedStream:
    """One TCP connection between a program in the sandbox and the host.

    `local` is the address that was dialled, by the program (outbound) or by us (inbound); `peer` the program's own.
    `sent` and `received` count bytes. At most one task receives and one sends at a time.
    """

    __slots__ = (
        "_answered",
        "_chunks",
        "_closed",
        "_consumed",
        "_credit",
        "_ended",
        "_eof_sent",
        "_error",
        "_id",
        "_link",
        "_news",
        "_over",
        "_taken",
        "_wide",
        "_window",
        "local",
        "peer",
        "received",
        "sent",
    )

    def __init__(self, link: Link, stream_id: int, local: Address, peer: Address) -> None:
        self.local = local
        self.peer = peer
        self.sent = 0
        self.received = 0
        self._link = link
        self._id = stream_id
        self._chunks: deque[bytes] = deque()
        self._taken = 0
        """Bytes of the first chunk that were received already."""
        self._credit = WINDOW
        self._window = FIRST_WINDOW
        self._wide = False
        """The window has its full size: one of a few that may, since what waits in windows is our memory."""
        self._consumed = 0
        self._ended = False
        """The program has ended its direction."""
        self._eof_sent = False
        self._closed = False
        """Nobody reads any more: what still comes is refused."""
        self._over = False
        """The guest knows this connection no longer."""
        self._error: StreamReset | None = None
        self._news: anyio.Event | None = None
        self._answered: anyio.Event | None = None

    # -- for whoever serves it -----------------------------------------------------------------------------------------

    async def receive(self, max_bytes: int = PAYLOAD_MAX) -> bytes:
        """At least one byte and at most `max_bytes`, as soon as there are any; b"" once the program has ended its
        direction. Raises StreamReset."""
        if max_bytes < 1:
            raise ValueError(f"cannot receive {max_bytes} bytes")
        while not self._chunks:
            if self._error:
                raise self._fault()
            if self._ended or self._closed:
                return b""
            self._news = anyio.Event()
            await self._news.wait()
        chunk = self._pop(max_bytes)
        self._consumed += len(chunk)
        if self._consumed >= (WINDOW if self._wide else FIRST_WINDOW) // 2 and not self._ended and not self._over:
            self._grant()
        return chunk

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`, waiting while the program does not take it. Raises StreamReset."""
        rest = memoryview(data).cast("B") if not isinstance(data, bytes) else memoryview(data)
        while rest:
            await self._link._uncongested()
            if self._error:
                raise self._fault()
            if self._eof_sent:
                raise OSError(errno.EPIPE, "this end of the connection was closed already")
            if not self._credit:
                self._answered = anyio.Event()
                await self._answered.wait()
                continue
            piece = rest[: min(self._credit, PAYLOAD_MAX)]
            self._link._send(HEADER.pack(len(piece), self._id, FrameType.DATA, 0, 0), piece)
            self._credit -= len(piece)
            self.sent += len(piece)
            rest = rest[len(piece) :]

    async def send_eof(self) -> None:
        """End our direction; the program's may go on. Ending it twice is fine."""
        if self._error:
            raise self._fault()
        if not self._eof_sent:
            self._eof_sent = True
            self._link._send(frame(FrameType.EOF, self._id))

    def reset(self) -> None:
        """Abort: the program gets ECONNRESET. Nothing on a connection that is over."""
        if not self._over and self._error is None:
            self._link._send(frame(FrameType.RESET, self._id))
        self._fail(StreamReset(errno.ECONNRESET, "the connection was reset by us"))

    async def aclose(self) -> None:
        """Close as close(2) does: what was sent is delivered, what still comes is answered with a reset. Closing
        twice is fine."""
        if not self._closed and not self._over and not self._error:
            self._link._send(frame(FrameType.EOF, self._id, _EOF_CLOSE))
        self._closed = self._eof_sent = True
        self._chunks.clear()
        self._wake()
        self._answer()

    def _grant(self) -> None:
        grant, self._consumed = self._consumed, 0
        if not self._wide and self._link._widen():
            self._wide = True
            grant += WINDOW - FIRST_WINDOW
        self._window += grant
        self._link._send(frame(FrameType.CREDIT, self._id, 0, U32.pack(grant)))

    def _pop(self, max_bytes: int) -> bytes:
        batch, room = [], max_bytes
        while self._chunks and len(self._chunks[0]) - self._taken <= room:
            chunk = self._chunks.popleft()
            batch.append(chunk[self._taken :])  # no copy when nothing of it was taken
            room -= len(batch[-1])
            self._taken = 0
        if not batch:
            batch.append(self._chunks[0][self._taken : self._taken + max_bytes])
            self._taken += max_bytes
        return batch[0] if len(batch) == 1 else b"".join(batch)

    # -- for the channel -----------------------------------------------------------------------------------------------

    def _take(self, received: Frame) -> bool:
        """Take one frame of the guest; True when it was the last. Raises GuestProtocolError for one that cannot be."""
        kind, payload = received.type, received.payload
        if received.sub:
            raise self._lie("named a sub-stream")
        if kind == FrameType.DATA:
            self._take_data(payload)
        elif kind == FrameType.CREDIT and len(payload) == 4:
            self._credit += U32.unpack(payload)[0]
            if self._credit > WINDOW:
                raise self._lie("granted more than its window")
            self._answer()
        elif kind == FrameType.EOF and not payload and not self._ended:
            self._ended = True
            self._wake()
        elif kind == FrameType.RESET and len(payload) == 4:
            number = U32.unpack(payload)[0]
            self._finish(StreamReset(number, f"the connection was reset: {os.strerror(number)}"))
            return True
        elif kind == FrameType.CLOSED and not payload and self._may_close():
            self._finish(None)
            return True
        else:
            raise self._lie(f"sent a frame of type {kind} out of turn")
        return False

    def _take_data(self, payload: bytes) -> None:
        if self._ended or not payload or len(payload) > self._window:
            raise self._lie("sent bytes beyond its window or after its end")
        self._window -= len(payload)
        if self._closed or self._error:
            return  # it was on its way when we closed
        self.received += len(payload)
        self._chunks.append(payload)
        self._wake()

    def _may_close(self) -> bool:
        return self._closed or self._error is not None or (self._ended and self._eof_sent)

    def _lose(self) -> None:
        """The sandbox is gone."""
        self._finish(self._error or StreamReset(errno.ECONNRESET, "the sandbox is gone"))

    def _finish(self, error: StreamReset | None) -> None:
        self._over = True
        if self._wide:
            self._wide = False
            self._link._narrow()
        if error:
            self._fail(error)

    def _fail(self, error: StreamReset) -> None:
        self._error = self._error or error
        self._wake()
        self._answer()

    def _wake(self) -> None:
        if self._news:
            self._news.set()
            self._news = None

    def _answer(self) -> None:
        if self._answered:
            self._answered.set()
            self._answered = None

    def _fault(self) -> StreamReset:
        """The same error as an object of its own: each waiter's copy gathers a traceback of its own."""
        assert self._error is not None
        return StreamReset(*self._error.args)

    def _lie(self, what: str) -> GuestProtocolError:
        return GuestProtocolError(f"the guest {what}, connection {self._id & 0x7FFF_FFFF}")
