"""The same tasks under several weights, side by side: does the ranking depend on them?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
