"""What the kernel alone takes for a sandbox, and what Proctor takes: `scripts/bench floor [--rounds 200]`.

Needs `cc` and root.
The parts are bare system calls in a C program of their own (`floor.c`); the whole lives are run in turn with them, so
that both see the same load. CPU is counted for Python and for the launcher process; slots and guests are not in it.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio

from proctor.sandbox import Edge, Resources, SandboxSpec
from proctor.sandbox.native.cgroup import CgroupLayout

SPEC = SandboxSpec(resources=Resources(cpus=1.0, memory_mb=256, disk_mb=64, disk_inodes=10_000, pids=64))


def floor(rounds: int, folder: Path) -> dict[str, float]:
    """Median milliseconds of each part."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("cc is not installed")
    program = folder / "floor"
    subprocess.run([compiler, "-O2", "-o", program, Path(__file__).with_name("floor.c")], check=True)
    layout = CgroupLayout.detect()
    trees = dict.fromkeys([*layout.controllers.values(), *([layout.unified] if layout.unified else [])])
    places = [tree / f"proctor-floor-{os.getpid()}" for tree in trees]
    try:
        for place in places:
            place.mkdir()
        done = subprocess.run([program, str(rounds), *map(str, places)], capture_output=True, text=True, check=True)
    finally:
        for place in places:
            place.rmdir()
    rows = (line.split("\t") for line in done.stdout.splitlines())
    return {name: float(value) / 1e3 for name, value in rows}


async def lives(rounds: int, home: Path) -> dict[str, float]:
    """Median milliseconds of the steps of a life, and the CPU of a whole one."""
    steps: dict[str, list[float]] = {"create": [], "exec true": [], "close": []}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    async with Edge(home, pool_size=2) as edge:
        await (await edge.create(SPEC)).close()
        own = time.process_time()
        for _ in range(rounds):
            marks = [time.perf_counter()]
            box = await edge.create(SPEC)
            marks.append(time.perf_counter())
            assert (await box.exec(["true"])).ok
            marks.append(time.perf_counter())
            await box.close()
            marks.append(time.perf_counter())
            for name, begin, end in zip(steps, marks, marks[1:], strict=False):
                steps[name].append(end - begin)
        own = time.process_time() - own
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {name: statistics.median(taken) * 1e3 for name, taken in steps.items()}
    found["CPU of a life in Python"] = own / rounds * 1e3
    used = children.ru_utime + children.ru_stime - before.ru_utime - before.ru_stime
    found["CPU of a life in the launcher process"] = used / rounds * 1e3
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench floor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} before the start; milliseconds, medians of {options.rounds}\n")
    with tempfile.TemporaryDirectory() as folder:
        rows = floor(options.rounds, Path(folder)) | anyio.run(lives, options.rounds, Path(folder) / "home")
    for name, value in rows.items():
        print(f"{name:52}{value:>9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
