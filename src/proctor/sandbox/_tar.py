"""A layer as a tar.zst file: pax headers, OCI whiteouts, holes kept, nothing followed.

- A deletion is an empty file `.wh.<name>`; an opaque directory has an empty file `.wh..wh..opq` as its first child
  (OCI image specification, layer.md).
- A name that the candidate itself began with `.wh.` would read as a deletion. It is written as `%2ewh.<rest>` with
  its true path in the pax record `PROCTOR.path`.
- Files with holes are written in the GNU sparse format 1.0, so a terabyte of nothing costs one line.
- Sockets have no form in tar and are left out (they are in the diff list). `user.*` attributes are kept as
  `SCHILY.xattr.*`; capabilities and overlayfs's own marks are not.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import zstandard

from proctor.sandbox._walk import Entry, Walk
from proctor.sandbox.contract import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = 1 << 20
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write_layer(upper: int, target: Path, *, level: int = 3) -> None:
    """Write the open directory `upper` to `target`. An error leaves `target` as it was."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise SandboxError(f"cannot write {target}: {error.strerror or error}") from error
    try:
        with (
            os.fdopen(handle, "wb") as file,
            zstandard.ZstdCompressor(level=level).stream_writer(file, closefd=False) as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, errorlevel=1) as tar,
        ):
            _Writer(tar).write(upper)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise SandboxError(f"cannot write {target}: {error.strerror or error}") from error
        raise


def write_plain_layer(upper: int, target: Path) -> None:
    """The same without compression and without care for what is at `target`."""
    with tarfile.open(target, mode="w", format=tarfile.PAX_FORMAT, errorlevel=1) as tar:
        _Writer(tar).write(upper)


class _Writer:
    """Turns walk entries into tar members. Hard links are kept by (device, inode) within the layer."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._links: dict[tuple[int, int], str] = {}

    def write(self, upper: int) -> None:
        with Walk(upper) as walk:
            for entry in walk:
                self._entry(entry)

    def _entry(self, entry: Entry) -> None:
        mode = entry.info.st_mode
        if entry.whiteout:
            parent = entry.path[: len(entry.path) - len(entry.name)]
            self._tar.addfile(_marker(_escape(parent) + _WHITEOUT + _escape(entry.name)))
        elif stat.S_ISDIR(mode):
            self._tar.addfile(self._member(entry, tarfile.DIRTYPE))
            if entry.opaque:
                self._tar.addfile(_marker(_escape(entry.path) + "/" + _OPAQUE))
        elif stat.S_ISREG(mode):
            self._file(entry)
        elif stat.S_ISLNK(mode):
            member = self._member(entry, tarfile.SYMTYPE)
            member.linkname = os.readlink(entry.name, dir_fd=entry.directory)
            self._tar.addfile(member)
        elif stat.S_ISFIFO(mode):
            self._tar.addfile(self._member(entry, tarfile.FIFOTYPE))
        # Sockets, and devices (which a sandbox cannot make), have no place in a layer.

    def _file(self, entry: Entry) -> None:
        try:
            source = os.open(entry.name, _READ, dir_fd=entry.directory)
        except OSError as error:
            raise SandboxError(f"/{entry.path} changed while it was read: {error}") from error
        try:
            info = os.fstat(source)
            identity = (info.st_dev, info.st_ino)
            if not stat.S_ISREG(info.st_mode):
                raise SandboxError(f"/{entry.path} changed its kind while it was read")
            if (first := self._links.get(identity)) is not None:
                member = self._member(entry, tarfile.LNKTYPE)
                member.linkname = first
                self._tar.addfile(member)
                return
            if info.st_nlink > 1:
                self._links[identity] = _escape(entry.path)
            self._content(entry, source, info)
        finally:
            os.close(source)

    def _content(self, entry: Entry, source: int, info: os.stat_result) -> None:
        member = self._member(entry, tarfile.REGTYPE, source)
        if info.st_blocks * 512 >= info.st_size:
            member.size = info.st_size
            self._add(member, _Exactly(source, [(0, info.st_size)]))
            return
        extents = list(_extents(source, info.st_size))
        table = _sparse_map(extents)
        member.pax_headers = {
            **member.pax_headers,
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": member.name,
            "GNU.sparse.realsize": str(info.st_size),
        }
        member.size = len(table) + sum(length for _, length in extents)
        self._add(member, _Exactly(source, extents, prefix=table))

    def _add(self, member: tarfile.TarInfo, content: _Exactly) -> None:
        self._tar.addfile(member, cast("IO[bytes]", content))

    def _member(self, entry: Entry, kind: bytes, source: int | None = None) -> tarfile.TarInfo:
        member = tarfile.TarInfo(_escape(entry.path))
        member.type = kind
        member.mode = stat.S_IMODE(entry.info.st_mode)
        member.uid, member.gid = entry.info.st_uid, entry.info.st_gid
        member.mtime = entry.info.st_mtime
        records: dict[str, str] = {}
        if member.name != entry.path:
            records["PROCTOR.path"] = entry.path
        if source is not None:
            for name in os.listxattr(source):
                if name.startswith("user."):
                    value = os.getxattr(source, name)
                    records[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
        member.pax_headers = records
        return member


class _Exactly:
    """Reads the extents of a file and gives exactly their length, padding with zeros what a writer cut off."""

    def __init__(self, source: int, extents: list[tuple[int, int]], prefix: bytes = b"") -> None:
        self._source = source
        self._pending = prefix
        self._extents = list(reversed(extents))

    def read(self, size: int = -1, /) -> bytes:
        wanted = _CHUNK if size < 0 else size
        out = bytearray(self._pending[:wanted])
        self._pending = self._pending[wanted:]
        while self._extents and len(out) < wanted:
            offset, length = self._extents.pop()
            if not length:
                continue
            want = min(length, wanted - len(out))
            data = os.pread(self._source, want, offset) or bytes(want)
            out += data
            if len(data) < length:
                self._extents.append((offset + len(data), length - len(data)))
        return bytes(out)


def _escape(path: str) -> str:
    """`path` with every component that begins with `.wh.` made harmless."""
    if _WHITEOUT not in path:
        return path
    return "/".join("%2e" + part[1:] if part.startswith(_WHITEOUT) else part for part in path.split("/"))


def _marker(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode = 0o600
    return member


def _extents(source: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that hold data, as (offset, length)."""
    position = 0
    while position < size:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
        except OSError:
            # ENXIO: nothing but a hole up to the end.
            return
        end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        if end <= start:
            return
        yield start, end - start
        position = end


def _sparse_map(extents: list[tuple[int, int]]) -> bytes:
    """The map that precedes a sparse member's data: count, then offset and length each, padded to 512 bytes."""
    numbers = [len(extents), *(number for extent in extents for number in extent)]
    text = "".join(f"{number}\n" for number in numbers).encode()
    return text + bytes(-len(text) % 512)
