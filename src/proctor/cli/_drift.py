"""`proctor compare A B --drift`: has the behaviour changed?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.common import ConfigError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from proctor.analysis.drift import Drift, Shift
    from proctor.analysis.proportions import Interval
    from proctor.runs.contenders import Selection

_CODES = {"pass": ExitCode.OK, "fail": ExitCode.FAILED, "inconclusive": ExitCode.INCONCLUSIVE}
_SHOWN = 5


def show_drift(selection: Selection, *, level: float, power: float, seed: int, as_json: bool) -> ExitCode:
    """Compare the behaviour of the two sides, print it, and return the exit code that its verdict gives."""
    from proctor.analysis.detect import detect_drift
    from proctor.analysis.drift import DriftOptions
    from proctor.runs.behaviour import read_behaviours

    if len(selection.sides) != 2:
        raise ConfigError(f"drift is between two versions, not {len(selection.sides)}", field="--drift",
                          remedy="give A::AGENT and B::AGENT")  # fmt: skip
    names = tuple(selection.sides)
    one, other = (read_behaviours(trials) for trials in selection.sides.values())
    options = DriftOptions(level=level, alpha=1 - level, power=power, seed=seed)
    found = detect_drift(one, other, options, names=(names[0], names[1]), inputs=selection.inputs)
    if as_json:
        from proctor.cli._json import echo_json

        echo_json(found.as_json())
    else:
        from proctor.runs.table import console

        print_drift(console(), found)
    return _CODES[found.verdict]


def print_drift(console: Console, drift: Drift) -> None:
    """The verdict and what it comes to, the measures as a table, then tools, first partings and notes."""
    from rich.table import Table
    from rich.text import Text

    from proctor.common.text import visible

    style = {"pass": "bold green", "fail": "bold red"}.get(drift.verdict, "bold yellow")
    console.print(Text(f"behaviour of {drift.new} against {drift.baseline}: {drift.verdict.upper()}", style=style))
    console.print(f"{drift.tasks} tasks in {drift.clusters} clusters, {drift.runs[0]} and {drift.runs[1]} runs, "
                  f"level {100 * drift.level:g} %, Holm over what decides, seed {drift.seed}")  # fmt: skip
    scores = ["unknown" if score is None else f"{score:.3f}" for score in drift.score]
    same = ", equal at every task" if drift.same_result else ""
    console.print(f"mean score {scores[0]} before, {scores[1]} now{same}")
    for line in drift.findings:
        console.print(Text(f"  {visible(line)}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measure")
    for name in ("before", "now", "change", "interval", "tolerance", "p", "adjusted"):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold")
    for shift in drift.shifts:
        table.add_row(*(Text(cell) for cell in _cells(shift)))
    console.print()
    console.print(table)
    for line in _details(drift):
        console.print(Text(visible(line)))
    for note in drift.notes:
        console.print(Text(f"note: {note}"))


def _details(drift: Drift) -> Iterator[str]:
    changed = [tool for tool in drift.tools if abs(tool.new - tool.baseline) > 1e-9]
    for tool in changed[:_SHOWN]:
        kind = " (only reads)" if tool.read_only else ""
        repeats = f"{100 * tool.baseline_repeats:.0f} % -> {100 * tool.repeats:.0f} %"
        yield f"{tool.tool}{kind}: {tool.baseline:.3g} -> {tool.new:.3g} calls a run, exact repeats {repeats}"
    for novelty in drift.novelties[:_SHOWN]:
        mark = "alert" if novelty.alert else "new"
        yield f"{mark}: {novelty.kind} {novelty.item} in {novelty.trials} trials ({novelty.evidence[0]})"
    for parted in drift.divergences[:_SHOWN]:
        before, now = parted.baseline or "the end", parted.new or "the end"
        yield f"{parted.task}: apart after {parted.shared} calls, before: {before}; now: {now}"


def _cells(shift: Shift) -> list[str]:
    verdict = "(shown only)" if shift.verdict is None else f"{shift.verdict}: {shift.reason}"
    limits = [None if end is None else f"{end:.3g}" for end in (shift.tolerance.low, shift.tolerance.high)]
    tolerance = " to ".join(end or "any" for end in limits)
    numbers = ["-" if value is None else f"{value:.4g}" for value in (shift.baseline, shift.new)]
    point = f"x {shift.point:.3g}" if shift.scale == "ratio" else f"{shift.point:+.3f}"
    return [shift.name.replace("_", " "), *numbers, point, _span(shift.interval), tolerance, f"{shift.p:.3g}",
            f"{shift.p_adjusted:.3g}", verdict]  # fmt: skip


def _span(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.low:.3g} .. {interval.high:.3g}"
