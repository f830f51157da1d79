"""What a command costs: a round trip of `true`, a file operation, a ping, and the throughput of both directions.

    .venv/bin/python bench/guest_exec.py [--image host] [--count 1000] [--json]

Prints milliseconds (p50, p90, p99) and MB/s, beside the cost of `true` on this machine without any sandbox.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING

import anyio

import proctor.sandbox
from proctor.sandbox.contract import OutputLimit, SandboxSpec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MIB = 1 << 20


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    ordered = sorted(seconds)
    return {
        f"p{part}_ms": round(ordered[min(len(ordered) - 1, len(ordered) * part // 100)] * 1e3, 3)
        for part in (50, 90, 99)
    }


async def measure(count: int, call: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Latencies of `count` calls, one after the other."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return quantiles(times)


def bare_true(count: int) -> dict[str, float]:
    """The same program started by this process itself."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        times.append(time.perf_counter() - began)
    return quantiles(times)


async def run(image: str, count: int) -> dict[str, dict[str, float]]:
    """All measurements."""
    results = {"true, no sandbox": bare_true(count)}
    async with proctor.sandbox.create(SandboxSpec(image=image)) as box:
        results["exec true"] = await measure(count, lambda: box.exec(["/bin/true"]))
        results["exec sh -c true"] = await measure(count, lambda: box.exec("true"))
        results["stat"] = await measure(count, lambda: box.stat("/"))
        results["read 4 KiB"] = await measure(count, lambda: box.read("/proc/self/status"))
        size = 256 * MIB
        began = time.perf_counter()
        await box.exec(f"head -c {size} /dev/zero")
        results["output"] = {"mb_per_s": round(size / 1e6 / (time.perf_counter() - began))}
        data = bytes(64 * MIB)
        began = time.perf_counter()
        await box.exec("cat > /dev/null", stdin=data)
        results["input"] = {"mb_per_s": round(len(data) / 1e6 / (time.perf_counter() - began))}
        began = time.perf_counter()
        await box.exec(["/bin/cat"], stdin=data, limit=OutputLimit(len(data), 0))
        results["there and back"] = {"mb_per_s": round(len(data) / 1e6 / (time.perf_counter() - began))}
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--image", default="host")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = anyio.run(run, options.image, options.count)
    if options.json:
        print(json.dumps(results))
        return
    for name, values in results.items():
        print(f"{name:18}", "  ".join(f"{key.removesuffix('_ms')} {value:g}" for key, value in values.items()))


if __name__ == "__main__":
    main()
