"""pass@k (at least one of k attempts succeeds) and pass^k (all k do): unbiased, never beyond the attempts made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.analysis.means import mean_interval
from proctor.analysis.proportions import Interval
from proctor.analysis.rates import rate_interval
from proctor.analysis.resample import MANY_CLUSTERS, Resampler, by_cluster, percentiles
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proctor.analysis.means import Codes, Floats

ENOUGH_CLUSTERS = 30
"""With fewer clusters the percentile bootstrap covers too little, and Wilson's interval is used instead."""
LEFT_OUT = 0.05
"""The curve ends where more than this share of the tasks have too few graded attempts."""
_DENSE = 16


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Both measures at one k, averaged over the `tasks` that have at least k graded attempts.

    `left_out` counts the tasks that have fewer.
    """

    k: int
    tasks: int
    left_out: int
    pass_at: Interval
    pass_hat: Interval


@dataclass(frozen=True, slots=True)
class Curve:
    """Points for k = 1, 2, … as far as the attempts carry (beyond 16 only every so often); `ends` says why it does not
    go on."""

    points: tuple[CurvePoint, ...]
    ends: str


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k attempts succeeds, from c successes in n: 1 - C(n-c,k)/C(n,k) (Chen et
    al. 2021, arXiv 2107.03374). Raises ConfigError for k > n: there is no unbiased estimate."""
    _check(n, c, k)
    return 1 - _all_of(n, n - c, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """The probability that all of k attempts succeed: C(c,k)/C(n,k) (Yao et al. 2024, arXiv 2406.12045).

    Raises ConfigError for k > n.
    """
    _check(n, c, k)
    return _all_of(n, c, k)


def _check(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ConfigError(f"{c} successes in {n} attempts", field="n, c", remedy="0 <= c <= n")
    if not 1 <= k <= n:
        remedy = "run more attempts; an extrapolation would be a guess" if k > n else "k is at least 1"
        raise ConfigError(f"k = {k} of {n} attempts", field="k", remedy=remedy)


def _all_of(n: int, c: int, k: int) -> float:
    from math import comb

    return comb(c, k) / comb(n, k)


def pass_curve(
    attempts: Floats, resolved: Floats, clusters: Codes, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Curve:
    """Both curves over the tasks of one agent, from each task's graded attempts and how many of them succeeded.

    Intervals: cluster bootstrap, percentiles; Wilson's (`rates.rate_interval`) with fewer than 30 clusters or when all
    tasks have the same value; cluster-robust t with more than 5,000 clusters.
    """
    import numpy as np

    if not len(attempts):
        return Curve((), "nothing was graded")
    last = furthest(attempts)
    present = np.bincount(clusters) > 0
    codes, count = (np.cumsum(present) - 1)[clusters], int(present.sum())
    values, held = [], []
    for k in _steps(last):
        has = attempts >= k
        values += [np.where(has, at, 0.0) for at in _at(attempts, resolved, k)]
        held.append(has)
    points = []
    replicates = None
    if ENOUGH_CLUSTERS <= count <= MANY_CLUSTERS:
        weights = np.stack([has for has in held for _ in range(2)], axis=1).astype(np.float64)
        sums = by_cluster(np.stack(values, axis=1), codes, count), by_cluster(weights, codes, count)
        replicates = Resampler(count, resamples, seed).ratios(*sums)
    for number, (k, has) in enumerate(zip(_steps(last), held, strict=True)):
        pair = []
        for column in (2 * number, 2 * number + 1):
            at = values[column][has]
            if count < ENOUGH_CLUSTERS or at.min() == at.max():
                pair.append(rate_interval(at, codes[has], level=level))
            elif replicates is None:
                pair.append(mean_interval(at, codes[has], level=level))
            else:
                low, high = percentiles(replicates[:, column], level)
                pair.append(Interval(float(at.mean()), low, high, level, "bootstrap/cluster"))
        points.append(CurvePoint(k, int(has.sum()), int((~has).sum()), *pair))
    return Curve(tuple(points), _why(attempts, last))


def furthest(attempts: Floats) -> int:
    """The largest k that all tasks but a few (`LEFT_OUT`) have attempts for."""
    import numpy as np

    ordered = np.sort(attempts)
    return int(ordered[int(LEFT_OUT * len(ordered))])


def _why(attempts: Floats, last: int) -> str:
    if last == attempts.max():
        return f"no task has more than {last} graded attempts" if last > 1 else "one attempt for each task"
    fewer = int((attempts < last + 1).sum())
    return f"{fewer} of {len(attempts)} tasks have no more than {last} graded attempts"


def _steps(last: int) -> Iterator[int]:
    """1 … 16, then a quarter further each time, and the last."""
    k = 1
    while k < last:
        yield k
        k += 1 if k < _DENSE else k // 4
    yield last


def _at(attempts: Floats, resolved: Floats, k: int) -> tuple[Floats, Floats]:
    """Both measures for every task; only those with at least k attempts mean anything."""
    import numpy as np

    none, every = np.ones(len(attempts)), np.ones(len(attempts))
    for taken in range(k):
        left = np.maximum(attempts - taken, 1.0)
        none *= np.maximum(attempts - resolved - taken, 0.0) / left
        every *= np.maximum(resolved - taken, 0.0) / left
    return 1 - none, every
