"""Which agents are compared: `RUN`, `RUN::AGENT`, or a Parquet file of trials in place of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.common import ConfigError, RefusedError
from proctor.runs.formats import RunLock, load
from proctor.runs.frame import load_trials

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

SEPARATOR = "::"


@dataclass(frozen=True, slots=True)
class Selection:
    """The sides by label, in the order given, and the digest of everything they were read from.

    `watched`: one of the runs had a stopping rule, whether or not it fired.
    """

    sides: dict[str, pl.DataFrame]
    inputs: dict[str, str]
    watched: bool = False


def select(references: Sequence[str]) -> Selection:
    """Read the sides. A run without `::AGENT` stands for all of its agents, in the order of its plan.

    A side is labelled by its agent, with the run's name before it where two runs have an agent of that label. Raises
    RefusedError for a run whose ledger is damaged: nothing is claimed from a record that may have been changed.
    """
    import polars as pl

    found: list[tuple[str, str, pl.DataFrame]] = []
    inputs: dict[str, str] = {}
    watched = False
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
                watched |= load(RunLock, path / "run.json").options.get("stop_when") is not None
        agents = trials["agent"].unique(maintain_order=True).to_list()
        if wanted and wanted not in agents:
            raise ConfigError(f"there is no agent {wanted!r} in it", field=reference,
                              remedy=f"it has {', '.join(agents) or 'none'}")  # fmt: skip
        found += [
            (path.resolve().name, agent, trials.filter(pl.col("agent") == agent))
            for agent in agents
            if agent == wanted or not wanted
        ]
    return Selection(_labelled(found), inputs, watched)


def _labelled(found: Sequence[tuple[str, str, pl.DataFrame]]) -> dict[str, pl.DataFrame]:
    names = [agent for _, agent, _ in found]
    sides: dict[str, pl.DataFrame] = {}
    for run, agent, trials in found:
        label = agent if names.count(agent) == 1 else f"{run}{SEPARATOR}{agent}"
        if label in sides:
            raise ConfigError(f"{label} is given twice", field="A B", remedy="give each agent of each run once")
        sides[label] = trials
    return sides
