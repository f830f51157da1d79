"""The outcome matrix: tasks x agents x attempts, from a trials frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.analysis.frame import GRADED, OUTCOMES, under
from proctor.analysis.report.model import Mark, Matrix, MatrixRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from proctor.analysis.aggregate import Aggregate

MOST_TRIALS = 20_000
"""A page lists as many trials as this; the rest of the tasks are counted."""
Identity = tuple[str | None, str | None, str | None, str | None]


def agent_names(trials: pl.LazyFrame, result: Aggregate) -> dict[Identity, str]:
    """(label, harness, version, model) of the frame -> the name under which the aggregate knows the agent."""
    found = trials.select("agent", "harness", "harness_version", "model").unique().collect(engine="streaming")
    names: dict[Identity, str] = {}
    for label, harness, version, model in found.iter_rows():
        for summary in result.summaries:
            same = (summary.harness, summary.harness_version, summary.model) == (harness or "", version or "", model)
            if same and (summary.agent == label or summary.agent.startswith(f"{label} (")):
                names[label, harness, version, model] = summary.agent
    return names


def build_matrix(trials: pl.LazyFrame, result: Aggregate, *, most: int = MOST_TRIALS) -> Matrix:
    """The matrix of all trials: a column for each agent and condition. When there are more than `most` trials, the
    first tasks by name."""
    import polars as pl

    names = agent_names(trials, result)
    counts = trials.group_by("task").agg(pl.len().alias("trials")).sort("task").collect(engine="streaming")
    shown = counts.filter(pl.col("trials").cum_sum() <= most)["task"]
    columns = ["task", "agent", "harness", "harness_version", "model", "run_id", "trial_id", "attempt", "outcome",
               "condition"]  # fmt: skip
    rows = trials.select(columns).filter(pl.col("task").is_in(shown.implode())).collect()
    seen_under = set(rows["condition"].unique())
    conditions = [name for name in result.conditions if name in seen_under]
    columns_of = [(summary.agent, condition) for condition in conditions for summary in result.summaries]
    place = {column: number for number, column in enumerate(columns_of)}
    order = rows.sort("task", "run_id", "attempt", "trial_id", maintain_order=True)
    cells: dict[str, list[list[tuple[str, str, int, str, str]]]] = {task: [[] for _ in columns_of] for task in shown}
    for task, *identity, run_id, trial_id, attempt, outcome, condition in order.iter_rows():
        agent = names.get(tuple(identity))
        if agent is not None:
            cells[task][place[agent, condition]].append((run_id, trial_id, attempt, outcome, condition))
    seen = set(rows["outcome"].unique())
    return Matrix(
        agents=tuple(under(agent, condition) for agent, condition in columns_of),
        rows=_rows(cells, compared=sum(condition == conditions[0] for _, condition in columns_of)),
        left_out=len(counts) - len(shown),
        outcomes=tuple(outcome for outcome in OUTCOMES if outcome in seen),
    )


def _rows(
    cells: Mapping[str, Sequence[Sequence[tuple[str, str, int, str, str]]]], *, compared: int
) -> tuple[MatrixRow, ...]:
    """The rows; whether agents differ and whether a task was resolved is said of the first `compared` columns."""
    rows, number = [], 0
    for task, by_agent in cells.items():
        marks: list[tuple[Mark, ...]] = []
        for trials in by_agent:
            marks.append(tuple(Mark(number + place, *trial) for place, trial in enumerate(trials, start=1)))
            number += len(trials)
        rates = {_rate(cell) for cell in marks[:compared]} - {None}
        rows.append(MatrixRow(task, tuple(marks), differs=len(rates) > 1, unsolved=not any(rates)))
    return tuple(rows)


def _rate(marks: Sequence[Mark]) -> float | None:
    graded = [mark.outcome == "resolved" for mark in marks if mark.outcome in GRADED]
    return sum(graded) / len(graded) if graded else None
