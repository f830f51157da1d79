"""The tree stream (csrc/tree.h): records of names, metadata and contents, as values and as bytes."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from proctor.sandbox.contract import FileStat, GuestProtocolError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HEADER: Final = struct.Struct("<BBHIIIIIqQ")
TRAILER: Final = struct.Struct("<I")
PATH_MAX: Final = 65_535
TARGET_MAX: Final = 4095
CHUNK: Final = 1 << 18

_KINDS: Final[dict[str, Literal["file", "dir", "link", "fifo", "socket", "char", "block"]]] = {
    "F": "file",
    "D": "dir",
    "L": "link",
    "P": "fifo",
    "K": "socket",
    "C": "char",
    "B": "block",
}


class TreeError(SandboxError):
    """A tree or an archive was refused; `field` names the entry."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a tree stream. `path` is relative, bytes as they are; empty for the root itself."""

    kind: str
    path: bytes
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """What one tree may hold."""

    max_entries: int = 500_000
    max_bytes: int = 16 << 30


DEFAULT_LIMITS: Final = TreeLimits()


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not carried: a fifo, a socket, a device, or what could not be read."""

    path: str
    reason: str


def shown(path: bytes) -> str:
    """A path for people and for FileStat (surrogateescape)."""
    return os.fsdecode(path)


def encode(record: Record) -> bytes:
    """A record without its content."""
    seconds, nanoseconds = divmod(record.mtime_ns, 1_000_000_000)
    header = HEADER.pack(
        ord(record.kind),
        0,
        len(record.path),
        record.mode,
        record.uid,
        record.gid,
        nanoseconds,
        len(record.target),
        seconds,
        record.size,
    )
    return header + record.path + record.target


def end_record(count: int) -> bytes:
    """The record that makes a stream of `count` records whole."""
    return encode(Record("E", b"", size=count))


def sound_path(path: bytes) -> bool:
    """Whether a path is relative and has no empty, `.` or `..` component and no NUL."""
    return b"\0" not in path and all(part not in (b"", b".", b"..") for part in path.split(b"/"))


class TreeSource:
    """Reads a tree stream that arrives in chunks; GuestProtocolError when it is not one, or not whole."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._buffer = bytearray()
        self._records = 0

    def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise GuestProtocolError("a tree stream ended in the middle")
            self._buffer += chunk

    def _exactly(self, size: int) -> bytes:
        self._fill(size)
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def records(self) -> Iterator[Record]:
        """Every record but the end. The content and the trailer of a file have to be taken before the next record."""
        while True:
            kind, zero, path_length, mode, uid, gid, nanoseconds, target_length, seconds, size = HEADER.unpack(
                self._exactly(HEADER.size)
            )
            if zero or target_length > TARGET_MAX or nanoseconds > 999_999_999 or chr(kind) not in "DFLPKCBSE":
                raise GuestProtocolError("a malformed record in a tree stream")
            path, target = self._exactly(path_length), self._exactly(target_length)
            if chr(kind) == "E":
                if size != self._records or path or target:
                    raise GuestProtocolError("a tree stream with a wrong count of records")
                return
            if (path and not sound_path(path)) or b"\0" in target or (kind == ord("L") and not target):
                raise GuestProtocolError(f"an unsound path in a tree stream: {shown(path)!r}")
            self._records += 1
            mtime_ns = seconds * 1_000_000_000 + nanoseconds
            yield Record(chr(kind), path, mode & 0o7777, uid, gid, mtime_ns, size, target)

    def content(self, size: int) -> Iterator[bytes]:
        """The content of the file whose record came last, in chunks."""
        left = size
        while left:
            self._fill(1)
            data = bytes(self._buffer[:left])
            del self._buffer[: len(data)]
            left -= len(data)
            yield data

    def trailer(self) -> int:
        """After the content: 0, or the errno that cut it short (the rest was zeros)."""
        return int(TRAILER.unpack(self._exactly(TRAILER.size))[0])


def file_stats(data: bytes) -> list[FileStat]:
    """The records of `list` and `stat`; GuestProtocolError when the data is not whole."""
    found: list[FileStat] = []
    at = 0
    while at + HEADER.size <= len(data):
        kind, _, path_length, mode, uid, gid, nanoseconds, target_length, seconds, size = HEADER.unpack_from(data, at)
        at += HEADER.size
        path, target = data[at : at + path_length], data[at + path_length : at + path_length + target_length]
        at += path_length + target_length
        if chr(kind) == "E" and size == len(found) and at == len(data):
            return found
        if chr(kind) not in _KINDS:
            break
        link = shown(target) if kind == ord("L") else None
        mtime = seconds + nanoseconds / 1e9
        found.append(FileStat(shown(path), _KINDS[chr(kind)], size, mode, uid, gid, mtime, link))
    raise GuestProtocolError("the guest sent a malformed list of files")


def skip_reason(record: Record) -> str:
    """Why a record of kind P, K, C, B or S was not carried."""
    if record.kind == "S":
        return os.strerror(record.size) if 0 < record.size < 4096 else errno.errorcode[errno.EIO]
    return _KINDS[record.kind]
