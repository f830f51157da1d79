"""Which ids an Edge's sandboxes have: one of the machine's ten slices, not shared with another while there are enough.

A slice is taken by a lock on a file of `/run`, which the kernel gives back when its Edge ends, however that happens.
"""

from __future__ import annotations

import fcntl
import logging
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

RANGES_PER_EDGE: Final = 2048
_UID_FLOOR: Final = 0x2000_0000
_UID_SLICES: Final = 10
"""Ids 0x20000000 to 0x6fffffff: above what people, distributions and other container tools use, below 2^31."""
_GUEST_UID_FLOOR: Final = 0x1FF0_0000
"""Ids of guests: one for each range, below all ranges, in no sandbox's map."""
_LOCKS: Final = Path("/run/proctor/ids")


@dataclass(slots=True)
class IdSlice:
    """A slice. The lock, if there is one, is held until `close`."""

    number: int
    lock: int = -1

    @classmethod
    def by_name(cls, edge: str) -> IdSlice:
        """The slice that the Edge called `edge` always has; others may have it, too."""
        return cls(zlib.crc32(edge.encode()) % _UID_SLICES)

    @classmethod
    def take(cls, edge: str, locks: Path = _LOCKS) -> IdSlice:
        """A slice that no other living Edge has taken; that of its name where it is free, or where none is."""
        preferred = cls.by_name(edge)
        try:
            locks.mkdir(mode=0o700, parents=True, exist_ok=True)
            for step in range(_UID_SLICES):
                number = (preferred.number + step) % _UID_SLICES
                lock = os.open(locks / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return cls(number, lock)
                os.close(lock)
        except OSError as error:
            log.warning("%s: %s: ids of sandboxes may be those of another Edge's", locks, error.strerror)
            return preferred
        log.warning("more than %d Edges run here: ids of sandboxes are also another Edge's", _UID_SLICES)
        return preferred

    @property
    def uid_start(self) -> int:
        """The first id of its sandboxes' ranges."""
        return _UID_FLOOR + self.number * RANGES_PER_EDGE * 65536

    @property
    def guest_uid(self) -> int:
        """The first guest's id."""
        return _GUEST_UID_FLOOR + self.number * RANGES_PER_EDGE

    def close(self) -> None:
        """Give it back. Idempotent."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1
