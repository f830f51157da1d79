"""What can be said about one agent, from its sums by task (`cells`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from proctor.analysis.cells import DIMENSIONS, Dimension
from proctor.analysis.faces import MEASURES, Change, Cost, Spent, change, cost
from proctor.analysis.frame import GRADED, PLAIN
from proctor.analysis.means import FEW_CLUSTERS, SuiteMean, Tasks, suite_mean
from proctor.analysis.passk import Curve, pass_curve
from proctor.analysis.proportions import Interval, proportion, score_interval
from proctor.analysis.rates import rate_interval
from proctor.analysis.splits import Gap, split_gap

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from proctor.analysis.cells import AgentCells, Cells, Suite


@dataclass(frozen=True, slots=True)
class Options:
    """How to aggregate. `weights` are the caller's own, name -> task -> weight (tasks not named weigh 0)."""

    level: float = 0.95
    seed: int = 0
    resamples: int = 2000
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gap_margin: float = 0.0
    """The alarm fires when the low end of the gap's interval is above this."""


@dataclass(frozen=True, slots=True)
class Group:
    """The tasks of one capability, difficulty, domain or split. `name` is None for tasks that do not say.

    A task of several capabilities counts in each of them. `rate` is None when nothing of the group was graded.
    """

    dimension: Dimension
    name: str | None
    tasks: int
    planned: int
    graded: int
    resolved: int
    rate: Interval | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One agent over all tasks (condition `plain`).

    `rate` is the success rate, repeats averaged first, over the `tasks` with a graded trial. `headline` is what to
    show: `rate`, or the held-out rate when `gap.alarm` fires (`truth` says which). `wilson` takes the tasks for
    independent; it is `rate` unless there are clusters. `worst` and `best` are the rates if every excluded trial had
    failed or been resolved. `clopper_pearson` is there only with one graded trial for each task and no clusters, since
    its guarantee is for independent trials.
    """

    agent: str
    harness: str
    harness_version: str
    model: str | None
    returned_models: tuple[str, ...]
    planned: int
    graded: int
    resolved: int
    outcomes: Mapping[str, int]
    excluded: Mapping[str, int]
    """Trials outside the denominator, by outcome."""
    tasks_planned: int
    tasks: int
    clusters: int
    headline: Interval | None
    truth: Literal["all", "held_out"]
    rate: Interval | None
    wilson: Interval | None
    clopper_pearson: Interval | None
    worst: float | None
    best: float | None
    success: SuiteMean | None
    """Resolved as 1, else 0."""
    score: SuiteMean | None
    """The graded score, where it says more than resolved or not; else None."""
    curve: Curve
    groups: tuple[Group, ...]
    gap: Gap | None
    economy: tuple[Cost, ...]
    robustness: tuple[Change, ...]
    statement: str
    """One sentence with interval and denominators."""
    notes: tuple[str, ...] = ()

    def by(self, dimension: Dimension) -> tuple[Group, ...]:
        """The groups of one dimension; empty when no task says anything of it."""
        return tuple(group for group in self.groups if group.dimension == dimension)


def summarise(agent: AgentCells, suite: Suite, options: Options, *, agents: int = 1) -> Summary:
    """The summary of one agent. `agents` is how many are looked at together: alarms share their error rate."""
    cells = agent.conditions.get(PLAIN)
    if cells is None:
        return _nothing(agent, f"no trials under the condition {PLAIN}")
    has = cells.graded > 0
    excluded = {outcome: count for outcome, count in cells.outcomes.items() if outcome not in GRADED}
    planned, graded, resolved = (int(one.sum()) for one in (cells.planned, cells.graded, cells.resolved))
    if not graded:
        nothing = f"nothing was graded; {planned} of {planned} planned trials are excluded ({_reasons(excluded)})"
        return _nothing(agent, nothing, cells, excluded)
    clusters = suite.clusters[has]
    means = cells.resolved[has] / cells.graded[has]
    level = options.level
    rate = rate_interval(means, clusters, level=level)
    success = suite_mean(Tasks(cells.graded[has], cells.resolved[has], cells.resolved[has], clusters), level=level)
    alone = success.clusters == success.tasks and graded == success.tasks
    gap = _gap(cells, suite, has, options, agents)
    alarm = gap is not None and gap.alarm
    headline = gap.held_out if gap is not None and alarm else rate
    return Summary(
        agent=agent.name,
        harness=agent.harness,
        harness_version=agent.harness_version,
        model=agent.model,
        returned_models=agent.returned_models,
        planned=planned,
        graded=graded,
        resolved=resolved,
        outcomes=cells.outcomes,
        excluded=excluded,
        tasks_planned=int((cells.planned > 0).sum()),
        tasks=success.tasks,
        clusters=success.clusters,
        headline=headline,
        truth="held_out" if alarm else "all",
        rate=rate,
        wilson=score_interval(rate.point, success.tasks, level=level),
        clopper_pearson=proportion(resolved, graded, method="clopper-pearson", level=level) if alone else None,
        worst=_bound(cells, 0),
        best=_bound(cells, 1),
        success=success,
        score=_score(cells, has, suite, level),
        curve=pass_curve(cells.graded[has], cells.resolved[has], clusters, level=level, resamples=options.resamples,
                         seed=options.seed),
        groups=_groups(cells, suite, level),
        gap=gap,
        economy=_economy(cells, suite, graded, level),
        robustness=_robustness(agent, cells, suite, level),
        statement=_statement(agent.name, headline, alarm, planned, graded, resolved, success.tasks, excluded),
        notes=_notes(cells, success, has),
    )  # fmt: skip


def _nothing(
    agent: AgentCells, why: str, cells: Cells | None = None, excluded: Mapping[str, int] | None = None
) -> Summary:
    """The summary of an agent without a graded trial: no number, and the reason."""
    return Summary(
        agent=agent.name, harness=agent.harness, harness_version=agent.harness_version, model=agent.model,
        returned_models=agent.returned_models, planned=int(cells.planned.sum()) if cells else 0, graded=0, resolved=0,
        outcomes=cells.outcomes if cells else {}, excluded=excluded or {},
        tasks_planned=int((cells.planned > 0).sum()) if cells else 0, tasks=0, clusters=0, headline=None, truth="all",
        rate=None, wilson=None, clopper_pearson=None, worst=_bound(cells, 0) if cells else None,
        best=_bound(cells, 1) if cells else None, success=None, score=None, curve=Curve((), why),
        groups=(), gap=None, economy=(), robustness=(), statement=f"{agent.name}: {why}",
    )  # fmt: skip


def _bound(cells: Cells, excluded_as: int) -> float:
    """The rate over planned tasks, repeats averaged first, if every excluded trial had failed (0) or passed (1)."""
    planned = cells.planned > 0
    passed = cells.resolved + excluded_as * (cells.planned - cells.graded)
    return float((passed[planned] / cells.planned[planned]).mean())


def _score(cells: Cells, has: NDArray[np.bool_], suite: Suite, level: float) -> SuiteMean | None:
    import numpy as np

    if np.allclose(cells.score, cells.resolved) and np.allclose(cells.squares, cells.resolved):
        return None
    return suite_mean(Tasks(cells.graded[has], cells.score[has], cells.squares[has], suite.clusters[has]), level=level)


def _groups(cells: Cells, suite: Suite, level: float) -> tuple[Group, ...]:
    groups = []
    for dimension in DIMENSIONS:
        for name, mask in suite.groups[dimension].items():
            here = mask & (cells.planned > 0)
            if not here.any():
                continue
            has = here & (cells.graded > 0)
            rate = None
            if has.any():
                rate = rate_interval(cells.resolved[has] / cells.graded[has], suite.clusters[has], level=level)
            planned, graded, resolved = (int(one[here].sum()) for one in (cells.planned, cells.graded, cells.resolved))
            groups.append(Group(dimension, name, int(has.sum()), planned, graded, resolved, rate))
    return tuple(groups)


def _gap(cells: Cells, suite: Suite, has: NDArray[np.bool_], options: Options, agents: int) -> Gap | None:
    known = has & (suite.hidden | suite.public)
    return split_gap(
        cells.resolved[known] / cells.graded[known],
        suite.clusters[known],
        suite.hidden[known],
        suite.hardness[known],
        level=options.level,
        margin=options.gap_margin,
        agents=agents,
    )


def _economy(cells: Cells, suite: Suite, graded: int, level: float) -> tuple[Cost, ...]:
    return tuple(
        cost(
            measure,
            graded,
            Spent(cells.known[measure], cells.spent[measure], cells.won[measure], suite.clusters),
            level=level,
        )
        for measure in MEASURES
    )


def _robustness(agent: AgentCells, plain: Cells, suite: Suite, level: float) -> tuple[Change, ...]:
    """Paired by the task's name: a perturbed task is the same task in another version."""
    import numpy as np

    first = np.unique(suite.by_name, return_index=True)[1]
    before, before_won = (np.bincount(suite.by_name, weights=one) for one in (plain.graded, plain.resolved))
    changes = []
    for condition, cells in agent.conditions.items():
        graded, won = (np.bincount(suite.by_name, weights=one) for one in (cells.graded, cells.resolved))
        both = (graded > 0) & (before > 0)
        if condition == PLAIN or not both.any():
            continue
        found = change(
            condition,
            before_won[both] / before[both],
            won[both] / graded[both],
            suite.clusters[first][both],
            unpaired=int(((graded > 0) ^ (before > 0)).sum()),
            level=level,
        )
        if other := int(((cells.graded > 0) & (plain.graded == 0) & both[suite.by_name]).sum()):
            found = replace(found, notes=(*found.notes, f"tasks in a version of their own under {condition}: {other}"))
        changes.append(found)
    return tuple(changes)


