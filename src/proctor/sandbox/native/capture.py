"""Keeping the head and the tail of a stream of any length in bounded memory, with an exact count of the rest."""

from __future__ import annotations

from proctor.sandbox.contract import Output, OutputLimit


class Capture:
    """Collects a stream under an `OutputLimit`; holds at most head + tail bytes."""

    __slots__ = ("_at", "_head", "_limit", "_ring", "_total")

    def __init__(self, limit: OutputLimit) -> None:
        self._limit = limit
        self._head = bytearray()
        self._ring = bytearray()
        self._at = 0  # where the oldest byte of a full ring is
        self._total = 0

    def add(self, data: bytes) -> None:
        """Append `data`."""
        self._total += len(data)
        room = self._limit.head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        size = self._limit.tail_bytes
        if not data or size <= 0:
            return
        if len(data) >= size:
            self._ring[:] = data[-size:]
            self._at = 0
            return
        grow = min(size - len(self._ring), len(data))
        if grow:
            self._ring += data[:grow]
            data = data[grow:]
        if data:
            first = min(size - self._at, len(data))
            self._ring[self._at : self._at + first] = data[:first]
            self._ring[: len(data) - first] = data[first:]
            self._at = (self._at + len(data)) % size

    def output(self) -> Output:
        """What was kept, and how many bytes between head and tail were not."""
        tail = bytes(self._ring[self._at :] + self._ring[: self._at])
        return Output(bytes(self._head), self._total - len(self._head) - len(tail), tail)
