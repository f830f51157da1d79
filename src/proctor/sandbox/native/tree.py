"""Tar archives and local directories as tree streams, and back (the stream itself: csrc/tree.h, native/records.py).

Nothing here follows a link or leaves the directory it was given, whoever filled the archive or the sandbox. What is
refused raises TreeError, whose `field` names the entry. All of it blocks: run it in a worker thread.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import IO, TYPE_CHECKING, Literal

from proctor.sandbox._walk import Walk
from proctor.sandbox.native.records import (
    CHUNK,
    DEFAULT_LIMITS,
    PATH_MAX,
    TARGET_MAX,
    TRAILER,
    Record,
    Skipped,
    TreeError,
    TreeLimits,
    TreeSource,
    encode,
    end_record,
    shown,
    skip_reason,
)
from proctor.sandbox.native.tarfiles import TarReader, open_archive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = [
    "Record",
    "Skipped",
    "TreeError",
    "TreeLimits",
    "directory_to_tree",
    "open_archive",
    "tar_to_tree",
    "tree_to_directory",
    "tree_to_tar",
]

Links = Literal["inside", "any"]
_NAME_MAX = 255
_ROOT = b""


class _Catalogue:
    """What a tree holds so far: caps, duplicates, and entries below something that is no directory."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits
        self._kinds: dict[bytes, str] = {}
        self._explicit = 0
        self._bytes = 0

    def add(self, path: bytes, kind: str, size: int) -> None:
        """Note one entry; TreeError when the tree may not hold it."""
        self._explicit += 1
        self._bytes += size
        if self._explicit > self._limits.max_entries:
            raise TreeError(f"more than {self._limits.max_entries} entries", field=shown(path))
        if self._bytes > self._limits.max_bytes:
            raise TreeError(f"more than {self._limits.max_bytes} bytes of content", field=shown(path))
        known = self._kinds.get(path)
        if known is not None and not known == kind == "D":
            raise TreeError("the same name twice", field=shown(path))
        self._kinds[path] = kind
        parent = path
        while parent:
            parent = parent.rpartition(b"/")[0]
            known = self._kinds.get(parent) if parent else "D"
            if known == "D":
                return
            if known is not None:
                raise TreeError(f"an entry below {shown(parent)!r}, which is no directory", field=shown(path))
            self._kinds[parent] = "D"

    def is_file(self, path: bytes) -> bool:
        """Whether `path` is a file of this tree."""
        return self._kinds.get(path) in ("F", "H")


def clean_path(name: bytes, what: str, entry: bytes) -> bytes:
    """A member's name as a path below the root: no leading `./`, no doubled or trailing slash; empty for the root.

    Absolute names and names with `..` are refused, not repaired.
    """
    if name.startswith(b"/"):
        raise TreeError(f"an absolute {what}", field=shown(entry))
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise TreeError(f"a {what} with `..`", field=shown(entry))
    path = b"/".join(parts)
    if not name or b"\0" in path or len(path) > PATH_MAX or any(len(part) > _NAME_MAX for part in parts):
        raise TreeError(f"an empty, overlong or malformed {what}", field=shown(entry)[:200] or "(no name)")
    return path


def _check_link(path: bytes, target: bytes, links: Links) -> None:
    if not target or b"\0" in target or len(target) > TARGET_MAX:
        raise TreeError("a symbolic link with an empty, overlong or malformed target", field=shown(path))
    if links == "any":
        return
    if target.startswith(b"/"):
        raise TreeError(f"a symbolic link to an absolute path ({shown(target)})", field=shown(path))
    depth = path.count(b"/")
    for part in target.split(b"/"):
        depth += -1 if part == b".." else part not in (b"", b".")
        if depth < 0:
            raise TreeError(f"a symbolic link that leaves the tree ({shown(target)})", field=shown(path))


class _Writer:
    """Encodes records, counting them; the metadata of directories comes last, deepest first, because a read-only
    directory could not be filled."""

    def __init__(self) -> None:
        self._count = 0
        self._directories: dict[bytes, Record] = {}

    def record(self, record: Record) -> bytes:
        """One record on the wire."""
        self._count += 1
        if record.kind == "D":
            self._directories[record.path] = record
        return encode(record)

    def finish(self) -> Iterator[bytes]:
        """The rest of the stream."""
        for path in sorted(self._directories, key=len, reverse=True):
            directory = self._directories[path]
            yield self.record(Record("d", path, directory.mode, mtime_ns=directory.mtime_ns))
        yield end_record(self._count)


