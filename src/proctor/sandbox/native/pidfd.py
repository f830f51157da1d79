"""How a process ended, asked of the kernel through its pidfd (Linux 6.15; ioctl PIDFD_GET_INFO of pidfd(7))."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from dataclasses import dataclass

_INFO = struct.Struct("<QQIIIIIIIIIIIi")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT = 1 << 3


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended; both None: the kernel does not say (it is too old, or nobody has reaped the process yet)."""

    exit_code: int | None = None
    signal: str | None = None


def has_ended(pidfd: int) -> bool:
    """Whether the process is dead."""
    watch = select.poll()  # not select(2), which knows no descriptor above 1,023
    watch.register(pidfd, select.POLLIN)
    return bool(watch.poll(0))


def ending(pidfd: int) -> Ending:
    """How the process ended."""
    request = bytearray(_INFO.size)
    struct.pack_into("<Q", request, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, request)
    except OSError:
        return Ending()
    mask, *_, status = _INFO.unpack(request)
    if not mask & _EXIT:
        return Ending()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return Ending(signal=signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}")
    return Ending(exit_code=os.WEXITSTATUS(status))
