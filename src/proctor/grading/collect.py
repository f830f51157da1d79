"""Collection: the candidate is frozen, killed and counted to zero; then its disk is read from outside.

Nothing of the candidate runs, and no tool reads its files with settings that it could have left: the upper layer is
compared with the layers below it by our own code. See docs/design/clean-room.md.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from proctor.common import InfraError
from proctor.grading.contract import GradeFinding
from proctor.grading.deliverable import Change, Collected, Dropped, FileState, Reason, dropped_findings, listing
from proctor.grading.diffing import LINK, make_patch
from proctor.grading.trees import View
from proctor.sandbox.contract import FileError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from proctor.sandbox.contract import DiffEntry, FileStat, Sandbox
    from proctor.tasks.model import Task

MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 256 << 20
MAX_FILES = 20_000
_CACHES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox"})
_BYTECODE = (".pyc", ".pyo")


class _TooMuch(Exception):
    """The candidate left more than may be carried."""


async def collect(task: Task, box: Sandbox) -> Collected:
    """End everything the candidate runs, and take what the task's carry rule allows.

    Raises InfraError when a process survives. What is too large to carry is the candidate's fault: the result
    then has a `problem`, and its grade is unresolved.
    """
    kind = task.carry.kind
    if kind == "live":
        return Collected(kind="live", box=box, summary={"kind": "live"})
    remaining = await box.kill_all()
    if remaining:
        raise InfraError(f"{remaining} processes of sandbox {box.id} survived being killed", remedy="see its receipt")
    if kind == "filesystem":
        layer = await box.snapshot()
        return Collected(kind=kind, layer=layer, summary={"kind": kind, "bytes": layer.size_bytes})
    dropped: list[Dropped] = []
    with View([*box.image.layers, *box.spec.layers]) as base:
        reader = _Reader(box, base, dropped)
        try:
            if kind == "patch":
                changes = await reader.repository(repository_of(task, box.image.workdir))
            else:
                changes = [change for path in task.carry.paths async for change in reader.tree(path)]
        except _TooMuch as error:
            return Collected(kind=kind, problem=str(error), findings=(GradeFinding("too-large", str(error)),))
    return Collected(
        kind=kind,
        patch=make_patch(changes) if kind == "patch" else None,
        changes=tuple(changes),
        summary={"kind": kind, "files": len(changes), "dropped": listing(dropped)},
        findings=tuple(dropped_findings([one for one in dropped if one.reason != "bytecode"])),
    )


def repository_of(task: Task, image_workdir: str) -> str:
    """The directory whose changes are carried by `patch`, without a final slash (`` for the root)."""
    chosen = task.carry.repo or task.environment.workdir or image_workdir
    return "/" + chosen.strip("/") if chosen.strip("/") else ""


class _Reader:
    """Reads what the candidate left, under caps, and notes what it refuses. Nothing runs in the sandbox any more,
    so what `stat` says still holds when `read` follows."""

    def __init__(self, box: Sandbox, base: View, dropped: list[Dropped]) -> None:
        self._box = box
        self._base = base
        self._dropped = dropped
        self._bytes = 0
        self._files = 0

    async def repository(self, repo: str) -> list[Change]:
        """What differs below the repository, `.git` and caches left out, with paths relative to it."""
        paths = {path: None for entry in await self._box.diff() for path in touched_paths(entry, repo, self._base)}
        found = [await self._change(path, path[len(repo) + 1 :]) for path in paths]
        return [change for change in found if change is not None]

    async def _change(self, path: str, relative: str) -> Change | None:
        """The path before and after; None when it is the same or may not be carried."""
        parts = relative.split("/")
        if _CACHES.intersection(parts) or relative.endswith(_BYTECODE):
            self._drop(path, "bytecode")
            return None
        before = self._base.state(path)
        info = await self._stat(path)
        if info is not None and info.kind not in ("file", "link", "dir"):
            self._drop(path, "special")
            return None
        after = await self._read(path, info) if info is not None and info.kind != "dir" else None
        if after is not None and after.mode == LINK and after != before and leaves(parts, os.fsdecode(after.data)):
            self._drop(path, "link", f"a link to {os.fsdecode(after.data)}, outside the repository")
            return None
        return None if before == after else Change(relative, before, after)

    async def tree(self, root: str) -> AsyncIterator[Change]:
        """Everything at and below a declared path, as absolute changes from nothing."""
        base = "/" + root.strip("/")
        if not await self._parents_are_real(base):
            self._drop(base, "link", "a directory above it is a link")
            return
        pending = [base]
        while pending:
            path = pending.pop()
            info = await self._stat(path)
            if info is None:
                continue
            if info.kind == "dir":
                names = [entry.name for entry in await self._box.list(path)]
                pending.extend(f"{path.rstrip('/')}/{name}" for name in sorted(names, reverse=True))
                continue
            change = await self._carried(base, path, info)
            if change is not None:
                yield change

    async def _carried(self, base: str, path: str, info: FileStat) -> Change | None:
        inside = path[len(base) :].strip("/").split("/")
        if "__pycache__" in inside or path.endswith(_BYTECODE):
            self._drop(path, "bytecode")
            return None
        if info.kind not in ("file", "link"):
            self._drop(path, "special")
            return None
        after = await self._read(path, info)
        if after.mode == LINK and (inside == [""] or leaves(inside, os.fsdecode(after.data))):
            self._drop(path, "link", f"a link to {os.fsdecode(after.data)}, outside {base}")
            return None
        return Change(path, None, after)

    async def _parents_are_real(self, path: str) -> bool:
        parts = path.strip("/").split("/")
        for count in range(1, len(parts)):
            info = await self._stat("/" + "/".join(parts[:count]))
            if info is not None and info.kind != "dir":
                return False
        return True

    async def _stat(self, path: str) -> FileStat | None:
        try:
            return await self._box.stat(path)
        except FileError:
            return None

    async def _read(self, path: str, info: FileStat) -> FileState:
        self._files += 1
        self._bytes += info.size
        if self._files > MAX_FILES:
            raise _TooMuch(f"more than {MAX_FILES} changed files")
        if info.size > MAX_FILE_BYTES or self._bytes > MAX_TOTAL_BYTES:
            raise _TooMuch(f"{path}: over {MAX_FILE_BYTES >> 20} MiB in a file or {MAX_TOTAL_BYTES >> 20} MiB in all")
        if info.kind == "link":
            return FileState(LINK, os.fsencode(info.target or ""))
        data = await self._box.read(path, max_bytes=MAX_FILE_BYTES)
        return FileState(0o755 if info.mode & 0o111 else 0o644, data)

    def _drop(self, path: str, reason: Reason, detail: str = "") -> None:
        self._dropped.append(Dropped(path, reason, detail))


def touched_paths(entry: DiffEntry, repo: str, base: View, *, git: bool = False) -> Iterator[str]:
    """Paths of files in the repository that a diff entry stands for, `.git` left out unless `git`.

    A directory that went, or became something else, stands for everything below it.
    """
    inside, around = entry.path.startswith(repo + "/"), (repo + "/").startswith(entry.path + "/")
    if not (inside or around) or (not git and ".git" in entry.path[len(repo) :].split("/")):
        return
    was_dir = base.is_dir(entry.path)
    if entry.change != "deleted" and entry.kind == "dir":
        if inside and entry.change == "modified" and not was_dir:
            yield entry.path  # the file that was there
        return
    if inside:
        yield entry.path
    if was_dir:
        for path, info in base.walk(entry.path):
            hidden = not git and "/.git/" in path[len(repo) :] + "/"
            if path.startswith(repo + "/") and not stat.S_ISDIR(info.st_mode) and not hidden:
                yield path


def leaves(parts: list[str], target: str) -> bool:
    """Whether a link at `parts` (relative to a root) points outside that root. Absolute targets do."""
    if target.startswith("/"):
        return True
    depth = len(parts) - 1
    for part in target.split("/"):
        if part == "..":
            depth -= 1
            if depth < 0:
                return True
        elif part not in ("", "."):
            depth += 1
    return False
