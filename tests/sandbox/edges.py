"""What the tests of the Edge share: a small spec, a private image store, and gauges of what the kernel holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox import Lifecycle, Resources, SandboxSpec
from proctor.sandbox.native.cgroup import CgroupLayout
from proctor.sandbox.sweep import home_tag

if TYPE_CHECKING:
    from collections.abc import Callable
from contextlib import suppress

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


def gauges(home: Path) -> Gauges:
    """Of this process and, for groups and loop devices, of the Edges of `home`."""
    layout = CgroupLayout.detect()
    return Gauges(
        descriptors=len(os.listdir("/proc/self/fd")),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        groups=sum(len(layout.slots(edge)) + 1 for edge in layout.edges() if edge.startswith(home_tag(home))),
        loops=len(loops(home)),
        children=len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    )


def loops(home: Path) -> list[str]:
    """Backing files of loop devices that lie, or lay, below `home`."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # detached this moment
            found.append(path.read_text().strip())
    return [text for text in found if text.startswith(str(home))]


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that the kernel or the Edge does in its own time."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await anyio.sleep(0.01)
