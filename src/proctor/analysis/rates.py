"""The interval of a success rate over tasks that are repeated, clustered or weighted: Wilson's, with the number of
tasks replaced by how many independent ones they are worth.

A t interval around a rate leaves [0, 1] and has no width when everything passed; Wilson's form has neither fault
(Korn and Graubard 1998 for the effective number; Dean and Pagano 2015 for its use with Wilson's interval).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from proctor.analysis.means import cluster_count, cluster_sums
from proctor.analysis.proportions import Interval, score_interval

if TYPE_CHECKING:
    from proctor.analysis.means import Codes, Floats


def rate_interval(
    means: Floats, clusters: Codes, weights: Floats | None = None, *, level: float = 0.95, exact: bool = False
) -> Interval:
    """The interval of the (weighted) mean of per-task rates, each in [0, 1].

    Independent tasks of equal weight: Wilson's with n = T. Repeats do not narrow it (the mean of a task's attempts
    varies no more than one attempt does, so the interval is on the safe side; `SuiteMean.population` is sharper).
    Otherwise n is the effective number of tasks, never more than T or Kish's number, and the number of clusters when
    all rates are 0 or all 1. `exact` gives Clopper and Pearson's form instead of Wilson's, for claims.
    """
    import numpy as np

    share = np.full(len(means), 1 / len(means)) if weights is None else weights / weights.sum()
    taking_part = means[share > 0]
    mean = float(means.sum() / len(means) if weights is None else (share * means).sum())
    # Exactly 0 or 1 when all are: rounding must not decide which formula is used.
    mean = min(max(mean, float(taking_part.min())), float(taking_part.max()))
    kish = 1 / float(np.square(share).sum())
    groups = cluster_count(clusters[share > 0])
    equal = weights is None or float(weights.min()) == float(weights.max())
    if equal and groups == len(means):
        return _shaped(mean, float(len(means)), level, exact, "")
    worth = _effective(mean, share * (means - mean), clusters, groups, kish, level)
    return _shaped(mean, worth, level, exact, "/effective")


def _shaped(mean: float, n: float, level: float, exact: bool, suffix: str) -> Interval:
    if not exact:
        return score_interval(mean, n, level=level, formula=f"wilson{suffix}")
    from scipy.stats import beta

    tail, k = (1 - level) / 2, mean * n
    low = 0.0 if mean == 0 else min(mean, float(beta.ppf(tail, k, n - k + 1)))
    high = 1.0 if mean == 1 else max(mean, float(beta.ppf(1 - tail, k + 1, n - k)))
    return Interval(mean, low, high, level, f"clopper-pearson{suffix}")


def _effective(mean: float, terms: Floats, clusters: Codes, groups: int, kish: float, level: float) -> float:
    import numpy as np
    from scipy.stats import norm, t

    if mean in (0.0, 1.0) or groups < 2:
        return min(kish, float(groups))
    variance = float(np.square(cluster_sums(terms, clusters)).sum()) * groups / (groups - 1)
    tail = (1 + level) / 2
    # The variance is itself estimated, from few clusters: t instead of z, put into the number of tasks.
    known = (float(norm.ppf(tail)) / float(t.ppf(tail, groups - 1))) ** 2
    if variance <= 0:
        return min(kish, float(groups))
    return min(kish, known * mean * (1 - mean) / variance)


def difference(one: Interval, other: Interval, *, formula: str = "newcombe") -> Interval:
    """one - other, for independent rates, from their own intervals (Newcombe 1998, method 10; Zou and Donner 2008).

    Clustered or weighted rates keep what their intervals know.
    """
    gap = one.point - other.point
    low = gap - math.hypot(one.point - one.low, other.high - other.point)
    high = gap + math.hypot(one.high - one.point, other.point - other.low)
    return Interval(gap, low, high, one.level, formula)
