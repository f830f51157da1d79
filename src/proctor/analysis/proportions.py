"""Intervals for one proportion: k successes in n independent trials, one score for each task.

With repeats of a task use `proctor.analysis.means`: repeats are not independent of each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from proctor.common import ConfigError

Method = Literal["wilson", "clopper-pearson", "beta", "wald"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A point with its interval. `formula` names how it was computed, so that it can be computed again."""

    point: float
    low: float
    high: float
    level: float
    formula: str


def proportion(k: int, n: int, *, method: Method = "wilson", level: float = 0.95) -> Interval:
    """The interval of k/n.

    `wilson` is for display (Wilson 1927), `clopper-pearson` for guarantees (never covers less than `level`; Clopper and
    Pearson 1934), `beta` is the equal-tailed posterior under a uniform prior, `wald` is here to be compared with and
    should not be shown: at n = 50, p = 0.98 its 95 % interval covers 63.5 %.
    """
    if not 0 <= k <= n or n == 0:
        raise ConfigError(f"{k} of {n} is not a proportion", field="k, n", remedy="0 <= k <= n and n > 0")
    if not 0 < level < 1:
        raise ConfigError(f"{level} is not a level", field="level", remedy="a number between 0 and 1")
    from scipy.stats import beta, norm

    tail = (1 - level) / 2
    rate = k / n
    if method == "wilson":
        return score_interval(rate, n, level=level, formula=method)
    if method == "clopper-pearson":
        low = 0.0 if k == 0 else float(beta.ppf(tail, k, n - k + 1))
        high = 1.0 if k == n else float(beta.ppf(1 - tail, k + 1, n - k))
    elif method == "beta":
        low, high = (float(beta.ppf(q, 1 + k, 1 + n - k)) for q in (tail, 1 - tail))
    else:
        half = float(norm.ppf(1 - tail)) * math.sqrt(rate * (1 - rate) / n)
        low, high = rate - half, rate + half
    return Interval(rate, low, high, level, method)


def score_interval(rate: float, n: float, *, level: float = 0.95, formula: str = "wilson") -> Interval:
    """Wilson's interval of a rate over n trials, neither of which has to be whole (a mean over tasks with repeats, an
    effective number of tasks)."""
    from scipy.stats import norm

    z = float(norm.ppf((1 + level) / 2))
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Next to 0 and 1 the two terms cancel to rounding errors, which may lie on the wrong side of the rate.
    low = 0.0 if rate == 0 else max(0.0, min(rate, centre - half))
    high = 1.0 if rate == 1 else min(1.0, max(rate, centre + half))
    return Interval(rate, low, high, level, formula)
