"""A layer as a directory tree: made harmless, then named by the digest of its content.

Two steps, both over a tree that only we can write to (a workspace of the store):

`normalise` removes what a layer must not carry: extended attributes (file capabilities, ACLs, forged overlay
marks), device nodes, sockets; shifts ids; keeps only the two overlay marks that mean a deletion.
`scan` computes the digest over names, kinds, modes, ids, link targets, hard links, file bytes and deletions. Times
do not count: two builds that differ in nothing else are one layer.

Deletions use the kernel's own marks (Documentation/filesystems/overlayfs.rst, "whiteouts and opaque directories"):
a character device 0:0, and `trusted.overlay.opaque=y` on a directory.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.sandbox.contract import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPAQUE = "trusted.overlay.opaque"
_OPAQUE_NAMES = (OPAQUE, "user.overlay.opaque")
_REFUSED_MARKS = frozenset({"overlay.redirect", "overlay.metacopy"})
_MAX_ID = 65_535
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """What a scan found out."""

    digest: str
    size_bytes: int
    entries: int


def is_whiteout(info: os.stat_result) -> bool:
    """True for the mark that deletes a name of the layers below."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(path: bytes) -> bool:
    """True for a directory that hides what layers below have at its place."""
    for name in _OPAQUE_NAMES:
        with suppress(OSError):
            if os.getxattr(path, name, follow_symlinks=False) in (b"y", b"x"):
                return True
    return False


def walk(path: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every entry below `path`, parents first, names in byte order; symbolic links are not followed."""
    for entry in sorted(os.scandir(path), key=lambda item: item.name):
        info = entry.stat(follow_symlinks=False)
        yield entry.path, info
        if stat.S_ISDIR(info.st_mode):
            yield from walk(entry.path)


def normalise(root: Path, *, id_base: int = 0, deletions: bool = True, strip_setid: bool = False) -> int:
    """Make the tree fit to be a layer, in place; returns how many entries were removed.

    `id_base` is subtracted from every owner (a frozen upper holds the ids of its sandbox's range). `deletions` keeps
    whiteouts and opaque marks; a base layer has none. `strip_setid` clears set-id bits (a layer that a candidate
    wrote). Raises ImageError for an owner outside the range and for marks that would redirect a name elsewhere.
    """
    base = os.fsencode(root)
    removed = 0
    for path, info in [(base, os.lstat(base)), *walk(base)]:
        kind = stat.S_IFMT(info.st_mode)
        whiteout = is_whiteout(info)
        if kind in (stat.S_IFBLK, stat.S_IFSOCK) or (kind == stat.S_IFCHR and not (whiteout and deletions)):
            os.unlink(path)
            removed += 1
            continue
        opaque = _clean_attributes(path, kind, base) and deletions
        if whiteout:
            # A mark has no owner or mode of its own; zeros keep the digest independent of who deleted.
            os.chown(path, 0, 0, follow_symlinks=False)
            os.chmod(path, 0)
            continue
        _settle_owner(path, info, id_base, strip_setid, base)
        if opaque and path != base:
            os.setxattr(path, OPAQUE, b"y", follow_symlinks=False)
    return removed


def _clean_attributes(path: bytes, kind: int, base: bytes) -> bool:
    """Remove every extended attribute; True if the entry was marked opaque."""
    opaque = False
    for name in os.listxattr(path, follow_symlinks=False):
        if name.partition(".")[2] in _REFUSED_MARKS:
            raise ImageError(f"{_shown(path, base)} carries {name}, which points into another layer")
        if name in _OPAQUE_NAMES and kind == stat.S_IFDIR:
            opaque = os.getxattr(path, name, follow_symlinks=False) in (b"y", b"x") or opaque
        if name != "security.selinux":
            os.removexattr(path, name, follow_symlinks=False)
    return opaque


def _settle_owner(path: bytes, info: os.stat_result, id_base: int, strip_setid: bool, base: bytes) -> None:
    uid, gid = info.st_uid - id_base, info.st_gid - id_base
    if not (0 <= uid <= _MAX_ID and 0 <= gid <= _MAX_ID):
        raise ImageError(
            f"{_shown(path, base)} is owned by {info.st_uid}:{info.st_gid}, outside {id_base}..{id_base + _MAX_ID}"
        )
    mode = stat.S_IMODE(info.st_mode)
    wanted = mode & ~0o6000 if strip_setid and not stat.S_ISDIR(info.st_mode) else mode
    owner_changes = (uid, gid) != (info.st_uid, info.st_gid)
    if owner_changes:
        os.chown(path, uid, gid, follow_symlinks=False)
    # chown clears set-id bits, so the mode comes after it.
    if not stat.S_ISLNK(info.st_mode) and (wanted != mode or (owner_changes and mode & 0o6000)):
        os.chmod(path, wanted)


def scan(root: Path) -> TreeFacts:
    """Digest, bytes and entries of a normalised tree."""
    base = os.fsencode(root)
    hasher = hashlib.sha256(b"proctor layer 1\n")
    first_names: dict[int, bytes] = {}
    size = entries = 0
    for path, info in [(base, os.lstat(base)), *walk(base)]:
        name = path[len(base) :].lstrip(b"/")
        linked = info.st_nlink > 1 and stat.S_ISREG(info.st_mode)
        if linked and info.st_ino in first_names:
            _feed(hasher, [name, b"same", first_names[info.st_ino]])
        else:
            _feed(hasher, [name, *_fields(path, info, root_entry=path == base)])
            size += info.st_size if stat.S_ISREG(info.st_mode) else 0
            if linked:
                first_names[info.st_ino] = name
        entries += 1
    return TreeFacts("sha256:" + hasher.hexdigest(), size, entries)


def _fields(path: bytes, info: os.stat_result, *, root_entry: bool) -> list[bytes]:
    mode = stat.S_IMODE(info.st_mode)
    owner = b"%o %d %d" % (mode, info.st_uid, info.st_gid)
    if is_whiteout(info):
        return [b"whiteout"]
    if stat.S_ISDIR(info.st_mode):
        opaque = not root_entry and OPAQUE in os.listxattr(path, follow_symlinks=False)
        return [b"opaque" if opaque else b"dir", owner]
    if stat.S_ISLNK(info.st_mode):
        return [b"link", b"%d %d" % (info.st_uid, info.st_gid), os.readlink(path)]
    if stat.S_ISREG(info.st_mode):
        return [b"file", owner, _file_digest(path)]
    if stat.S_ISFIFO(info.st_mode):
        return [b"fifo", owner]
    raise ImageError(f"{os.fsdecode(path)} is a device or socket; a layer holds none")


def _file_digest(path: bytes) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _feed(hasher: hashlib._Hash, fields: list[bytes]) -> None:
    """Length-prefixed fields, so no two lists of fields give the same bytes."""
    hasher.update(len(fields).to_bytes(2, "little"))
    for item in fields:
        hasher.update(len(item).to_bytes(8, "little"))
        hasher.update(item)


def _shown(path: bytes, base: bytes) -> str:
    return os.fsdecode(path[len(base) :] or b"/")
