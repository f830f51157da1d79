"""The output of one command as files, so that it survives the process that took it in and can be read from any offset.

A stream is a handful of files `<exec>.<stream>.<offset>`, each holding the bytes from that offset on. The first holds
the head; later ones are cut into segments, of which the newest are kept, so that a stream never takes more than its
limit and one segment. What is there after a crash is exactly what their names and sizes say.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.sandbox.contract import Output

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox.contract import OutputLimit

_SEGMENTS = 4
_SMALLEST_SEGMENT = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a stream from `offset` on. An offset later than the one asked for: what lies between was not kept."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + len(self.data)


class Spool:
    """One stream of one command below `folder`. Blocking, but only for the page cache."""

    def __init__(self, folder: Path, name: str, limit: OutputLimit) -> None:
        """`name` is `<exec>.<stream>`. What an earlier process has written is found again."""
        self._folder = folder
        self._name = name
        self._limit = limit
        self._segment = max(limit.tail_bytes // _SEGMENTS, min(limit.tail_bytes, _SMALLEST_SEGMENT))
        self._most = -(-limit.tail_bytes // max(self._segment, 1)) + 1
        self._segments = self._found()
        self.total = self._segments[-1][0] + self._segments[-1][1] if self._segments else 0
        """Bytes that the command wrote, kept or not."""
        self._descriptor = -1
        self._at_end = bool(self._segments)
        """The last file goes on; otherwise the next byte begins a new one."""

    def _found(self) -> list[tuple[int, int]]:
        """Offset and size of each file, in order."""
        prefix = f"{self._name}."
        with os.scandir(self._folder) as entries:
            found = [(entry.name, entry.stat().st_size) for entry in entries if entry.name.startswith(prefix)]
        numbers = [(int(name[len(prefix) :]), size) for name, size in found if name[len(prefix) :].isdigit()]
        return sorted(numbers)

    def add(self, data: bytes) -> None:
        """Take bytes in. What the disk has no room for is counted and lost."""
        view = memoryview(data)
        while len(view):
            room = self._room()
            taken = self._write(view[:room]) if room else 0
            if not taken:  # nothing shall be kept here, or the disk is full
                self._finish_file()
                taken = len(view)
            self.total += taken
            view = view[taken:]

    def _room(self) -> int:
        """Bytes that the current file takes; opens the next one where it takes none."""
        if self._at_end:
            start, size = self._segments[-1]
            cap = self._limit.head_bytes if start == 0 else self._segment
            if size < cap:
                return cap - size
            self._finish_file()
        return self._limit.head_bytes if self.total == 0 and self._limit.head_bytes else self._segment

    def _write(self, data: memoryview) -> int:
        try:
            if self._descriptor < 0:
                start = self._segments[-1][0] if self._at_end else self.total
                path = self._folder / f"{self._name}.{start}"
                self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                if not self._at_end:
                    self._segments.append((start, 0))
                    self._at_end = True
                    self._drop_old()
            written = os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE):
                raise
            return 0
        start, size = self._segments[-1]
        self._segments[-1] = (start, size + written)
        return written

    def _drop_old(self) -> None:
        """Of all files but the head, keep as many as cover the tail."""
        first = 1 if self._segments[0][0] == 0 and self._limit.head_bytes else 0
        while len(self._segments) - first > self._most:
            start, _ = self._segments.pop(first)
            with suppress(FileNotFoundError):
                os.unlink(self._folder / f"{self._name}.{start}")

    def _finish_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._at_end = False

    def skip_to(self, offset: int) -> None:
        """Bytes up to `offset` are gone: they were taken in by a process that could not keep them."""
        if offset > self.total:
            self._finish_file()
            self.total = offset

    def read(self, since: int, most: int = 1 << 20) -> Piece:
        """The first bytes that are kept at or after `since`, at most `most`; empty at the end of what there is."""
        for start, size in self._segments:
            if start + size <= since or not size:
                continue
            at = max(start, since)
            with open(self._folder / f"{self._name}.{start}", "rb") as file:
                file.seek(at - start)
                return Piece(at, file.read(min(most, start + size - at)))
        return Piece(max(since, self.total), b"")

    def output(self) -> Output:
        """Head and tail as a result has them."""
        head = self.read(0, self._limit.head_bytes).data if self._limit.head_bytes else b""
        if self.total and self._segments and self._segments[0][0] != 0:
            head = b""
        at = max(len(head), self.total - self._limit.tail_bytes)
        tail = bytearray()
        while (piece := self.read(at)).data:
            if piece.offset > at:  # a hole: the tail begins after it
                tail.clear()
            tail += piece.data
            at = piece.end
        if at < self.total:  # the disk was full at the end
            tail.clear()
        return Output(head, self.total - len(head) - len(tail), bytes(tail))

    def close(self) -> None:
        """Nothing more will come; what there is can still be read."""
        self._finish_file()

    def remove(self) -> None:
        """Remove the files."""
        self._finish_file()
        for start, _ in self._segments:
            with suppress(FileNotFoundError):
                os.unlink(self._folder / f"{self._name}.{start}")
        self._segments.clear()
