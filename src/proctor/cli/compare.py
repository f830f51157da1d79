"""`proctor compare`: agents against each other, paired by task."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from proctor.common import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from proctor.analysis.claims import Terms
    from proctor.analysis.comparison import Comparison, Dimension
    from proctor.runs.contenders import Selection


@click.command()
@click.argument("sides", nargs=-1, required=True, metavar="A[::AGENT] [B[::AGENT]] …")
@click.option("--gate", metavar="margin=M", help="Exit 0, 1 or 3: B no worse than A by M (0.02 is two points), "
              "worse by more, or not to be told. Also max_excluded=0.05.")  # fmt: skip
@click.option("--score", type=click.Choice(["score", "resolved"]), default="score", show_default=True,
              help="Average scores, or only count what is resolved.")  # fmt: skip
@click.option("--all-pairs", is_flag=True, help="Every agent against every other, not only against the first.")
@click.option("--by", "dimension", type=click.Choice(["capability", "difficulty", "domain", "split"]),
              help="Also each group of tasks by itself: for looking, not for claiming.")  # fmt: skip
@click.option("--effect", type=float, metavar="E", help="Say what it would take to tell a difference of E (0.03).")
@click.option("--level", type=float, default=0.95, show_default=True, help="Of intervals; tests use 1 - level.")
@click.option("--power", type=float, default=0.8, show_default=True, help="How surely a real difference is found.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of bootstrap and Monte Carlo.")
@click.option("--drift", "view", flag_value="drift", help="Compare what two agents did, not what they scored. "
              "Exit 0, 1 or 3: no drift beyond tolerance, drift, or not to be told.")  # fmt: skip
@click.option("--crossed", "view", flag_value="crossed", help="Take all agents as one exam of models x harnesses x "
              "tasks: where the variance comes from, how firm the ranks are.")  # fmt: skip
@click.option("--conditions", "view", flag_value="conditions", help="Each agent against itself: what an ablation, a "
              "perturbation or a fault changes, paired by task.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.pass_context
def compare(
    context: click.Context,
    /,
    *,
    sides: tuple[str, ...],
    gate: str | None,
    dimension: Dimension | None,
    view: str | None,
    as_json: bool,
    **terms: object,
) -> None:
    """Compare agents by the records of runs, paired by task. The first is the baseline.

    A and B are run directories (or Parquet files of trials); a run stands for all of its agents unless ::AGENT names
    one. "Better" and "worse" are said only when a test fixed by the design earns them; else it is said what it would
    take to tell. What was not run under the same terms is refused.

    \b
    proctor compare runs/one
    proctor compare runs/old::tool-loop runs/new::tool-loop --gate margin=0.02
    proctor compare runs/old::tool-loop runs/new::tool-loop --drift
    proctor compare runs/ablated --conditions

    Exit codes: 0 done, or the gate passes; 1 the gate fails; 3 the gate is inconclusive; 4 bad input; 5 refused, since
    not comparable. With --drift its verdict takes the gate's place.
    """
    from proctor.analysis.claims import Terms
    from proctor.analysis.claims import compare as compare_sides
    from proctor.analysis.gate import parse_gate
    from proctor.runs.contenders import select

    if view is not None:
        _check_alone(context, view)
    asked, rule = Terms(**terms), parse_gate(gate) if gate is not None else None  # type: ignore[arg-type]
    selection = select(sides, conditions=view == "conditions")
    if view in ("drift", "crossed"):
        context.exit(_show(view, selection, asked, as_json=as_json))
    asked = replace(asked, anytime=selection.watched)
    if view == "conditions":
        from proctor.analysis.changes import changes

        comparison = changes(selection.sides, asked, inputs=selection.inputs)
    else:
        comparison = compare_sides(selection.sides, asked, gate=rule, inputs=selection.inputs)
    comparison = replace(comparison, notes=(*selection.notes, *comparison.notes))
    if dimension is not None:
        from proctor.analysis.exploration import explore

        comparison = replace(comparison, exploration=explore(selection.sides, dimension, asked))
    if as_json:
        from proctor.runs.formats import dump_json

        click.echo(dump_json(comparison.as_json(), indent=1), nl=False)
    else:
        from proctor.runs.table import console

        print_comparison(console(), comparison)
    if comparison.gate is not None:
        codes = {"pass": ExitCode.OK, "fail": ExitCode.FAILED, "inconclusive": ExitCode.INCONCLUSIVE}
        context.exit(codes[comparison.gate.verdict])


_ALONE = {"conditions": ("gate", "all_pairs", "dimension"),
          "drift": ("gate", "score", "all_pairs", "dimension", "effect"),
          "crossed": ("gate", "all_pairs", "dimension", "effect", "power")}  # fmt: skip
"""Options that have no meaning with each view."""


def _check_alone(context: click.Context, view: str) -> None:
    for param in context.command.params:
        if param.name in _ALONE[view] and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{view} and {param.opts[0]} do not go together")


def _show(view: str, selection: Selection, asked: Terms, *, as_json: bool) -> ExitCode:
    """Something else than who is better: how the behaviour changed, or what a crossed exam says."""
    if view == "drift":
        from proctor.cli._drift import show_drift

        return show_drift(selection, level=asked.level, power=asked.power, seed=asked.seed, as_json=as_json)
    from proctor.cli._crossed import show_crossed

    return show_crossed(selection, level=asked.level, seed=asked.seed, score=asked.score, as_json=as_json)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """The sides as a table, then each claim and the gate in lines."""
    from rich.table import Table
    from rich.text import Text

    from proctor.analysis import wording

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("agent", "harness", "model"):
        table.add_column(name, overflow="fold")
    for name in ("tasks", "planned", "graded", "mean"):
        table.add_column(name, justify="right")
    table.add_column("excluded", overflow="fold")
    for side in comparison.contenders:
        harness = " ".join(filter(None, (side.harness, side.harness_version)))
        mean = "-" if side.mean is None else f"{side.mean:.3f}"
        cells = (side.label, harness, side.model or "-", side.tasks, side.planned, side.graded, mean)
        table.add_row(*(Text(str(cell)) for cell in cells), Text(wording.counted(side.excluded) or "-"))
    console.print(Text(wording.heading(comparison), style="bold"))
    console.print(table)
    for claim in comparison.claims:
        console.print()
        first, *rest = wording.claim_lines(claim, claims=len(comparison.claims))
        style = {"better": "bold green", "worse": "bold red"}.get(claim.word, "bold")
        console.print(Text(first, style=style))
        for line in rest:
            console.print(Text(line))
    for note in comparison.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if comparison.exploration:
        console.print()
        _print_exploration(console, comparison)
    if comparison.gate is not None:
        console.print()
        for line in wording.gate_lines(comparison.gate):
            console.print(Text(line, style="bold" if line.startswith("gate") else ""))


def _print_exploration(console: Console, comparison: Comparison) -> None:
    """Groups of tasks, the largest difference first."""
    from rich.table import Table
    from rich.text import Text

    from proctor.analysis.wording import p_value, points

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (comparison.exploration[0].dimension, "contender", "baseline"):
        table.add_column(name, overflow="fold")
    for name in ("tasks", "points", "interval", "p", "q"):
        table.add_column(name, justify="right")
    for line in comparison.exploration:
        gap = line.difference
        span = f"{points(gap.low)} .. {points(gap.high)}"
        cells = (line.name, line.contender, line.baseline, line.tasks, points(gap.point), span)
        table.add_row(*(Text(str(cell)) for cell in (*cells, p_value(line.p), p_value(line.q))))
    console.print(Text("by group, for looking and not for claiming (q: Benjamini-Hochberg)", style="bold"))
    console.print(table)
