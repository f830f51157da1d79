"""What the short form of the isolation self-test adds to the making of a sandbox, side by side and interleaved.

python bench/self_test.py [--count 40]
"""

from __future__ import annotations

import argparse
import statistics
import time

import anyio

from proctor.sandbox import Edge, SandboxSpec


async def _create(edge: Edge, *, self_test: bool) -> float:
    start = time.perf_counter()
    box = await edge.create(SandboxSpec(self_test=self_test))
    took = time.perf_counter() - start
    await box.close()
    return took * 1000


async def main(count: int) -> None:
    """Print medians and 90th percentiles in ms."""
    times: dict[bool, list[float]] = {False: [], True: []}
    async with Edge(pool_size=4) as edge:
        for _ in range(count):
            for self_test in times:
                times[self_test].append(await _create(edge, self_test=self_test))
    for self_test, found in times.items():
        name = "with self-test" if self_test else "without"
        print(
            f"{name:<15} p50 {statistics.median(found):6.1f} ms   p90 {statistics.quantiles(found, n=10)[-1]:6.1f} ms"
        )
    print(f"it adds         p50 {statistics.median(times[True]) - statistics.median(times[False]):6.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    anyio.run(main, parser.parse_args().count)
