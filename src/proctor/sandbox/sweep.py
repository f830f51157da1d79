"""Comparing what the kernel has with what somebody owns, and removing what nobody does.

Two questions, asked at the start of every Edge and every 30 s:

- *Whose Edge is dead?* Every Edge holds a lock on its directory while it lives, and so does a launcher that outlives
  it (`doorbell`): its sandboxes wait for another Edge. A directory of which neither is held, or a
  control group named after this home without a directory, belongs to nobody: its processes, groups, disk images and the
  directory are removed. Groups of other homes are removed when they have held no process for ten minutes: a home may
  have been deleted with its Edge's last act undone.
- *Does my own kernel state match my journal?* A slot of mine that holds no process and is not in the journal is removed
  once two sweeps in a row have seen it so (a slot that is just being made looks the same for a moment).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.common import InfraError
from proctor.sandbox.native import doorbell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proctor.sandbox.native.cgroup import CgroupLayout

log = logging.getLogger(__name__)

_LOCK = "lock"
_FORGOTTEN_AFTER_S = 600.0


def home_tag(home: Path) -> str:
    """Four letters that tell the Edges of one home from those of another, in the names of their control groups."""
    return hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:4]


@dataclass(slots=True)
class EdgeDirectory:
    """`<home>/edges/<id>`, locked as long as this object is open."""

    id: str
    path: Path
    _lock: int
    adopted: bool = False
    """An earlier Edge made it, whose durable sandboxes are now ours."""

    @classmethod
    def create(cls, home: Path) -> EdgeDirectory:
        """Make and lock a directory for a new Edge."""
        edges = home / "edges"
        edges.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Under the common lock, no sweep can see the directory before it is locked.
        with _common_lock(edges):
            edge_id = f"{home_tag(home)}-{secrets.token_hex(4)}"
            path = edges / edge_id
            path.mkdir(mode=0o700)
            (path / "disks").mkdir()
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, f"{os.getpid()}\n".encode())
        return cls(edge_id, path, lock)

    @classmethod
    def reopen(cls, path: Path) -> EdgeDirectory | None:
        """The directory of an Edge that is gone, locked by us; None when somebody else has it, or it is gone too."""
        with _common_lock(path.parent):
            try:
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return None
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return cls(path.name, path, lock, adopted=True)

    def next_generation(self) -> int:
        """How many Edges have had this directory before us."""
        path = self.path / "generation"
        count = int(path.read_text()) + 1 if path.exists() else 1
        part = path.with_suffix(".part")
        part.write_text(str(count))
        part.replace(path)
        return count

    def remove(self) -> None:
        """Remove the directory and let go of the lock."""
        with _common_lock(self.path.parent):
            shutil.rmtree(self.path)
            os.close(self._lock)
            self._lock = -1

    def release(self) -> None:
        """Let go of the lock but leave the directory, for a later Edge or sweep to go on with.

        Unlocked, not just closed: a forked copy of this process may hold a copy of the descriptor.
        """
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        self._lock = -1


@contextmanager
def _common_lock(edges: Path) -> Iterator[None]:
    descriptor = os.open(edges / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def owner(path: Path) -> int | None:
    """The process id of the living Edge whose directory `path` is; None when it is dead."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 32, 0).decode().strip()
            return int(text) if text.isdigit() else 0
        return None
    finally:
        os.close(descriptor)


def edges(home: Path) -> list[Path]:
    """Directories of all Edges of this home, dead or alive."""
    try:
        return sorted(path for path in (home / "edges").iterdir() if path.is_dir())
    except FileNotFoundError:
        return []


def orphans(home: Path) -> list[Path]:
    """Directories of Edges of this home that are gone and whose sandboxes live on."""
    return [path for path in edges(home) if owner(path) is None and doorbell.is_home(path)]


async def sweep_dead(home: Path, layout: CgroupLayout) -> list[str]:
    """Remove all that dead Edges of this home have left; returns their ids."""
    removed = []
    tag = home_tag(home) + "-"
    for edge_id in (*_dead(home, layout, tag), *_forgotten(layout, tag)):
        try:
            await layout.remove_edge(edge_id)
        except InfraError as error:
            # A process that the kernel does not let go of. The directory stays, so that the next sweep tries again.
            log.warning("edge %s: %s", edge_id, error.line())
            continue
        path = home / "edges" / edge_id
        if path.exists():
            with _common_lock(path.parent):
                # Nobody can have come to life in it: ids are never used again.
                shutil.rmtree(path, ignore_errors=True)
        removed.append(edge_id)
    return removed


def _dead(home: Path, layout: CgroupLayout, tag: str) -> list[str]:
    folder = home / "edges"
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _common_lock(folder):
        known = {path.name: path for path in edges(home)}
        dead = [
            name
            for name, path in known.items()
            if name.startswith(tag) and owner(path) is None and not doorbell.is_home(path)
        ]
        dead += [name for name in layout.edges() if name.startswith(tag) and name not in known]
    return dead


def _forgotten(layout: CgroupLayout, tag: str) -> list[str]:
    """Groups of Edges of other homes, which may not exist any more, that have been without any process for long.

    A living Edge always has one: its pool is never empty for more than a moment.
    """
    found = []
    for name in layout.edges():
        if name.startswith(tag):
            continue
        changed = [path.stat().st_mtime for path in layout.edge_directories(name) if path.exists()]
        recent = time.time() - max(changed, default=0) < _FORGOTTEN_AFTER_S
        if not recent and not any(layout.slot(name, slot).populated() for slot in layout.slots(name)):
            found.append(name)
    return found


class SlotWatch:
    """Finds slots of a living Edge that nobody owns: empty, and unknown in two sweeps in a row."""

    def __init__(self, edge_id: str, layout: CgroupLayout) -> None:
        self._edge_id = edge_id
        self._layout = layout
        self._suspects: frozenset[str] = frozenset()

    async def sweep(self, known: frozenset[str]) -> list[str]:
        """Remove forsaken slots; `known` are those of living or closing sandboxes. Returns what was removed."""
        idle = set()
        for name in self._layout.slots(self._edge_id):
            if name not in known and not self._layout.slot(self._edge_id, name).populated():
                idle.add(name)
        removed = []
        for name in sorted(idle & self._suspects):
            try:
                await self._layout.slot(self._edge_id, name).remove(deadline_s=1.0)
            except InfraError:
                continue  # still busy: the next sweep tries again
            removed.append(name)
        self._suspects = frozenset(idle.difference(removed))
        return removed
