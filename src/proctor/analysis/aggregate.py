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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.analysis.cells import Dimension, reduce_trials
from proctor.analysis.faces import Front, front
from proctor.analysis.frame import PLAIN
from proctor.analysis.provenance import FORMULAS, Input, Provenance
from proctor.analysis.rates import rate_interval
from proctor.analysis.resample import Resampler, by_cluster
from proctor.analysis.summaries import Group, Options, Summary, summarise
from proctor.analysis.weights import WeightedRate, Weighting, Weightings, side_by_side
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import polars as pl

    from proctor.analysis.cells import AgentCells, Cells, Reduced, Suite
    from proctor.analysis.faces import Measure
    from proctor.analysis.means import Floats

__all__ = ["Aggregate", "Dimension", "Group", "Options", "Summary", "aggregate", "as_json"]

FRONT_MEASURES: tuple[Measure, ...] = ("cost_usd", "tokens", "wall_s")


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Every agent of a trials frame. `summaries` are in the order in which agents first appear.

    `planned`, `graded` and `tasks` count trials and tasks under all conditions. `ranking` is by `headline`, best
    first; it says nothing on whether two neighbours can be told apart (compare does). `fronts` are there for measures
    that are known of at least two agents.
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

    Raises ConfigError for a frame that lacks columns, for a trial that occurs twice, for an outcome that is not on the
    list, for a score outside [0, 1] and for an amount that is negative or not finite.
    """
    from proctor import __version__

    options = options or Options()
    _check(options)
    reduced = reduce_trials(trials)
    suite, agents = reduced.suite, reduced.agents
    for name, weights in options.weights.items():
        if strangers := sorted(weights.keys() - set(suite.names)):
            raise ConfigError(f"there is no task {strangers[0]!r}", field=f"weights.{name}")
    summaries = tuple(summarise(agent, suite, options, agents=len(agents)) for agent in agents)
    ranked = sorted((one for one in summaries if one.headline), key=_place)
    everything = [cells for agent in agents for cells in agent.conditions.values()]
    return Aggregate(
        planned=sum(int(cells.planned.sum()) for cells in everything),
        graded=sum(int(cells.graded.sum()) for cells in everything),
        tasks=len(suite.names),
        conditions=tuple(dict.fromkeys(name for agent in agents for name in agent.conditions)),
        summaries=summaries,
        ranking=tuple(one.agent for one in ranked),
        weightings=_weightings(agents, suite, options),
        fronts=tuple(_fronts(agents, suite, options)),
        provenance=Provenance(
            version=__version__,
            inputs=tuple(inputs),
            level=options.level,
            seed=options.seed,
            resamples=options.resamples,
            formulas=FORMULAS,
        ),
        notes=tuple(_notes(reduced, inputs, summaries)),
    )


def _check(options: Options) -> None:
    if not 0 < options.level < 1:
        raise ConfigError(f"{options.level} is not a level", field="level", remedy="a number between 0 and 1")
    if options.seed < 0:
        raise ConfigError(f"{options.seed} is negative", field="seed", remedy="0 or more")
    for name, weights in options.weights.items():
        if any(not math.isfinite(weight) or weight < 0 for weight in weights.values()):
            raise ConfigError("weights are finite and not negative", field=f"weights.{name}")


def _place(summary: Summary) -> tuple[float, str]:
    assert summary.headline is not None
    return -summary.headline.point, summary.agent


def _notes(reduced: Reduced, inputs: Sequence[Input], summaries: Sequence[Summary]) -> Iterator[str]:
    for source in inputs:
        if source.damage:
            yield f"{source.name}: the ledger is damaged, its numbers cannot be trusted: {source.damage}"
        if source.unrunnable:
            yield f"{source.name}: tasks that could not be run there and are excluded: {source.unrunnable}"
    yield from reduced.notes
    if any(summary.truth == "held_out" for summary in summaries):
        who = ", ".join(summary.agent for summary in summaries if summary.truth == "held_out")
        yield f"public tasks score higher than held-out ones for {who}: the held-out rate is taken as the truth"


def _graded(agents: Sequence[AgentCells]) -> Iterator[tuple[AgentCells, Cells]]:
    """The agents that have a graded trial under `plain`, with their sums there."""
    for agent in agents:
        cells = agent.conditions.get(PLAIN)
        if cells is not None and cells.graded.any():
            yield agent, cells


def _weightings(agents: Sequence[AgentCells], suite: Suite, options: Options) -> Weightings:
    import numpy as np

    kinds: list[tuple[str, str, Floats]] = [("task", "each task counts the same", np.ones(len(suite.names)))]
    absent = []
    domains = suite.groups["domain"]
    if len(domains) > 1:
        label = np.zeros(len(suite.names))
        for number, mask in enumerate(domains.values()):
            label[mask] = number
        kinds.append(("domain", "each domain counts the same, shared by its tasks", label))
    else:
        absent.append("there are not two domains")
    if suite.weights.min() != suite.weights.max():
        kinds.append(("declared", "the weights that the dataset declares", suite.weights))
    else:
        absent.append("the dataset declares no weights")
    for name, weights in options.weights.items():
        kinds.append((name, "given by the caller", np.array([weights.get(task, 0.0) for task in suite.names])))
    found = []
    for name, meaning, values in kinds:
        rates = []
        for agent, cells in _graded(agents):
            has = cells.graded > 0
            weight = values[has]
            if name == "domain" and meaning.startswith("each domain"):
                _, codes, counts = np.unique(weight, return_inverse=True, return_counts=True)
                weight = 1.0 / counts[codes]
            if weight.sum() <= 0:
                continue
            rate = rate_interval(
                cells.resolved[has] / cells.graded[has], suite.clusters[has], weight, level=options.level
            )
            kish = float(weight.sum() ** 2 / np.square(weight).sum())
            rates.append(WeightedRate(agent.name, rate, int((weight > 0).sum()), kish))
        found.append(Weighting(name, meaning, tuple(rates)))
    return side_by_side(found, absent)


def _fronts(agents: Sequence[AgentCells], suite: Suite, options: Options) -> Iterator[Front]:
    """Success against the mean cost of a trial. All agents and measures are resampled together, by cluster."""
    import numpy as np

    names, tops, bottoms = [], [], []
    for measure in FRONT_MEASURES:
        for agent, cells in _graded(agents):
            known = cells.known[measure]
            if known.any():
                names.append((measure, agent.name))
                for value, count in ((cells.resolved, cells.graded), (cells.spent[measure], known)):
                    tops.append(np.divide(value, count, out=np.zeros_like(value), where=count > 0))
                    bottoms.append((count > 0).astype(np.float64))
    if not names:
        return
    clusters = len(suite.cluster_names)
    sums = [by_cluster(np.stack(one, axis=1), suite.clusters, clusters) for one in (tops, bottoms)]
    points = sums[0].sum(axis=0) / sums[1].sum(axis=0)
    replicates = Resampler(clusters, options.resamples, options.seed).ratios(*sums) if clusters > 1 else None
    for measure in FRONT_MEASURES:
        places = [place for place, (of, _) in enumerate(names) if of == measure]
        if len(places) < 2 or not any(points[2 * place + 1] for place in places):
            continue
        pairs = {names[place][1]: (float(points[2 * place]), float(points[2 * place + 1])) for place in places}
        columns = [column for place in places for column in (2 * place, 2 * place + 1)]
        drawn = None if replicates is None else replicates[:, columns].reshape(len(replicates), len(places), 2)
        missing = tuple(agent.name for agent, _ in _graded(agents) if agent.name not in pairs)
        yield front(measure, pairs, drawn, missing)


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
