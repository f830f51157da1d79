"""What an Edge means to do, written before it does it, so that a later Edge can clean up after a sudden death.

One `journal.jsonl` per Edge, append-only, one JSON object a line. Each record is a single `write` on an `O_APPEND`
descriptor: a process killed between two records leaves whole lines. Records are *not* flushed to the disk one by one,
because a death of the process cannot lose them (the page cache outlives it) and a death of the machine leaves nothing
to clean up but a directory: processes, cgroups, mounts and memory are gone with it, and disk images have no name once
they are attached. The sweep flushes every 30 s and at the end. It is read by `journal_reader`.
"""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from proctor.common import InfraError

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
_COMPACT_BYTES = 16 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode


class State(StrEnum):
    """The life of a sandbox, in order. A sandbox with no CLOSED is one that somebody has to clean up after."""

    INTENT = "INTENT"
    CREATED = "CREATED"
    CLOSING = "CLOSING"
    CLOSED = "CLOSED"


def now() -> str:
    """The present time as RFC 3339 in UTC with milliseconds."""
    seconds, thousandths = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_to_the_second(seconds)}.{thousandths:03}Z"


@lru_cache(maxsize=1)
def _to_the_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class Journal:
    """The open journal of a living Edge, and what it says about the sandboxes that have not ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._dirty = False
        self._torn = False
        self._size = 0
        # The lines of sandboxes that have not ended: what a shorter journal has to hold.
        self._lines: dict[str, list[bytes]] = {}

    def resume(self) -> None:
        """Go on with what an earlier Edge wrote: its living sandboxes are ours now."""
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # torn: the disk was full
            self._size += len(line)
            if record["state"] == State.CLOSED:
                self._lines.pop(record["sandbox"], None)
            else:
                self._lines.setdefault(record["sandbox"], []).append(line)

    def write(self, sandbox: str, state: State, **fields: Any) -> None:
        """Append one record. Raises InfraError when the disk is full: then the act must not be done."""
        # Built by hand, not through a model: this is on the path of every create. The reader checks each line strictly.
        record: dict[str, Any] = {"version": VERSION, "at": now(), "sandbox": sandbox, "state": state.value}
        record.update((key, value) for key, value in fields.items() if value not in (None, "", {}))
        # After a torn record (a full disk), an empty line keeps the next one whole.
        line = b"\n" * self._torn + _encode(record).encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
            self._torn = written != len(line)
        except OSError as error:
            raise InfraError(
                f"cannot write the journal {self.path}: {error.strerror}", remedy="free disk space"
            ) from error
        if self._torn:
            raise InfraError(f"cannot write the journal {self.path}: the disk is full", remedy="free disk space")
        self._dirty = True
        self._size += written
        if state is State.CLOSED:
            self._lines.pop(sandbox, None)
            if self._size > _COMPACT_BYTES:
                self._compact()
        else:
            self._lines.setdefault(sandbox, []).append(line)

    def _compact(self) -> None:
        """Go on in a new file that holds the living sandboxes only; the old one is there until the new one is whole."""
        lines = b"".join(line for lines in self._lines.values() for line in lines)
        part = self.path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, lines)
            os.replace(part, self.path)
        except OSError:
            os.close(descriptor)  # a full disk: the old file serves on
            return
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, len(lines)

    def flush(self) -> None:
        """Bring what was written to the disk."""
        if self._dirty:
            os.fdatasync(self._descriptor)
            self._dirty = False

    def close(self) -> None:
        """Flush and close."""
        if self._descriptor >= 0:
            self.flush()
            os.close(self._descriptor)
            self._descriptor = -1
