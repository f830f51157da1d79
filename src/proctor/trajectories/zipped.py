"""Members of a zip file, also those that zstd packed (method 93), which the standard library reads since 3.14 only.

Written for files of strangers: sizes are bounded whatever the directory claims, and nothing is written to disk.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

import zstandard

from proctor.common import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MAX_MEMBER_BYTES = 512 << 20
"""A longer member is refused."""
_ZSTD = 93
_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
_LOCAL = struct.Struct("<4s5H3I2H")


class Zipped:
    """A zip file that is open for reading. Raises ConfigError for what is no zip file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            self._zip = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, ValueError, OSError) as error:
            self._file.close()
            raise ConfigError(f"not a zip file: {error}", field=str(path)) from error
        self.names = [info.filename for info in self._zip.infolist() if not info.is_dir()]

    def __enter__(self) -> Zipped:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._file.close()

    def read(self, name: str) -> bytes:
        """The content of a member. Raises ConfigError when it is damaged, or too large."""
        info = self._zip.getinfo(name)
        where = f"{self._path}: {name}"
        if info.file_size > MAX_MEMBER_BYTES:
            raise ConfigError(f"{info.file_size} bytes are more than {MAX_MEMBER_BYTES}", field=where)
        if info.flag_bits & 1:
            raise ConfigError("it is encrypted", field=where)
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL.size)
        if len(header) < _LOCAL.size or header[:4] != b"PK\x03\x04":
            raise ConfigError("its header is damaged", field=where)
        names, extra = _LOCAL.unpack(header)[9:11]
        self._file.seek(info.header_offset + _LOCAL.size + names + extra)
        packed = self._file.read(info.compress_size)
        try:
            data = _unpacked(packed, info.compress_type, info.file_size)
        except (zlib.error, zstandard.ZstdError, ValueError) as error:
            raise ConfigError(f"it cannot be unpacked: {error}", field=where) from error
        if len(data) != info.file_size or zlib.crc32(data) != info.CRC:
            raise ConfigError("it is damaged: size or checksum do not fit", field=where)
        return data


def _unpacked(packed: bytes, method: int, size: int) -> bytes:
    if method == _STORED:
        return packed
    if method == _DEFLATED:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size + 1)
    if method == _ZSTD:
        with zstandard.ZstdDecompressor().stream_reader(packed) as stream:
            return stream.read(size + 1)
    raise ValueError(f"packed by method {method}, which is not known")
