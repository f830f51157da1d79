"""What a sandbox changed: an upper layer read against the layers below it.

A sandbox's disk is `image layers (read-only) + one private upper layer`. The upper says everything: files that are
there were added or modified, whiteouts (character devices 0:0) are deletions, and an opaque directory hides what
lower layers have at its place. Layers hold ids, modes and contents as seen from inside. See docs/design/layers.md.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

from proctor.sandbox._walk import Entry, Walk, is_opaque, is_whiteout
from proctor.sandbox.contract import DiffEntry, Layer, SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Self

Kind = Literal["file", "dir", "link", "fifo", "socket", "char", "block"]

_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}
_CHUNK = 1 << 20
_PATH_AT_ONCE = 4000
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def kind_of(mode: int) -> Kind:
    """The kind of file that `st_mode` says."""
    return _KINDS[stat.S_IFMT(mode)]


class LowerStack:
    """Read-only layers (lowest first) looked up as overlayfs would: upper names win, whiteouts and opaque marks hide.

    Use as a context manager; one descriptor per layer is held open.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._resources = ExitStack()
        self._roots: list[int] = []
        try:
            for layer in reversed(layers):
                self._roots.append(self._open(layer))
        except BaseException:
            self._resources.close()
            raise

    def _open(self, layer: Layer) -> int:
        try:
            root = os.open(layer.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"cannot open layer {layer.digest or layer.handle or layer.path}: {error}") from error
        self._resources.callback(os.close, root)
        return root

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def whole(self) -> tuple[int, ...]:
        """The layers that contribute to the root directory, topmost first, to be handed to `lookup` and `names`."""
        return tuple(self._roots)

    def lookup(self, within: tuple[int, ...], path: str) -> tuple[os.stat_result | None, tuple[int, ...], int]:
        """Find `path`, whose parent directory is made by the layers `within`.

        Returns its metadata (None when it does not exist), the layers that make it if it is a directory, and the
        layer that holds it.
        """
        top: os.stat_result | None = None
        holder = -1
        makers: list[int] = []
        for root in within:
            try:
                with _reach(root, path) as (directory, name):
                    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if is_whiteout(info) or (top is not None and not stat.S_ISDIR(info.st_mode)):
                break
            if top is None:
                top, holder = info, root
            if not stat.S_ISDIR(info.st_mode):
                break
            makers.append(root)
            if self._opaque(root, path):
                break
        return top, tuple(makers), holder

    def names(self, within: tuple[int, ...], path: str) -> list[str]:
        """Names visible in directory `path`, which the layers `within` make."""
        shown: set[str] = set()
        hidden: set[str] = set()
        for root in within:
            with _opened(root, path or ".", _DIRECTORY) as descriptor:
                for name in os.listdir(descriptor):
                    if name in shown or name in hidden:
                        continue
                    info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    (hidden if is_whiteout(info) else shown).add(name)
        return sorted(shown, key=os.fsencode)

    @staticmethod
    def _opaque(root: int, path: str) -> bool:
        with _opened(root, path, _DIRECTORY) as descriptor:
            return is_opaque(descriptor)


