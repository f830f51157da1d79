"""Tests that may be looked at after every trial: evidence that stays valid whenever one stops.

A p-value is for a size that was fixed beforehand; who looks after every trial and stops at the first p < 0.05 will
nearly always find something. An e-value is a bet against "no difference": its expectation is at most 1 if there is
none, so it ever reaches 1 / alpha with probability at most alpha (Ville's inequality), however often one looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

_NODES = 200
"""Gauss-Legendre nodes of the mixture's integral: exact for polynomials up to degree 399."""


def e_value(b: int, c: int) -> float:
    """Evidence of `b` against `c` discordant tasks: 2^(b+c) Beta(b + 1, c + 1).

    The stake is spread evenly over every probability that the next discordant task goes to the first agent.
    """
    if b < 0 or c < 0:
        raise ConfigError(f"({b}, {c}) are not counts", field="b, c")
    log = (b + c) * math.log(2) + math.lgamma(b + 1) + math.lgamma(c + 1) - math.lgamma(b + c + 2)
    return math.exp(min(log, 700.0))


@cache
def _mixture() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The slopes l = logit(p) / 2 at the nodes of p, and the logarithms of their weights."""
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    p = (nodes + 1) / 2
    return (np.log(p) - np.log1p(-p)) / 2, np.log(weights / 2)


class SymmetricEvidence:
    """The same for differences of any size: repeats, graded scores, sums over clusters.

    If neither is better, a unit's difference D is as likely as -D, so exp(l D) / cosh(l D) is a fair bet for every l.
    With l = logit(p) / 2 and p uniform on (0, 1) this is `e_value` when differences are -1, 0 and 1. `scale` brings
    units to about that size and must not depend on the results: 1 for tasks, the size of a cluster for its sum.
    """

    def __init__(self) -> None:
        self._slopes, self._log_weights = _mixture()
        self._log_wealth = 0 * self._slopes
        self.units = 0

    def add(self, difference: float, scale: float = 1.0) -> None:
        """Account for one more unit."""
        import numpy as np

        if not (math.isfinite(difference) and scale > 0):
            raise ConfigError(f"{difference} is not a difference", field="difference")
        x = self._slopes * (difference / scale)
        # log cosh, written so that it cannot overflow
        self._log_wealth += x - (np.abs(x) + np.log1p(np.exp(-2 * np.abs(x))) - math.log(2))
        self.units += 1

    @property
    def value(self) -> float:
        """The e-value: how many times the stake has been won."""
        import numpy as np

        logs = self._log_wealth + self._log_weights
        top = float(logs.max())
        return math.exp(min(top + math.log(float(np.exp(logs - top).sum())), 700.0))


def evidence(units: Iterable[tuple[float, float]]) -> float:
    """The e-value of (difference, scale) units."""
    total = SymmetricEvidence()
    for difference, scale in units:
        total.add(difference, scale)
    return total.value


Decision = Literal["above", "below", "undecided"]


@dataclass(frozen=True, slots=True)
class SPRT:
    """Wald's sequential probability ratio test of a success rate: `p1` against `p0` (Wald 1945).

    It is for independent trials of one agent, one at each task.
    """

    p0: float
    p1: float
    alpha: float = 0.05
    beta: float = 0.10

    def __post_init__(self) -> None:
        if not 0 < self.p0 < self.p1 < 1:
            raise ConfigError(f"p0={self.p0:g}, p1={self.p1:g}", field="sprt", remedy="0 < p0 < p1 < 1 is needed")
        if not (0 < self.alpha < 1 and 0 < self.beta < 1 and self.alpha + self.beta < 1):
            raise ConfigError(f"alpha={self.alpha:g}, beta={self.beta:g}", field="sprt",
                              remedy="both between 0 and 1, and their sum below 1")  # fmt: skip

    @property
    def upper(self) -> float:
        """The log-likelihood ratio at which p1 is accepted."""
        return math.log((1 - self.beta) / self.alpha)

    @property
    def lower(self) -> float:
        """The log-likelihood ratio at which p0 is accepted."""
        return math.log(self.beta / (1 - self.alpha))

    @property
    def steps(self) -> tuple[float, float]:
        """What a success and a failure add to the log-likelihood ratio."""
        return math.log(self.p1 / self.p0), math.log((1 - self.p1) / (1 - self.p0))

    def log_ratio(self, outcomes: Sequence[bool]) -> float:
        """The log-likelihood ratio of p1 to p0."""
        success, failure = self.steps
        passed = sum(outcomes)
        return passed * success + (len(outcomes) - passed) * failure

    def decide(self, outcomes: Sequence[bool]) -> tuple[Decision, int]:
        """The decision, and after how many outcomes it fell (all of them while undecided)."""
        total = 0.0
        success, failure = self.steps
        for count, passed in enumerate(outcomes, 1):
            total += success if passed else failure
            if total >= self.upper:
                return "above", count
            if total <= self.lower:
                return "below", count
        return "undecided", len(outcomes)

    def expected_trials(self, rate: float) -> float:
        """Wald's approximation of the expected number of trials when the true rate is `p0` or `p1`."""
        success, failure = self.steps
        drift = rate * success + (1 - rate) * failure
        accept = {self.p1: 1 - self.beta, self.p0: self.alpha}.get(rate)
        if accept is None:
            raise ConfigError(f"{rate:g} is neither p0 nor p1", field="rate")
        return (accept * self.upper + (1 - accept) * self.lower) / drift
