"""Reading tar archives from strangers, strictly: one meaning for each archive, or a refusal that names the entry.

Formats: POSIX ustar and pax, and GNU tar's long names (POSIX.1-2017, `pax`; GNU tar manual, "Basic Tar Format").
What two readers could understand differently is refused, not guessed at.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from proctor.sandbox.native.records import CHUNK, TreeError, TreeLimits, shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK: Final = 512
_EXTENSION_MAX: Final = 1 << 20
_ZSTD_WINDOW_MAX: Final = 128 << 20
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,6}) ([^=\0]+)=")
_MTIME = re.compile(rb"(-?)([0-9]{1,12})(?:\.([0-9]{1,20}))?\Z")
_REFUSED = {b"3": "a character device", b"4": "a block device", b"6": "a fifo", b"S": "a sparse file"}


@dataclass(frozen=True, slots=True)
class TarEntry:
    """One member of an archive, as it says itself; names are not cleaned yet."""

    kind: str
    """As in tree records: F, D, L or H."""
    name: bytes
    mode: int
    mtime_ns: int
    size: int
    target: bytes


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a `.tar`, `.tar.gz` or `.tar.zst`, told apart by content. Damage raises TreeError."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=file) as plain:
                    yield plain  # type: ignore[misc]
            elif magic == b"\x28\xb5\x2f\xfd":
                import zstandard

                decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX)
                with decompressor.stream_reader(file, read_across_frames=True) as plain:
                    yield plain
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TreeError(f"a damaged archive: {error}", field=path.name) from error
    except ValueError as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise TreeError(f"a damaged archive: {error}", field=path.name) from error


class TarReader:
    """Iterates over the members of a tar stream; the content of a file has to be taken before the next member."""

    def __init__(self, stream: IO[bytes], limits: TreeLimits) -> None:
        self._stream = stream
        self._limits = limits
        self._headers = 0
        self._left = 0
        self._padding = 0

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._stream.read(min(size, CHUNK))
            if not part:
                raise TreeError("an archive that is cut short", field="tar")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def content(self) -> Iterator[bytes]:
        """The content of the file that came last, in chunks."""
        while self._left:
            data = self._read(min(self._left, CHUNK))
            self._left -= len(data)
            yield data
        self._read(self._padding)
        self._padding = 0

    def entries(self) -> Iterator[TarEntry]:
        """Every member. Raises TreeError for what is malformed, ambiguous or not carried."""
        extension: dict[bytes, bytes] = {}
        while True:
            header = self._read(_BLOCK)
            if header == bytes(_BLOCK):
                return
            self._count(header)
            kind, size = header[156:157], _number(header[124:136], "size")
            if kind in (b"x", b"g", b"L", b"K"):
                extension = self._extend(extension, kind, size)
                continue
            entry = _entry(header, kind, size, extension)
            extension = {}
            self._left, self._padding = entry.size, -entry.size % _BLOCK
            yield entry
            for _ in self.content():
                pass

    def _count(self, header: bytes) -> None:
        stored = _number(header[148:156], "checksum")
        if stored != sum(header[:148]) + 8 * 0x20 + sum(header[156:]):
            raise TreeError("not a tar archive, or a damaged one: a header with a wrong checksum", field="tar")
        self._headers += 1
        if self._headers > 3 * self._limits.max_entries + 16:
            raise TreeError(f"an archive of more than {self._limits.max_entries} entries", field="tar")

    def _extend(self, extension: dict[bytes, bytes], kind: bytes, size: int) -> dict[bytes, bytes]:
        if not 0 < size <= _EXTENSION_MAX:
            raise TreeError(f"an extension header of {size} bytes", field="tar")
        data = self._read(size)
        self._read(-size % _BLOCK)
        if kind == b"L":
            return {**extension, b"path": data.rstrip(b"\0")}
        if kind == b"K":
            return {**extension, b"linkpath": data.rstrip(b"\0")}
        records = _pax_records(data)
        if any(key.startswith(b"GNU.sparse") for key in records):
            raise TreeError("a sparse file (pack it plainly)", field=shown(records.get(b"path", b"tar")))
        if kind == b"x":
            return {**extension, **records}
        if records.keys() & {b"path", b"linkpath", b"size"}:
            raise TreeError("a global header that overrides the names or sizes of all entries", field="tar")
        return extension


def _entry(header: bytes, kind: bytes, size: int, extension: dict[bytes, bytes]) -> TarEntry:
    name = header[:100].split(b"\0")[0]
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].split(b"\0")[0]):
        name = prefix + b"/" + name
    name = extension.get(b"path", name)
    target = extension.get(b"linkpath", header[157:257].split(b"\0")[0])
    if b"size" in extension:
        size = _decimal(extension[b"size"], "size")
    if kind in _REFUSED:
        raise TreeError(f"{_REFUSED[kind]} is not carried", field=shown(name))
    if kind in (b"\0", b"0", b"7"):
        # Before ustar a directory was a file whose name ended with a slash.
        letter = "D" if name.endswith(b"/") and not size else "F"
    elif kind in (b"1", b"2", b"5"):
        letter = {b"1": "H", b"2": "L", b"5": "D"}[kind]
    else:
        raise TreeError(f"an entry of unknown type {kind!r}", field=shown(name))
    if size and letter != "F":
        raise TreeError("an entry with content that is no file", field=shown(name))
    mtime_ns = _mtime(extension[b"mtime"]) if b"mtime" in extension else _number(header[136:148], "mtime") * 10**9
    mode = _number(header[100:108], "mode")
    return TarEntry(letter, name, mode & 0o7777, mtime_ns, size, target if letter in "HL" else b"")


def _number(field: bytes, what: str) -> int:
    """A number of a header: octal digits, or GNU's base 256 with the top bit set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0")[0].strip(b" ")
    if not text:
        return 0
    if not re.fullmatch(rb"[0-7]+", text):
        raise TreeError(f"not a tar archive, or a damaged one: {what} is {field!r}", field="tar")
    return int(text, 8)


def _decimal(text: bytes, what: str) -> int:
    if not re.fullmatch(rb"[0-9]{1,18}", text):
        raise TreeError(f"a pax header with a {what} of {text!r}", field="tar")
    return int(text)


def _mtime(text: bytes) -> int:
    found = _MTIME.match(text)
    if not found:
        raise TreeError(f"a pax header with an mtime of {text!r}", field="tar")
    value = int(found[2]) * 10**9 + int(((found[3] or b"") + b"000000000")[:9])
    return -value if found[1] else value


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """`length key=value\\n` records; the length counts itself."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        found = _PAX_RECORD.match(data, at)
        if found is None:
            raise TreeError("a malformed pax header", field="tar")
        end = at + int(found[1])
        if end > len(data) or end <= found.end() - 1 or data[end - 1 : end] != b"\n":
            raise TreeError("a malformed pax header", field="tar")
        records[found[2]] = data[found.end() : end - 1]
        at = end
    return records
