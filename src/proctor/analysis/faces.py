"""Two more faces of an agent: economy (what a resolved task costs) and robustness (what perturbation takes away)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proctor.analysis.means import FEW_CLUSTERS, cluster_count, cluster_sums, t_interval
from proctor.analysis.proportions import Interval

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.analysis.means import Codes, Floats

Measure = Literal["tokens", "cost_usd", "steps", "tool_calls", "wall_s", "cpu_s"]
MEASURES: tuple[Measure, ...] = ("tokens", "cost_usd", "steps", "tool_calls", "wall_s", "cpu_s")


@dataclass(frozen=True, slots=True)
class Cost:
    """What graded trials spent of one thing.

    `known` of `graded` trials have a known value; the intervals are over those. `total` is None when a part of it is
    unknown. `per_trial` averages a task's attempts first. `per_resolved` is that divided by the success rate: what one
    success costs, with all that was spent on failures. Its high end is infinite (null in JSON) when the data cannot
    exclude that nothing is ever resolved; it is None when nothing was.
    """

    measure: Measure
    graded: int
    known: int
    total: float | None
    per_trial: Interval | None
    per_resolved: Interval | None


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """An agent between success and cost. `dominated_by` names an agent that is no worse in both and better in one.

    `probability` is the share of joint resamples of the clusters in which it lies on the front.
    """

    agent: str
    rate: float
    cost: float
    on_front: bool
    dominated_by: str | None
    probability: float | None


@dataclass(frozen=True, slots=True)
class Front:
    """The Pareto front of success rate (more is better) against the mean cost of a trial (less is better).

    `missing` are agents whose cost is not known.
    """

    measure: Measure
    points: tuple[FrontPoint, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """What a condition (perturbed input, fault profile, ablation) changes, paired within task: condition minus plain.

    Tasks are paired by name (perturbed input is another version of the task). Only those with graded trials under both
    count; `unpaired` have them under one. `kept` is the rate under the
    condition as a share of the plain one (None when that is 0).
    """

    condition: str
    tasks: int
    clusters: int
    unpaired: int
    plain: float
    changed: float
    change: Interval
    kept: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spent:
    """One measure of one agent, by task: trials whose value is known, the sum of the values, how many of those trials
    were resolved; and the task's cluster. Arrays of one length."""

    known: Floats
    total: Floats
    resolved: Floats
    clusters: Codes


def cost(measure: Measure, graded: int, spent: Spent, *, level: float = 0.95) -> Cost:
    """What graded trials spent of one measure, with intervals (cluster-robust t; Fieller's for the ratio)."""

    has = spent.known > 0
    known = int(spent.known.sum())
    if not known:
        return Cost(measure, graded, 0, None, None, None)
    costs, rates = spent.total[has] / spent.known[has], spent.resolved[has] / spent.known[has]
    clusters = spent.clusters[has]
    mean, groups = float(costs.mean()), cluster_count(clusters)
    spread = _covariance(costs, costs, clusters)
    per_trial = t_interval(mean, math.sqrt(spread) if spread is not None else None, groups - 1, level, "t/cluster")
    if per_trial is not None:
        per_trial = Interval(mean, max(0.0, per_trial.low), per_trial.high, level, per_trial.formula)
    return Cost(
        measure=measure,
        graded=graded,
        known=known,
        total=float(spent.total.sum()) if known == graded else None,
        per_trial=per_trial or Interval(mean, 0.0, math.inf, level, "none/one-cluster"),
        per_resolved=ratio(costs, rates, clusters, level=level),
    )


def ratio(top: Floats, bottom: Floats, clusters: Codes, *, level: float = 0.95) -> Interval | None:
    """mean(top) / mean(bottom) for non-negative per-task values, by Fieller's theorem (1954), cluster-robust.

    None when the mean below is 0. When its own interval reaches 0 the ratio has no upper end: `high` is infinite.
    """
    from scipy.stats import t

    over, under = float(top.mean()), float(bottom.mean())
    groups = cluster_count(clusters)
    if under <= 0:
        return None
    point = over / under
    if groups < 2:
        return Interval(point, 0.0, math.inf, level, "none/one-cluster")
    square = float(t.ppf((1 + level) / 2, groups - 1)) ** 2
    tops, bottoms = _covariance(top, top, clusters) or 0.0, _covariance(bottom, bottom, clusters) or 0.0
    both = _covariance(top, bottom, clusters) or 0.0
    # The ratio r is in the set when (over - r under)^2 <= t^2 var(over - r under): a quadratic in r.
    a, b, c = under**2 - square * bottoms, over * under - square * both, over**2 - square * tops
    root = b * b - a * c
    half = math.sqrt(max(0.0, root))
    if a > 0:
        low, high = max(0.0, (b - half) / a), (b + half) / a
    else:
        # The set is what lies outside two roots: one on each side of 0 when the mean above is not in doubt (c > 0),
        # else it holds 0 as well.
        low, high = (b - half) / a if c > 0 and a < 0 else 0.0, math.inf
    return Interval(point, min(point, low), max(point, high), level, "fieller/cluster")


