"""What the tests of the Edge share: a small spec, a private image store, and gauges of what the kernel holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox import Lifecycle, Resources, SandboxSpec
from proctor.sandbox.native.cgroup import CgroupLayout

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = Resources(cpus=0.5, memory_mb=64, disk_mb=16, disk_inodes=2000, pids=32)


def small(**fields: object) -> SandboxSpec:
    """A spec of small limits and a short life."""
    return SandboxSpec(**{"resources": SMALL, "lifecycle": Lifecycle(ttl_s=120), **fields})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Gauges:
    """What leaks would show in."""

    descriptors: int
    mounts: int
    groups: int
    loops: int
    children: int


def gauges(prefix: str = "") -> Gauges:
    """Of this process and, for groups, of Edges whose id begins with `prefix`."""
    layout = CgroupLayout.detect()
    return Gauges(
        descriptors=len(os.listdir("/proc/self/fd")),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        groups=sum(len(layout.slots(edge)) + 1 for edge in layout.edges() if edge.startswith(prefix)),
        loops=sum(1 for path in Path("/sys/block").glob("loop*/loop/backing_file") if "proctor" in path.read_text()),
        children=len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    )


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that the kernel or the Edge does in its own time."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await anyio.sleep(0.01)
