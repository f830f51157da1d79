"""Bodies of HTTP/1.x messages: where they end, found without holding them."""

from __future__ import annotations

import re

from proctor.sandbox.net.httphead import HeadError

_LINE_MAX = 4096
_TRAILERS_MAX = 16 << 10
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


class Body:
    """Follows one body. `take(data)` says how many bytes at the front of `data` belong to it; `done` when it is over.

    `length` None with `chunked` False is a body that ends with the connection: it is never done. `content` holds the
    pieces of content in what was taken last, which for a chunked body lie between its sizes.
    """

    def __init__(self, length: int | None, *, chunked: bool) -> None:
        self.done = length == 0 and not chunked
        self._rest = length
        self._chunked = chunked
        self._line = bytearray()
        self._state = "size"
        self._trailers = 0
        self.until_close = length is None and not chunked
        self.content: list[bytes] = []

    def take(self, data: bytes) -> int:
        """How many bytes of `data` are of this body. Raises HeadError where chunks are malformed."""
        self.content.clear()
        if self.done:
            return 0
        if self._chunked:
            return self._take_chunks(data)
        count = len(data)
        if self._rest is not None:
            count = min(self._rest, count)
            self._rest -= count
            self.done = self._rest == 0
        self.content.append(data[:count])
        return count

    def _take_chunks(self, data: bytes) -> int:
        at = 0
        while at < len(data) and not self.done:
            if self._state == "data":
                assert self._rest is not None
                count = min(self._rest, len(data) - at)
                self.content.append(data[at : at + count])
                at += count
                self._rest -= count
                if self._rest == 0:
                    self._state = "data-end"
                continue
            end = data.find(b"\n", at)
            stop = len(data) if end < 0 else end + 1
            self._line += data[at:stop]
            at = stop
            if len(self._line) > _LINE_MAX:
                raise HeadError("http-malformed-chunk")
            if end >= 0:
                self._end_of_line()
        return at

    def _end_of_line(self) -> None:
        if not self._line.endswith(b"\r\n"):
            raise HeadError("http-malformed-chunk")
        line = bytes(self._line[:-2])
        self._line.clear()
        if self._state == "data-end":
            if line:
                raise HeadError("http-malformed-chunk")
            self._state = "size"
        elif self._state == "size":
            match = _CHUNK.fullmatch(line)
            if match is None:
                raise HeadError("http-malformed-chunk")
            self._rest = int(match[1], 16)
            self._state = "data" if self._rest else "trailers"
        else:
            self._trailers += len(line)
            if self._trailers > _TRAILERS_MAX:
                raise HeadError("http-malformed-chunk")
            self.done = not line
