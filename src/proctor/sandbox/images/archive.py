"""Archives from elsewhere, read without trust: into a tree that nothing outside can be reached through.

Compression is told by the first bytes, never by the name. Names may not be absolute or climb; links are written as
they are and never followed out (a name that passes through a link is resolved inside the tree, as the kernel would
after chroot); device nodes and sockets are left out; extended attributes, so file capabilities and forged overlay
marks, are left out; a name may be given once (directories may repeat); bytes, entries, depth and ratio are capped.

OCI deletions (`.wh.<name>`, `.wh..wh..opq`; image-spec, layer.md, "Whiteouts") become overlayfs marks when they are
allowed, and are refused otherwise.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import shutil
import stat
import tarfile
import zlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Protocol, cast

import zstandard

from proctor.sandbox.contract import ImageError
from proctor.sandbox.images.tree import OPAQUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_WHITEOUT = ".wh."
_OPAQUE_MARK = ".wh..wh..opq"
_MAX_ID = 65_535
_MAX_LINKS = 40
_CHUNK = 1 << 20


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Caps:
    """How much one archive may become. Generous for real images, small against a bomb."""

    total_bytes: int = 64 << 30
    entries: int = 2_000_000
    depth: int = 256
    ratio: int = 1000
    """Unpacked bytes for each compressed byte; counted once more than `free_bytes` have come out."""
    free_bytes: int = 256 << 20


@dataclass(slots=True)
class Extracted:
    """What came out of an archive, and what was left out of it."""

    entries: int = 0
    size_bytes: int = 0
    devices: int = 0
    attributes: int = 0
    whiteouts: list[str] = field(default_factory=list)


class _Counted:
    """Counts what is read from the compressed side."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._ahead = b""
        self.count = 0

    def peek(self, size: int) -> bytes:
        """The first bytes, left to be read."""
        while len(self._ahead) < size and (data := self._stream.read(size - len(self._ahead))):
            self._ahead += data
        return self._ahead

    def read(self, size: int = -1, /) -> bytes:
        if self._ahead:
            data, self._ahead = (self._ahead, b"") if size < 0 else (self._ahead[:size], self._ahead[size:])
        else:
            data = self._stream.read(size)
        self.count += len(data)
        return data


class _Capped:
    """Raises when more comes out of a decompressor than the caps allow."""

    def __init__(self, stream: Readable, counted: _Counted, caps: Caps, what: str) -> None:
        self._stream, self._counted, self._caps, self._what = stream, counted, caps, what
        self._out = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(_CHUNK if size is None or size < 0 else min(size, _CHUNK))
        self._out += len(data)
        caps = self._caps
        # A tar holds headers and padding beside the files' bytes, hence the slack.
        if self._out > caps.total_bytes + caps.entries * 1536:
            raise ImageError(f"{self._what} unpacks to more than {caps.total_bytes} bytes")
        if self._out > caps.free_bytes and self._out > max(self._counted.count, 1) * caps.ratio:
            raise ImageError(f"{self._what} unpacks to more than {caps.ratio} times its size")
        return data


@contextmanager
def decompressed(file: IO[bytes], what: str, caps: Caps | None = None) -> Iterator[Readable]:
    """The plain bytes of an open file that may be gzip, zstd, xz or bzip2; damage becomes an ImageError that names
    `what`."""
    with decompressed_stream(file, what, caps) as stream:
        yield stream


@contextmanager
def decompressed_stream(file: Readable, what: str, caps: Caps | None = None) -> Iterator[Readable]:
    """`decompressed` for a stream that cannot seek."""
    caps = caps or Caps()
    counted = _Counted(file)
    magic = counted.peek(6)
    source = cast("IO[bytes]", counted)
    with ExitStack() as stack:
        stream: Readable
        if magic.startswith(b"\x1f\x8b"):
            stream = gzip.GzipFile(fileobj=source, mode="rb")
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            reader = zstandard.ZstdDecompressor(max_window_size=1 << 27)
            stream = stack.enter_context(reader.stream_reader(source, read_across_frames=True, closefd=False))
        elif magic.startswith(b"\xfd7zXZ\0"):
            stream = _Pieces(lambda: lzma.LZMADecompressor(memlimit=512 << 20), counted)
        elif magic.startswith(b"BZh"):
            stream = _Pieces(bz2.BZ2Decompressor, counted)
        else:
            stream = counted
        try:
            yield _Capped(stream, counted, caps, what)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise ImageError(f"{what} is damaged or not an archive: {error}") from error
        except OSError as error:
            # What gzip and bz2 raise for bad data is an OSError that no system call made.
            if error.errno is not None:
                raise
            raise ImageError(f"{what} is damaged or not an archive: {error}") from error


