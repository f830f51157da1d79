"""Two more faces of an agent: economy (what a resolved task costs) and robustness (what perturbation takes away)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from proctor.analysis.proportions import Interval

Measure = Literal["tokens", "cost_usd", "steps", "tool_calls", "wall_s", "cpu_s"]
MEASURES: tuple[Measure, ...] = ("tokens", "cost_usd", "steps", "tool_calls", "wall_s", "cpu_s")


@dataclass(frozen=True, slots=True)
class Cost:
    """What graded trials spent of one thing.

    `known` of `graded` trials have a known value; the intervals are over those. `total` is None when a part of it is
    unknown. `per_trial` averages a task's attempts first. `per_resolved` is everything spent, also on failures,
    divided by the number of trials resolved: what one success costs. Its high end is infinite (null in JSON) when the
    data cannot exclude that nothing is ever resolved; it is None when nothing was.
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

    Only tasks with graded trials under both count; `unpaired` have them under one. `kept` is the rate under the
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
