"""The final disk of a replay against the recorded one: every path, its kind, mode and owner, and every byte."""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import zstandard

from proctor.common import ConfigError
from proctor.runs.replay.compare import Level
from proctor.runs.replay.masks import file_without_times

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import IO

    from proctor.runs.formats import DiffItem

_CHUNK = 1 << 20
_LOOKED_INTO = 4 << 20
"""Larger files are compared by digest alone."""


_LOOKED_INTO_IN_ALL = 64 << 20


@dataclass(frozen=True, slots=True)
class DiskDifference:
    """One path that is not as it was. `level` is CLOCK when only times in its content differ."""

    path: str
    what: str
    level: Level


@dataclass(frozen=True, slots=True)
class _Member:
    kind: bytes
    mode: int
    owner: tuple[int, int]
    link: str
    size: int
    digest: str


def compare_disks(
    then: Sequence[DiffItem], now: Sequence[DiffItem], then_archive: Path | None, now_archive: Path | None
) -> list[DiskDifference]:
    """Every path whose change, kind, mode, owner, link or content differs. Contents are compared where both archives
    are there. Times of files do not count."""
    found = dict(_list_differences(then, now))
    if then_archive is not None and now_archive is not None:
        before, after = _members(then_archive), _members(now_archive)
        common = [path for path in before if path in after and path not in found]
        for path in common:
            what = _member_difference(before[path], after[path])
            if what:
                found[path] = DiskDifference(path, what, Level.DIFFERENT)
        differ = {path for path, one in found.items() if one.what == "content" and before[path].size <= _LOOKED_INTO
                  and after[path].size <= _LOOKED_INTO}  # fmt: skip
        differ |= {path for path, one in found.items() if one.what == "size" and path in before and path in after}
        mine, theirs = _contents(then_archive, differ), _contents(now_archive, differ)
        for path in differ & mine.keys() & theirs.keys():
            if file_without_times(path, mine[path]) == file_without_times(path, theirs[path]):
                found[path] = DiskDifference(path, found[path].what, Level.CLOCK)
    return [found[path] for path in sorted(found)]


def _list_differences(then: Sequence[DiffItem], now: Sequence[DiffItem]) -> Iterator[tuple[str, DiskDifference]]:
    before, after = {one.path: one for one in then}, {one.path: one for one in now}
    for path in before.keys() | after.keys():
        mine, theirs = before.get(path), after.get(path)
        if mine is None or theirs is None:
            change = (mine or theirs).change  # type: ignore[union-attr]
            what = f"{change} then, untouched now" if theirs is None else f"{change} now, untouched then"
            yield path, DiskDifference(path, what, Level.DIFFERENT)
            continue
        for name in ("change", "kind", "mode", "size"):
            old, new = getattr(mine, name), getattr(theirs, name)
            if old != new:
                what = "size" if name == "size" else f"{name} {old} then, {new} now"
                yield path, DiskDifference(path, what, Level.DIFFERENT)
                break


def _member_difference(before: _Member, after: _Member) -> str:
    if before.kind != after.kind:
        return "kind"
    if before.owner != after.owner:
        return f"owner {before.owner[0]}:{before.owner[1]} then, {after.owner[0]}:{after.owner[1]} now"
    if before.link != after.link:
        return f"points to {before.link} then, {after.link} now"
    return "content" if before.digest != after.digest else ""


def _members(archive: Path) -> Mapping[str, _Member]:
    found: dict[str, _Member] = {}
    for path, member, file in _walk(archive):
        digest = ""
        if file is not None:
            hasher = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
            digest = hasher.hexdigest()
        found[path] = _Member(member.type, member.mode, (member.uid, member.gid), member.linkname, member.size, digest)
    return found


def _contents(archive: Path, paths: Container[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    room = _LOOKED_INTO_IN_ALL
    for path, member, file in _walk(archive):
        if file is not None and path in paths and member.size <= room:
            found[path] = file.read(_LOOKED_INTO)
            room -= len(found[path])
    return found


def _walk(archive: Path) -> Iterator[tuple[str, tarfile.TarInfo, IO[bytes] | None]]:
    """The members of a layer as absolute paths. Raises ConfigError for an archive that cannot be read."""
    try:
        with (
            archive.open("rb") as raw,
            zstandard.ZstdDecompressor().stream_reader(raw) as stream,
            tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar,
        ):
            for member in tar:
                path = member.pax_headers.get("PROCTOR.path", member.name)
                yield "/" + path.strip("/"), member, tar.extractfile(member) if member.isreg() else None
    except (OSError, tarfile.TarError, zstandard.ZstdError) as error:
        raise ConfigError(f"not an archive of a layer: {error}", field=str(archive)) from error
