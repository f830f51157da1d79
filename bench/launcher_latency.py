"""Launch latency: plan sent → HELLO of the guest received, without the Edge and the SDK on top.

    python bench/launcher_latency.py [--rounds 200] [--gap-ms 50] [--parallel 4]

Prints back to back, with idle gaps (a naive loop hides what only an idle machine pays), several at once; and what an
idle sandbox costs in memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import anyio

from proctor.sandbox.native import seccomp
from proctor.sandbox.native.launcher import Launched, Launcher, LauncherConfig
from proctor.sandbox.native.plan import Bind, Limits, MemoryUpper, Plan


def make_layer(root: Path) -> Path:
    """A layer that is just enough to show the machine's /usr as a root file system."""
    for name in ("usr", "proc", "dev", "sys", "tmp", "etc"):
        (root / name).mkdir()
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    return root


def make_plan(layer: Path, number: int) -> Plan:
    return Plan(
        name=f"bench-{number}",
        layers=(layer,),
        upper=MemoryUpper(64 << 20, 10_000),
        limits=Limits(256 << 20, 128, 100_000),
        seccomp=seccomp.program(),
        binds=(Bind(Path("/usr"), "/usr"),),
    )


async def one(launcher: Launcher, plan: Plan) -> tuple[float, Launched]:
    """Seconds until HELLO, and the sandbox."""
    start = time.perf_counter()
    sandbox = await launcher.launch(plan)
    await anyio.wait_readable(sandbox.channel)
    assert sandbox.channel.recv(64)
    return time.perf_counter() - start, sandbox


async def end(launcher: Launcher, sandbox: Launched) -> None:
    sandbox.close()
    await launcher.layout.slot(launcher.config.edge, sandbox.slot).destroy()


def report(title: str, seconds: list[float], steps: list[dict[str, int]], rate: float) -> None:
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2] * 1000, ordered[int(len(ordered) * 0.99)] * 1000
    print(f"{title:<28} p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  max {ordered[-1] * 1000:6.2f} ms  {rate:6.0f}/s")
    names = steps[0]
    medians = ", ".join(f"{name} {statistics.median(step[name] for step in steps):.0f}" for name in names)
    print(f"  median µs in the launcher: {medians}")


async def sequence(launcher: Launcher, layer: Path, rounds: int, gap_s: float, title: str) -> None:
    seconds: list[float] = []
    steps: list[dict[str, int]] = []
    begin = time.perf_counter()
    for number in range(rounds):
        elapsed, sandbox = await one(launcher, make_plan(layer, number))
        seconds.append(elapsed)
        steps.append(sandbox.timings_us)
        await end(launcher, sandbox)
        if gap_s:
            await anyio.sleep(gap_s)
    report(title, seconds, steps, rounds / (time.perf_counter() - begin))


async def crowd(launcher: Launcher, layer: Path, rounds: int, parallel: int) -> None:
    seconds: list[float] = []
    steps: list[dict[str, int]] = []
    numbers = iter(range(rounds))

    async def worker() -> None:
        for number in numbers:
            elapsed, sandbox = await one(launcher, make_plan(layer, number))
            seconds.append(elapsed)
            steps.append(sandbox.timings_us)
            await end(launcher, sandbox)

    begin = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(parallel):
            group.start_soon(worker)
    report(f"{parallel} at once", seconds, steps, rounds / (time.perf_counter() - begin))


def kernel_kib() -> int:
    """Kernel memory of the whole machine that grows with sandboxes."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("Slab", "KernelStack", "PageTables", "Percpu"))


async def memory(launcher: Launcher, layer: Path, count: int) -> None:
    """Idle sandboxes: what is charged to them, and how the machine's kernel memory grows (on a quiet machine)."""
    first = kernel_kib()
    made = [(await one(launcher, make_plan(layer, number)))[1] for number in range(count)]
    await anyio.sleep(0.5)
    kernel = (kernel_kib() - first) / count
    groups = [launcher.layout.slot(launcher.config.edge, sandbox.slot) for sandbox in made]
    charged = sum(group.stats().memory_bytes for group in groups) / count / 1024
    print(f"{count} idle sandboxes: {charged:.0f} KiB charged to each, {kernel:.0f} KiB of kernel memory for each")
    for sandbox in made:
        await end(launcher, sandbox)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--gap-ms", type=float, default=50)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--pool", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layer = make_layer(Path(folder))
        launcher = await Launcher.start(LauncherConfig(edge=f"bench-{os.getpid()}", pool=arguments.pool))
        try:
            await anyio.sleep(0.2)
            await sequence(launcher, layer, arguments.rounds, 0, "back to back")
            title = f"gaps of {arguments.gap_ms:g} ms"
            await sequence(launcher, layer, arguments.rounds, arguments.gap_ms / 1000, title)
            await crowd(launcher, layer, arguments.rounds, arguments.parallel)
            await memory(launcher, layer, 100)
        finally:
            await launcher.close()


if __name__ == "__main__":
    anyio.run(main)