def _statement(
    agent: str,
    headline: Interval,
    alarm: bool,
    planned: int,
    graded: int,
    resolved: int,
    tasks: int,
    excluded: Mapping[str, int],
) -> str:
    which = "on one task" if tasks == 1 else f"on {tasks} tasks"
    if alarm:
        which = "on held-out tasks (public ones score higher than chance allows)"
    out = f"{planned - graded} of {planned} planned are excluded"
    if excluded:
        out += f" ({_reasons(excluded)})"
    return (
        f"{agent}: {percent(headline.point)} {which}, {headline.level * 100:g} % interval {percent(headline.low)} to "
        f"{percent(headline.high)}; {resolved} of {graded} graded trials resolved, {out}"
    )


def _notes(cells: Cells, success: SuiteMean, has: NDArray[np.bool_]) -> tuple[str, ...]:
    notes = list(success.notes)
    if without := int(((cells.planned > 0) & ~has).sum()):
        notes.append(f"planned tasks without a graded trial, which are in no rate: {without}")
    if success.tasks < FEW_CLUSTERS:
        notes.append(f"few tasks ({success.tasks}): nothing here says much about others")
    return tuple(notes)


def percent(value: float) -> str:
    """0.667 as `66.7 %`."""
    return f"{value * 100:.1f} %"


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
