"""Two agents at the same tasks: the difference, its error and its interval, and tests of pass-or-fail scores.

Repeats of a task are averaged before they come here: one difference for each task. Where tasks come in clusters (one
repository, one template) the cluster is the unit, because its tasks move together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.analysis.proportions import Interval
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean difference with its standard error and the degrees of freedom of its t distribution.

    `units` is what was counted as independent: tasks, or clusters of tasks. `error` is None with one unit.
    """

    point: float
    error: float | None
    df: int
    units: int
    formula: str

    @property
    def statistic(self) -> float | None:
        """t against no difference; None when there is no error to divide by."""
        return self.point / self.error if self.error else None

    @property
    def p(self) -> float | None:
        """Two-sided p of no difference by the t distribution; None when there is no error."""
        if self.statistic is None:
            return None
        from scipy.stats import t

        return float(2 * t.sf(abs(self.statistic), self.df))

    def interval(self, level: float = 0.95) -> Interval:
        """The t interval; infinitely wide when the error is unknown, since one unit says nothing of the next."""
        if self.error is None:
            return Interval(self.point, -math.inf, math.inf, level, self.formula)
        from scipy.stats import t

        half = float(t.ppf(0.5 + level / 2, self.df)) * self.error
        return Interval(self.point, self.point - half, self.point + half, level, self.formula)


