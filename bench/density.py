"""How many sandboxes can be alive at once: `scripts/bench density [--count 10000] [--json FILE]`.

Every one has namespaces, ids and groups of its own (which is checked), and answers a command when all are alive. They
are spread over processes with an Edge each, since one process may hold 20,000 descriptors on many machines, and an
Edge has 2,048 ranges of ids.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from proctor.sandbox import Edge, LaunchError, Lifecycle, Policy, Resources, SandboxSpec

if TYPE_CHECKING:
    from proctor.sandbox.box import Box

SPEC = SandboxSpec(
    resources=Resources(cpus=0.5, memory_mb=64, disk_mb=16, disk_inodes=2000, pids=32), lifecycle=Lifecycle(ttl_s=None)
)
PER_PROCESS = 1700
OVERCOMMIT = Policy(memory_overcommit=1000, cpu_overcommit=100_000, pids_share=1000, memory_headroom_mb=2048)
"""Limits may be promised many times over, since these idle; memory that is really gone still stops creation."""
NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
FAILURES_MAX = 5


def memory_kb() -> dict[str, int]:
    """Parts of /proc/meminfo."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines}


def ticks(pids: list[int]) -> float:
    """CPU seconds of processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


# --- a worker: one Edge and its share ---------------------------------------------------------------------------------


async def worker(count: int, at_once: int, burst: bool) -> None:
    """Orders come as lines on stdin; what they led to goes to stdout as JSON lines."""
    with tempfile.TemporaryDirectory() as home:
        async with Edge(Path(home), pool_size=8, policy=OVERCOMMIT) as edge:
            await (await edge.create(SPEC)).close()
            say({"pid": os.getpid()})
            await order()
            boxes: list[Any] = []
            created: list[tuple[float, float]] = []
            failures: list[str] = []
            left = iter(range(count))

            async def create() -> None:
                for _ in left:
                    begin = time.monotonic()
                    box = await make(edge, failures)
                    assert (await box.exec(["true"])).ok
                    boxes.append(box)
                    created.append((time.monotonic(), time.monotonic() - begin))

            async with anyio.create_task_group() as tasks:
                for _ in range(count if burst else at_once):
                    tasks.start_soon(create)
            spaces = [[os.readlink(f"/proc/{box.host_pid}/ns/{name}") for name in NAMESPACES] for box in boxes]
            charged = [(await box.stats()).memory_bytes for box in boxes]
            say(
                {
                    "created": created,
                    "failures": failures,
                    "spaces": spaces,
                    "slots": len({(edge.id, box._live.slot) for box in boxes}),
                    "uids": [box._live.launched.uid_base for box in boxes],
                    "guests": [box.host_pid for box in boxes],
                    "charged": statistics.median(charged),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                }
            )
            await order()
            answered = [0]

            async def ask(part: list[Any]) -> None:
                for number, box in enumerate(part):
                    result = await box.exec(["echo", str(number)])
                    answered[0] += result.text == f"{number}\n"

            begin = time.monotonic()
            async with anyio.create_task_group() as tasks:
                for share in range(at_once):
                    tasks.start_soon(ask, boxes[share::at_once])
            say({"answered": answered[0], "took": time.monotonic() - begin})
            await order()
            begin = time.monotonic()
        say({"closed": time.monotonic() - begin})


async def make(edge: Edge, failures: list[str]) -> Box:
    """Create one; a failure is counted, reported and tried again, a few times."""
    while True:
        try:
            return await edge.create(SPEC)
        except LaunchError as error:
            failures.append(error.message)
            if len(failures) > FAILURES_MAX:
                raise


async def order() -> None:
    """Wait for the next line."""
    if not await anyio.to_thread.run_sync(sys.stdin.readline):
        raise SystemExit("the bench is gone")


def say(message: dict[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps(message), flush=True)


# --- the bench --------------------------------------------------------------------------------------------------------


class Workers:
    """The processes."""

    def __init__(self, count: int, at_once: int, burst: bool) -> None:
        number = -(-count // PER_PROCESS)
        shares = [count // number + (index < count % number) for index in range(number)]
        extra = ["--burst"] if burst else []
        self.all = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", "--count", str(share), "--at-once", str(at_once), *extra],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for share in shares
        ]

    def order(self) -> None:
        """The next step, in all at once."""
        for one in self.all:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """What each says."""
        found = []
        for one in self.all:
            assert one.stdout is not None
            line = one.stdout.readline()
            if not line:
                raise SystemExit(f"a worker has ended with {one.wait()}")
            found.append(json.loads(line))
        return found

    def end(self) -> None:
        """Their Edges end all sandboxes."""
        for one in self.all:
            assert one.stdin is not None
            one.stdin.close()
        for one in self.all:
            one.wait()


def measure(count: int, at_once: int, burst: bool) -> dict[str, Any]:
    """Make them, look at them, ask each, end them."""
    workers = Workers(count, at_once, burst)
    try:
        pids = [one["pid"] for one in workers.answers()]
        before = memory_kb()
        began = time.monotonic()
        workers.order()
        found = workers.answers()
        after = memory_kb()
        guests = [pid for one in found for pid in one["guests"]]
        used = ticks([*pids, *guests])
        time.sleep(watch_s := 5.0 if count >= 1000 else 1.0)
        idle = (ticks([*pids, *guests]) - used) / watch_s
        workers.order()
        asked = workers.answers()
        workers.order()
        closed = workers.answers()
    finally:
        workers.end()
    created = sorted(tuple(pair) for one in found for pair in one["created"])
    spaces = [row for one in found for row in one["spaces"]]
    return {
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "memory_mb": before["MemTotal"] >> 10},
        "load": os.getloadavg()[0],
        "burst": burst,
        "alive": len(guests),
        "answered": sum(one["answered"] for one in asked),
        "distinct": {name: len({row[index] for row in spaces}) for index, name in enumerate(NAMESPACES)}
        | {
            "groups": sum(one["slots"] for one in found),
            "id ranges": len({uid for one in found for uid in one["uids"]}),
        },
        "create_failures": [message for one in found for message in one["failures"]],
        "creates_per_s": rates(began, [at for at, _ in created]),
        "create_ms": quantiles([took for _, took in created]),
        "execs_per_s": count / max(one["took"] for one in asked),
        "close_s": max(one["closed"] for one in closed),
        "idle_cpu_share": idle,
        "charged_kb": statistics.median(one["charged"] for one in found) / 1024,
        "machine_kb": (before["MemAvailable"] - after["MemAvailable"]) / count,
        "kernel_slab_kb": (after["SUnreclaim"] - before["SUnreclaim"]) / count,
        "descriptors_per_sandbox": sum(one["descriptors"] for one in found) / count,
    }


def rates(began: float, times: list[float]) -> list[float]:
    """Creations per second of each thousand (or of each tenth, of fewer)."""
    step = 1000 if len(times) >= 2000 else max(len(times) // 10, 1)
    ends = [times[min(index + step, len(times)) - 1] for index in range(0, len(times), step)]
    return [round(step / (end - start), 1) for start, end in zip([began, *ends], ends, strict=False)]


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(seconds)
    return {
        name: round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1e3, 1)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


def main() -> int:
    """Measure and print; 1 when something is not as it must be."""
    parser = argparse.ArgumentParser(prog="scripts/bench density", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="sandboxes alive at once")
    parser.add_argument("--at-once", type=int, default=2, help="creations under way in each process")
    parser.add_argument("--burst", action="store_true", help="ask for all of them at the same moment")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        anyio.run(worker, options.count, options.at_once, options.burst)
        return 0
    figures = measure(options.count, options.at_once, options.burst)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text)
    distinct = {name: number for name, number in figures["distinct"].items() if number != options.count}
    if distinct or figures["answered"] != options.count:
        print(f"NOT as it must be: {distinct}, {figures['answered']} answered", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
