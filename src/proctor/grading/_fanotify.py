"""fanotify by ctypes: permission events on one directory, answered in a thread. Linux; needs CAP_SYS_ADMIN.

Kernel interface: fanotify(7), fanotify_init(2), fanotify_mark(2).
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAN_MODIFY = 0x2
FAN_MOVED_TO = 0x80
FAN_CREATE = 0x100
FAN_CLOSE_WRITE = 0x8
FAN_Q_OVERFLOW = 0x4000
FAN_OPEN_PERM = 0x1_0000
_EVENT_ON_CHILD = 0x0800_0000
_CLOEXEC, _NONBLOCK, _CLASS_CONTENT = 0x1, 0x2, 0x4
_REPORT_DIR_FID, _REPORT_NAME = 0x400, 0x800
_INFO_HEADER = struct.Struct("=BBH8sIi")
_MARK_ADD, _MARK_ONLYDIR = 0x1, 0x8
_ALLOW, _DENY = 0x1, 0x2
_METADATA = struct.Struct("=IBBHQii")
_RESPONSE = struct.Struct("=iI")


@dataclass(frozen=True, slots=True)
class Event:
    """One event on a child of the directory. `fd` is open only while the callback runs; `pid` is the host's."""

    mask: int
    fd: int
    pid: int


@dataclass(frozen=True, slots=True)
class NameEvent:
    """A name that appeared in the directory: created (or linked), or moved there."""

    mask: int
    name: str
    pid: int


class DirectoryWatch:
    """Calls `decide` for every open, and every write, of a file in `directory`; an open waits for its answer.
    Calls `named` for every name that appears there.

    `decide` returns whether an open may go on (its answer to other events is not used). Raises OSError when the
    kernel has no such events or the caller may not have them.
    """

    def __init__(self, directory: int, decide: Callable[[Event], bool], named: Callable[[NameEvent], None]) -> None:
        self._decide = decide
        self._named = named
        self.overflowed = False
        opens = FAN_OPEN_PERM | FAN_MODIFY | FAN_CLOSE_WRITE | _EVENT_ON_CHILD
        self._group = _group(_CLASS_CONTENT, directory, opens)
        try:
            self._names = _group(_REPORT_DIR_FID | _REPORT_NAME, directory, FAN_CREATE | FAN_MOVED_TO)
        except OSError:
            os.close(self._group)
            raise
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="proctor-reward-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Every event that happened before is delivered; opens that wait are let through."""
        if self._group < 0:
            return
        os.write(self._stop_write, b"x")
        self._thread.join()
        for descriptor in (self._group, self._names, self._stop_read, self._stop_write):
            os.close(descriptor)
        self._group = -1

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._group, select.POLLIN)
        poll.register(self._names, select.POLLIN)
        poll.register(self._stop_read, select.POLLIN)
        stopping = False
        while not stopping:
            stopping = any(descriptor == self._stop_read for descriptor, _ in poll.poll())
            for event, _ in _read_all(self._group):
                self._handle(event)
            for event, info in _read_all(self._names):
                self._handle_name(event, info)

    def _handle(self, event: Event) -> None:
        if event.mask & FAN_Q_OVERFLOW:
            self.overflowed = True
        if event.fd < 0:
            return
        allowed = False
        try:
            allowed = self._decide(event)
        finally:
            if event.mask & FAN_OPEN_PERM:
                os.write(self._group, _RESPONSE.pack(event.fd, _ALLOW if allowed else _DENY))
            os.close(event.fd)

    def _handle_name(self, event: Event, info: bytes) -> None:
        if event.mask & FAN_Q_OVERFLOW or len(info) < _INFO_HEADER.size:
            self.overflowed = True
            return
        handle_bytes = _INFO_HEADER.unpack_from(info)[4]
        name = info[_INFO_HEADER.size + handle_bytes :].split(b"\0", 1)[0]
        self._named(NameEvent(event.mask, os.fsdecode(name), event.pid))


def _group(flags: int, directory: int, mask: int) -> int:
    """A notification group with one mark on `directory`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
    group: int = libc.fanotify_init(_CLOEXEC | _NONBLOCK | flags, os.O_RDONLY | os.O_CLOEXEC)
    if group < 0:
        raise _error("fanotify_init")
    if libc.fanotify_mark(group, _MARK_ADD | _MARK_ONLYDIR, mask, directory, b".") < 0:
        error = _error("fanotify_mark")
        os.close(group)
        raise error
    return group


def _read_all(group: int) -> Iterator[tuple[Event, bytes]]:
    """Every event that waits, with its information records."""
    while True:
        try:
            data = os.read(group, 65536)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data):
            length, _, _, header, mask, descriptor, pid = _METADATA.unpack_from(data, offset)
            yield Event(mask, descriptor, pid), data[offset + header : offset + length]
            offset += length


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
