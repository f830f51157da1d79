"""The mean of a suite when tasks are repeated and come in clusters (Miller 2024, arXiv 2411.00640).

Repeats are averaged first. Two errors answer two questions and are both given, by name: how far the mean would move
over other tasks of the same population, and how far if the very same tasks were run again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.analysis.proportions import Interval
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Codes = NDArray[np.int64]

FEW_CLUSTERS = 10
"""With fewer clusters than this their variance is hardly known; notes say so."""


@dataclass(frozen=True, slots=True)
class SuiteMean:
    """The mean over tasks of each task's mean score, with its errors.

    `population`: over other tasks like these, tasks independent (t with T-1 df); it already contains the noise of
    running. `clustered`: the same with tasks of one cluster moving together (t with C-1 df). `rerun`: the same tasks
    run again, nothing else changed. An interval is None where there is nothing to compute it from (one task, one
    cluster, no task with two attempts); a t interval is not clipped to [0, 1].
    """

    mean: float
    tasks: int
    trials: int
    clusters: int
    population_error: float | None
    population: Interval | None
    cluster_error: float | None
    cluster_df: int
    clustered: Interval | None
    rerun_error: float | None
    rerun: Interval | None
    deff: float | None
    """Design effect: how much larger the variance is than if tasks were independent; T / deff tasks' worth of news."""
    icc: float | None
    """ICC(1,1): the share of the variance of a single trial's score that lies between tasks. May be negative."""
    icc_mean: float | None
    """ICC(1,K): the same for the mean of a task's attempts (K the usual number of them)."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tasks:
    """Per-task sums, as arrays of one length: graded attempts, sum and sum of squares of their scores, cluster.

    `clusters` are small whole numbers from 0; equal ones are one cluster, and not all have to occur.
    """

    attempts: Floats
    total: Floats
    squares: Floats
    clusters: Codes

    @property
    def means(self) -> Floats:
        """The mean score of each task."""
        return self.total / self.attempts

    @classmethod
    def of(cls, scores: Sequence[Sequence[float]], clusters: Sequence[Hashable] | None = None) -> Tasks:
        """From the scores of each task's attempts; without clusters every task is its own."""
        import numpy as np

        if not scores or not all(len(one) for one in scores):
            raise ConfigError("a mean needs a score for every task", field="scores")
        if clusters is not None and len(clusters) != len(scores):
            raise ConfigError(f"{len(clusters)} clusters for {len(scores)} tasks", field="clusters")
        names: dict[Hashable, int] = {}
        codes = [names.setdefault(name, len(names)) for name in (clusters or range(len(scores)))]
        return cls(
            attempts=np.array([len(one) for one in scores], dtype=np.float64),
            total=np.array([math.fsum(one) for one in scores]),
            squares=np.array([math.fsum(value * value for value in one) for one in scores]),
            clusters=np.array(codes, dtype=np.int64),
        )


def suite_mean(tasks: Tasks, *, level: float = 0.95) -> SuiteMean:
    """The mean of a suite with every error that the data carry. Formulas: `provenance.FORMULAS`."""
    import numpy as np

    means = tasks.means
    count, trials = len(means), int(tasks.attempts.sum())
    mean = float(means.mean())
    naive = float(means.var())
    sums = cluster_sums(means - mean, tasks.clusters)
    clusters = len(sums)
    plain_error = math.sqrt(float(np.square(sums).sum())) / count
    notes = []
    population_error = float(means.std(ddof=1)) / math.sqrt(count) if count > 1 else None
    cluster_error = plain_error * math.sqrt(clusters / (clusters - 1)) if clusters > 1 else None
    if clusters < FEW_CLUSTERS and clusters < count:
        notes.append(f"few clusters ({clusters}): how much they vary is hardly known, and the t interval is wide")
    rerun_error, rerun_df, icc, icc_mean = _within(tasks, mean)
    if rerun_error == 0:
        notes.append("no task gave two different results: noise of running was not seen, which does not make it 0")
    return SuiteMean(
        mean=mean,
        tasks=count,
        trials=trials,
        clusters=clusters,
        population_error=population_error,
        population=t_interval(mean, population_error, count - 1, level, "t/population"),
        cluster_error=cluster_error,
        cluster_df=clusters - 1,
        clustered=t_interval(mean, cluster_error, clusters - 1, level, "t/cluster"),
        rerun_error=rerun_error,
        rerun=t_interval(mean, rerun_error, rerun_df, level, "t/rerun"),
        deff=plain_error**2 / (naive / count) if naive > 0 and clusters > 1 else None,
        icc=icc,
        icc_mean=icc_mean,
        notes=tuple(notes),
    )


def _within(tasks: Tasks, mean: float) -> tuple[float | None, int, float | None, float | None]:
    """Rerun error, its degrees of freedom, ICC(1,1) and ICC(1,K), from the one-way analysis of variance of attempts
    in tasks. With unequal numbers of attempts K is the n0 of that analysis."""
    import numpy as np

    attempts, count = tasks.attempts, len(tasks.attempts)
    trials = float(attempts.sum())
    df = int(trials) - count
    if df < 1:
        return None, 0, None, None
    within = max(0.0, float((tasks.squares - tasks.total**2 / attempts).sum())) / df
    rerun_error = math.sqrt(within * float((1 / attempts).sum())) / count
    if count < 2:
        return rerun_error, df, None, None
    grand = float(tasks.total.sum()) / trials
    between = float((attempts * np.square(tasks.means - grand)).sum()) / (count - 1)
    usual = (trials - float(np.square(attempts).sum()) / trials) / (count - 1)
    spread = between + (usual - 1) * within
    icc = (between - within) / spread if spread > 0 else None
    icc_mean = (between - within) / between if between > 0 else None
    return rerun_error, df, icc, icc_mean


def mean_interval(values: Floats, clusters: Codes, *, level: float = 0.95) -> Interval:
    """The cluster-robust t interval of a mean over tasks; at least two clusters."""
    import numpy as np

    mean = float(values.mean())
    sums = cluster_sums(values - mean, clusters)
    groups = len(sums)
    error = math.sqrt(float(np.square(sums).sum()) * groups / (groups - 1)) / len(values)
    found = t_interval(mean, error, groups - 1, level, "t/cluster")
    assert found is not None
    return found


def cluster_sums(values: Floats, clusters: Codes) -> Floats:
    """The sum of the values of each cluster that occurs, in the order of the codes."""
    import numpy as np

    sums = np.bincount(clusters, weights=values).astype(np.float64)
    return sums[np.bincount(clusters) > 0]


def cluster_count(clusters: Codes) -> int:
    """How many clusters occur."""
    import numpy as np

    return int(np.count_nonzero(np.bincount(clusters)))


def t_interval(mean: float, error: float | None, df: int, level: float, formula: str) -> Interval | None:
    """mean ± t(df) x error; None without an error or degrees of freedom."""
    if error is None or df < 1:
        return None
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, df)) * error
    return Interval(mean, mean - half, mean + half, level, formula)
