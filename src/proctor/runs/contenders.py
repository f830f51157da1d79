"""Which agents are compared: `RUN`, `RUN::AGENT`, or a Parquet file of trials in place of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.analysis.cells import check_trials
from proctor.common import ConfigError, RefusedError
from proctor.runs.formats import RunLock, load
from proctor.runs.frame import load_trials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

SEPARATOR = "::"


@dataclass(frozen=True, slots=True)
class Selection:
    """The sides by label, in the order given, and the digest of everything they were read from.

    `watched`: one of the runs had a stopping rule, whether or not it fired. `notes`: what a reader of a difference
    should know of the runs.
    """

    sides: dict[str, pl.DataFrame]
    inputs: dict[str, str]
    watched: bool = False
    notes: tuple[str, ...] = ()


def select(references: Sequence[str], *, conditions: bool = False) -> Selection:
    """Read the sides. Of a run with several conditions only the first is taken, unless `conditions` asks for all of
    them, of all runs together, by agent.

    A run without `::AGENT` stands for all of its agents, in the order of its plan. A side is labelled by its agent,
    with the run's name before it where two runs have an agent of that label. Raises RefusedError for a run whose ledger
    is damaged: nothing is claimed from a record that may have been changed. Raises ConfigError for trials that no
    number can be made from, and for a trial that occurs twice.
    """
    import polars as pl

    found: list[tuple[str, str, pl.DataFrame]] = []
    inputs: dict[str, str] = {}
    watched, versions, notes = False, dict[str, str](), list[str]()
    for reference in references:
        place, _, wanted = reference.partition(SEPARATOR)
        path = Path(place)
        loaded = load_trials([path])
        trials = loaded.trials.collect()
        for source in loaded.inputs:
            if source.damage is not None:
                raise RefusedError(f"the ledger is damaged: {source.damage}", field=place,
                                   remedy="compare only whole records")  # fmt: skip
            inputs[place] = source.digest
            if source.kind == "run":
                lock = load(RunLock, path / "run.json")
                watched |= lock.options.get("stop_when") is not None
                versions.setdefault(lock.proctor_version, place)
        check_trials(trials, field=place)
        if not conditions:
            trials, left_out = _first_condition(trials)
            notes += [f"{place}: {left_out}"] if left_out else []
        agents = trials["agent"].unique(maintain_order=True).to_list()
        if wanted and wanted not in agents:
            raise ConfigError(f"there is no agent {wanted!r} in it", field=reference,
                              remedy=f"it has {', '.join(agents) or 'none'}")  # fmt: skip
        found += [
            (place, agent, trials.filter(pl.col("agent") == agent)) for agent in agents if agent == wanted or not wanted
        ]
    if len(versions) > 1:
        made = ", ".join(f"{version} ({place})" for version, place in versions.items())
        notes.append(f"the runs were made by different versions of Proctor: {made}")
    sides = _by_agent(found) if conditions else _labelled(found, inputs)
    if len(sides) == 1 and notes and not conditions:
        raise ConfigError(f"there is one agent; {notes[0]}", field="A B", remedy="add --conditions, or another agent")
    return Selection(sides, inputs, watched, tuple(dict.fromkeys(notes)))


def _first_condition(trials: pl.DataFrame) -> tuple[pl.DataFrame, str | None]:
    """The plain trials (or those of the first condition, if none are), and what was left out for it."""
    import polars as pl

    names = trials["condition"].unique(maintain_order=True).drop_nulls().to_list()
    if len(names) < 2:
        return trials, None
    kept = "plain" if "plain" in names else names[0]
    others = ", ".join(name for name in names if name != kept)
    note = f"only trials under {kept} count here; --conditions compares {others}"
    return trials.filter(pl.col("condition") == kept), note


def _by_agent(found: Sequence[tuple[str, str, pl.DataFrame]]) -> dict[str, pl.DataFrame]:
    """All trials of each agent, whatever the run and the condition."""
    import polars as pl

    together: dict[str, list[pl.DataFrame]] = {}
    for _, agent, trials in found:
        together.setdefault(agent, []).append(trials)
    sides = {agent: pl.concat(frames) for agent, frames in together.items()}
    for agent, trials in sides.items():
        check_trials(trials, field=agent)
    return sides


def _labelled(found: Sequence[tuple[str, str, pl.DataFrame]], inputs: Mapping[str, str]) -> dict[str, pl.DataFrame]:
    """Labels as short as they can be while they differ: the agent, its run's name and it, its run's path and it."""
    resolved = {place: Path(place).resolve() for place, _, _ in found}
    agents = Counter(agent for _, agent, _ in found)
    runs = Counter((resolved[place].name, agent) for place, agent, _ in found)
    seen: set[tuple[str, str]] = set()
    sides: dict[str, pl.DataFrame] = {}
    for place, agent, trials in found:
        # A copy of a run is no second run. Tables may well be equal: they hold neither times of day nor a chain.
        source = inputs[place] if resolved[place].is_dir() else str(resolved[place])
        if (source, agent) in seen:
            raise ConfigError(f"{place}{SEPARATOR}{agent} is given twice", field="A B",
                              remedy="give each agent of each run once")  # fmt: skip
        seen.add((source, agent))
        run = resolved[place].name
        short = agent if agents[agent] == 1 else f"{run}{SEPARATOR}{agent}"
        sides[short if runs[run, agent] == 1 else f"{resolved[place]}{SEPARATOR}{agent}"] = trials
    return sides
