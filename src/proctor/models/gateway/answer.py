"""An upstream's answer while it is read: cut into events, understood, freed of the key, ready to be handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from proctor.models.contract import ModelFault
from proctor.models.gateway.events import EventSplitter, EventTooLong, fields_of
from proctor.models.gateway.reading import reader_for
from proctor.models.gateway.upstream import MAX_REPLY_BYTES, TryFailed, translated

if TYPE_CHECKING:
    from proctor.models.gateway.calls import Redactor
    from proctor.models.gateway.config import UpstreamConfig
    from proctor.models.gateway.dialects import Operation
    from proctor.models.gateway.upstream import Opened

_AFTER_LAST_S = 1.0
"""How long an upstream may keep a stream open after its last event."""


class Answer:
    """One answer. `begin` it; then `take_ready` and `more` in turns, until `more` is false.

    `ready` holds what may be handed over: whole events, or the whole answer when it is not streamed.
    """

    def __init__(
        self, opened: Opened, operation: Operation, upstream: UpstreamConfig, redactor: Redactor, *, hide_usage: bool
    ) -> None:
        self.opened = opened
        self.reader = reader_for(operation)
        self.is_stream = "text/event-stream" in opened.headers.get("Content-Type", "")
        self.events: list[bytes] = []
        """Everything a stream has brought, events that are kept from the client too."""
        self.body = b""
        """An answer that was not streamed."""
        self.first_token_s: float | None = None
        self.last_seen = False
        self.size = 0
        self._upstream = upstream
        self._redactor = redactor
        self._hide_usage = hide_usage
        self._splitter = EventSplitter()
        self._ready: list[bytes] = []

    async def begin(self) -> None:
        """Read a stream up to its first event, or else the whole answer. Raises TryFailed: nothing has been handed
        over, so there may be another try."""
        if not self.is_stream:
            await self._read_whole()
            return
        chunk = self.opened.first
        while chunk:
            self._take(chunk)
            if self.reader.fault is ModelFault.OVERLOADED:
                raise self._failed(ModelFault.OVERLOADED, self.reader.problem, b"".join(self.events))
            if self._ready:
                return
            with translated(self._upstream):
                chunk = await self.opened.response.content.readany()
        raise TryFailed(ModelFault.CUT, "the stream ended before the answer did", retried=True)

    async def _read_whole(self) -> None:
        content = bytearray(self.opened.first)
        with translated(self._upstream):
            async for chunk in self.opened.response.content.iter_any():
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise self._too_long()
        self.size = len(content)
        self.body = self._redactor.raw(bytes(content))
        self.reader.whole(self.body)
        if self.reader.fault is ModelFault.OVERLOADED:
            raise self._failed(ModelFault.OVERLOADED, self.reader.problem, self.body)
        self.last_seen = True
        self._ready = [self.body]

    async def more(self) -> bool:
        """Read on; False when the answer has ended. Raises TryFailed when it broke off."""
        if not self.is_stream:
            return False
        chunk = b""
        with translated(self._upstream):
            if self.last_seen:
                # Reading to the end lets the connection be used again; an upstream that keeps it open loses it.
                with anyio.move_on_after(_AFTER_LAST_S):
                    chunk = await self.opened.response.content.readany()
            else:
                chunk = await self.opened.response.content.readany()
        if chunk:
            self._take(chunk)
            return True
        if rest := self._splitter.rest():
            self._event(rest)
        self.reader.close()
        return False

    def take_ready(self) -> bytes:
        """What may be handed over now."""
        data = self._ready[0] if len(self._ready) == 1 else b"".join(self._ready)
        self._ready.clear()
        return data

    def _take(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > MAX_REPLY_BYTES:
            raise self._too_long()
        try:
            for event in self._splitter.feed(chunk):
                self._event(event)
        except EventTooLong as error:
            raise TryFailed(ModelFault.BAD_REPLY, str(error), retried=False) from error

    def _event(self, event: bytes) -> None:
        clean = self._redactor.raw(event)
        seen = self.reader.event(*fields_of(clean))
        if seen.begun and self.first_token_s is None:
            self.first_token_s = anyio.current_time() - self.opened.began_at
        self.events.append(clean)
        if not (seen.only_usage and self._hide_usage):
            self._ready.append(clean)
        self.last_seen = self.last_seen or seen.last

    def _failed(self, fault: ModelFault, message: str, body: bytes) -> TryFailed:
        return TryFailed(fault, message, retried=True, status=200, headers=self.opened.headers, body=body)

    def _too_long(self) -> TryFailed:
        return TryFailed(ModelFault.BAD_REPLY, f"the reply is longer than {MAX_REPLY_BYTES} bytes", retried=False)
