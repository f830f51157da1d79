"""Programs that bring their own C library: editing ELF files in place, so that they run above any image.

A dynamic program names its loader by an absolute path, and the loader looks for libraries in directories that are
compiled into it. Both are strings in a file, and both may be replaced by others that are not longer: then the program,
its loader and its libraries form an island that takes nothing from the image (glibc, musl, or no C library at all),
without variables that its children would inherit and without moving one byte (some programs keep a payload at the end
of their own file).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from proctor.sandbox.contract import ImageError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"
_PT_INTERP = 3
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
# What Debian's loader has compiled in: where it looks by default (one table, which the compiler may have copied), and
# two files of /etc that say more. `/lib/` and `/usr/lib/` would show the image's own libraries.
_SEARCHED = b"/lib/x86_64-linux-gnu/", b"/usr/lib/x86_64-linux-gnu/", b"/lib/", b"/usr/lib/"
_CONSULTED = b"/etc/ld.so.cache", b"/etc/ld.so.preload"


def interpreter(data: bytes) -> str | None:
    """The loader that an ELF program of 64 bits names; None for a static one, a library, or any other file."""
    found = _interpreter_at(data)
    if found is None:
        return None
    offset, size = found
    return data[offset : offset + size].rstrip(b"\0").decode("utf-8", "replace")


def set_interpreter(path: Path, loader: str) -> None:
    """Let the program name `loader` instead; ImageError if it names none, or a shorter one."""
    with path.open("r+b") as file:
        start = file.read(1 << 16)
        found = _interpreter_at(start)
        if found is None:
            raise ImageError(f"{path.name} is not a dynamic program of 64 bits", field="toolkit.native")
        offset, size = found
        name = loader.encode() + b"\0"
        if len(name) > size:
            raise ImageError(f"{path.name} has no room for the name of another loader", field="toolkit.native")
        file.seek(offset)
        file.write(name.ljust(size, b"\0"))


def _interpreter_at(data: bytes) -> tuple[int, int] | None:
    """Offset and size of the loader's name, within what was given of the file."""
    if not data.startswith(_MAGIC) or len(data) < _HEADER.size:
        return None
    _, _, _, _, table, _, _, _, entry_size, count, *_ = _HEADER.unpack_from(data)
    for number in range(count):
        at = table + number * entry_size
        if at + _PROGRAM.size > len(data):
            return None
        kind, _, offset, _, _, size, _, _ = _PROGRAM.unpack_from(data, at)
        if kind == _PT_INTERP and offset + size <= len(data):
            return offset, size
    return None


def relocated_loader(data: bytes, directory: str) -> bytes:
    """glibc's loader for x86-64, as Debian builds it, looking for libraries in `directory` and nowhere else.

    ImageError when the file does not have the expected strings: then it is another loader.
    """
    wanted = directory.rstrip("/").encode()
    shortest = len(_SEARCHED[0]) - 1
    if len(wanted) > shortest:
        raise ImageError(f"{directory} is longer than {shortest} bytes", field="toolkit")
    # A directory that is too short to hold the name becomes `/`, where there are no libraries.
    new = [(wanted if len(wanted) < len(old) else b"").ljust(len(old), b"/") for old in _SEARCHED]
    data = _replaced(data, b"\0".join((*_SEARCHED, b"")), b"\0".join((*new, b"")))
    for old in _CONSULTED:
        data = _replaced(data, b"\0" + old + b"\0", b"\0" + (b"/-/" + old[5:]).ljust(len(old), b"-") + b"\0")
    return data


def _replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    if old not in data or len(old) != len(new):
        raise ImageError(f"the loader has no {old!r}; it is not Debian's for x86-64", field="toolkit")
    return data.replace(old, new)