class _Pieces:
    """Decompressor objects as a stream: one after another, since parallel packers write many streams in a row.

    lzma's own file class would do, but has no memory limit.
    """

    def __init__(self, make: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor], source: Readable) -> None:
        self._make, self._source = make, source
        self._decoder = make()

    def read(self, size: int = -1, /) -> bytes:
        wanted = _CHUNK if size < 0 else size
        while True:
            if self._decoder.eof:
                # Zeros after a stream are padding (xz file format, 2.2).
                rest = (self._decoder.unused_data or self._source.read(_CHUNK)).lstrip(b"\0")
                if not rest:
                    return b""
                self._decoder = self._make()
                out = self._decoder.decompress(rest, max_length=wanted)
            else:
                data = self._source.read(_CHUNK) if self._decoder.needs_input else b""
                if not data and self._decoder.needs_input:
                    raise EOFError("the compressed stream ends early")
                out = self._decoder.decompress(data, max_length=wanted)
            if out:
                return out


def extract(stream: Readable, root: Path, *, what: str, deletions: bool, caps: Caps | None = None) -> Extracted:
    """Unpack a plain tar stream into the empty directory `root`, with the ids and times it names.

    ImageError names the entry that is not acceptable; the tree is then incomplete and to be thrown away.
    """
    extraction = _Extraction(root, what, deletions, caps or Caps())
    with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|", errorlevel=2) as tar:
        for member in tar:
            extraction.add(tar, member)
    extraction.finish()
    return extraction.facts