@contextmanager
def _reach(root: int, path: str) -> Iterator[tuple[int, str]]:
    """A directory and a name in it that together are `path` below `root`: the kernel takes 4 KiB of path at a time."""
    directory, rest = root, path
    try:
        while len(os.fsencode(rest)) > _PATH_AT_ONCE:
            cut = rest.rfind("/", 0, _PATH_AT_ONCE // 4)
            below = os.open(rest[:cut], _DIRECTORY, dir_fd=directory)
            if directory != root:
                os.close(directory)
            directory, rest = below, rest[cut + 1 :]
        yield directory, rest
    finally:
        if directory != root:
            os.close(directory)


@contextmanager
def _opened(root: int, path: str, flags: int) -> Iterator[int]:
    with _reach(root, path) as (directory, name):
        descriptor = os.open(name, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def diff(upper: int, layers: Sequence[Layer]) -> list[DiffEntry]:
    """Compare the open upper directory with the `layers` under it (lowest first).

    One entry for each path that differs, sorted by the walk (parents first). A directory that was replaced or
    deleted is one `deleted` entry for itself, or for each of its former children, not for everything below. A file
    that was copied up but is the same in kind, mode, owner, time, size and content is no change.
    """
    with LowerStack(layers) as lower, Walk(upper) as walk:
        return list(_differences(lower, walk))


def _differences(lower: LowerStack, walk: Walk) -> Iterator[DiffEntry]:
    # The chain of directories above the current entry: path, the lower layers that made it, and whether an opaque
    # mark at or above it hides them now. Marks are not repeated on directories inside an opaque one.
    above: list[tuple[str, tuple[int, ...], bool]] = [("", lower.whole(), False)]
    for entry in walk:
        parent = entry.path[: -len(entry.name) - 1] if "/" in entry.path else ""
        while above[-1][0] != parent:
            above.pop()
        _, within, hidden = above[-1]
        before, makers, holder = lower.lookup(within, entry.path) if within else (None, (), -1)
        if entry.whiteout:
            if before is not None:
                yield DiffEntry("/" + entry.path, "deleted", kind_of(before.st_mode))
            continue
        is_directory = stat.S_ISDIR(entry.info.st_mode)
        if before is None:
            yield _entry(entry, "added")
        elif not _same(entry, before, holder):
            yield _entry(entry, "modified")
        if is_directory:
            hidden = hidden or entry.opaque
            if hidden:
                yield from _hidden(lower, entry, makers)
            above.append((entry.path, makers, hidden))


def _hidden(lower: LowerStack, entry: Entry, makers: tuple[int, ...]) -> Iterator[DiffEntry]:
    """Deletions that an opaque directory stands for: lower children that it does not have itself."""
    if not makers:
        return
    own = {name for name, there in _children(entry) if there}
    for name in lower.names(makers, entry.path):
        if name not in own:
            path = f"{entry.path}/{name}"
            info, _, _ = lower.lookup(makers, path)
            if info is not None:
                yield DiffEntry("/" + path, "deleted", kind_of(info.st_mode))


def _children(entry: Entry) -> Iterator[tuple[str, bool]]:
    with _opened(entry.directory, entry.name, _DIRECTORY) as descriptor:
        for name in os.listdir(descriptor):
            yield name, not is_whiteout(os.stat(name, dir_fd=descriptor, follow_symlinks=False))


def _entry(entry: Entry, change: Literal["added", "modified"]) -> DiffEntry:
    info = entry.info
    return DiffEntry(
        "/" + entry.path,
        change,
        kind_of(info.st_mode),
        size=0 if stat.S_ISDIR(info.st_mode) else info.st_size,
        mode=stat.S_IMODE(info.st_mode),
    )


def _same(entry: Entry, before: os.stat_result, holder: int) -> bool:
    now = entry.info
    if (now.st_mode, now.st_uid, now.st_gid) != (before.st_mode, before.st_uid, before.st_gid):
        return False
    if stat.S_ISDIR(now.st_mode):
        return True
    if now.st_size != before.st_size or now.st_rdev != before.st_rdev:
        return False
    if stat.S_ISLNK(now.st_mode):
        with _reach(holder, entry.path) as (directory, name):
            return os.readlink(entry.name, dir_fd=entry.directory) == os.readlink(name, dir_fd=directory)
    if not stat.S_ISREG(now.st_mode):
        return True
    # A file with holes may be terabytes of nothing, which is not worth reading: call it modified.
    has_holes = now.st_blocks * 512 < now.st_size
    return now.st_mtime_ns == before.st_mtime_ns and not has_holes and _same_bytes(entry, holder)


def _same_bytes(entry: Entry, holder: int) -> bool:
    with _opened(entry.directory, entry.name, _FILE) as ours, _opened(holder, entry.path, _FILE) as theirs:
        while True:
            mine, other = os.read(ours, _CHUNK), os.read(theirs, _CHUNK)
            if mine != other:
                return False
            if not mine:
                return True


def usage(upper: int) -> tuple[int, int]:
    """Bytes and files that an upper's file system holds now (`statvfs`, so it costs the same for any size)."""
    info = os.statvfs(f"/proc/self/fd/{upper}")
    return (info.f_blocks - info.f_bfree) * info.f_frsize, info.f_files - info.f_ffree


def export(upper: int, target: Path) -> None:
    """Write the upper directory to `target` as tar.zst with OCI whiteouts; see `_tar`. Appears whole or not at all."""
    from proctor.sandbox._tar import write_layer

    write_layer(upper, target)
