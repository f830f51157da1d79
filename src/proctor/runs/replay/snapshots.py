"""Fork points: the private layer of a trial's sandbox at chosen steps, kept beside its record.

A snapshot is the layer as it is, a tar.zst with whiteouts, read from outside while the sandbox lives: taking one kills
nothing and changes nothing. Its processes are not in it, and their number says so. What has not changed since the last
one is not kept again, and all of a trial together may hold only so much: then every second of the older ones goes.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import IO, TYPE_CHECKING, Any, cast

import anyio
import zstandard

from proctor.common import ConfigError, RefusedError, digest_file
from proctor.runs.covering import cover_archive
from proctor.runs.formats import SnapshotItem, SnapshotsFile, load
from proctor.sandbox.contract import FileError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proctor.models.contract import ModelAnswer, ModelClient, ModelSpec
    from proctor.runs.record import TrialRecord
    from proctor.sandbox.contract import Sandbox

FOLDER = "snapshots"
INDEX = "snapshots.json"
MAX_BYTES = 256 << 20
"""The most that the snapshots of one trial hold together."""
MAX_UPPER_BYTES = 512 << 20
"""A layer that holds more than this is not read again and again."""
MAX_RESTORED_BYTES = 1 << 30
"""The most that is laid out on the host to restore a snapshot."""
_AT_ONCE = 200
_SPECIAL = 0o7000
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A fork point that was kept: before which step, and the archive of the layer."""

    step: int
    archive: Path


@dataclass(slots=True)
class SnapshotKeeper:
    """Takes snapshots before every `every`-th step of one trial. `note` gets one event for each."""

    directory: Path
    every: int
    note: Callable[[Mapping[str, Any]], None]
    max_bytes: int = MAX_BYTES
    secrets: Sequence[str] = ()
    _items: list[SnapshotItem] = field(default_factory=list)
    _last: int = 0

    async def due(self, step: int, taken: int, box: Sandbox) -> None:
        """The harness is about to begin `step`, after `taken` steps of the agent. What cannot be kept is noted, and
        hinders nothing."""
        if step <= self._last or taken % self.every:
            return
        self._last = step
        begun = monotonic()
        try:
            item = await self._take(step, box)
        except (OSError, SandboxError) as error:
            item = SnapshotItem(step=step, note=f"not kept: {error}")
        item = item.model_copy(update={"took_s": round(monotonic() - begun, 6)})
        self._items.append(item)
        await anyio.to_thread.run_sync(self._thin)
        self._write()
        self.note(item.model_dump(exclude_none=True))

    async def _take(self, step: int, box: Sandbox) -> SnapshotItem:
        stats = await box.stats()
        facts: dict[str, Any] = {"step": step, "processes": max(0, stats.pids - 1)}
        if stats.disk_bytes > MAX_UPPER_BYTES:
            note = f"not kept: the layer holds {stats.disk_bytes} bytes, more than {MAX_UPPER_BYTES}"
            return SnapshotItem(**facts, note=note)
        folder = self.directory / FOLDER
        folder.mkdir(exist_ok=True)
        target = folder / f"{step}.tar.zst"
        await box.export_diff(target)
        if self.secrets and not await anyio.to_thread.run_sync(cover_archive, target, self.secrets):
            target.unlink()
            return SnapshotItem(**facts, note="not kept: the token of the trial is part of a name")
        digest = await anyio.to_thread.run_sync(digest_file, target)
        same = next((one for one in reversed(self._items) if one.digest == digest and one.file is not None), None)
        if same is not None:
            target.unlink()
            return SnapshotItem(**facts, file=same.file, digest=digest, size_bytes=same.size_bytes)
        return SnapshotItem(**facts, file=target.name, digest=digest, size_bytes=target.stat().st_size)

    def _thin(self) -> None:
        """Keep within the bound: forget every second of what is kept, the newest excepted, until it fits."""
        while self._kept_bytes() > self.max_bytes:
            kept = [number for number, one in enumerate(self._items) if one.file is not None]
            going = kept[-2::-2] if len(kept) > 1 else kept
            for number in going:
                one = self._items[number]
                note = f"not kept: more than {self.max_bytes} bytes in all"
                self._items[number] = one.model_copy(update={"file": None, "note": note})
            files = {one.file for one in self._items}
            for path in (self.directory / FOLDER).iterdir():
                if path.name not in files:
                    path.unlink()

    def _kept_bytes(self) -> int:
        return sum({one.file: one.size_bytes or 0 for one in self._items if one.file is not None}.values())

    def _write(self) -> None:
        from proctor.runs.formats import dump

        content = SnapshotsFile(every=self.every, max_bytes=self.max_bytes, snapshots=self._items)
        (self.directory / INDEX).write_bytes(dump(content))


class SnapshottingModel:
    """A model client that has the sandbox kept before it is asked."""

    def __init__(self, inner: ModelClient, keeper: SnapshotKeeper, box: Sandbox, record: TrialRecord) -> None:
        self.spec: ModelSpec = inner.spec
        self._inner = inner
        self._keeper = keeper
        self._box = box
        self._record = record

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ModelAnswer:
        """As the inner client's."""
        steps = self._record.steps
        await self._keeper.due(len(steps) + 1, sum(step.source == "agent" for step in steps), self._box)
        return await self._inner.complete(messages, tools)

    async def aclose(self) -> None:
        """As the inner client's."""
        await self._inner.aclose()


