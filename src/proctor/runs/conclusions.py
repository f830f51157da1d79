"""The parts of a report that put agents beside each other: comparison, crossing, change of behaviour.

Each is there or its reason for not being there is: a report says what could not be said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from proctor.analysis.aggregate import Aggregate, Options
    from proctor.analysis.comparison import Comparison
    from proctor.analysis.crossed import Crossed
    from proctor.analysis.drift import Drift
    from proctor.analysis.report.matrix import Identity

DRIFT_TRIALS = 2000
"""Behaviour is read from every record and compared run by run; above this many it is left to `proctor compare`."""
_IDENTITY = ("agent", "harness", "harness_version", "model")


@dataclass(frozen=True, slots=True)
class Conclusions:
    """What can be said of several agents. `absent` has the reason for what is None."""

    comparison: Comparison | None = None
    drift: Drift | None = None
    crossed: Crossed | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


def conclude(trials: pl.LazyFrame, result: Aggregate, baseline: str | None, options: Options) -> Conclusions:
    """Compare all agents with the baseline (the first, by default). Raises ConfigError for an unknown baseline."""
    import polars as pl

    agents = _ordered([one.agent for one in result.summaries if one.graded], baseline)
    if len(agents) < 2:
        return Conclusions(absent={"comparison": "There are not two agents with graded trials to compare."})
    plain = trials.filter(pl.col("condition") == "plain").collect()
    sides = _sides(plain, result, agents)
    absent: dict[str, str] = {}
    comparison = _compare(sides, result, options, absent)
    drift = _drift(sides, result, options, absent) if _are_versions(agents, result, absent) else None
    return Conclusions(comparison, drift, _crossed(plain, result, options, absent), absent)


def _are_versions(agents: Sequence[str], result: Aggregate, absent: dict[str, str]) -> bool:
    """The rule of drift in a report: two agents with the same harness, in any versions, models and options. What two
    harnesses do differs by design, and would always be a drift."""
    if len(agents) != 2:
        return False
    one, other = (next(found for found in result.summaries if found.agent == agent) for agent in agents)
    if one.harness == other.harness:
        return True
    absent["drift"] = (
        f"Behaviour is compared between versions of one harness; these are {one.harness} and {other.harness}. "
        "`proctor compare --drift` compares any two."
    )
    return False


def _ordered(agents: list[str], baseline: str | None) -> list[str]:
    if baseline is None:
        return agents
    if baseline not in agents:
        raise ConfigError(f"no agent with a graded trial is called {baseline!r}", field="--baseline",
                          remedy=f"there are {', '.join(agents) or 'none'}")  # fmt: skip
    return [baseline, *(agent for agent in agents if agent != baseline)]


def _sides(plain: pl.DataFrame, result: Aggregate, agents: Sequence[str]) -> dict[str, pl.DataFrame]:
    """The trials of each agent, by the name that the aggregate has for it."""
    import polars as pl

    from proctor.analysis.report.matrix import agent_names

    names = agent_names(plain.lazy(), result)

    def is_of(identity: Identity) -> pl.Expr:
        pairs = zip(_IDENTITY, identity, strict=True)
        return pl.all_horizontal(pl.col(column).eq_missing(pl.lit(value)) for column, value in pairs)

    return {
        agent: plain.filter(pl.any_horizontal(is_of(identity) for identity, name in names.items() if name == agent))
        for agent in agents
    }


def _inputs(result: Aggregate) -> dict[str, str]:
    return {one.name: one.digest for one in result.provenance.inputs}


def _compare(
    sides: Mapping[str, pl.DataFrame], result: Aggregate, options: Options, absent: dict[str, str]
) -> Comparison | None:
    from proctor.analysis.claims import Terms, compare

    try:
        return compare(dict(sides), Terms(level=options.level, seed=options.seed), inputs=_inputs(result))
    except RefusedError as error:
        absent["comparison"] = f"The agents cannot be compared: {error.line()}."
        return None


def _drift(
    sides: Mapping[str, pl.DataFrame], result: Aggregate, options: Options, absent: dict[str, str]
) -> Drift | None:
    from proctor.analysis.detect import detect_drift
    from proctor.analysis.drift import DriftOptions
    from proctor.runs.behaviour import read_behaviours

    one, other = sides
    if sum(map(len, sides.values())) > DRIFT_TRIALS:
        absent["drift"] = f"Behaviour is not compared here for more than {DRIFT_TRIALS:,} trials."
        return None
    try:
        before, after = read_behaviours(sides[one]), read_behaviours(sides[other])
        asked = DriftOptions(level=options.level, alpha=1 - options.level, seed=options.seed)
        return detect_drift(before, after, asked, names=(one, other), inputs=_inputs(result))
    except (RefusedError, ConfigError) as error:
        absent["drift"] = f"Behaviour cannot be compared: {error.line()}."
        return None


def _crossed(plain: pl.DataFrame, result: Aggregate, options: Options, absent: dict[str, str]) -> Crossed | None:
    """Only where at least two models were run in at least two harnesses."""
    import polars as pl

    from proctor.analysis.crossed import CrossedOptions, crossed

    kinds = {(one.harness, one.model) for one in result.summaries if one.model and one.graded}
    if min(len({harness for harness, _ in kinds}), len({model for _, model in kinds})) < 2 or len(kinds) < 3:
        return None
    try:
        return crossed(plain.filter(pl.col("model").is_not_null()), CrossedOptions(options.level, options.seed))
    except (RefusedError, ConfigError) as error:
        absent["crossed"] = f"Models and harnesses cannot be told apart here: {error.line()}."
        return None
