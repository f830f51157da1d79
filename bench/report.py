"""A report on ten thousand trials: how long it takes to build, how large it is, how long a browser takes to open it.

    scripts/bench report [--tasks N] [--attempts N] [--agents N] [--keep DIR] [--json]

The run is made up, with a whole ledger and real record files; making it is not measured. Opening is measured in
headless Chromium, from navigation to the load event and the first frame after it; without Chromium it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

OPEN_LIMIT_S = 2.0
_LOADED = """new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(
  [performance.getEntriesByType('navigation')[0].loadEventEnd, performance.now(),
   document.querySelectorAll('*').length]))))"""


def measure(folder: Path, tasks: int, attempts: int, agents: int) -> dict[str, Any]:
    """Make a run, report on it, open it."""
    from tests.report.chromium import BROWSER, browser
    from tests.report.made import MadeRun, make_run

    from proctor.runs.reporting import Request, write_report

    run = folder / "run"
    if not run.exists():
        skill = {f"agent-{number}": 0.2 + 0.6 * number / max(1, agents - 1) for number in range(agents)}
        make_run(run, MadeRun(tasks=tasks, attempts=attempts, skill=skill, steps=8))
    found: dict[str, Any] = {"trials": tasks * attempts * agents, "tasks": tasks}
    start, burnt = time.perf_counter(), os.times()
    workers = len(os.sched_getaffinity(0))
    page = write_report(Request((run,), folder / "report.html", "html", "beside", workers=workers)).path
    spent = [now - before for now, before in zip(os.times()[:4], burnt[:4], strict=True)]
    found |= {"workers": workers, "build_s": round(time.perf_counter() - start, 1), "build_cpu_s": round(sum(spent), 1)}
    found["size_mb"] = round(page.stat().st_size / 1e6, 2)
    beside = list((folder / "report_trials").iterdir())
    found["beside_mb"] = round(sum(one.stat().st_size for one in beside) / 1e6, 1)
    if BROWSER is not None:
        with browser() as tab:
            for name, width in (("desktop", 1280), ("phone", 390)):
                opened = []
                for _ in range(5):
                    tab.open(page, width=width)
                    loaded, painted, found["elements"] = tab.value(_LOADED)
                    opened.append(max(loaded, painted) / 1000)
                found[f"open_{name}_s"] = round(median(opened), 2)
                found[f"open_{name}_worst_s"] = round(max(opened), 2)
    return found


def main() -> int:
    """Print what was measured; exit 1 when opening takes longer than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--attempts", type=int, default=5)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="work here and keep it")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder, given.tasks, given.attempts, given.agents)
    print(json.dumps(found) if given.json else "\n".join(f"{name:24} {value}" for name, value in found.items()))
    return int(found.get("open_desktop_s", 0.0) > OPEN_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
