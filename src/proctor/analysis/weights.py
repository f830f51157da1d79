"""The same tasks under several weights, side by side: does the ranking depend on them?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proctor.analysis.proportions import Interval


@dataclass(frozen=True, slots=True)
class WeightedRate:
    """One agent under one weighting. `effective_tasks` is Kish's (sum w)^2 / sum w^2."""

    agent: str
    rate: Interval
    tasks: int
    effective_tasks: float


@dataclass(frozen=True, slots=True)
class Weighting:
    """One way to weigh tasks: `task` (each 1), `domain` (each domain 1, shared by its tasks), `declared` (the
    dataset's weights), or the name of weights given by the caller. `rates` are ordered best first."""

    name: str
    meaning: str
    rates: tuple[WeightedRate, ...]

    @property
    def ranking(self) -> tuple[str, ...]:
        """Agents, best first; equal rates by name."""
        return tuple(rate.agent for rate in self.rates)


@dataclass(frozen=True, slots=True)
class Weightings:
    """All weightings of a suite; `depends` when two of them rank the agents differently, and `statement` says so."""

    weightings: tuple[Weighting, ...]
    depends: bool
    statement: str


def side_by_side(weightings: Sequence[Weighting], absent: Sequence[str] = ()) -> Weightings:
    """Order each weighting and compare the orders. `absent` are lines on weightings that would add nothing."""
    ordered = [
        Weighting(one.name, one.meaning, tuple(sorted(one.rates, key=lambda rate: (-rate.rate.point, rate.agent))))
        for one in weightings
    ]
    conflict = next(
        (
            (one, other, pair)
            for number, one in enumerate(ordered)
            for other in ordered[number + 1 :]
            if (pair := _swapped(one, other)) is not None
        ),
        None,
    )
    if conflict is not None:
        one, other, (first, second) = conflict
        statement = (
            f"the ranking depends on the weights: weighted by {one.name} {first} is ahead of {second}, "
            f"weighted by {other.name} it is not"
        )
    elif len(ordered) > 1:
        statement = f"the ranking is the same under all weights ({', '.join(one.name for one in ordered)})"
    else:
        statement = "; ".join(absent) or "there is only one weighting"
    return Weightings(tuple(ordered), conflict is not None, statement)


def _swapped(one: Weighting, other: Weighting) -> tuple[str, str] | None:
    """The first two agents whose order differs; a tie is an order of its own."""
    rates = {rate.agent: rate.rate.point for rate in other.rates}
    for number, ahead in enumerate(one.rates):
        for behind in one.rates[number + 1 :]:
            if {ahead.agent, behind.agent} <= rates.keys():
                here = ahead.rate.point - behind.rate.point
                there = rates[ahead.agent] - rates[behind.agent]
                if (here > _SAME) != (there > _SAME) or (here < -_SAME) != (there < -_SAME):
                    return ahead.agent, behind.agent
    return None


_SAME = 1e-12
"""Rates closer than this are equal: the rest is rounding."""
