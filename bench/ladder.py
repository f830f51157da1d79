"""What a sandbox costs with 1, 100 and 1,000 others alive: `scripts/bench ladder [--quick] [--out DIRECTORY]`.

Each rung keeps so many idle sandboxes and measures on top: back to back and idle-gapped, without a network and with a
policy. Then whole lives at a steady 35 and 100 a second, and the others' command lines (see `sandbox`). Writes
`ladder.json` and `ladder.html`. 10,000 alive need several processes: `scripts/bench density`.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from density import OVERCOMMIT, SPEC, memory_kb

import sandbox as plain
from proctor.sandbox import Edge, SandboxSpec
from proctor.sandbox.net import NetworkPolicy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proctor.sandbox.box import Box

RUNGS = (1, 100, 1000)
RATES = (35, 100)
GAP_S = 0.05
STEPS = ("create → first exec", "exec", "fork", "reset", "pause", "resume by exec", "close")


async def clocked(action: Callable[[], Awaitable[Any]], taken: list[float]) -> Any:
    """Add how long an awaitable takes, milliseconds."""
    begin = time.perf_counter()
    result = await action()
    taken.append((time.perf_counter() - begin) * 1e3)
    return result


async def first(edge: Edge, spec: SandboxSpec) -> Box:
    """A sandbox that has answered once."""
    box = await edge.create(spec)
    assert (await box.exec(["true"])).ok
    return box


async def life(edge: Edge, spec: SandboxSpec, steps: dict[str, list[float]], gap_s: float) -> None:
    """Every step once."""
    await anyio.sleep(gap_s)
    box: Box = await clocked(lambda: first(edge, spec), steps["create → first exec"])
    await anyio.sleep(gap_s)
    await clocked(lambda: box.exec(["true"]), steps["exec"])
    await anyio.sleep(gap_s)
    (child,) = await clocked(box.fork, steps["fork"])
    await child.close()
    await clocked(box.reset, steps["reset"])
    await clocked(box.pause, steps["pause"])
    await clocked(lambda: box.exec(["true"]), steps["resume by exec"])
    await clocked(box.close, steps["close"])


async def rung(alive: int, count: int) -> dict[str, Any]:
    """Medians and 99th percentiles of every step above `alive` idle sandboxes."""
    kinds = {"no network": SPEC, "network policy": replace(SPEC, network=NetworkPolicy("allow"))}
    with tempfile.TemporaryDirectory() as home:
        async with Edge(Path(home), policy=OVERCOMMIT) as edge:
            await (await first(edge, SPEC)).close()
            before = memory_kb()["MemAvailable"]
            for _ in range(alive):
                await first(edge, SPEC)
            mb = (before - memory_kb()["MemAvailable"]) / 1024 / alive
            rows = []
            for kind, spec in kinds.items():
                for pace, gap_s in (("back to back", 0.0), ("idle-gapped", GAP_S)):
                    steps: dict[str, list[float]] = {name: [] for name in STEPS}
                    for _ in range(count):
                        await life(edge, spec, steps, gap_s)
                    rows += [
                        {"step": name, "network": kind, "pace": pace, **summary(taken)} for name, taken in steps.items()
                    ]
    return {"alive": alive, "machine_mb_each": mb, "rows": rows}


def summary(taken: list[float]) -> dict[str, float]:
    """Median and 99th percentile, milliseconds."""
    ordered = sorted(taken)
    return {"p50": statistics.median(ordered), "p99": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]}


async def sustained(rate: int, seconds: float) -> dict[str, float]:
    """Whole lives begun at a steady rate, whatever became of those before."""
    taken: list[float] = []
    with tempfile.TemporaryDirectory() as home:
        async with Edge(Path(home), policy=OVERCOMMIT) as edge:

            async def one() -> None:
                begin = time.perf_counter()
                async with await first(edge, SPEC):
                    pass
                taken.append((time.perf_counter() - begin) * 1e3)

            begin = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for number in range(int(rate * seconds)):
                    await anyio.sleep(max(begin + number / rate - time.perf_counter(), 0))
                    tasks.start_soon(one)
            reached = len(taken) / (time.perf_counter() - begin)
    return {"wanted_per_s": rate, "reached_per_s": reached, **summary(taken)}


# --- the page ---------------------------------------------------------------------------------------------------------


def plot(figures: dict[str, Any], step: str) -> str:
    """One step's medians over the rungs, as SVG: a line for each kind and pace."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for one in figures["rungs"]:
        for row in one["rows"]:
            if row["step"] == step:
                lines.setdefault(f"{row['network']}, {row['pace']}", []).append((one["alive"], row["p50"]))
    top = max(value for points in lines.values() for _, value in points) * 1.15
    places = {alive: 60 + index * 150 for index, alive in enumerate(one["alive"] for one in figures["rungs"])}
    colours = ("#1b6ca8", "#7fb2d9", "#b85c00", "#e0a96d")
    parts = [f'<text x="60" y="18" font-weight="600">{html.escape(step)}, ms (median)</text>']
    for share in (0, 0.5, 1):
        y = 190 - 150 * share
        parts.append(f'<line x1="50" x2="400" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="44" y="{y + 4}" text-anchor="end">{top * share:.1f}</text>')
    for alive, x in places.items():
        parts.append(f'<text x="{x}" y="208" text-anchor="middle">{alive:,} alive</text>')
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{places[alive]},{190 - 150 * value / top:.1f}" for alive, value in points)
        colour = colours[number % len(colours)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for alive, value in points:
            parts.append(f'<circle cx="{places[alive]}" cy="{190 - 150 * value / top:.1f}" r="3" fill="{colour}"/>')
        parts.append(f'<text x="420" y="{50 + number * 20}" fill="{colour}">{html.escape(name)}</text>')
    return f'<svg viewBox="0 0 620 220" role="img" aria-label="{html.escape(step)}">{"".join(parts)}</svg>'


def page(figures: dict[str, Any]) -> str:
    """One file that needs nothing else."""
    machine = figures["machine"]
    head = f"{machine['cpus']} cores, Linux {machine['kernel']}, load {machine['load']:.1f} before the start"
    steady = "".join(
        f"<tr><td>{one['wanted_per_s']} / s<td>{one['reached_per_s']:.1f} / s<td>{one['p50']:.1f}<td>{one['p99']:.1f}"
        for one in figures["sustained"]
    )
    memory = "".join(f"<tr><td>{one['alive']:,}<td>{one['machine_mb_each']:.2f}" for one in figures["rungs"])
    others = "".join(
        f"<tr><td>{html.escape(one['name'])}<td>{one['p50']:.1f}<td>{one['p99']:.1f}" for one in figures["others"]
    )
    skipped = "".join(f"<li>{html.escape(f'{name}: {why}')}</li>" for name, why in figures["skipped"].items())
    return f"""<!doctype html><meta charset="utf-8"><title>Proctor: the ladder</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}}
svg{{width:100%;max-width:34rem;font-size:12px}} main{{display:flex;flex-wrap:wrap;gap:1rem}}
td,th{{padding:.2rem 1rem .2rem 0;text-align:left;border-bottom:1px solid #ddd}}</style>
<h1>What a sandbox costs</h1><p>{html.escape(head)}.</p>
<main>{"".join(plot(figures, step) for step in STEPS)}</main>
<h2>Whole lives at a steady rate</h2><table><tr><th>wanted<th>reached<th>p50, ms<th>p99, ms{steady}</table>
<h2>Memory lost to the machine</h2><table><tr><th>alive<th>MB each{memory}</table>
<h2>The others: a whole life by command line</h2><table><tr><th><th>p50, ms<th>p99, ms{others}</table><ul>{skipped}</ul>
"""


def main() -> int:
    """Measure, write, say where."""
    parser = argparse.ArgumentParser(prog="scripts/bench ladder", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rungs and seconds")
    parser.add_argument("--out", type=Path, default=Path("ladder"), help="directory for ladder.json and ladder.html")
    options = parser.parse_args()
    rungs = RUNGS[:2] if options.quick else RUNGS
    count, seconds = (10, 5.0) if options.quick else (60, 60.0)
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0]}
    figures: dict[str, Any] = {"machine": machine}
    figures["rungs"] = [anyio.run(rung, alive, count) for alive in rungs]
    figures["sustained"] = [anyio.run(sustained, rate, seconds) for rate in RATES]
    compared, figures["skipped"] = plain.others(options.quick)
    figures["others"] = [asdict(one) for one in compared]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ladder.json").write_text(json.dumps(figures, indent=1))
    (options.out / "ladder.html").write_text(page(figures))
    print(f"{options.out}/ladder.json\n{options.out}/ladder.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
