"""Walking a directory that a hostile writer filled (and may still be filling), without ever leaving it.

Every step is relative to an open directory descriptor and follows no link. Depth is bounded by nothing but the
file system: only the last few levels stay open, and a parent that was closed is reopened as `..` and must still be
the directory that was left, so a rename in the middle is noticed, not followed.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.sandbox.contract import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPEN_LEVELS = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPAQUE = "trusted.overlay.opaque"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an upper layer. `directory` is the open parent, valid until the walk goes on."""

    path: str
    """Relative to the layer's root, `surrogateescape` for undecodable bytes, no leading slash."""
    name: str
    directory: int
    info: os.stat_result
    opaque: bool = False
    """A directory that hides everything below it in lower layers."""

    @property
    def whiteout(self) -> bool:
        """True for the mark that overlayfs leaves for a deletion: a character device 0:0."""
        return is_whiteout(self.info)


def is_whiteout(info: os.stat_result) -> bool:
    """Whether `info` is an overlay whiteout (character device 0:0; overlayfs refuses to create one by request)."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(directory: int) -> bool:
    """Whether the open directory carries overlayfs's opaque mark."""
    try:
        return os.getxattr(directory, _OPAQUE) == b"y"
    except OSError:
        # ENODATA: no mark; ENOTSUP: a file system without such attributes, which cannot have been an upper.
        return False


@dataclass(slots=True)
class _Level:
    name: str
    names: Iterator[str]
    identity: tuple[int, int]
    descriptor: int | None


class Walk:
    """Depth-first, names sorted by bytes, parents before children. Use as a context manager.

    After an entry for a directory has been yielded, `skip()` prevents the walk from entering it.
    """

    def __init__(self, root: int) -> None:
        self._levels: list[_Level] = []
        self._skip = False
        self._push("", os.open(".", _DIRECTORY, dir_fd=root))

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        for level in self._levels:
            if level.descriptor is not None:
                os.close(level.descriptor)
        self._levels.clear()

    def skip(self) -> None:
        """Do not enter the directory that was yielded last."""
        self._skip = True

    def __iter__(self) -> Iterator[Entry]:
        parts: list[str] = []
        while self._levels:
            level = self._levels[-1]
            name = next(level.names, None)
            if name is None:
                self._pop()
                if parts:
                    parts.pop()
                continue
            assert level.descriptor is not None
            try:
                info = os.stat(name, dir_fd=level.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            path = "/".join([*parts, name])
            if not stat.S_ISDIR(info.st_mode):
                yield Entry(path, name, level.descriptor, info)
                continue
            try:
                child = os.open(name, _DIRECTORY, dir_fd=level.descriptor)
            except (FileNotFoundError, NotADirectoryError):
                continue
            self._skip = False
            try:
                yield Entry(path, name, level.descriptor, os.fstat(child), is_opaque(child))
            except BaseException:
                os.close(child)
                raise
            if self._skip:
                os.close(child)
                continue
            parts.append(name)
            self._push(name, child)

    def _push(self, name: str, descriptor: int) -> None:
        info = os.fstat(descriptor)
        names = sorted(os.listdir(descriptor), key=os.fsencode)
        self._levels.append(_Level(name, iter(names), (info.st_dev, info.st_ino), descriptor))
        if len(self._levels) > _OPEN_LEVELS:
            old = self._levels[-_OPEN_LEVELS - 1]
            if old.descriptor is not None:
                os.close(old.descriptor)
                old.descriptor = None

    def _pop(self) -> None:
        done = self._levels.pop()
        assert done.descriptor is not None
        try:
            if self._levels and self._levels[-1].descriptor is None:
                parent = os.open("..", _DIRECTORY, dir_fd=done.descriptor)
                info = os.fstat(parent)
                if (info.st_dev, info.st_ino) != self._levels[-1].identity:
                    os.close(parent)
                    raise SandboxError(
                        f"directory {done.name!r} was moved while it was read",
                        remedy="stop the sandbox's processes first (kill_all)",
                    )
                self._levels[-1].descriptor = parent
        finally:
            os.close(done.descriptor)