def tar_to_tree(stream: IO[bytes], *, limits: TreeLimits = DEFAULT_LIMITS, links: Links = "inside") -> Iterator[bytes]:
    """The tree stream of an uncompressed tar. Set-id bits, owners and extended attributes are not carried.

    With `links="any"` symbolic links may point anywhere: extraction never follows one, so that is for archives whose
    links mean something inside the sandbox (a virtual environment). Everything else that is hostile is refused.
    """
    reader, catalogue, writer = TarReader(stream, limits), _Catalogue(limits), _Writer()
    for entry in reader.entries():
        path = clean_path(entry.name, "name", entry.name)
        if path == _ROOT:
            if entry.kind != "D":
                raise TreeError("the root of a tree that is no directory", field=shown(entry.name))
            continue
        catalogue.add(path, entry.kind, entry.size)
        target = entry.target
        if entry.kind == "L":
            _check_link(path, target, links)
        elif entry.kind == "H":
            target = clean_path(target, "hard link's target", entry.name)
            if target == path or not catalogue.is_file(target):
                raise TreeError(f"a hard link to {shown(target)!r}, which is no earlier file", field=shown(path))
        mode = entry.mode & (0o1777 if entry.kind == "D" else 0o777)
        yield writer.record(Record(entry.kind, path, mode, mtime_ns=entry.mtime_ns, size=entry.size, target=target))
        if entry.kind == "F":
            yield from reader.content()
            yield TRAILER.pack(0)
    yield from writer.finish()


def directory_to_tree(root: Path, *, limits: TreeLimits = DEFAULT_LIMITS) -> Iterator[bytes]:
    """The tree stream of a local directory's content. Links stay links; sockets, fifos and devices are refused."""
    try:
        yield from _read_tree(root, limits)
    except OSError as error:
        raise TreeError(f"cannot be read: {error.strerror}", field=str(error.filename or root)) from error


def _read_tree(root: Path, limits: TreeLimits) -> Iterator[bytes]:
    catalogue, writer = _Catalogue(limits), _Writer()
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with Walk(descriptor) as walk:
            for entry in walk:
                path, info = os.fsencode(entry.path), entry.info
                mode, mtime_ns = info.st_mode & 0o777, info.st_mtime_ns
                if stat.S_ISDIR(info.st_mode):
                    catalogue.add(path, "D", 0)
                    yield writer.record(Record("D", path, info.st_mode & 0o1777, mtime_ns=mtime_ns))
                elif stat.S_ISLNK(info.st_mode):
                    catalogue.add(path, "L", 0)
                    target = os.fsencode(os.readlink(entry.name, dir_fd=entry.directory))
                    _check_link(path, target, "any")
                    yield writer.record(Record("L", path, mode, mtime_ns=mtime_ns, target=target))
                elif stat.S_ISREG(info.st_mode):
                    catalogue.add(path, "F", info.st_size)
                    yield writer.record(Record("F", path, mode, mtime_ns=mtime_ns, size=info.st_size))
                    yield from _local_content(entry.directory, entry.name, path, info.st_size)
                else:
                    raise TreeError("a socket, fifo or device is not carried", field=entry.path)
        yield from writer.finish()
    finally:
        os.close(descriptor)


def _local_content(directory: int, name: str, path: bytes, size: int) -> Iterator[bytes]:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        left = size
        while left:
            data = file.read(min(left, CHUNK))
            if not data:
                raise TreeError("the file shrank while it was read", field=shown(path))
            left -= len(data)
            yield data
    yield TRAILER.pack(0)


def tree_to_tar(
    chunks: Iterable[bytes],
    out: IO[bytes],
    *,
    limits: TreeLimits = DEFAULT_LIMITS,
    root_name: str = "file",
) -> list[Skipped]:
    """Write a tree stream as a pax tar; returns what was not carried. A tree that is one file is named `root_name`.

    A file that changed while the guest read it has the length that was promised and is listed in the result.
    """
    source, catalogue, skipped = TreeSource(chunks), _Catalogue(limits), list[Skipped]()
    for record in source.records():
        name = record.path or os.fsencode(root_name)
        if record.kind not in "DFL":
            skipped.append(Skipped(shown(name), skip_reason(record)))
            continue
        if record.path == _ROOT and record.kind == "D":
            continue
        catalogue.add(name, record.kind, record.size if record.kind == "F" else 0)
        out.write(_tar_header(name, record))
        if record.kind == "F":
            for data in source.content(record.size):
                out.write(data)
            out.write(bytes(-record.size % tarfile.BLOCKSIZE))
            if error := source.trailer():
                skipped.append(Skipped(shown(name), f"changed while it was read: {os.strerror(error)}"))
    out.write(bytes(2 * tarfile.BLOCKSIZE))
    return skipped


def _tar_header(name: bytes, record: Record) -> bytes:
    info = tarfile.TarInfo(shown(name))
    info.mode = record.mode & (0o1777 if record.kind == "D" else 0o777)
    info.uid, info.gid = record.uid, record.gid
    seconds, nanoseconds = divmod(record.mtime_ns, 10**9)
    info.mtime = seconds
    if nanoseconds:
        info.pax_headers = {"mtime": f"{seconds}.{nanoseconds:09d}" if seconds >= 0 else str(seconds)}
    info.type = {"D": tarfile.DIRTYPE, "L": tarfile.SYMTYPE, "F": tarfile.REGTYPE}[record.kind]
    info.size = record.size if record.kind == "F" else 0
    info.linkname = shown(record.target) if record.kind == "L" else ""
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


