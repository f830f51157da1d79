"""How fast sandboxes are: `scripts/bench sandbox [--json] [--quick]`.

Ours is measured through the SDK, in one process, on an Edge that has been used once. The others are measured as their
users run them (one command line per life), where they are installed and work; the rest are skipped by name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox import Edge, Resources, SandboxSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from proctor.sandbox.box import Box

IDLE_GAP_S = 0.05
DOCKER_IMAGE = "proctor-bench:true"
SPEC = SandboxSpec(resources=Resources(cpus=1.0, memory_mb=256, disk_mb=64, disk_inodes=10_000, pids=64))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `goal` is met when it says so; None: there is none."""

    name: str
    p50: float
    p99: float | None
    unit: str
    count: int
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """What issue 2 asks for on an idle machine with two cores."""

    p50: float
    p99: float = float("inf")

    def text(self) -> str:
        """As in the table."""
        return f"p50 ≤ {self.p50:g}" + (f", p99 ≤ {self.p99:g}" if self.p99 != float("inf") else "")


def row(name: str, seconds: list[float], goal: Goal | None = None) -> Row:
    """Median and 99th percentile of durations, in milliseconds."""
    ordered = sorted(seconds)
    p50 = statistics.median(ordered) * 1e3
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3
    met = None if goal is None else p50 <= goal.p50 and p99 <= goal.p99
    return Row(name, p50, p99, "ms", len(ordered), goal.text() if goal else "", met)


# --- ours -------------------------------------------------------------------------------------------------------------


async def first_exec(edge: Edge, count: int, gap_s: float) -> list[float]:
    """Seconds from `create` to the end of the first successful command."""
    taken = []
    for _ in range(count):
        await anyio.sleep(gap_s)
        begin = time.perf_counter()
        box = await edge.create(SPEC)
        assert (await box.exec(["true"])).ok
        taken.append(time.perf_counter() - begin)
        await box.close()
    return taken


async def timed(count: int, action: Callable[[], object]) -> list[float]:
    """Seconds of each call of a coroutine function."""
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        await action()  # type: ignore[misc]
        taken.append(time.perf_counter() - begin)
    return taken


async def forks(box: Box, count: int) -> list[float]:
    """Seconds to fork a sandbox with a few changes; the fork is closed outside the clock."""
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        (child,) = await box.fork()
        taken.append(time.perf_counter() - begin)
        await child.close()
        await box.reset()
    return taken


async def lives(edge: Edge, count: int, at_once: int) -> float:
    """Whole lives (create, exec, close) per second, `at_once` of them at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            async with await edge.create(SPEC) as box:
                assert (await box.exec(["true"])).ok

    begin = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(worker)
    return count / (time.perf_counter() - begin)


async def idle_memory_mb(edge: Edge, count: int) -> tuple[float, float]:
    """MB per idle sandbox: what its group is charged, and what the whole machine lost."""
    before = available_kb()
    boxes = [await edge.create(SPEC) for _ in range(count)]
    for box in boxes:
        await box.exec(["true"])
    await anyio.sleep(0.5)
    charged = [(await box.stats()).memory_bytes for box in boxes]
    lost_kb = before - available_kb()
    for box in boxes:
        await box.close()
    return statistics.median(charged) / 2**20, lost_kb / 1024 / count


def available_kb() -> int:
    """MemAvailable of the machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1])
    raise RuntimeError("no MemAvailable")