def snapshot_at(directory: Path, step: int) -> Snapshot | None:
    """The fork point before this step; None when there is none, or when processes lived that it does not hold.

    Raises ConfigError when its archive is not what the record says.
    """
    path = directory / INDEX
    if not path.exists():
        return None
    for item in load(SnapshotsFile, path).snapshots:
        if item.step == step and item.file is not None and not item.processes:
            archive = directory / FOLDER / item.file
            if os.sep in item.file or not archive.is_file() or digest_file(archive) != item.digest:
                raise ConfigError("a snapshot is not what the record says", field=str(archive))
            return Snapshot(step, archive)
    return None


def why_not_restorable(archive: Path) -> str | None:
    """Why a snapshot cannot be put onto a sandbox; None when it can. Files may have holes: a terabyte of nothing is
    small in the archive alone."""
    size = 0
    for _, member in _members(archive):
        size += member.size
        if size > MAX_RESTORED_BYTES:
            return f"it holds more than {MAX_RESTORED_BYTES} bytes when it is laid out"
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return f"/{member.name} is neither a file, a directory nor a link"
    return None


async def restore(box: Sandbox, archive: Path) -> None:
    """Put the changes of a layer onto a fresh sandbox of the same image: what was deleted first, then what is there.

    They are its own changes again, so its diff and what is graded are those of a sandbox that made them itself.
    """
    with TemporaryDirectory(prefix="proctor-restore-") as folder:
        plain = Path(folder, "layer.tar")
        mounts = (*box.image.mounts, *box.spec.mounts)
        places = ("/proc", "/dev", "/sys", *(mount.target.rstrip("/") for mount in mounts))
        marks = await anyio.to_thread.run_sync(_without_marks, archive, plain, places)
        for path in marks.gone:
            await _remove(box, path)
        for path in marks.emptied:
            for entry in await _entries(box, path):
                await _remove(box, f"{path}/{entry}")
        await box.upload(plain, "/")
        for (uid, gid), paths in marks.owners.items():
            await _tell(box, ["chown", "-h", f"{uid}:{gid}"], paths)
        for mode, paths in marks.modes.items():  # a change of owner takes these bits away
            await _tell(box, ["chmod", f"{mode:o}"], paths)


async def _tell(box: Sandbox, command: list[str], paths: list[str]) -> None:
    """What an upload cannot carry, by the image's own tools."""
    for at in range(0, len(paths), _AT_ONCE):
        given = await box.exec([*command, "--", *paths[at : at + _AT_ONCE]], user="root")
        if not given.ok:
            remedy = "branch off a step without a snapshot"
            raise RefusedError(f"the snapshot cannot be restored: {command[0]}: {given.error_text[:200]}",
                               field="--from", remedy=remedy)  # fmt: skip


async def _remove(box: Sandbox, path: str) -> None:
    try:
        await box.remove(path, recursive=True)
    except FileError as error:
        if error.errno != 2:
            raise


async def _entries(box: Sandbox, path: str) -> list[str]:
    try:
        return [entry.name for entry in await box.list(path)]
    except FileError:
        return []


@dataclass(slots=True)
class _Marks:
    """What a layer says beside its files: what it deletes, which directories it empties, the paths of every owner but
    root, and those of modes with more than permissions."""

    gone: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    owners: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    modes: dict[int, list[str]] = field(default_factory=dict)


def _without_marks(archive: Path, target: Path, places: tuple[str, ...]) -> _Marks:
    """Write the layer as an ordinary tar, and return its marks. The empty `places` that mounts lie on are there
    already."""
    marks = _Marks()
    with target.open("wb") as file, tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as out:
        for tar, member in _members(archive):
            parent, _, name = member.name.rpartition("/")
            path = "/" + member.pax_headers.get("PROCTOR.path", member.name).strip("/")
            if name == _OPAQUE:
                marks.emptied.append("/" + parent)
            elif name.startswith(_WHITEOUT):
                marks.gone.append(f"/{parent}/{name.removeprefix(_WHITEOUT)}".replace("//", "/"))
            elif not (member.isdir() and _is_place(path, places)):
                out.addfile(_plain(member, path[1:]), tar.extractfile(member) if member.isreg() else None)
                if (member.uid, member.gid) != (0, 0):
                    marks.owners.setdefault((member.uid, member.gid), []).append(path)
                if member.mode & _SPECIAL and not member.issym():
                    marks.modes.setdefault(member.mode, []).append(path)
    return marks


def _is_place(path: str, places: tuple[str, ...]) -> bool:
    return any(place == path or place.startswith(path + "/") or path.startswith(place + "/") for place in places)


def _plain(member: tarfile.TarInfo, name: str) -> tarfile.TarInfo:
    """The member without its marks; a file with holes is written out."""
    plain = tarfile.TarInfo(name)
    for part in ("mode", "mtime", "uid", "gid", "type", "linkname", "size"):
        setattr(plain, part, getattr(member, part))
    if member.isreg():
        plain.type = tarfile.REGTYPE
    return plain


def _members(archive: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    with (
        archive.open("rb") as raw,
        zstandard.ZstdDecompressor().stream_reader(raw) as stream,
        tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar,
    ):
        for member in tar:
            yield tar, member
