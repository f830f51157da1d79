"""The sections on each agent's faces: repeats, cost, groups of tasks, and whether the number holds elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from proctor.analysis.report.charts import Series, Spot, axis, curves, interval_bar, scatter, symmetric
from proctor.analysis.report.overview import RATE_AXIS
from proctor.analysis.report.sections import (
    Badge,
    Column,
    Figure,
    Named,
    Note,
    Section,
    Table,
    Two,
    amount,
    counted,
    grouped,
    percent,
    point_span,
    points,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proctor.analysis.aggregate import Aggregate
    from proctor.analysis.cells import Dimension
    from proctor.analysis.faces import Cost, Front
    from proctor.analysis.proportions import Interval
    from proctor.analysis.report.model import Report
    from proctor.analysis.summaries import Group, Summary

MOST_LINES = 8
"""A figure with more agents than this cannot be read; it shows the best ones, the table beside it all."""
MEASURES = {
    "tokens": "tokens",
    "cost_usd": "cost",
    "steps": "steps",
    "tool_calls": "tool calls",
    "wall_s": "wall time",
    "cpu_s": "CPU time",
}
_DIMENSIONS: dict[Dimension, str] = {
    "capability": "By capability", "difficulty": "By difficulty", "domain": "By domain", "split": "By split",
}  # fmt: skip


def repeats(report: Report) -> Section:
    """pass@k and pass^k as far as the attempts carry."""
    title = "Repeated attempts"
    shown = [(number, one) for number, one in enumerate(report.aggregate.summaries) if one.curve.points]
    if not any(len(one.curve.points) > 1 for _, one in shown):
        why = shown[0][1].curve.ends if shown else "nothing was graded"
        return Section(
            "repeats", title, (Note(f"No curves: {why}. Run with more attempts to see how reliable a success is."),)
        )
    best = {name: place for place, name in enumerate(report.aggregate.ranking)}
    drawn = sorted(shown, key=lambda item: best.get(item[1].agent, len(best)))[:MOST_LINES]
    series, ticks = [], sorted({point.k for _, one in shown for point in one.curve.points})
    for colour, one in drawn:
        for dashed in (False, True):
            places = tuple(
                (float(point.k), value.point, value.low, value.high)
                for point in one.curve.points
                for value in [point.pass_hat if dashed else point.pass_at]
            )
            series.append(Series(one.agent, colour, places, dashed))
    description = " ".join(
        f"{one.agent}: from {percent(one.curve.points[0].pass_at.point)} at one attempt to "
        f"{percent(one.curve.points[-1].pass_at.point)} for at least one success and "
        f"{percent(one.curve.points[-1].pass_hat.point)} for success every time in {one.curve.points[-1].k}."
        for _, one in drawn
    )
    chart = curves("pass@k and pass^k by agent", description, series, ticks, "attempts k")
    legend = tuple((one.agent, colour, False) for colour, one in drawn)
    caption = (
        "Solid: at least one of k attempts succeeds (pass@k). Dashed: all k succeed (pass^k). Whiskers: intervals."
    )
    rows = tuple(
        (
            Named(one.agent, colour),
            str(point.k),
            f"{percent(point.pass_at.point)} ({span(point.pass_at)})",
            f"{percent(point.pass_hat.point)} ({span(point.pass_hat)})",
            f"{point.tasks:,}",
        )
        for colour, one in shown
        for point in one.curve.points
    )
    columns = (Column("agent"), Column("k", "number"), Column("pass@k", "number"), Column("pass^k", "number"),
               Column("tasks", "number"))  # fmt: skip
    reasons = grouped([(one.agent, one.curve.ends) for _, one in shown], len(report.aggregate.summaries))
    ends = tuple(Note(f"Why it ends there: {line}.") for line in reasons)
    return Section("repeats", title, (Figure(chart, caption, legend), Table("pass@k and pass^k", columns, rows), *ends))


def economy(report: Report) -> Section:
    """What a success costs, and who is on the front."""
    result = report.aggregate
    parts: list[Table | Figure | Note] = [_front_figure(result, front) for front in result.fronts[:1]]
    known = [measure for measure in MEASURES
             if any(cost.measure == measure and cost.total != 0 and cost.known for one in result.summaries
                    for cost in one.economy)]  # fmt: skip
    rows = tuple(
        (Named(one.agent, colour), *(_cost(one.economy, measure) for measure in known))
        for colour, one in enumerate(result.summaries)
    )
    if known:
        columns = (Column("agent"), *(Column(MEASURES[measure], "number") for measure in known))
        note = (
            "First line: for each resolved task, with all that failures cost. Second line: for each trial. In "
            f"brackets: the {result.provenance.level * 100:g} % interval; ∞ where the data cannot exclude it."
        )
        parts.append(Table("What a success costs", columns, rows, note))
    for front in result.fronts:
        name = MEASURES[front.measure]
        parts += [
            Note(f"By {name}: {point.dominated_by} resolves no less than {point.agent} and costs no more.")
            for point in front.points
            if point.dominated_by
        ]
        if front.missing:
            parts.append(Note(f"By {MEASURES[front.measure]}: unknown for {', '.join(front.missing)}."))
    if not parts:
        parts.append(Note("Nothing is known of what the trials cost."))
    return Section("economy", "Cost against success", tuple(parts))


def _front_figure(result: Aggregate, front: Front) -> Figure:
    place = {one.agent: number for number, one in enumerate(result.summaries)}
    costs = {one.agent: cost for one in result.summaries for cost in one.economy if cost.measure == front.measure}
    best = sorted(front.points, key=lambda point: (not point.on_front, -point.rate))[:MOST_LINES]
    spots = []
    for point in best:
        rate, spent = result.of(point.agent).rate, costs[point.agent].per_trial
        y = (point.rate, rate.low, rate.high) if rate else (point.rate, point.rate, point.rate)
        x = (point.cost, spent.low, spent.high) if spent else (point.cost, point.cost, point.cost)
        spots.append(Spot(point.agent, place[point.agent], x, y))
    name = MEASURES[front.measure]
    description = " ".join(
        f"{point.agent}: {percent(point.rate)} at {amount(point.cost, front.measure)} a trial"
        f"{'' if point.on_front else f', beaten by {point.dominated_by}'}."
        for point in best
    )
    picture = scatter(f"Success rate against {name}", description, spots, f"{name} of a trial, mean",
                      lambda value: amount(value, front.measure))  # fmt: skip
    on = ", ".join(point.agent for point in front.points if point.on_front)
    return Figure(picture, f"Up and to the left is better. On the front by {name}: {on}.")


def _cost(economy: Sequence[Cost], measure: str) -> object:
    cost = next((one for one in economy if one.measure == measure), None)
    if cost is None or not cost.known:
        return "unknown"
    won, each = cost.per_resolved, cost.per_trial
    first = _with_range(won, measure) if won else "nothing resolved"
    some = "" if cost.known == cost.graded else f"; known of {cost.known} of {cost.graded}"
    second = f"{_with_range(each, measure)}{some}" if each else "unknown"
    return Two(first, second)


def _with_range(value: Interval, measure: str) -> str:
    """`284 ms (148 to 420)`: a unit is written once, unless the ends have another."""
    point = amount(value.point, measure)
    ends = [amount(value.low, measure), "∞" if math.isinf(value.high) else amount(value.high, measure)]
    unit = point.rpartition(" ")[2] if measure.endswith("_s") else ""
    if all(end.endswith(f" {unit}") or end == "∞" for end in ends):
        ends = [end.removesuffix(f" {unit}") for end in ends]
    return f"{point} ({' to '.join(end.removeprefix('$') for end in ends)})"


def groups(report: Report) -> Section:
    """Success by what tasks are about, as far as they say."""
    tables = []
    for dimension, title in _DIMENSIONS.items():
        by_agent = [
            (one.agent, {group.name: group for group in one.by(dimension)}) for one in report.aggregate.summaries
        ]
        names = list(dict.fromkeys(name for _, found in by_agent for name in found))
        if len(names) < 2:
            continue
        tables.append(_group_table(title, dimension, names, by_agent))
    if not tables:
        return Section("groups", "By kind of task", (Note("The tasks do not say of what kind they are."),))
    return Section("groups", "By kind of task", tuple(tables))


def _group_table(
    title: str, dimension: str, names: Sequence[str | None], by_agent: Sequence[tuple[str, dict[str | None, Group]]]
) -> Table:
    rows = []
    for name in names:
        for colour, (agent, found) in enumerate(by_agent):
            group = found.get(name)
            if group is None:
                continue
            label = name if name is not None else "not said"
            first = Two(label, counted(group.tasks, "task"))
            if group.rate is None:
                rows.append((first, Named(agent, colour), "", "nothing graded", f"0 of {group.planned} planned"))
                continue
            rows.append((
                first,
                Named(agent, colour),
                interval_bar(group.rate.point, group.rate.low, group.rate.high, colour=colour),
                f"{percent(group.rate.point)} ({span(group.rate)})",
                f"{group.resolved:,} of {group.graded:,}",
            ))  # fmt: skip
    columns = (Column(dimension), Column("agent"), Column("rate", "picture", RATE_AXIS),
               Column("success rate", "number"),
               Column("resolved", "number"))  # fmt: skip
    note = "A task with several capabilities counts in each of them." if dimension == "capability" else ""
    return Table(title, columns, tuple(rows), note)


def holds(report: Report) -> Section | None:
    """Whether the numbers hold: under perturbation, on held-out tasks, under other weights. None: nothing to say."""
    result = report.aggregate
    parts: list[Table | Note] = [*_robustness(result.summaries), *_gaps(result.summaries)]
    weighted = result.weightings
    if len(weighted.weightings) > 1:
        rows = tuple(
            (Two(one.name, one.meaning), rate.agent, Two(percent(rate.rate.point), span(rate.rate)),
             f"{rate.effective_tasks:.1f}")
            for one in weighted.weightings
            for rate in one.rates
        )  # fmt: skip
        columns = (Column("weights"), Column("agent"), Column("success rate", "number"),
                   Column("effective tasks", "number"))  # fmt: skip
        parts.append(Table("The same tasks under several weights", columns, rows))
        parts.append(
            Note(f"{weighted.statement[:1].upper()}{weighted.statement[1:]}.", "warn" if weighted.depends else "quiet")
        )
    return Section("holds", "Does it hold?", tuple(parts)) if parts else None


def _robustness(summaries: Sequence[Summary]) -> Iterator[Table | Note]:
    changes = [(one, change) for one in summaries for change in one.robustness]
    if not changes:
        return
    scale = symmetric(value for _, change in changes for value in (change.change.low, change.change.high))
    ends = axis([(scale.low, points(scale.low)), (0.0, "0"), (scale.high, points(scale.high))], scale)
    rows = tuple(
        (
            Two(one.agent, change.condition),
            interval_bar(change.change.point, change.change.low, change.change.high, scale=scale, zero=True),
            Two(points(change.change.point), point_span(change.change.low, change.change.high)),
            f"{percent(change.plain)} → {percent(change.changed)}",
            f"{change.tasks:,}",
        )
        for one, change in changes
    )
    columns = (Column("agent, condition"), Column("change", "picture", ends), Column("change in points", "number"),
               Column("rate", "number"), Column("tasks", "number"))  # fmt: skip
    yield Table("Under other conditions, paired by task", columns, rows)
    noted: dict[str, list[str]] = {}
    for one, change in changes:
        for note in change.notes:
            noted.setdefault(note, []).append(f"{one.agent}, {change.condition}")
    for note, where in noted.items():
        yield Note(f"{'; '.join(where) if len(where) < len(changes) else 'all of these'}: {note}.")


def _gaps(summaries: Sequence[Summary]) -> Iterator[Table | Note]:
    found = [(one, one.gap) for one in summaries if one.gap is not None]
    if not found:
        return
    rows = tuple(
        (
            one.agent,
            Two(percent(gap.public.point), counted(gap.public_tasks, "task")),
            Two(percent(gap.held_out.point), counted(gap.held_out_tasks, "task")),
            Two(points(gap.gap.point), point_span(gap.gap.low, gap.gap.high)),
            Badge("alarm", "bad") if gap.alarm else Badge("no alarm", "quiet"),
        )
        for one, gap in found
    )
    columns = (Column("agent"), Column("public", "number"), Column("held out", "number"),
               Column("gap in points", "number"),
               Column("alarm"))  # fmt: skip
    yield Table("Public against held-out tasks", columns, rows, f"Rule: {found[0][1].rule}.")
