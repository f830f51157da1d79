"""What a run may leave on the machine: nothing. Everything is looked for by the name of the test's own home."""

from __future__ import annotations

import os
from pathlib import Path

from proctor.sandbox.sweep import home_tag


def footprint(home: Path) -> dict[str, list[str]]:
    """Edge directories, control groups, processes, mounts and loop devices of the Edges of `home`."""
    tag = f"{home_tag(home)}-"
    groups = Path("/sys/fs/cgroup").glob(f"*/proctor/{tag}*")
    loops = Path("/sys/block").glob("loop*/loop/backing_file")
    return {
        "edges": sorted(path.name for path in (home / "edges").glob(f"{tag}*")),
        "groups": sorted(map(str, groups)),
        "processes": [pid for pid in os.listdir("/proc") if pid.isdigit() and tag in _read(f"/proc/{pid}/cgroup")],
        "mounts": [line for line in _read("/proc/self/mountinfo").splitlines() if str(home) in line],
        "loops": [str(path) for path in loops if str(home) in _read(path)],
    }


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def children() -> list[str]:
    """Children of this process."""
    found: list[str] = []
    for task in os.listdir("/proc/self/task"):
        found += _read(f"/proc/self/task/{task}/children").split()
    return found
