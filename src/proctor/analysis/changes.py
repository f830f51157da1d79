"""What a condition changes: each agent against itself, with and without one thing, paired by task.

An ablation that helps says what was lacking: it is a causal statement, since nothing else differs. A perturbation or a
fault that hurts says how robust an agent is. Both are the paired difference of `proctor.analysis.claims`, with its
test, its interval, and Holm's correction over everything that is claimed at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from proctor.analysis.claims import Terms, compare
from proctor.analysis.frame import PLAIN
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl

    from proctor.analysis.comparison import Comparison

MEANT_TO_DIFFER = frozenset({"condition", "limits", "task_digest"})
"""A condition may be a longer budget, or the task in another version; the image has to be the same."""


def changes(
    agents: Mapping[str, pl.DataFrame], terms: Terms | None = None, *, inputs: Mapping[str, str] | None = None
) -> Comparison:
    """Compare every agent under every condition with its plain trials. Raises ConfigError when there is none to compare
    with, RefusedError for what is not comparable."""
    import polars as pl

    sides: dict[str, pl.DataFrame] = {}
    couples: list[tuple[str, str]] = []
    for agent, trials in agents.items():
        names = trials["condition"].unique(maintain_order=True).to_list()
        if PLAIN not in names:
            raise ConfigError(f"there are no plain trials, only {', '.join(names)}", field=agent,
                              remedy="name a run without --condition beside this one")  # fmt: skip
        sides |= {
            agent if name == PLAIN else f"{agent} [{name}]": trials.filter(pl.col("condition") == name)
            for name in names
        }
        couples += [(agent, f"{agent} [{name}]") for name in names if name != PLAIN]
    if not couples:
        raise ConfigError("nothing was run under another condition than plain", field="--conditions",
                          remedy="run with --ablate, --perturb or --tool-faults")  # fmt: skip
    terms = replace(terms or Terms(), ignore=MEANT_TO_DIFFER)
    return compare(sides, terms, inputs=inputs, pairs=couples)
