"""Reading layers from outside: a path in a stack of layers, component by component, never through a link."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from proctor.grading.deliverable import FileState
from proctor.grading.diffing import LINK
from proctor.sandbox.layers import LowerStack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from proctor.sandbox.contract import Layer

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class View:
    """The files that a stack of layers shows. Paths are absolute inside. Use as a context manager."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._stack = LowerStack(layers)

    def __enter__(self) -> Self:
        self._stack.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.__exit__(*exc)

    def _find(self, path: str) -> tuple[os.stat_result | None, tuple[int, ...], int]:
        within = self._stack.whole()
        info: os.stat_result | None = None
        holder = -1
        prefix = ""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            return None, (), -1
        for part in parts:
            if not within:
                return None, (), -1
            prefix = f"{prefix}/{part}" if prefix else part
            info, within, holder = self._stack.lookup(within, prefix)
            if info is None:
                return None, (), -1
        return info, within, holder

    def stat(self, path: str) -> os.stat_result | None:
        """Metadata without following a link; None when it does not exist (also below a link or a file)."""
        return self._find(path)[0]

    def is_dir(self, path: str) -> bool:
        """Whether `path` is a directory (not a link to one)."""
        info = self.stat(path)
        return info is not None and stat.S_ISDIR(info.st_mode)

    def state(self, path: str, *, limit: int | None = None) -> FileState | None:
        """A regular file or link as plain data; None for anything else. Raises ValueError beyond `limit` bytes."""
        info, _, holder = self._find(path)
        if info is None:
            return None
        relative = path.strip("/")
        if stat.S_ISLNK(info.st_mode):
            return FileState(LINK, os.fsencode(os.readlink(relative, dir_fd=holder)))
        if not stat.S_ISREG(info.st_mode):
            return None
        if limit is not None and info.st_size > limit:
            raise ValueError(f"{path} has {info.st_size} bytes")
        descriptor = os.open(relative, _READ, dir_fd=holder)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read() if limit is None else file.read(limit + 1)
        return FileState(0o755 if info.st_mode & 0o111 else 0o644, data)

    def has_capability(self, path: str) -> bool:
        """Whether a file carries file capabilities."""
        info, _, holder = self._find(path)
        if info is None or not stat.S_ISREG(info.st_mode):
            return False
        descriptor = os.open(path.strip("/"), _READ, dir_fd=holder)
        try:
            os.getxattr(descriptor, "security.capability")
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def names(self, path: str) -> list[str]:
        """Names in a directory; empty for anything else."""
        if path.strip("/") == "":
            return self._stack.names(self._stack.whole(), "")
        info, within, _ = self._find(path)
        if info is None or not stat.S_ISDIR(info.st_mode):
            return []
        return self._stack.names(within, path.strip("/"))

    def walk(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """`path` and everything below it, parents first, without following links."""
        pending = ["/" + path.strip("/")]
        while pending:
            current = pending.pop()
            info = self.stat(current)
            if info is None:
                continue
            yield current, info
            if stat.S_ISDIR(info.st_mode):
                pending.extend(f"{current.rstrip('/')}/{name}" for name in reversed(self.names(current)))