def _covariance(one: Floats, other: Floats, clusters: Codes) -> float | None:
    """Cluster-robust covariance of two means over the same tasks; None for a single cluster."""
    first, second = cluster_sums(one - one.mean(), clusters), cluster_sums(other - other.mean(), clusters)
    groups = len(first)
    return float((first * second).sum()) / len(one) ** 2 * groups / (groups - 1) if groups > 1 else None


def change(
    condition: str, plain: Floats, changed: Floats, clusters: Codes, *, unpaired: int = 0, level: float = 0.95
) -> Change:
    """The paired change over tasks that have both, by cluster-robust t.

    When no task (or every cluster in the same way) changed there is no variance to go by; then the interval is that of
    Agresti and Min (2005), which adds half a task to each of the four outcomes of a pair.
    """
    import numpy as np

    deltas = changed - plain
    mean, groups = float(deltas.mean()), cluster_count(clusters)
    spread = _covariance(deltas, deltas, clusters)
    notes = []
    if groups < FEW_CLUSTERS:
        notes.append(f"few independent tasks or clusters ({groups}): the interval says little")
    if spread is not None and spread > 1e-18:
        found = t_interval(mean, math.sqrt(spread), groups - 1, level, "t/paired-cluster")
        assert found is not None
        interval = Interval(mean, max(-1.0, found.low), min(1.0, found.high), level, found.formula)
    else:
        interval = agresti_min(mean, float(np.square(deltas).mean()), groups, level=level)
    before, after = float(plain.mean()), float(changed.mean())
    return Change(
        condition=condition,
        tasks=len(deltas),
        clusters=groups,
        unpaired=unpaired,
        plain=before,
        changed=after,
        change=interval,
        kept=after / before if before > 0 else None,
        notes=tuple(notes),
    )


def agresti_min(mean: float, square: float, n: int, *, level: float = 0.95) -> Interval:
    """The interval of a paired difference in [-1, 1] with half a pair added to each outcome (Agresti and Min 2005).

    `square` is the mean of the squared differences; for pairs of yes and no it is the share of discordant pairs. The
    point stays the plain mean.
    """
    from scipy.stats import norm

    centre = n * mean / (n + 2)
    variance = (n * square + 1) / (n + 2) - centre**2
    half = float(norm.ppf((1 + level) / 2)) * math.sqrt(variance / (n + 2))
    low, high = max(-1.0, centre - half), min(1.0, centre + half)
    return Interval(mean, min(mean, low), max(mean, high), level, "agresti-min")


def front(
    measure: Measure,
    agents: Mapping[str, tuple[float, float]],
    replicates: Floats | None = None,
    missing: tuple[str, ...] = (),
) -> Front:
    """The Pareto front of agents -> (rate, mean cost). `replicates` are joint resamples, (resamples, agents, 2)."""
    import numpy as np

    shares = None
    if replicates is not None:
        rates, costs = replicates[:, :, 0], replicates[:, :, 1]
        beaten = np.zeros(rates.shape, dtype=bool)
        for other in range(rates.shape[1]):
            better = (rates[:, [other]] >= rates) & (costs[:, [other]] <= costs)
            beaten |= better & ((rates[:, [other]] > rates) | (costs[:, [other]] < costs))
        shares = 1 - beaten.mean(axis=0)
    points = []
    for number, (agent, (rate, spent)) in enumerate(agents.items()):
        ahead = [
            name
            for name, (its_rate, its_cost) in agents.items()
            if its_rate >= rate and its_cost <= spent and (its_rate > rate or its_cost < spent)
        ]
        by = max(ahead, key=lambda name: (agents[name][0], -agents[name][1]), default=None)
        points.append(
            FrontPoint(agent, rate, spent, by is None, by, float(shares[number]) if shares is not None else None)
        )
    return Front(measure, tuple(points), missing)
