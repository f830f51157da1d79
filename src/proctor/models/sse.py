"""Server-sent events, read incrementally from any chunking of the bytes (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its type (`message` when the stream names none) and its data."""

    name: str
    data: str


class EventDecoder:
    """Bytes in, events out. Comments, ids and retry hints are dropped; undecodable bytes are replaced.

    `feed` returns the events that became complete; `finish` those that a stream without a final blank line still
    holds (the standard drops them, but a `[DONE]` there is common).
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text: list[str] = []
        self._after_cr = False
        self._at_start = True
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes."""
        return self._take(self._decoder.decode(chunk))

    def finish(self) -> list[Event]:
        """The stream has ended."""
        return self._take(self._decoder.decode(b"", final=True) + "\n\n")

    def _take(self, text: str) -> list[Event]:
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix("\ufeff")
        # A line ends with CR, LF or CRLF, and a CRLF may be cut in two.
        if self._after_cr and text:
            self._after_cr = False
            text = text.removeprefix("\n")
        if text.endswith("\r"):
            self._after_cr = True
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        events: list[Event] = []
        for line in lines[:-1]:
            self._text.append(line)
            whole = "".join(self._text)
            self._text.clear()
            event = self._line(whole)
            if event is not None:
                events.append(event)
        if lines[-1]:
            self._text.append(lines[-1])
        return events

    def _line(self, line: str) -> Event | None:
        if not line:
            name, data = self._name or "message", self._data
            self._name, self._data = "", []
            return Event(name, "\n".join(data)) if data else None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None