class _Directory:
    """Writes entries below an open local directory, one component at a time and never through a link."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._path = _ROOT
        self._parent = os.dup(root)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._parent)

    def enter(self, path: bytes) -> tuple[int, bytes]:
        """The open parent of `path`, made where it is missing, and the last component."""
        parent, _, name = path.rpartition(b"/")
        if parent != self._path:
            below = self._path and parent.startswith(self._path + b"/")
            start = self._parent if below else self._root
            descriptor = os.dup(start)
            for part in (parent[len(self._path) + 1 :] if below else parent).split(b"/"):
                if part:
                    try:
                        following = self.open_directory(descriptor, part, path)
                    finally:
                        os.close(descriptor)
                    descriptor = following
            os.close(self._parent)
            self._parent, self._path = descriptor, parent
        return self._parent, name

    @staticmethod
    def open_directory(directory: int, name: bytes, path: bytes) -> int:
        """Open a directory, made if absent; never through a link."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, flags, dir_fd=directory)
        except FileNotFoundError:
            os.mkdir(name, 0o755, dir_fd=directory)
            return os.open(name, flags, dir_fd=directory)
        except OSError as error:
            raise TreeError(f"cannot be written below what is there: {error.strerror}", field=shown(path)) from error

    def make_way(self, path: bytes) -> tuple[int, bytes]:
        """`enter`, and remove a file or link that has the name."""
        parent, name = self.enter(path)
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError) as error:
            raise TreeError(f"cannot replace what is there: {error.strerror}", field=shown(path)) from error
        return parent, name


def tree_to_directory(
    chunks: Iterable[bytes],
    target: Path,
    *,
    limits: TreeLimits = DEFAULT_LIMITS,
) -> list[Skipped]:
    """Write a tree stream below the local directory `target` (made if absent), or, if the tree is one file or link, as
    `target` itself; returns what was not carried. Links are written as links, never followed; set-id bits are cut.
    """
    try:
        return _write_tree(TreeSource(chunks), target, limits)
    except OSError as error:
        raise TreeError(f"cannot be written here: {error.strerror}", field=str(target)) from error


def _write_tree(source: TreeSource, target: Path, limits: TreeLimits) -> list[Skipped]:
    records = source.records()
    first = next(records, None)
    if first is None:
        raise TreeError("an empty tree", field=str(target))
    single = first.path == _ROOT and first.kind != "D"
    folder = target.parent if single else target
    folder.mkdir(parents=True, exist_ok=True)
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    writer = _Directory(root)
    sink = _Sink(source, writer, _Catalogue(limits), os.fsencode(target.name) if single else _ROOT)
    try:
        sink.take(first)
        for record in records:
            sink.take(record)
        sink.finish()
    finally:
        writer.close()
        os.close(root)
    return sink.skipped


class _Sink:
    def __init__(self, source: TreeSource, writer: _Directory, catalogue: _Catalogue, root_name: bytes) -> None:
        self._source = source
        self._writer = writer
        self._catalogue = catalogue
        self._root_name = root_name
        self._directories: list[Record] = []
        self.skipped: list[Skipped] = []

    def take(self, record: Record) -> None:
        """Write one record."""
        path = record.path or self._root_name
        if path == _ROOT:
            return
        if record.kind not in "DFL":
            self.skipped.append(Skipped(shown(path), skip_reason(record)))
            return
        self._catalogue.add(path, record.kind, record.size if record.kind == "F" else 0)
        if record.kind == "D":
            parent, name = self._writer.enter(path)
            os.close(_Directory.open_directory(parent, name, path))
            self._directories.append(record)
        elif record.kind == "L":
            parent, name = self._writer.make_way(path)
            os.symlink(record.target, name, dir_fd=parent)
            os.utime(name, ns=(record.mtime_ns, record.mtime_ns), dir_fd=parent, follow_symlinks=False)
        else:
            self._file(path, record)

    def _file(self, path: bytes, record: Record) -> None:
        parent, name = self._writer.make_way(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
            for data in self._source.content(record.size):
                file.write(data)
            file.flush()
            os.fchmod(file.fileno(), record.mode & 0o777)
            os.utime(file.fileno(), ns=(record.mtime_ns, record.mtime_ns))
        if error := self._source.trailer():
            self.skipped.append(Skipped(shown(path), f"changed while it was read: {os.strerror(error)}"))

    def finish(self) -> None:
        """Directories get their own modes and times last, deepest first. We keep access to what we wrote."""
        for record in sorted(self._directories, key=lambda record: len(record.path), reverse=True):
            parent, name = self._writer.enter(record.path)
            descriptor = _Directory.open_directory(parent, name, record.path)
            os.fchmod(descriptor, record.mode & 0o777 | 0o700)
            os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
            os.close(descriptor)
