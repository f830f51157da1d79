"""From a trials frame to what can be said about each agent: the numbers that a table, a report or a gate shows.

    from proctor.runs.frame import load_trials
    loaded = load_trials([Path("runs/one"), Path("trials.parquet")])
    result = aggregate(loaded.trials, inputs=loaded.inputs)
    print(result.summaries[0].statement)

Only trials under the condition `plain` make a rate; the others are compared with them (`Summary.robustness`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from proctor.analysis.faces import Change, Cost, Front
    from proctor.analysis.means import SuiteMean
    from proctor.analysis.passk import Curve
    from proctor.analysis.proportions import Interval
    from proctor.analysis.provenance import Input, Provenance
    from proctor.analysis.splits import Gap
    from proctor.analysis.weights import Weightings

Dimension = Literal["capability", "difficulty", "domain", "split"]


@dataclass(frozen=True, slots=True)
class Options:
    """How to aggregate. `weights` are the caller's own, name -> task -> weight (tasks not named weigh 0)."""

    level: float = 0.95
    seed: int = 0
    resamples: int = 2000
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gap_margin: float = 0.0
    """The alarm fires when the low end of the gap's interval is above this."""


@dataclass(frozen=True, slots=True)
class Group:
    """The tasks of one capability, difficulty, domain or split. `name` is None for tasks that do not say.

    A task of several capabilities counts in each of them. `rate` is None when nothing of the group was graded.
    """

    dimension: Dimension
    name: str | None
    tasks: int
    planned: int
    graded: int
    resolved: int
    rate: Interval | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One agent over all tasks (condition `plain`).

    `rate` is the success rate, repeats averaged first, over the `tasks` with a graded trial. `headline` is what to
    show: `rate`, or the held-out rate when `gap.alarm` fires (`truth` says which). `worst` and `best` are the rates if
    every excluded trial had failed or been resolved. `clopper_pearson` is there only with one graded trial for each
    task and no clusters, since its guarantee is for independent trials.
    """

    agent: str
    harness: str
    harness_version: str
    model: str | None
    returned_models: tuple[str, ...]
    planned: int
    graded: int
    resolved: int
    outcomes: Mapping[str, int]
    excluded: Mapping[str, int]
    """Trials outside the denominator, by outcome."""
    tasks_planned: int
    tasks: int
    clusters: int
    headline: Interval | None
    truth: Literal["all", "held_out"]
    rate: Interval | None
    wilson: Interval | None
    clopper_pearson: Interval | None
    worst: float
    best: float
    success: SuiteMean | None
    """Resolved as 1, else 0."""
    score: SuiteMean | None
    """The graded score, where it says more than resolved or not; else None."""
    curve: Curve
    groups: tuple[Group, ...]
    gap: Gap | None
    economy: tuple[Cost, ...]
    robustness: tuple[Change, ...]
    statement: str
    """One sentence with interval and denominators."""
    notes: tuple[str, ...] = ()

    def by(self, dimension: Dimension) -> tuple[Group, ...]:
        """The groups of one dimension."""
        return tuple(group for group in self.groups if group.dimension == dimension)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Every agent of a trials frame. `summaries` are in the order in which agents first appear.

    `ranking` is by `headline`, best first; it says nothing on whether two neighbours can be told apart (compare does).
    """

    planned: int
    graded: int
    tasks: int
    conditions: tuple[str, ...]
    summaries: tuple[Summary, ...]
    ranking: tuple[str, ...]
    weightings: Weightings
    fronts: tuple[Front, ...]
    provenance: Provenance
    notes: tuple[str, ...] = ()

    def of(self, agent: str) -> Summary:
        """The summary of this agent. Raises KeyError."""
        for summary in self.summaries:
            if summary.agent == agent:
                return summary
        raise KeyError(agent)


def aggregate(
    trials: pl.DataFrame | pl.LazyFrame, *, inputs: Sequence[Input] = (), options: Options | None = None
) -> Aggregate:
    """Aggregate a trials frame (columns of `frame.TRIALS`). A LazyFrame is streamed: millions of rows are fine.

    Raises ConfigError for a frame that lacks columns, for a trial that occurs twice, and for a score outside [0, 1].
    """
    raise NotImplementedError


def as_json(value: Any) -> Any:
    """Any of the dataclasses here as plain JSON values; what is infinite or not a number becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: as_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
