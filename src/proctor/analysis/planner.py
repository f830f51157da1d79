"""Before a run: how many tasks, attempts, audits and how much money does a question cost?

What is not known yet is assumed, and the assumption is named. A small first run is the best source of it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from proctor.analysis.permutation import units_needed
from proctor.analysis.power import Spread, detectable, tasks_needed
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proctor.analysis.pairing import Pairs

TYPICAL = Spread(between=1 / 9, first=1 / 6, second=1 / 6)
"""Miller's example (arXiv 2411.00640): pass-or-fail tasks of every difficulty, agents that differ from task to task."""
_LEAST = 1e-6
"""Smaller differences and shares are refused: nothing of that size is ever found, and arithmetic ends there."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a plan rests on. `source` says where it is from; an unknown cost stays unknown."""

    spread: Spread = TYPICAL
    design_effect: float = 1.0
    cost_per_trial: float | None = None
    source: str = "typical pass-or-fail tasks: variance 1/9 between tasks, 1/6 within"
    alpha: float = 0.05
    power: float = 0.8
    repeats: bool = True
    """False when nothing is known of how runs of one task vary: then only one attempt can be planned."""

    def __post_init__(self) -> None:
        for name, value in (("--level", 1 - self.alpha), ("--power", self.power)):
            if not 0 < value < 1:
                raise ConfigError(f"{value:g} is not between 0 and 1", field=name)
        if not all(0 <= one < math.inf for one in (self.spread.between, self.spread.first, self.spread.second)):
            raise ConfigError("this is not a variance", field="--between, --within", remedy="0 or more")
        if not 0 < self.design_effect < math.inf:
            raise ConfigError(f"{self.design_effect:g} is not a positive number", field="--design-effect")
        if self.cost_per_trial is not None and not 0 <= self.cost_per_trial < math.inf:
            raise ConfigError(f"{self.cost_per_trial:g} is not a cost", field="--cost-per-trial", remedy="0 or more")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to compare two agents: so many tasks and attempts find `effect` with the assumed power.

    `effect` is None when so few tasks can show nothing. `fits` is False when it takes more tasks than there are, or
    more money than there is; None when that cannot be told.
    """

    attempts: int
    tasks: int
    trials: int
    cost_usd: float | None
    effect: float | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Audit:
    """How many trials to audit, drawn at random, to see at least one bad one with the stated confidence."""

    prevalence: float
    confidence: float
    population: int | None
    audits: int
    formula: Literal["binomial", "hypergeometric"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What `proctor plan` says."""

    effect: float | None
    tasks: int | None
    budget_usd: float | None
    assumptions: Assumptions
    options: tuple[Option, ...]
    audit: Audit | None

    def as_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {"version": 1, **asdict(self)}


def options(
    assumptions: Assumptions,
    attempts: Sequence[int],
    *,
    effect: float | None = None,
    tasks: int | None = None,
    budget_usd: float | None = None,
) -> tuple[Option, ...]:
    """One option for each number of attempts.

    With `effect`: the tasks it takes, and whether they fit into `tasks` and `budget_usd`. Without: the effect that
    `tasks`, or as many as `budget_usd` pays for, can find.
    """
    if effect is None and tasks is None and budget_usd is None:
        raise ConfigError("nothing is given to plan from", field="--effect", remedy="or give --tasks, or --budget")
    for name, value in (("--effect", effect), ("--tasks", tasks), ("--budget", budget_usd)):
        if value is None:
            continue
        if name == "--effect" and not _LEAST <= value < 1:
            raise ConfigError(f"{value:g} is not between {_LEAST:g} and 1", field=name, remedy="0.03 is three points")
        if not 0 < value < math.inf:
            raise ConfigError(f"{value:g} is not a positive number", field=name)
    if effect is None and tasks is None and not assumptions.cost_per_trial:
        raise ConfigError("a budget buys nothing while the cost of a trial is unknown", field="--cost-per-trial",
                          remedy="give it, or a run to take it from")  # fmt: skip
    found = []
    for count in attempts if assumptions.repeats else (1,):
        if effect is not None:
            needed = tasks_needed(
                effect, assumptions.spread, attempts=(count, count), alpha=assumptions.alpha, power=assumptions.power,
                design_effect=assumptions.design_effect,
            )  # fmt: skip
            size = max(units_needed(assumptions.alpha), math.ceil(needed - 1e-9))
        else:
            size = _affordable(assumptions, count, tasks, budget_usd)
        found.append(_option(assumptions, count, size, effect, tasks, budget_usd))
    return tuple(found)


