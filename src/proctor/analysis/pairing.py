"""From trials to pairs: two sides at the same tasks, or the reason why they cannot be compared.

A difference between two scores is a difference between two agents only when everything else was the same: the tasks by
digest, their images, the limits, the condition. What differs is refused by name. A task that only one side was given,
or that one side has no score for, is left out of the difference and counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.analysis.comparison import Contender, Discordance
from proctor.analysis.frame import GRADED
from proctor.analysis.power import Spread
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import polars as pl
    from numpy.typing import NDArray

MUST_AGREE: Mapping[str, str] = {
    "task_digest": "another content of the task",
    "image_digest": "another image",
    "limits": "other limits",
    "judge_digest": "another judge",
    "condition": "another condition",
}
"""Columns that have to be equal on both sides of every task, where the frame has them and knows them."""
STOPPED = "stopped"
"""Outcome of planned trials that a stopping rule left out."""
UNRUNNABLE = "unrunnable"
"""Outcome of tasks that the dataset holds and the machine of the run could not run."""
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two sides at the tasks that both have scores for, repeats averaged. All arrays are in the order of `tasks`."""

    tasks: tuple[str, ...]
    clusters: tuple[str, ...]
    baseline: NDArray[np.float64]
    contender: NDArray[np.float64]
    baseline_attempts: NDArray[np.int64]
    contender_attempts: NDArray[np.int64]
    within: tuple[float | None, float | None]
    """Variance of one run's score within a task, pooled over tasks; None without a task that has two scores."""
    single: bool
    """Each side has exactly one score, 0 or 1, at each task."""
    unpaired: Mapping[str, int]
    worst: float
    best: float
    excluded_share: float
    """The larger of the two sides' shares of planned trials (at any task of either side) that have no score."""
    complete: tuple[bool, ...]
    """For each task: no trial of it was left out by a stopping rule."""

    @property
    def differences(self) -> NDArray[np.float64]:
        """Contender minus baseline, for each task."""
        return self.contender - self.baseline

    @property
    def clustered(self) -> bool:
        """True when some cluster has more than one of the tasks."""
        return len(set(self.clusters)) < len(self.clusters)

    @property
    def discordance(self) -> Discordance | None:
        """Who resolved what, where scores are single and pass-or-fail."""
        if not self.single:
            return None
        counts = Counter(zip(self.contender > 0.5, self.baseline > 0.5, strict=True))
        return Discordance(counts[True, True], counts[True, False], counts[False, True], counts[False, False])

    @property
    def attempts(self) -> tuple[float, float]:
        """Harmonic mean of the attempts at a task, for the contender and the baseline: what divides run noise."""
        return _harmonic(self.contender_attempts), _harmonic(self.baseline_attempts)

    def spread(self) -> Spread | None:
        """Between-task and within-task variance of the difference; None when runs were not repeated."""
        import numpy as np

        baseline, contender = self.within
        if baseline is None or contender is None or len(self.tasks) < 2:
            return None
        contender_attempts, baseline_attempts = self.attempts
        noise = contender / contender_attempts + baseline / baseline_attempts
        return Spread(max(0.0, float(np.var(self.differences, ddof=1)) - noise), contender, baseline)


def contender(label: str, trials: pl.DataFrame) -> Contender:
    """The facts of one side. Its rows must be of one agent: one harness, one model, one condition."""
    import polars as pl

    if trials.is_empty():
        raise ConfigError("no trials are planned", field=label, remedy="name an agent of the run")
    for name in ("harness", "harness_version", "model"):
        found = trials[name].unique().to_list()
        if len(found) > 1:
            raise RefusedError(f"more than one {name} under this name: {_listed(found)}", field=label,
                               remedy="compare them as two agents")  # fmt: skip
    first = trials.row(0, named=True)
    graded = trials.filter(pl.col("outcome").is_in(GRADED))
    excluded = trials.filter(~pl.col("outcome").is_in(GRADED))["outcome"].to_list()
    means = graded.group_by("task").agg(pl.col("score").mean())["score"]
    returned = trials["returned_models"].explode().drop_nulls().unique().sort().to_list()
    return Contender(
        label=label,
        agent=first["agent"],
        run_ids=tuple(trials["run_id"].unique(maintain_order=True)),
        harness=first["harness"],
        harness_version=first["harness_version"],
        model=first["model"],
        returned_models=tuple(returned),
        tasks=trials["task"].n_unique(),
        planned=trials.height,
        graded=graded.height,
        excluded=dict(sorted(Counter(excluded).items())),
        mean=float(means.mean()) if means.len() else None,  # type: ignore[arg-type]
        conditions=tuple(trials["condition"].drop_nulls().unique().sort()),
    )


