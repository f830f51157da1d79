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
    from collections.abc import Callable

FAN_MODIFY = 0x2
FAN_CLOSE_WRITE = 0x8
FAN_Q_OVERFLOW = 0x4000
FAN_OPEN_PERM = 0x1_0000
_EVENT_ON_CHILD = 0x0800_0000
_CLOEXEC, _NONBLOCK, _CLASS_CONTENT = 0x1, 0x2, 0x4
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


class DirectoryWatch:
    """Calls `decide` for every open, and every write, of a file in `directory`; an open waits for its answer.

    `decide` returns whether an open may go on (its answer to other events is not used). Raises OSError when the
    kernel has no such events or the caller may not have them.
    """

    def __init__(self, directory: int, decide: Callable[[Event], bool]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._decide = decide
        self._group = libc.fanotify_init(_CLOEXEC | _NONBLOCK | _CLASS_CONTENT, os.O_RDONLY | os.O_CLOEXEC)
        if self._group < 0:
            raise _error("fanotify_init")
        mask = FAN_OPEN_PERM | FAN_MODIFY | FAN_CLOSE_WRITE | _EVENT_ON_CHILD
        libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
        if libc.fanotify_mark(self._group, _MARK_ADD | _MARK_ONLYDIR, mask, directory, b".") < 0:
            error = _error("fanotify_mark")
            os.close(self._group)
            raise error
        self.overflowed = False
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="proctor-reward-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Every event that happened before is delivered; opens that wait are let through."""
        if self._group < 0:
            return
        os.write(self._stop_write, b"x")
        self._thread.join()
        for descriptor in (self._group, self._stop_read, self._stop_write):
            os.close(descriptor)
        self._group = -1

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._group, select.POLLIN)
        poll.register(self._stop_read, select.POLLIN)
        stopping = False
        while not stopping:
            stopping = any(descriptor == self._stop_read for descriptor, _ in poll.poll())
            self._drain()

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._group, 65536)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(data):
                length, _, _, _, mask, descriptor, pid = _METADATA.unpack_from(data, offset)
                offset += length
                self._handle(Event(mask, descriptor, pid))

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


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