def _affordable(assumptions: Assumptions, attempts: int, tasks: int | None, budget_usd: float | None) -> int:
    sizes = [tasks] if tasks is not None else []
    if budget_usd is not None and assumptions.cost_per_trial:
        sizes.append(math.floor(budget_usd / (2 * attempts * assumptions.cost_per_trial)))
    return min(sizes)


def _option(
    assumptions: Assumptions, attempts: int, size: int, effect: float | None, tasks: int | None, budget: float | None
) -> Option:
    cost = None if assumptions.cost_per_trial is None else 2 * size * attempts * assumptions.cost_per_trial
    fits: bool | None = tasks is None or size <= tasks
    if fits and budget is not None:
        fits = None if cost is None else cost <= budget
    if effect is None and size / assumptions.design_effect >= units_needed(assumptions.alpha):
        sd = math.sqrt(assumptions.spread.variance(attempts, attempts))
        effect = detectable(
            sd, size, alpha=assumptions.alpha, power=assumptions.power, design_effect=assumptions.design_effect
        )
        effect = effect if effect < 1 else None
    return Option(attempts, size, 2 * size * attempts, cost, effect, fits)


def learned(pairs: Pairs, cost_per_trial: float | None, source: str, *, alpha: float, power: float) -> Assumptions:
    """Assumptions from two agents that were run before. Without repeats all variance counts as between tasks."""
    from proctor.analysis.paired import discordance_error, over_clusters, over_tasks

    spread, size = pairs.spread(), len(pairs.tasks)
    repeats = spread is not None
    counts = pairs.discordance
    if size < 2:
        raise ConfigError("one task says nothing of how tasks vary", field="RUN", remedy="a run of two or more tasks")
    plain = over_tasks(pairs.differences).error or 0.0
    if spread is None:
        error = discordance_error(counts.contender_only, counts.baseline_only, size) if counts else plain
        spread, source = Spread(error**2 * size), f"{source}; what more attempts would bring is not known from one"
    clustered = over_clusters(pairs.differences, pairs.clusters).error if pairs.clustered else None
    design_effect = max(1.0, (clustered / plain) ** 2) if clustered and plain else 1.0
    return Assumptions(spread, design_effect, cost_per_trial, source, alpha, power, repeats)


def audits_needed(prevalence: float, *, confidence: float = 0.95, population: int | None = None) -> Audit:
    """The smallest random sample that holds at least one bad trial with `confidence`, if `prevalence` of them are bad.

    1 - (1 - prevalence)^n, or the hypergeometric of a finite population: 59, 149, 299 for 5, 2, 1 % at 95 %.
    """
    for name, value, least in (("--prevalence", prevalence, _LEAST), ("--confidence", confidence, 0)):
        if not least <= value < 1 or value == 0:
            raise ConfigError(f"{value:g} is not between {least:g} and 1", field=name)
    needed = math.ceil(math.log(1 - confidence) / math.log(1 - prevalence) - 1e-12)
    if population is None:
        return Audit(prevalence, confidence, None, needed, "binomial")
    if population < 1:
        raise ConfigError(f"{population} trials are none", field="--population")
    bad = max(1, round(prevalence * population))
    low, high = 1, population - bad + 1  # so many audits cannot miss all of them
    while low < high:
        middle = (low + high) // 2
        if catch_probability(population, bad, middle) >= confidence:
            high = middle
        else:
            low = middle + 1
    return Audit(prevalence, confidence, population, low, "hypergeometric")


def catch_probability(population: int, bad: int, audited: int) -> float:
    """The probability that a random audit of `audited` out of `population` trials sees one of the `bad` ones."""
    if not (0 <= bad <= population and 0 <= audited <= population):
        raise ConfigError(f"{bad} bad, {audited} audited of {population}", field="audit", remedy="at most all of them")
    from scipy.stats import hypergeom

    return 1 - float(hypergeom.pmf(0, population, bad, audited))


def flake_bound(reruns: int, *, confidence: float = 0.95) -> float:
    """The largest failure rate that `reruns` reruns without a failure leave possible: 1 - (1 - confidence)^(1/r)."""
    if reruns < 1:
        raise ConfigError(f"{reruns} reruns show nothing", field="reruns", remedy="1 or more")
    return float(1 - (1 - confidence) ** (1 / reruns))


def flag_value(sensitivity: float, false_positive_rate: float, prevalence: float) -> float:
    """How often a flag is right (positive predictive value): rare offences make even a good detector mostly wrong."""
    true = sensitivity * prevalence
    flagged = true + false_positive_rate * (1 - prevalence)
    if not flagged > 0:
        raise ConfigError("nothing would ever be flagged", field="sensitivity, false_positive_rate")
    return true / flagged
