"""Control groups of sandboxes: where they are, what they say, how they are emptied and removed.

Three arrangements exist and all are served by one `CgroupLayout`: cgroup2 with controllers; cgroup v1 controllers
beside a cgroup2 tree without any (hybrid); cgroup v1 alone (the launcher then mounts a cgroup2 tree that only it can
see and hands over a descriptor). Limits are written by the launcher while it makes a sandbox; all else is here.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio

from proctor.common import InfraError, RefusedError
from proctor.sandbox.native.plan import CgroupTree

V1_CONTROLLERS: Final = ("memory", "cpu", "cpuacct", "pids")
_V2_CONTROLLERS: Final = ("memory", "cpu", "pids")
_OUR_DIRECTORY: Final = "proctor"
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Counters of one sandbox's groups, as the kernel keeps them. `None`: this kernel or layout does not count it."""

    memory_bytes: int
    memory_peak_bytes: int | None
    cpu_s: float
    pids: int
    pids_peak: int | None
    oom_kills: int
    pids_refused: int


@dataclass(frozen=True, slots=True)
class CgroupLayout:
    """Where controllers are mounted. `unified` is None on v1-only machines until the launcher has given its own."""

    version: int
    controllers: dict[str, Path]
    unified: Path | None

    @classmethod
    def detect(cls, mountinfo: Path = Path("/proc/self/mountinfo")) -> CgroupLayout:
        """Read the arrangement of this machine. Raises RefusedError where memory, cpu or pids cannot be limited."""
        controllers, unified = _cgroup_mounts(mountinfo.read_text())
        if unified is not None and not {"memory", "cpu", "pids"} & set(controllers):
            available = (unified / "cgroup.controllers").read_text().split()
            if not set(_V2_CONTROLLERS) <= set(available):
                raise RefusedError(
                    f"cgroup2 at {unified} offers only {' '.join(available) or 'no controllers'}",
                    field="cgroups",
                    remedy="memory, cpu and pids are needed; run where they are delegated",
                )
            return cls(2, dict.fromkeys(_V2_CONTROLLERS, unified), unified)
        missing = sorted({"memory", "cpu", "pids"} - set(controllers))
        if missing:
            raise RefusedError(f"no cgroup controller for {', '.join(missing)}", field="cgroups", remedy="mount it")
        return cls(1, {name: path for name, path in controllers.items() if name in V1_CONTROLLERS}, unified)

    def prepare(self, edge: str) -> tuple[CgroupTree, ...]:
        """Make this Edge's directory in every tree and return the trees for the launcher.

        Raises RefusedError where the machine does not let us: a read-only tree, or a container's own group whose
        processes keep its controllers from being handed down.
        """
        try:
            return self._prepare_v2(edge) if self.version == 2 else self._prepare_v1(edge)
        except OSError as error:
            crowded = self.version == 2 and error.errno == errno.EBUSY
            raise RefusedError(
                f"cannot use {error.filename or self.unified}: {error.strerror}",
                field="cgroups",
                remedy="processes are in the way of its controllers: move them to a group below, as in "
                f"mkdir {self.unified}/init && for p in $(cat {self.unified}/cgroup.procs); "
                f"do echo $p > {self.unified}/init/cgroup.procs; done"
                if crowded
                else "run as root on the machine, or in a container with a writable cgroup tree of its own",
            ) from error

    def _prepare_v2(self, edge: str) -> tuple[CgroupTree, ...]:
        assert self.unified is not None
        folder = self.unified
        for name in ("", _OUR_DIRECTORY, edge):
            folder = folder / name
            folder.mkdir(exist_ok=True)
            _enable_controllers(folder)
        return (CgroupTree("*", folder),)

    def _prepare_v1(self, edge: str) -> tuple[CgroupTree, ...]:
        trees: dict[Path, list[str]] = {}
        for name, mount in self.controllers.items():
            trees.setdefault(mount, []).append(name)
        if self.unified is not None:
            trees[self.unified] = ["unified"]
        for mount in trees:
            (mount / _OUR_DIRECTORY / edge).mkdir(parents=True, exist_ok=True)
        return tuple(CgroupTree(",".join(names), mount / _OUR_DIRECTORY / edge) for mount, names in trees.items())

    def with_unified(self, unified: Path) -> CgroupLayout:
        """The same layout with the cgroup2 tree that the launcher mounted for itself."""
        return replace(self, unified=unified)

    def edge_directories(self, edge: str) -> tuple[Path, ...]:
        """This Edge's directory in every tree, whether or not it exists; the cgroup2 one last."""
        mounts = dict.fromkeys(self.controllers.values())
        if self.unified is not None:
            mounts.pop(self.unified, None)
            mounts[self.unified] = None
        return tuple(mount / _OUR_DIRECTORY / edge for mount in mounts)

    def edges(self) -> list[str]:
        """Ids of all Edges that have directories in some tree: what a sweep has to compare with living ones."""
        found: set[str] = set()
        for directory in self.edge_directories("x"):
            with suppress(FileNotFoundError):
                found.update(_subdirectories(directory.parent))
        return sorted(found)

    def slots(self, edge: str) -> list[str]:
        """Names of all slots of `edge` that have a directory in some tree: pooled, running and left over alike."""
        found: set[str] = set()
        for directory in self.edge_directories(edge):
            with suppress(FileNotFoundError):
                found.update(_subdirectories(directory))
        return sorted(found)

    def slot(self, edge: str, slot: str) -> SlotGroup:
        """The groups of one slot."""
        return SlotGroup(self, edge, slot)

    async def remove_edge(self, edge: str, *, deadline_s: float = 10.0) -> int:
        """Kill and remove every slot of `edge` and its directories; returns how many slots there were.

        For the end of an Edge and for the sweep: call it only when no launcher of that Edge is alive.
        """
        names = self.slots(edge)
        with anyio.move_on_after(deadline_s) as scope:
            for name in names:
                await self.slot(edge, name).destroy(deadline_s=deadline_s)
            for directory in self.edge_directories(edge):
                await _remove_tree(directory, deadline_s)
        if scope.cancelled_caught:
            raise InfraError(f"cgroups of edge {edge} are still in use after {deadline_s:g} s")
        return len(names)


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """The groups of one slot in every tree. All its processes are in the cgroup2 one, which is therefore used to
    freeze, kill and count them; the others hold limits and counters."""

    layout: CgroupLayout
    edge: str
    name: str

    @property
    def unified(self) -> Path:
        """The slot's cgroup2 directory."""
        if self.layout.unified is None:
            raise InfraError("the cgroup2 tree of the launcher is not known yet", field="cgroups")
        return self.layout.unified / _OUR_DIRECTORY / self.edge / self.name

    def directory(self, controller: str) -> Path | None:
        """The slot's directory in the tree of `controller`, or None where the machine has no such controller."""
        mount = self.layout.controllers.get(controller)
        return None if mount is None else mount / _OUR_DIRECTORY / self.edge / self.name

    def stats(self, events: tuple[int, int] | None = None) -> GroupStats:
        """Current and peak use. Raises FileNotFoundError when the slot's groups are gone.

        `events`: kills for memory and refused processes, where the caller has just read them.
        """
        return self._stats_v2(events) if self.layout.version == 2 else self._stats_v1(events)

    def populated(self) -> bool:
        """Whether any process, the guest included, is left in the slot."""
        try:
            return _keyed(self.unified / "cgroup.events").get("populated", 0) != 0
        except (FileNotFoundError, OSError) as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return False
            raise

    def freeze(self) -> None:
        """Ask the kernel to stop every process of the slot; `frozen()` says when it has."""
        (self.unified / "cgroup.freeze").write_text("1")

    def thaw(self) -> None:
        """Let every process of the slot go on."""
        (self.unified / "cgroup.freeze").write_text("0")

    def frozen(self) -> bool:
        """Whether every process of the slot stands still."""
        return _keyed(self.unified / "cgroup.events").get("frozen", 0) != 0

    async def pause(self, deadline_s: float = 5.0) -> None:
        """Freeze, and wait until everything stands still. Raises InfraError after `deadline_s` seconds."""
        self.freeze()
        end, pause = time.monotonic() + deadline_s, 0.0002
        while not self.frozen():
            if time.monotonic() > end:
                raise InfraError(
                    f"{self.name}: does not stand still after {deadline_s:g} s: {self._survivors()}",
                    remedy="state D means that the kernel holds them; look at their stacks",
                )
            await anyio.sleep(pause)
            pause = min(pause * 2, 0.02)

    def reclaim(self) -> int:
        """Have the kernel take back memory that can be read again from a disk, or swapped; returns bytes. Blocking.

        As much as there is: `memory.reclaim` (cgroup2, Linux 5.19) or `memory.force_empty` (v1). Where neither is,
        nothing is taken back.
        """
        group, usage = self._below("memory"), "memory.current" if self.layout.version == 2 else "memory.usage_in_bytes"
        before = _number(f"{group}/{usage}")
        file, words = ("memory.reclaim", str(before)) if self.layout.version == 2 else ("memory.force_empty", "0")
        # The kernel reports that it could not free all of it, which nobody expects of a group that has processes.
        with suppress(OSError), open(f"{group}/{file}", "w", opener=_without_creating) as control:
            control.write(words)
        return max(before - _number(f"{group}/{usage}"), 0)

    def kill(self) -> None:
        """SIGKILL to every process of the slot, the guest included, in a way that no fork outruns. Gone is fine."""
        try:
            (self.unified / "cgroup.kill").write_text("1")
        except FileNotFoundError:
            if self.unified.exists():  # kernels before 5.14 have no cgroup.kill
                self._kill_one_by_one()
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    async def wait_empty(self, deadline_s: float = 5.0) -> None:
        """Wait until no process is left. Raises InfraError after `deadline_s` seconds, naming what remains."""
        end = time.monotonic() + deadline_s
        pause = 0.0005
        while self.populated():
            if time.monotonic() > end:
                raise InfraError(
                    f"{self.name}: processes survive SIGKILL for {deadline_s:g} s: {self._survivors()}",
                    remedy="state D means that the kernel holds them; look at their stacks",
                )
            await anyio.sleep(pause)
            pause = min(pause * 2, 0.02)

    def remove_empty(self) -> None:
        """Remove the slot's directories in every tree, with the empty ones below them, at once. Gone is fine.

        Raises OSError when something is in the way, as a process that is not quite dead: then `remove` waits for it.
        """
        for directory in self.layout.edge_directories(self.edge):
            _rmdir(f"{directory}/{self.name}")

    async def remove(self, *, deadline_s: float = 5.0) -> None:
        """Remove the slot's directories in every tree, nested ones first; waits for dying processes. Gone is fine."""
        for directory in self._directories():
            await _remove_tree(directory, deadline_s)

    async def destroy(self, *, deadline_s: float = 5.0) -> None:
        """Kill everything, wait until nothing is left, remove the directories."""
        self.kill()
        await self.wait_empty(deadline_s)
        await self.remove(deadline_s=deadline_s)

    def _directories(self) -> tuple[Path, ...]:
        return tuple(directory / self.name for directory in self.layout.edge_directories(self.edge))

    def _kill_one_by_one(self) -> None:
        self.freeze()
        try:
            for pid in self._pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            self.thaw()

    def _pids(self) -> list[int]:
        pids: list[int] = []
        for folder, _, _ in os.walk(self.unified):
            with suppress(FileNotFoundError):
                pids += [int(line) for line in Path(folder, "cgroup.procs").read_text().split()]
        return pids

    def _survivors(self) -> str:
        lines = []
        for pid in self._pids()[:5]:
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
                lines.append(f"{pid} {fields[0].split('(', 1)[1]} {fields[1].split()[0]}")
        return ", ".join(lines) or "none listed"

    def _below(self, controller: str) -> str:
        # Text, not Path: joined for every sandbox that ends, and a Path costs more than the file's system calls.
        return f"{self.layout.controllers[controller]}/{_OUR_DIRECTORY}/{self.edge}/{self.name}"

    def _events(self, memory: str, pids: str) -> tuple[int, int]:
        return _keyed(memory).get("oom_kill", 0), _keyed(pids).get("max", 0)

    def _stats_v1(self, events: tuple[int, int] | None) -> GroupStats:
        memory, pids = self._below("memory"), self._below("pids")
        oom_kills, pids_refused = events or self._events(f"{memory}/memory.oom_control", f"{pids}/pids.events")
        counts_cpu = "cpuacct" in self.layout.controllers
        return GroupStats(
            memory_bytes=_number(f"{memory}/memory.usage_in_bytes"),
            memory_peak_bytes=_number(f"{memory}/memory.max_usage_in_bytes"),
            cpu_s=_number(f"{self._below('cpuacct')}/cpuacct.usage") / 1e9 if counts_cpu else 0.0,
            pids=_number(f"{pids}/pids.current"),
            pids_peak=_optional_number(f"{pids}/pids.peak"),
            oom_kills=oom_kills,
            pids_refused=pids_refused,
        )

    def _stats_v2(self, events: tuple[int, int] | None) -> GroupStats:
        group = self._below("memory")
        oom_kills, pids_refused = events or self._events(f"{group}/memory.events", f"{group}/pids.events")
        return GroupStats(
            memory_bytes=_number(f"{group}/memory.current"),
            memory_peak_bytes=_optional_number(f"{group}/memory.peak"),
            cpu_s=_keyed(f"{group}/cpu.stat").get("usage_usec", 0) / 1e6,
            pids=_number(f"{group}/pids.current"),
            pids_peak=_optional_number(f"{group}/pids.peak"),
            oom_kills=oom_kills,
            pids_refused=pids_refused,
        )


