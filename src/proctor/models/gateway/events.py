"""Server-sent events as bytes: cut into whole events without changing one of them (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import re

_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LINE = re.compile(rb"\r\n|\n|\r")
MAX_EVENT_BYTES = 32 << 20


class EventTooLong(Exception):
    """An event that no answer has."""


class EventSplitter:
    """Chunks in, whole events out; joined again, the events are the chunks, byte for byte.

    A blank line ends an event and belongs to it. Where a chunk ends between CR and LF the LF begins the next event,
    which means the same.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that are whole now. Raises EventTooLong."""
        data = self._rest + chunk if self._rest else chunk
        events = []
        at = 0
        # The end of an event may be cut in two, but never lies more than three bytes before what came last.
        begin = max(0, len(self._rest) - 3)
        for match in _END.finditer(data, begin):
            events.append(data[at : match.end()])
            at = match.end()
        self._rest = data[at:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"one event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    def rest(self) -> bytes:
        """What has come after the last whole event; the splitter is empty then."""
        rest, self._rest = self._rest, b""
        return rest


def fields_of(event: bytes) -> tuple[str, bytes]:
    """The type (`message` when it names none) and the data of an event; no data for a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return "message", event[6:-2]
    name, data = "message", []
    for line in _LINE.split(event.removeprefix(b"\xef\xbb\xbf")):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ").decode("utf-8", "replace")
    return name, b"\n".join(data)
