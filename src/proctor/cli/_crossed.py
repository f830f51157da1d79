"""`proctor compare RUN… --crossed`: model x harness x task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.common import ExitCode

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from proctor.analysis.crossed import Crossed
    from proctor.analysis.logit import LogitModel
    from proctor.analysis.ranks import Ranking
    from proctor.runs.contenders import Selection

_SHOWN = 6


def show_crossed(selection: Selection, *, level: float, seed: int, score: str, as_json: bool) -> ExitCode:
    """Analyse all sides together as one crossed exam and print it."""
    import polars as pl

    from proctor.analysis.crossed import CrossedOptions, crossed

    trials = pl.concat(selection.sides.values())
    found = crossed(trials, CrossedOptions(level=level, seed=seed, score=score, logit=True, inputs=selection.inputs))
    if as_json:
        from proctor.cli._json import echo_json

        echo_json(found.as_json())
    else:
        from proctor.runs.table import console

        print_crossed(console(), found)
    return ExitCode.OK


def print_crossed(console: Console, found: Crossed) -> None:
    """Means, components, rankings, what turns around, and the decision study."""
    from rich.text import Text

    left_out = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items()) or "none"
    title = f"{len(found.models)} models x {len(found.harnesses)} harnesses x {found.tasks} tasks"
    console.print(Text(f"{title} ({found.clusters} clusters): {found.trials} graded trials; left out: {left_out}"))
    console.print(_means(found))
    if found.components is not None:
        console.print()
        console.print(_components(found))
    if found.interaction is not None:
        one = found.interaction
        console.print(f"does the harness change which model is better? F({one.df[0]}, {one.df[1]}) = "
                      f"{one.statistic:.2f}, p {one.p:.3g}")  # fmt: skip
    if found.logit is not None:
        console.print()
        console.print(_on_the_logit(found.logit))
        if found.logit.interaction_p is not None:
            console.print(f"model x harness on the logit: p {found.logit.interaction_p:.3g} ({found.logit.formula})")
    rankings = [("models, over all harnesses", found.ranks_models), ("agents", found.ranks_agents)]
    rankings += [(f"models in {harness}", ranking) for harness, ranking in found.ranks_within.items()]
    for title, ranking in rankings:
        if ranking is not None:
            console.print()
            console.print(_ranking(title, ranking))
    for pair, tau in found.agreement.items():
        console.print(Text(f"rankings of {pair}: Kendall tau {tau:.2f}"))
    for one_pair in found.reversals[:_SHOWN]:
        seen = "turns around" if one_pair.seen else "may turn around"
        console.print(Text(f"{one_pair.first} - {one_pair.second} {seen}: {one_pair.difference:+.3f} in "
                           f"{one_pair.harness}, {one_pair.difference_other:+.3f} in {one_pair.other} "
                           f"(in {100 * one_pair.chance:.0f} % of the resamples)"))  # fmt: skip
    _print_study(console, found)
    notes = (*found.notes, *(found.components.notes if found.components else ()),
             *(found.logit.notes if found.logit else ()))  # fmt: skip
    for note in notes:
        console.print(Text(f"note: {note}"))


def _means(found: Crossed) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mean score", overflow="fold")
    for harness in found.harnesses:
        table.add_column(Text(harness), justify="right")
    cells = {(cell.model, cell.harness): cell for cell in found.cells}
    for model in found.models:
        row = []
        for harness in found.harnesses:
            cell = cells.get((model, harness))
            span = cell.interval if cell else None
            row.append("not run" if cell is None else f"{cell.mean:.3f}"
                       + (f" ({span.low:.2f} .. {span.high:.2f})" if span else ""))  # fmt: skip
        table.add_row(Text(model), *row)
    return table


def _components(found: Crossed) -> RenderableType:
    from rich.table import Table

    assert found.components is not None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"variance ({found.components.formula})")
    for name in ("share", "component", "as estimated", "df", "mean square"):
        table.add_column(name, justify="right")
    for one in found.components.components:
        df = "-" if one.df is None else str(one.df)
        square = "-" if one.mean_square is None else f"{one.mean_square:.6f}"
        table.add_row(one.name, f"{100 * one.share:.1f} %", f"{one.value:.6f}", f"{one.raw:+.6f}", df, square)
    return table


def _on_the_logit(model: LogitModel) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("on the logit, pass or fail")
    for name in ("share", "standard deviation", "levels"):
        table.add_column(name, justify="right")
    for one in model.components:
        table.add_row(one.name, f"{100 * one.share:.1f} %", f"{one.sd:.2f}", f"{one.levels:,}")
    table.add_row("residual", f"{100 * model.residual_share:.1f} %", "1.81", "")
    return table


def _ranking(title: str, ranking: Ranking) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(Text(title), overflow="fold")
    for name in ("mean", "rank", f"{100 * ranking.level:g} % ranks", "P(first)"):
        table.add_column(name, justify="right")
    for one in ranking.systems:
        table.add_row(Text(one.label), f"{one.mean:.3f}", f"{one.rank:g}", f"{one.low:g} .. {one.high:g}",
                      f"{one.p_first:.3f}")  # fmt: skip
    if ranking.tau is not None:
        table.caption = f"Kendall tau with itself, tasks drawn again: {ranking.tau:.2f} ({ranking.formula})"
        table.caption_justify = "left"
    return table


def _print_study(console: Console, found: Crossed) -> None:
    study = found.study
    if study is None:
        return
    now = study.now
    if now.relative is None:
        console.print(f"reliability: {study.object}s do not differ by more than noise, so no exam would rank them")
        return
    exam = now.exam
    console.print()
    span = f" ({study.interval.low:.2f} .. {study.interval.high:.2f})" if study.interval else ""
    console.print(f"reliability of ranking {study.object}s with {exam.harnesses} harnesses, {exam.tasks} tasks, "
                  f"{exam.attempts} attempts: {now.relative:.3f}{span} (of the numbers themselves: {now.absolute:.3f}; "
                  f"with endless tasks: {now.ceiling:.3f})")  # fmt: skip
    for harnesses, attempts, tasks in study.needed:
        size = "no number of tasks" if tasks is None else f"{tasks:,} tasks"
        console.print(f"  for {study.target:g} with {harnesses} harnesses and {attempts} attempts: {size}")
