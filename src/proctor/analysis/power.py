"""How large must a difference be to be found, and how many tasks does it take to find one?

All of it is about a paired comparison of two agents. `alpha` is two-sided. Variances are those of scores in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proctor.common import ConfigError


@dataclass(frozen=True, slots=True)
class Spread:
    """What makes the difference of two agents at a task vary.

    `between`: variance, over tasks, of the true difference. `first`, `second`: variance of one run's score within a
    task, for each agent. Attempts make the last two smaller, nothing but tasks helps against the first.
    """

    between: float
    first: float = 0.0
    second: float = 0.0

    def variance(self, first_attempts: float, second_attempts: float) -> float:
        """Variance of a task's difference of means."""
        return self.between + self.first / first_attempts + self.second / second_attempts


def z_total(alpha: float, power: float) -> float:
    """z(1 - alpha/2) + z(power): how many standard errors a difference must be away from zero."""
    for name, value in (("alpha", alpha), ("power", power)):
        if not 0 < value < 1:
            raise ConfigError(f"{value} is not a probability", field=name, remedy="a number between 0 and 1")
    from scipy.stats import norm

    return float(norm.ppf(1 - alpha / 2) + norm.ppf(power))


def detectable(
    sd: float, tasks: float, *, alpha: float = 0.05, power: float = 0.8, design_effect: float = 1.0
) -> float:
    """The smallest true difference that `tasks` find with `power`, when task differences have standard deviation `sd`.

    Clusters count by their `design_effect`: T tasks are worth T / design_effect independent ones.
    """
    if sd < 0 or tasks <= 0 or design_effect <= 0:
        raise ConfigError("sd >= 0, tasks > 0, design effect > 0 are needed", field="sd, tasks, design_effect")
    return z_total(alpha, power) * sd * math.sqrt(design_effect / tasks)


def tasks_needed(
    effect: float,
    spread: Spread,
    *,
    attempts: tuple[float, float] = (1, 1),
    alpha: float = 0.05,
    power: float = 0.8,
    design_effect: float = 1.0,
) -> float:
    """Tasks (as a real number: round up) that find a true difference of `effect` with `power`."""
    if effect == 0:
        raise ConfigError("no number of tasks finds a difference of zero", field="effect", remedy="a positive number")
    return z_total(alpha, power) ** 2 * spread.variance(*attempts) * design_effect / effect**2


def mcnemar_power(tasks: int, first_only: float, second_only: float, *, alpha: float = 0.05) -> float:
    """Power of the exact McNemar test: at each task only the first agent resolves with probability `first_only`, only
    the second with `second_only`.

    Summed over how many tasks are discordant: the number is binomial, and so is the split of them.
    """
    discordant = first_only + second_only
    if min(first_only, second_only) < 0 or not 0 < discordant <= 1 or tasks < 1:
        raise ConfigError("not discordant rates", field="first_only, second_only", remedy="0 < their sum <= 1")
    import numpy as np
    from scipy.stats import binom

    counts = np.arange(tasks + 1)
    weights = binom.pmf(counts, tasks, discordant)
    counts, weights = counts[weights > 1e-15], weights[weights > 1e-15]
    # The largest k with 2 P[Binomial(m, 1/2) <= k] <= alpha, for every m at once; -1 where there is none.
    critical = binom.ppf(alpha / 2, counts, 0.5).astype(int)
    critical = np.where(binom.cdf(critical, counts, 0.5) <= alpha / 2, critical, critical - 1)
    share = first_only / discordant
    rejected = binom.cdf(critical, counts, share) + binom.sf(counts - critical - 1, counts, share)
    return float(weights @ np.where(critical >= 0, rejected, 0.0))


def mcnemar_tasks(first_only: float, second_only: float, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Tasks for a power, by the normal approximation (the exact test asks for a few more)."""
    difference = first_only - second_only
    return tasks_needed(difference, Spread(first_only + second_only - difference**2), alpha=alpha, power=power)