async def ours(quick: bool) -> list[Row]:
    """All measurements of the native runtime."""
    count = 60 if quick else 300
    rows = []
    async with Edge() as edge:
        await first_exec(edge, 5, 0)
        create = Goal(5, 30)
        rows.append(row("create → first exec, back to back", await first_exec(edge, count, 0), create))
        rows.append(
            row("create → first exec, after 50 ms idle", await first_exec(edge, count // 2, IDLE_GAP_S), create)
        )
        async with await edge.create(SPEC) as box:
            rows.append(row("exec true", await timed(count * 2, lambda: box.exec(["true"])), Goal(2)))
            await box.exec("echo x > /root/x")
            rows.append(row("fork", await forks(box, count // 2), Goal(5)))
            rows.append(row("reset", await timed(count // 2, box.reset), Goal(5)))
        for at_once in (1, 4, 8):
            rate = await lives(edge, count * 2, at_once)
            goal, met = ("≥ 150 / s", rate >= 150) if at_once == 4 else ("", None)
            rows.append(Row(f"whole lives, {at_once} at a time", rate, None, "/ s", count * 2, goal, met))
        charged, lost = await idle_memory_mb(edge, 20 if quick else 30)
        rows.append(Row("idle sandbox, charged to its group", charged, None, "MB", 30, "≤ 2", charged <= 2))
        rows.append(Row("idle sandbox, lost to the machine", lost, None, "MB", 30))
    return rows


# --- the others -------------------------------------------------------------------------------------------------------


def rivals(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Command lines that run `true` in a sandbox, by name, and the reasons why some cannot.

    What does not run by its defaults on this machine is tried with other ones; the name then says so.
    """
    links = [part for name in ("bin", "sbin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")]
    base = ["--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    rootfs = root_directory(folder)
    life = ["run", "--rm", "--network=none"]
    image = ["--rootfs", str(rootfs), "/bin/true"]
    # crun refuses machines where cgroup2 has controllers beside those of v1; podman raises limits, which not all may.
    ulimits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    oci = ["run", "--bundle", str(bundle(folder, rootfs)), f"bench-{os.getpid()}"]
    variants = {
        "bwrap": {"bwrap": ["bwrap", "--unshare-all", "--die-with-parent", *base, "true"]},
        "crun": {"crun": ["crun", *oci]},
        "runc": {"runc": ["runc", *oci]},
        "podman": {
            "podman": ["podman", *life, *image],
            "podman with own ulimits": ["podman", *life, *ulimits, *image],
            "podman with runc": ["podman", "--runtime=runc", *life, *ulimits, *image],
        },
        "docker": {"docker": ["docker", *life, docker_image(rootfs), "/bin/true"]},
    }
    working: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}
    for name, commands in variants.items():
        if shutil.which(name) is None:
            skipped[name] = "not installed"
            continue
        for label, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode == 0:
                working[label] = command
                skipped.pop(name, None)
                break
            skipped.setdefault(name, (done.stderr.strip().splitlines() or ["it fails without a word"])[0])
    return working, skipped


def root_directory(folder: Path) -> Path:
    """A root with a static `true`, for runtimes that want a directory."""
    root = folder / "rootfs"
    (root / "bin").mkdir(parents=True)
    source = folder / "true.c"
    source.write_text("int main(void) { return 0; }\n")
    if compiler := shutil.which("cc"):
        subprocess.run([compiler, "-static", "-o", root / "bin/true", source], check=True)
    for name in ("proc", "dev", "sys", "tmp", "etc"):
        (root / name).mkdir()
    return root


def bundle(folder: Path, rootfs: Path) -> Path:
    """An OCI bundle of that root."""
    maker = shutil.which("crun") or shutil.which("runc")
    if maker is None:
        return folder
    subprocess.run([maker, "spec"], cwd=folder, check=True)
    config = json.loads((folder / "config.json").read_text())
    config["process"] |= {"args": ["/bin/true"], "terminal": False}
    config["root"] = {"path": str(rootfs), "readonly": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def docker_image(rootfs: Path) -> str:
    """The image of that root in Docker's own store, made if its daemon answers."""
    if shutil.which("docker") is not None:
        tar = subprocess.run(["tar", "-C", rootfs, "-c", "."], capture_output=True, check=True).stdout
        subprocess.run(["docker", "import", "-", DOCKER_IMAGE], input=tar, capture_output=True, check=False)
    return DOCKER_IMAGE


def others(quick: bool) -> tuple[list[Row], dict[str, str]]:
    """Whole lives of the others, and why some are missing."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        working, skipped = rivals(Path(folder))
        for name, command in working.items():
            taken = []
            for _ in range(10 if quick else 30):
                begin = time.perf_counter()
                subprocess.run(command, capture_output=True, check=True, timeout=60)
                taken.append(time.perf_counter() - begin)
            rows.append(row(f"{name} run true (whole life)", taken))
        if "docker" not in skipped:
            subprocess.run(["docker", "rmi", DOCKER_IMAGE], capture_output=True, check=False)
        ours_cli = [sys.executable, "-m", "proctor", "box", "run", "--", "true"]
        taken = []
        for _ in range(5 if quick else 15):
            begin = time.perf_counter()
            subprocess.run(ours_cli, capture_output=True, check=True, timeout=60)
            taken.append(time.perf_counter() - begin)
        rows.append(row("proctor box run true (whole life, with a new Edge)", taken))
    return rows, skipped


def main() -> int:
    """Measure, print, and say by the exit code whether every goal was met."""
    parser = argparse.ArgumentParser(prog="scripts/bench sandbox", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--no-others", action="store_true", help="only ours")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = anyio.run(ours, options.quick)
    compared, skipped = ([], {}) if options.no_others else others(options.quick)
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "load_before": load}
    if options.json:
        print(json.dumps({"machine": machine, "rows": [asdict(one) for one in rows + compared], "skipped": skipped}))
    else:
        print(f"{machine['cpus']} cores, Linux {machine['kernel']}, load {load:.1f} before the start\n")
        print(f"{'':52}{'p50':>9}{'p99':>9}        goal")
        for one in rows + compared:
            p99 = "" if one.p99 is None else f"{one.p99:.2f}"
            met = {True: "met", False: "MISSED", None: ""}[one.met]
            print(f"{one.name:52}{one.p50:>9.2f}{p99:>9} {one.unit:<4}  {one.goal:<20} {met}".rstrip())
        for name, reason in skipped.items():
            print(f"skipped {name}: {reason}")
    return 0 if all(one.met is not False for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