def pair(
    baseline: pl.DataFrame,
    other: pl.DataFrame,
    *,
    score: str = "score",
    ignore: frozenset[str] = frozenset(),
    tables: tuple[pl.DataFrame, pl.DataFrame] | None = None,
) -> Pairs:
    """Pair two sides by task. `score` is `score`, or `resolved` for pass or fail. `ignore` names columns of
    MUST_AGREE that are meant to differ (an ablation's condition). `tables` are both sides by task, if they are known.

    Raises RefusedError with everything that is not comparable, and when no task has scores on both sides.
    """

    import numpy as np

    check_comparable(baseline, other, ignore)
    one, two = tables or (by_task(baseline, score), by_task(other, score))
    joined = _Joined.of(one.join(two, on="task", how="full", suffix="_other", coalesce=True, maintain_order="left"))
    both = (joined.one["graded"] > 0) & (joined.two["graded"] > 0)
    unpaired = joined.unpaired()
    if not both.any():
        reasons = ", ".join(f"{count} {reason}" for reason, count in unpaired.items())
        raise RefusedError("no task has scores on both sides", field="TASKS", remedy=reasons or "run both at one task")
    worst, best = joined.bounds()
    attempts = [side["graded"][both].astype(np.int64) for side in (joined.one, joined.two)]
    binary = bool((joined.one["binary"] & joined.two["binary"])[both].all())
    return Pairs(
        tasks=tuple(task for task, paired in zip(joined.tasks, both, strict=True) if paired),
        clusters=tuple(cluster for cluster, paired in zip(joined.clusters, both, strict=True) if paired),
        baseline=joined.one["total"][both] / attempts[0],
        contender=joined.two["total"][both] / attempts[1],
        baseline_attempts=attempts[0],
        contender_attempts=attempts[1],
        within=(_within(joined.one, both), _within(joined.two, both)),
        single=binary and all(int(a.max()) == 1 for a in attempts),
        unpaired=unpaired,
        worst=worst,
        best=best,
        excluded_share=max(joined.excluded_share(side) for side in (joined.one, joined.two)),
        complete=tuple(((joined.one["stopped"] + joined.two["stopped"])[both] == 0).tolist()),
    )


def check_comparable(baseline: pl.DataFrame, other: pl.DataFrame, ignore: frozenset[str] = frozenset()) -> None:
    """Raise RefusedError naming what differs besides the agent, at tasks that both sides have."""
    import polars as pl

    problems = []
    names = [name for name in MUST_AGREE if name in baseline.columns and name in other.columns and name not in ignore]
    sides = pl.concat([side.select("task", *names) for side in (baseline, other)])
    shared = set(baseline["task"]) & set(other["task"])
    found = (
        sides.filter(pl.col("task").is_in(list(shared)))
        .group_by("task", maintain_order=True)
        .agg(pl.col(name).drop_nulls().n_unique() for name in names)
    )
    for name in names:
        tasks = found.filter(pl.col(name) > 1)["task"].to_list()
        if tasks:
            problems.append(f"{MUST_AGREE[name]} at {_listed(tasks)}")
    if problems:
        raise RefusedError(f"not comparable: {'; '.join(problems)}", field="A B",
                           remedy="a difference would not be the agents'; run both under the same terms")  # fmt: skip


def by_task(trials: pl.DataFrame, score: str) -> pl.DataFrame:
    """For each task: how many trials were planned, scored, stopped; the mean, and what else pairing needs."""
    import polars as pl

    if score == "resolved":
        value = pl.when(pl.col("outcome").is_in(GRADED)).then((pl.col("outcome") == "resolved").cast(pl.Float64))
    else:
        value = pl.when(pl.col("outcome").is_in(GRADED)).then(pl.col("score"))
    return (
        trials.with_columns(value.alias("value"))
        .group_by("task", maintain_order=True)
        .agg(
            pl.col("cluster").drop_nulls().first(),
            pl.len().alias("planned"),
            pl.col("value").count().alias("graded"),
            pl.col("value").sum().alias("total"),
            pl.col("value").mean().alias("mean"),
            ((pl.col("value") - pl.col("value").mean()) ** 2).sum().alias("deviation"),
            pl.col("value").is_in([0.0, 1.0]).all().alias("binary"),
            (pl.col("outcome") == STOPPED).sum().cast(pl.Int64).alias("stopped"),
            pl.col("outcome").is_in([STOPPED, UNRUNNABLE]).sum().cast(pl.Int64).alias("untried"),
            (pl.col("outcome") == UNRUNNABLE).all().alias("unrunnable"),
        )
    )


