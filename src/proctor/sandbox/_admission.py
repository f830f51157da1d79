"""Whether one more sandbox fits: limits promised to living sandboxes against what the machine really has.

`Ledger` is a pure value that the tests can drive; `Machine` reads the kernel. The Edge puts both together and keeps a
first-come, first-served queue with a deadline.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proctor.common import InfraError, RefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox.contract import Resources

DESCRIPTORS_PER_SANDBOX = 8


@dataclass(frozen=True, slots=True)
class Policy:
    """How far promises may exceed the machine, and what is always left to it."""

    memory_overcommit: float = 2.0
    """Sum of memory limits, in multiples of the machine's memory: most sandboxes stay far below their limit."""
    cpu_overcommit: float = 16.0
    """Sum of cpus, in multiples of the machine's cores: time is shared, nothing breaks."""
    memory_headroom_mb: int = 512
    """Available memory below which nothing new starts, whatever was promised."""
    disk_headroom_mb: int = 1024
    """Free disk below which nothing new starts. Disk is never over-committed."""
    pids_share: float = 0.8
    """Share of the machine's process and thread limit that sandboxes may hold together."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine has, and what of it is free now."""

    cpus: int
    memory_mb: int
    memory_available_mb: int
    disk_free_mb: int
    pids: int
    descriptors: int

    @classmethod
    def read(cls, home: Path) -> Machine:
        """The present facts; `home` says which disk holds the uppers."""
        memory = _meminfo()
        disk = os.statvfs(home)
        return cls(
            cpus=len(os.sched_getaffinity(0)),
            memory_mb=memory["MemTotal"] // 1024,
            memory_available_mb=memory["MemAvailable"] // 1024,
            disk_free_mb=disk.f_bavail * disk.f_frsize >> 20,
            pids=min(_number("/proc/sys/kernel/pid_max"), _number("/proc/sys/kernel/threads-max")),
            descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """What one sandbox is promised."""

    cpus: float
    memory_mb: int
    disk_mb: int
    """Disk of the machine: 0 when the upper lives in memory."""
    pids: int

    @classmethod
    def of(cls, resources: Resources, *, on_disk: bool) -> Demand:
        """The demand of a spec whose upper is (or is not) on the machine's disk."""
        return cls(resources.cpus, resources.memory_mb, resources.disk_mb if on_disk else 0, resources.pids)


class Promises(dict[str, Demand]):
    """Demands by sandbox, with their sums: a create must not cost more because there are many."""

    def __init__(self) -> None:
        super().__init__()
        self.cpus = 0.0
        self.memory_mb = self.disk_mb = self.pids = 0

    def __setitem__(self, box_id: str, demand: Demand) -> None:
        self.drop(box_id)
        super().__setitem__(box_id, demand)
        self._add(demand, 1)

    def drop(self, box_id: str) -> None:
        """Forget a promise; unknown ones are ignored."""
        demand = super().pop(box_id, None)
        if demand is not None:
            self._add(demand, -1)

    def _add(self, demand: Demand, sign: int) -> None:
        self.memory_mb += sign * demand.memory_mb
        self.disk_mb += sign * demand.disk_mb
        self.pids += sign * demand.pids
        self.cpus = self.cpus + sign * demand.cpus if len(self) else 0.0  # no rounding is kept


@dataclass(slots=True)
class Ledger:
    """The sum of all promises."""

    policy: Policy
    held: Promises = field(default_factory=Promises)
    frozen_mb: int = 0
    """Memory that frozen layers hold, which belongs to no living sandbox's limit."""
    disk_used_mb: int = 0
    """Part of the promised disk that is already used, so that it is not counted against the free disk twice."""

    def obstacle(self, demand: Demand, machine: Machine) -> tuple[str, str] | None:
        """The first resource that `demand` does not fit into now, as (field, sentence); None when it fits."""
        policy = self.policy
        held = self.held
        memory = held.memory_mb + self.frozen_mb
        cpus, pids, disk = held.cpus, held.pids, held.disk_mb - self.disk_used_mb
        checks = [
            ("resources.memory_mb", demand.memory_mb, memory, int(machine.memory_mb * policy.memory_overcommit), "MB"),
            ("resources.cpus", demand.cpus, cpus, machine.cpus * policy.cpu_overcommit, "cores"),
            ("resources.pids", demand.pids, pids, int(machine.pids * policy.pids_share), "processes"),
        ]
        if demand.disk_mb:
            checks.append(
                ("resources.disk_mb", demand.disk_mb, disk, machine.disk_free_mb - policy.disk_headroom_mb, "MB")
            )
        for name, wanted, promised, capacity, unit in checks:
            if promised + wanted > capacity:
                return name, f"{wanted:g} {unit} wanted, {max(capacity - promised, 0):g} of {capacity:g} unpromised"
        if machine.memory_available_mb < policy.memory_headroom_mb:
            return (
                "resources.memory_mb",
                f"{machine.memory_available_mb} MB of memory available, {policy.memory_headroom_mb} kept free",
            )
        open_files = (len(self.held) + 1) * DESCRIPTORS_PER_SANDBOX
        if open_files > machine.descriptors - 64:
            return "edge", f"{machine.descriptors} file descriptors allowed, {open_files} needed"
        return None

    def impossible(self, demand: Demand, machine: Machine) -> RefusedError | None:
        """The refusal of a demand that would not fit on this machine even if it were empty."""
        empty = Ledger(self.policy)
        obstacle = empty.obstacle(demand, machine)
        if obstacle is None or obstacle[1].startswith(f"{machine.memory_available_mb} MB of memory available"):
            return None
        name, sentence = obstacle
        return RefusedError(f"does not fit on this machine: {sentence}", field=name, remedy="ask for less")


def raise_descriptor_limit() -> None:
    """Lift the soft limit of open files to the hard one: every sandbox holds a handful."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _meminfo() -> dict[str, int]:
    # Its three first lines; more is not needed, and this is read for a create every now and then.
    lines = _bytes("/proc/meminfo").split(b"\n", 3)[:3]
    found = {line.partition(b":")[0].decode(): int(line.split()[1]) for line in lines}
    if "MemAvailable" not in found:
        raise InfraError("/proc/meminfo has no MemAvailable", remedy="Linux 3.14 or newer is needed")
    return found


def _number(path: str) -> int:
    return int(_bytes(path))


def _bytes(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
