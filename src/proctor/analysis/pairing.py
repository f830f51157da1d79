"""From trials to pairs: two sides at the same tasks, or the reason why they cannot be compared.

A difference between two scores is a difference between two agents only when everything else was the same: the tasks by
digest, their images, the limits, the condition. What differs is refused by name. A task that only one side was given,
or that one side has no score for, is left out of the difference and counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    baseline: pl.DataFrame, other: pl.DataFrame, *, score: str = "score", ignore: frozenset[str] = frozenset()
) -> Pairs:
    """Pair two sides by task. `score` is `score`, or `resolved` for pass or fail. `ignore` names columns of
    MUST_AGREE that are meant to differ (an ablation's condition).

    Raises RefusedError with everything that is not comparable, and when no task has scores on both sides.
    """
    import polars as pl

    check_comparable(baseline, other, ignore)
    one, two = (_by_task(trials, score) for trials in (baseline, other))
    joined = one.join(two, on="task", how="full", suffix="_other", coalesce=True, maintain_order="left")
    scored = pl.col("graded").fill_null(0).gt(0), pl.col("graded_other").fill_null(0).gt(0)
    both = joined.filter(scored[0] & scored[1])
    unpaired = _unpaired(joined)
    if both.is_empty():
        reasons = ", ".join(f"{count} {reason}" for reason, count in unpaired.items())
        raise RefusedError("no task has scores on both sides", field="TASKS", remedy=reasons or "run both at one task")
    worst, best = _bounds(joined)
    clusters = both.select(pl.coalesce("cluster", "cluster_other", "task")).to_series().to_list()
    attempts = [both[name].to_numpy() for name in ("graded", "graded_other")]
    binary = bool(both.select((pl.col("binary") & pl.col("binary_other")).all()).item())
    share = max(_excluded_share(joined, side) for side in ("", "_other"))
    return Pairs(
        tasks=tuple(both["task"]),
        clusters=tuple(clusters),
        baseline=both["mean"].to_numpy(),
        contender=both["mean_other"].to_numpy(),
        baseline_attempts=attempts[0],
        contender_attempts=attempts[1],
        within=(_within(both, ""), _within(both, "_other")),
        single=binary and all(int(a.max()) == 1 for a in attempts),
        unpaired=unpaired,
        worst=worst,
        best=best,
        excluded_share=share,
        complete=tuple(both.select((pl.col("stopped") + pl.col("stopped_other")) == 0).to_series()),
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


def _by_task(trials: pl.DataFrame, score: str) -> pl.DataFrame:
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


def _unpaired(joined: pl.DataFrame) -> dict[str, int]:
    """Why tasks could not be paired, with how many."""
    reasons: Counter[str] = Counter()
    columns = ("planned", "graded", "stopped", "planned_other", "graded_other", "stopped_other", "nowhere")
    for planned, graded, stopped, planned_other, graded_other, stopped_other, nowhere in (
        joined.with_columns(_nowhere().alias("nowhere")).select(columns).iter_rows()
    ):
        if nowhere:
            reasons["cannot be run here"] += 1
        elif planned is None:
            reasons["only the contender was given it"] += 1
        elif planned_other is None:
            reasons["only the baseline was given it"] += 1
        elif graded and graded_other:
            continue
        elif (not graded and stopped == planned) or (not graded_other and stopped_other == planned_other):
            reasons["left out by the stopping rule"] += 1
        elif graded or graded_other:
            reasons[f"the {'contender' if graded else 'baseline'} has no score"] += 1
        else:
            reasons["neither has a score"] += 1
    return dict(reasons)


def _bounds(joined: pl.DataFrame) -> tuple[float, float]:
    """The differences if every trial without a score, at tasks both were given, had gone against the contender or for
    it. Trials that a stopping rule left out, or that cannot be run here, are not missing: nobody tried them."""
    import polars as pl

    tried = joined.filter(pl.col("planned").is_not_null() & pl.col("planned_other").is_not_null()).with_columns(
        (pl.col("planned") - pl.col("untried")).alias("n"),
        (pl.col("planned_other") - pl.col("untried_other")).alias("m"),
    )
    tried = tried.filter((pl.col("n") > 0) & (pl.col("m") > 0))
    low, high = pl.col("total") / pl.col("n"), (pl.col("total") + pl.col("n") - pl.col("graded")) / pl.col("n")
    low_other = pl.col("total_other") / pl.col("m")
    high_other = (pl.col("total_other") + pl.col("m") - pl.col("graded_other")) / pl.col("m")
    worst, best = tried.select((low_other - high).mean().alias("worst"), (high_other - low).mean().alias("best")).row(0)
    return float(worst), float(best)


def _within(both: pl.DataFrame, side: str) -> float | None:
    repeated = int((both[f"graded{side}"] - 1).sum())
    return float(both[f"deviation{side}"].sum()) / repeated if repeated > 0 else None


def _excluded_share(joined: pl.DataFrame, side: str) -> float:
    """Trials of one side without a score, by the plan of the side that was given more at each task. What neither side
    can run here is not asked for."""
    import polars as pl

    planned = pl.max_horizontal("planned", "planned_other")
    asked = joined.filter(~_nowhere())
    share = asked.select(1 - pl.col(f"graded{side}").fill_null(0).sum() / planned.sum()).item()
    return max(0.0, float(share))


def _nowhere() -> pl.Expr:
    """The task cannot be run here by either side."""
    import polars as pl

    return (pl.col("unrunnable") & pl.col("unrunnable_other")).fill_null(False)


def _harmonic(counts: NDArray[np.int64]) -> float:
    return float(len(counts) / (1 / counts).sum())


def _listed(items: list[str | None]) -> str:
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