class _Extraction:
    def __init__(self, root: Path, what: str, deletions: bool, caps: Caps) -> None:
        self.root = os.fsencode(root)
        self.what = what
        self.deletions = deletions
        self.caps = caps
        self.facts = Extracted()
        self._seen: set[bytes] = set()
        self._deleted: list[bytes] = []
        self._opaque: list[bytes] = []
        self._directories: dict[bytes, tarfile.TarInfo] = {}

    def refuse(self, member: tarfile.TarInfo, why: str) -> ImageError:
        return ImageError(f"{self.what}: entry {member.name!r} {why}")

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.facts.entries += 1
        if self.facts.entries > self.caps.entries:
            raise ImageError(f"{self.what} holds more than {self.caps.entries} entries")
        parts = self._parts(member, member.name)
        self.facts.attributes += sum(key.startswith("SCHILY.xattr.") for key in member.pax_headers)
        if not parts:
            if not member.isdir():
                raise self.refuse(member, "has no name")
            self._settle(self.root, member)
            return
        parent = self._resolve(member, parts[:-1])
        path = parent + b"/" + parts[-1]
        if parts[-1].startswith(_WHITEOUT.encode()):
            self._note_deletion(member, parent, parts[-1])
            return
        if path in self._seen and not member.isdir():
            raise self.refuse(member, "is given twice")
        self._seen.add(path)
        self._write(tar, member, path)

    def _parts(self, member: tarfile.TarInfo, name: str) -> list[bytes]:
        raw = os.fsencode(name)
        if raw.startswith(b"/"):
            raise self.refuse(member, "has an absolute name")
        parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise self.refuse(member, "climbs out of its directory")
        if len(parts) > self.caps.depth or any(len(part) > 255 for part in parts) or b"\0" in raw:
            raise self.refuse(member, "has a name that is too long or too deep")
        return parts

    def _resolve(self, member: tarfile.TarInfo, parts: list[bytes]) -> bytes:
        """The real directory of `parts` inside the tree, made if missing; links never lead out of it."""
        pending = list(reversed(parts))
        done: list[bytes] = []
        links = 0
        while pending:
            part = pending.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                done = done[:-1]
                continue
            path = b"/".join([self.root, *done, part])
            try:
                info = os.lstat(path)
            except FileNotFoundError:
                os.mkdir(path, 0o755)
                os.chmod(path, 0o755)
            else:
                if stat.S_ISLNK(info.st_mode):
                    links += 1
                    if links > _MAX_LINKS:
                        raise self.refuse(member, "passes through too many links")
                    target = os.readlink(path)
                    done = [] if target.startswith(b"/") else done
                    pending.extend(reversed(target.split(b"/")))
                    continue
                if not stat.S_ISDIR(info.st_mode):
                    raise self.refuse(member, "lies below something that is not a directory")
            done.append(part)
            if len(done) > self.caps.depth:
                raise self.refuse(member, "has a name that is too long or too deep")
        return b"/".join([self.root, *done])

    def _note_deletion(self, member: tarfile.TarInfo, parent: bytes, name: bytes) -> None:
        if not self.deletions:
            raise self.refuse(member, "deletes from a layer below, and there is none")
        if not member.isreg() or member.size != 0:
            raise self.refuse(member, "is a deletion but not an empty file")
        if name == _OPAQUE_MARK.encode():
            self._opaque.append(parent)
            return
        victim = name[len(_WHITEOUT) :]
        if victim in (b"", b".", b"..") or victim.startswith(_WHITEOUT.encode()):
            raise self.refuse(member, "deletes something without a proper name")
        self._deleted.append(parent + b"/" + victim)

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
        if member.ischr() or member.isblk():
            self.facts.devices += 1
            return
        if member.isdir():
            self._directory(member, path)
            return
        if os.path.lexists(path):
            # Only a directory can be here without having been named: a parent made on the way.
            raise self.refuse(member, "takes the place of a directory that holds other entries")
        if member.isreg():
            self._file(tar, member, path)
        elif member.issym():
            if not member.linkname or len(os.fsencode(member.linkname)) > 4095:
                raise self.refuse(member, "is a link with an impossible target")
            os.symlink(os.fsencode(member.linkname), path)
            self._settle(path, member)
        elif member.islnk():
            self._hard_link(member, path)
        elif member.isfifo():
            os.mkfifo(path)
            self._settle(path, member)
        else:
            raise self.refuse(member, f"is of a kind ({member.type!r}) that no image needs")

    def _directory(self, member: tarfile.TarInfo, path: bytes) -> None:
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise self.refuse(member, "is given twice") from None
        # Modes and times are set at the end: a read-only directory would be in the way of nothing for root, but its
        # time changes with every entry.
        self._directories[path] = member

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
        self.facts.size_bytes += member.size
        if self.facts.size_bytes > self.caps.total_bytes:
            raise ImageError(f"{self.what} unpacks to more than {self.caps.total_bytes} bytes")
        source = tar.extractfile(member)
        assert source is not None
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
        self._settle(path, member)

    def _hard_link(self, member: tarfile.TarInfo, path: bytes) -> None:
        parts = self._parts(member, member.linkname)
        if not parts:
            raise self.refuse(member, "is a hard link to nothing")
        target = self._resolve(member, parts[:-1]) + b"/" + parts[-1]
        try:
            info = os.lstat(target)
        except FileNotFoundError:
            raise self.refuse(member, f"is a hard link to {member.linkname!r}, which came not before it") from None
        if stat.S_ISDIR(info.st_mode):
            raise self.refuse(member, "is a hard link to a directory")
        try:
            os.link(target, path, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            raise self.refuse(member, "is one hard link too many") from error

    def _settle(self, path: bytes, member: tarfile.TarInfo) -> None:
        """Owner, mode, time; the mode last, because a change of owner clears set-id bits."""
        if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
            raise self.refuse(member, f"is owned by {member.uid}:{member.gid}; ids go from 0 to {_MAX_ID}")
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            os.chmod(path, member.mode & 0o7777)
        moment = int(min(max(member.mtime, 0), 1 << 33)) * 10**9
        os.utime(path, ns=(moment, moment), follow_symlinks=False)

    def finish(self) -> None:
        """Deletions, then what directories look like, deepest first."""
        for path in self._deleted:
            # A name that the same archive brings wins over its deletion: deletions speak of the layers below.
            if not os.path.lexists(path):
                os.mknod(path, stat.S_IFCHR, 0)
            elif stat.S_ISDIR(os.lstat(path).st_mode):
                self._opaque.append(path)
            self.facts.whiteouts.append(os.fsdecode(path[len(self.root) :]))
        for path in self._opaque:
            os.setxattr(path, OPAQUE, b"y", follow_symlinks=False)
            self.facts.whiteouts.append(os.fsdecode(path[len(self.root) :]) + "/")
        for path in sorted(self._directories, reverse=True):
            self._settle(path, self._directories[path])