def _cgroup_mounts(mountinfo: str) -> tuple[dict[str, Path], Path | None]:
    """v1 controllers with their mount points, and the first cgroup2 mount point."""
    controllers: dict[str, Path] = {}
    unified: Path | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        mount = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if tail[0] == "cgroup2" and unified is None:
            unified = mount
        elif tail[0] == "cgroup":
            for option in tail[2].split(","):
                controllers.setdefault(option, mount)
    return controllers, unified


def _subdirectories(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _enable_controllers(folder: Path) -> None:
    enabled = (folder / "cgroup.subtree_control").read_text().split()
    if missing := [name for name in _V2_CONTROLLERS if name not in enabled]:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))


async def _remove_tree(directory: Path, deadline_s: float) -> None:
    """rmdir of a cgroup directory and all below it. EBUSY is retried: a killed process leaves its group a bit later."""
    end = time.monotonic() + deadline_s
    pause = 0.0005
    while True:
        try:
            _rmdir(directory)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise InfraError(f"cannot remove cgroup {directory.name}: {error.strerror}", field="cgroups") from error
        await anyio.sleep(pause)
        pause = min(pause * 2, 0.02)


def _rmdir(directory: Path | str) -> None:
    """Most groups have nothing below them, so that is tried first; the kernel says EBUSY for groups that have."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        for folder, _, _ in os.walk(directory, topdown=False):
            with suppress(FileNotFoundError):
                os.rmdir(folder)


def _text(path: Path | str) -> bytes:
    # Plain system calls: read for every sandbox that ends, and Python's file objects cost more than the kernel does.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


def _without_creating(path: str, _: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def _number(path: str) -> int:
    return int(_text(path))


def _optional_number(path: str) -> int | None:
    try:
        return int(_text(path))
    except FileNotFoundError:
        return None


def _keyed(path: Path | str) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).decode().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