def over_tasks(differences: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """The mean over tasks that are independent of each other: sd / sqrt(T), T - 1 degrees of freedom."""
    import numpy as np

    d = _array(differences)
    error = float(np.std(d, ddof=1)) / math.sqrt(d.size) if d.size > 1 else None
    return Estimate(float(d.mean()), error, d.size - 1, d.size, "paired-t")


def over_clusters(differences: Sequence[float] | NDArray[np.float64], clusters: Sequence[str]) -> Estimate:
    """The mean over tasks, with an error that lets tasks of a cluster move together.

    sqrt(sum over clusters of (sum of deviations)^2) / T, times sqrt(C / (C - 1)), with C - 1 degrees of freedom
    (Miller 2024, arXiv 2411.00640, with the small-sample factor of Liang and Zeger's estimator).
    """
    import numpy as np

    d = _array(differences)
    members = membership(clusters)
    count = int(members.max()) + 1
    sums = np.bincount(members, weights=d - d.mean(), minlength=count)
    error = math.sqrt(float(sums @ sums)) / d.size * math.sqrt(count / (count - 1)) if count > 1 else None
    return Estimate(float(d.mean()), error, count - 1, count, "cluster-t")


def with_pseudo_pairs(estimate: Estimate) -> Estimate:
    """The same estimate with two units added, one wholly for each side: for data without any spread.

    If every task says the same, the sample's own error is zero and its interval a point, which no finite number of
    tasks can justify. Two pseudo-pairs are what Bonett and Price (2012, J. Educ. Behav. Stat. 37) add to the discordant
    cells of paired proportions; an error of that size is kept, the point stays the one that was measured.
    """
    size = estimate.units + 2
    mean = estimate.point * estimate.units / size
    mean_square = (estimate.point**2 * estimate.units + 2) / size
    error = math.sqrt((mean_square - mean**2) / size)
    return Estimate(estimate.point, error, max(1, estimate.units - 1), estimate.units, "t-two-pseudo-pairs")


def discordance_error(b: int, c: int, n: int) -> float:
    """The standard error of (b - c) / n with one task added to each discordant cell (Bonett and Price 2012).

    For planning: few tasks seldom show all that can differ, and with b = c = 0 the sample's own error would be zero.
    """
    size = n + 2
    return math.sqrt(((b + c + 2) / size - ((b - c) / size) ** 2) / size)


def mcnemar(b: int, c: int, *, mid_p: bool = False) -> float:
    """Two-sided p of `b` against `c` discordant tasks: exact, or with half the weight on what was seen (mid-p).

    Exact: min(1, 2 P[Binomial(b + c, 1/2) <= min(b, c)]) (McNemar 1947). Mid-p (Lancaster 1961) is less conservative
    but may exceed its level a little; it never decides a word.
    """
    if b < 0 or c < 0:
        raise ConfigError(f"({b}, {c}) are not counts", field="b, c", remedy="numbers of discordant tasks")
    if b + c == 0:
        return 1.0
    from scipy.stats import binom

    low = min(b, c)
    p = 2 * float(binom.cdf(low, b + c, 0.5))
    if mid_p:
        p -= float(binom.pmf(low, b + c, 0.5))
        return 1.0 if b == c else min(1.0, p)
    return min(1.0, p)


def score_statistic(b: int, c: int, n: int, difference: float) -> float:
    """Tango's score statistic of "the true paired difference is `difference`": near standard normal if it is.

    `b` tasks of `n` only the contender resolved, `c` only the baseline (Tango 1998, Statistics in Medicine 17). Unlike
    Wald's it keeps its meaning when no task is discordant, and at 0 it is McNemar's.
    """
    if difference in (-1.0, 1.0):
        return math.copysign(math.inf, -difference) if b - c != n * difference else 0.0
    linear = -b - c + (2 * n - b + c) * difference
    root = math.sqrt(max(0.0, linear * linear + 8 * n * c * difference * (1 - difference)))
    q = (root - linear) / (4 * n)
    variance = n * (2 * q + difference * (1 - difference))
    deviation = b - c - n * difference
    if variance <= 0:
        return 0.0 if abs(deviation) < 1e-12 else math.copysign(math.inf, deviation)
    return deviation / math.sqrt(variance)


def score_interval(b: int, c: int, n: int, level: float = 0.95) -> Interval:
    """Tango's interval of a paired difference of proportions: all differences that the score test does not reject."""
    if min(b, c) < 0 or b + c > n or n == 0:
        raise ConfigError(f"({b}, {c}) of {n} are not discordant tasks", field="b, c, n", remedy="b + c <= n, n > 0")
    from scipy.optimize import brentq
    from scipy.stats import norm

    z = float(norm.ppf(0.5 + level / 2))
    point = (b - c) / n

    def end(target: float, low: float, high: float) -> float:
        excess = [score_statistic(b, c, n, x) - target for x in (low, high)]
        if excess[0] * excess[1] > 0:  # the test rejects nothing on this side
            return low if target > 0 else high
        return float(brentq(lambda x: score_statistic(b, c, n, x) - target, low, high, xtol=1e-12))

    edge = 1 - 1e-12
    low = -1.0 if point == -1 else end(z, -edge, point)
    high = 1.0 if point == 1 else end(-z, point, edge)
    return Interval(point, low, high, level, "tango-score")


def cluster_bootstrap(
    differences: Sequence[float] | NDArray[np.float64],
    clusters: Sequence[str],
    *,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """The percentile interval of the mean when whole clusters are drawn with replacement.

    Clusters of unequal size keep it: the mean of a resample is over the tasks that were drawn.
    """
    import numpy as np

    d = _array(differences)
    members = membership(clusters)
    count = int(members.max()) + 1
    sums = np.bincount(members, weights=d, minlength=count)
    sizes = np.bincount(members, minlength=count).astype(float)
    random = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, 4_000_000 // count)
    for start in range(0, resamples, step):
        drawn = random.integers(count, size=(min(step, resamples - start), count))
        means[start : start + step] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = (float(end) for end in np.quantile(means, [(1 - level) / 2, (1 + level) / 2]))
    return Interval(float(d.mean()), low, high, level, "cluster-bootstrap-percentile")


def membership(clusters: Sequence[str]) -> NDArray[np.int64]:
    """For each task, the number of its cluster: 0, 1, … in order of appearance."""
    import numpy as np

    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in clusters], dtype=np.int64)


def _array(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    d = np.asarray(values, dtype=np.float64)
    if d.ndim != 1 or d.size == 0 or not np.isfinite(d).all():
        raise ConfigError("differences must be a list of finite numbers, at least one", field="differences")
    return d
