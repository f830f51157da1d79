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
        z = float(norm.ppf(1 - tail))
        centre = (k + z * z / 2) / (n + z * z)
        half = z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
        low, high = max(0.0, centre - half), min(1.0, centre + half)
    elif method == "clopper-pearson":
        low = 0.0 if k == 0 else float(beta.ppf(tail, k, n - k + 1))
        high = 1.0 if k == n else float(beta.ppf(1 - tail, k + 1, n - k))
    elif method == "beta":
        low, high = (float(beta.ppf(q, 1 + k, 1 + n - k)) for q in (tail, 1 - tail))
    else:
        half = float(norm.ppf(1 - tail)) * math.sqrt(rate * (1 - rate) / n)
        low, high = rate - half, rate + half
    return Interval(rate, low, high, level, method)