_NUMBERS = ("planned", "graded", "total", "deviation", "stopped", "untried")
_FLAGS = ("binary", "unrunnable")


@dataclass(frozen=True, slots=True)
class _Joined:
    """Both sides at every task of either: arrays in the order of `tasks`. `planned` is NaN where a side was not given
    the task; other numbers are 0 there, and flags are False."""

    tasks: list[str]
    clusters: list[str]
    one: Mapping[str, NDArray[Any]]
    two: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, joined: pl.DataFrame) -> _Joined:
        import numpy as np

        def side(suffix: str) -> dict[str, NDArray[Any]]:
            numbers = {name: joined[f"{name}{suffix}"].cast(float).to_numpy() for name in _NUMBERS}
            found: dict[str, NDArray[Any]] = {
                name: values if name == "planned" else np.nan_to_num(values) for name, values in numbers.items()
            }
            return found | {name: joined[f"{name}{suffix}"].fill_null(False).to_numpy() for name in _FLAGS}

        columns = zip(joined["cluster"], joined["cluster_other"], joined["task"], strict=True)
        clusters = [next(name for name in names if name is not None) for names in columns]
        return cls(joined["task"].to_list(), clusters, side(""), side("_other"))

    @property
    def nowhere(self) -> NDArray[np.bool_]:
        """The task cannot be run here by either side."""
        found: NDArray[np.bool_] = self.one["unrunnable"] & self.two["unrunnable"]
        return found

    def unpaired(self) -> dict[str, int]:
        """Why tasks could not be paired, with how many."""
        import numpy as np

        reasons: Counter[str] = Counter()
        paired = (self.one["graded"] > 0) & (self.two["graded"] > 0) & ~self.nowhere
        for index in np.flatnonzero(~paired):
            reasons[self._reason(int(index))] += 1
        return dict(reasons)

    def _reason(self, index: int) -> str:
        planned, graded, stopped = (self.one[name][index] for name in ("planned", "graded", "stopped"))
        planned_other, graded_other, stopped_other = (
            self.two[name][index] for name in ("planned", "graded", "stopped")
        )
        if self.nowhere[index]:
            return "cannot be run here"
        if planned != planned:
            return "only the contender was given it"
        if planned_other != planned_other:
            return "only the baseline was given it"
        if (not graded and stopped == planned) or (not graded_other and stopped_other == planned_other):
            return "left out by the stopping rule"
        if graded or graded_other:
            return f"the {'contender' if graded else 'baseline'} has no score"
        return "neither has a score"

    def bounds(self) -> tuple[float, float]:
        """The differences if every trial without a score, at tasks both were given, had gone against the contender or
        for it. Trials that a stopping rule left out, or that cannot be run here, are not missing: nobody tried them."""
        import numpy as np

        tried = [side["planned"] - side["untried"] for side in (self.one, self.two)]
        asked = (tried[0] > 0) & (tried[1] > 0)  # NaN, where a side was not given the task, is not more than 0
        ends = []
        for side, n in zip((self.one, self.two), tried, strict=True):
            low, count = side["total"][asked], n[asked]
            ends.append((low / count, (low + count - side["graded"][asked]) / count))
        (low, high), (low_other, high_other) = ends
        return float(np.mean(low_other - high)), float(np.mean(high_other - low))

    def excluded_share(self, side: Mapping[str, NDArray[Any]]) -> float:
        """Trials of one side without a score, by the plan of the side that was given more at each task. What neither
        side can run here is not asked for."""
        import numpy as np

        planned = np.fmax(self.one["planned"], self.two["planned"])
        asked = ~self.nowhere
        return max(0.0, 1 - float(side["graded"][asked].sum()) / float(planned[asked].sum()))


def _within(side: Mapping[str, NDArray[Any]], both: NDArray[np.bool_]) -> float | None:
    repeated = float((side["graded"][both] - 1).sum())
    return float(side["deviation"][both].sum()) / repeated if repeated > 0 else None


def _harmonic(counts: NDArray[np.int64]) -> float:
    return float(len(counts) / (1 / counts).sum())


def _listed(items: list[str | None]) -> str:
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
