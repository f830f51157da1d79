"""Frames and exec requests of the guest protocol as bytes (docs/design/guest-protocol.md); no input or output here."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Final

from proctor.sandbox.contract import GuestProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

VERSION: Final = 2
HEADER: Final = struct.Struct("<IIBBH")
PAYLOAD_MAX: Final = 65_536
WINDOW: Final = 262_144
FIRST_WINDOW: Final = 65_536
"""Bytes that a new connection of the carried network may send us."""
REQUEST_MAX: Final = 2 << 20
ITEMS_MAX: Final = 32_768
_FIRST_BUFFER: Final = 4096

GUEST_ID: Final = 0x8000_0000
"""Streams that the guest numbers have this bit: connections and name queries of the carried network."""

STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2
REPORT: Final = 3

U32: Final = struct.Struct("<I")
EXITED: Final = struct.Struct("<iiQQQI")
_FIELD: Final = struct.Struct("<BI")


class FrameType(IntEnum):
    """What a frame says."""

    HELLO = 1
    EXEC = 2
    STARTED = 3
    DATA = 4
    EOF = 5
    CREDIT = 6
    KILL = 7
    EXITED = 8
    FAILED = 9
    CLOSED = 10
    KILLALL = 11
    KILLED = 12
    PING = 13
    PONG = 14
    GONE = 15
    LISTEN = 16
    LISTENING = 17
    UNLISTEN = 18
    UNLISTENED = 19
    ACCEPTED = 20
    CONNECT = 21
    CONNECTED = 22
    RESET = 23
    QUERY = 24
    REFUSED = 25
    RESIZE = 32
    RESUME = 33
    RESUMED = 34
    DONE = 35


NETWORK_TYPES: Final = range(16, 32)
"""Types of frames of the carried network."""


class HelloFlag(IntFlag):
    """What a guest says of itself."""

    GROUPS = 1
    DURABLE = 2
    RESUMED = 4


class ExecFlag(IntFlag):
    """How an exec is connected."""

    NONE = 0
    STDIN = 1
    KEEP = 2
    MERGE = 4
    LOGIN_ENV = 8
    STARTED = 16


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame."""

    type: int
    sub: int
    stream: int
    payload: bytes


class RequestError(ValueError):
    """A request that has no form on the wire: a NUL in a text, too many items, too many bytes."""


def frame(kind: FrameType, stream: int = 0, sub: int = 0, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return HEADER.pack(len(payload), stream, kind, sub, 0) + payload


def exec_frames(stream: int, request: bytes) -> bytes:
    """A request as one EXEC frame, or as several of which all but the last have sub 1."""
    if len(request) <= PAYLOAD_MAX:
        return frame(FrameType.EXEC, stream, 0, request)
    pieces = [request[at : at + PAYLOAD_MAX] for at in range(0, len(request), PAYLOAD_MAX)]
    last = len(pieces) - 1
    return b"".join(frame(FrameType.EXEC, stream, int(i < last), piece) for i, piece in enumerate(pieces))


def encode_text(text: str | bytes) -> bytes:
    """File-system encoding of a text (surrogateescape); RequestError when it has none or holds a NUL."""
    if isinstance(text, str):
        try:
            text = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise RequestError("a text with a lone surrogate has no bytes") from error
    if b"\0" in text:
        raise RequestError("a text holds a NUL byte")
    return text


def exec_request(
    argv: Sequence[str | bytes],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    flags: ExecFlag = ExecFlag.NONE,
    report_fd: int | None = None,
    builtin: str | None = None,
    terminal: tuple[int, int] | None = None,
) -> bytes:
    """Encode an exec request. Raises RequestError for what the wire cannot carry."""
    fields: list[tuple[int, bytes]] = [(1, encode_text(item)) for item in argv]
    for name, value in (env or {}).items():
        if not name or "=" in name:
            raise RequestError(f"{name!r} is not a name of an environment variable")
        fields.append((2, encode_text(f"{name}={value}")))
    if len(fields) > ITEMS_MAX:
        raise RequestError(f"more than {ITEMS_MAX} arguments and variables")
    for tag, text in ((3, cwd), (4, user), (7, builtin)):
        if text is not None:
            fields.append((tag, encode_text(text)))
    fields.append((5, U32.pack(flags)))
    if report_fd is not None:
        if not 3 <= report_fd <= 255:
            raise RequestError("a report descriptor is a number from 3 to 255")
        fields.append((6, U32.pack(report_fd)))
    if terminal is not None:
        fields.append((8, terminal_size(*terminal)))
    request = b"".join(_FIELD.pack(tag, len(data)) + data for tag, data in fields)
    if len(request) > REQUEST_MAX:
        raise RequestError(f"arguments and environment of more than {REQUEST_MAX} bytes")
    return request


def terminal_size(columns: int, rows: int) -> bytes:
    """A size as the wire has it. Raises RequestError for one that no terminal can have."""
    if not (0 < columns < 1 << 16 and 0 < rows < 1 << 16):
        raise RequestError(f"a terminal of {columns} by {rows} characters: both must be 1 to 65535")
    return U32.pack(columns | rows << 16)


class FrameReader:
    """Cuts a byte stream into frames, holding at most one frame and one read in memory.

    Most sandboxes never say much, so the buffer is small until a read has filled it.
    """

    def __init__(self, size: int = 4 * (HEADER.size + PAYLOAD_MAX)) -> None:
        self._size = size
        self._buffer = bytearray(min(size, _FIRST_BUFFER))
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def space(self) -> memoryview:
        """Where the next bytes of the stream go; never empty."""
        if self._end == len(self._buffer) < self._size:
            unread = self._view[self._start : self._end]
            self._buffer = bytearray(self._size)
            self._buffer[: len(unread)] = unread
            self._view = memoryview(self._buffer)
            self._start, self._end = 0, len(unread)
        elif self._start:
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

    def took(self, count: int) -> None:
        """`count` bytes were put into `space()`."""
        self._end += count

    def has_frame(self) -> bool:
        """Whether `frames` has one more (or a malformed one to complain about)."""
        held = self._end - self._start
        return held >= HEADER.size and held - HEADER.size >= HEADER.unpack_from(self._buffer, self._start)[0]

    def frames(self) -> Iterator[Frame]:
        """Every whole frame; GuestProtocolError for a malformed one."""
        while self._end - self._start >= HEADER.size:
            length, stream, kind, sub, reserved = HEADER.unpack_from(self._buffer, self._start)
            if length > PAYLOAD_MAX or reserved:
                raise GuestProtocolError("the guest sent a malformed frame header")
            stop = self._start + HEADER.size + length
            if stop > self._end:
                return
            payload = bytes(self._view[self._start + HEADER.size : stop])
            self._start = stop
            yield Frame(kind, sub, stream, payload)
