"""Where two agents differ: the comparison again for each capability, domain, difficulty or split. For looking, not for
claiming: no words, and q-values (Benjamini and Hochberg) instead of Holm, over everything that is shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from proctor.analysis.claims import Analysis, Terms, couples
from proctor.analysis.comparison import Dimension, GroupDifference
from proctor.analysis.multiplicity import benjamini_hochberg
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl

COLUMNS: dict[str, str] = {"capability": "capabilities"}
"""Columns whose name is not the dimension's."""


def explore(
    sides: Mapping[str, pl.DataFrame], dimension: Dimension, terms: Terms | None = None
) -> tuple[GroupDifference, ...]:
    """One line for each couple and group that can be paired, in order of size; tasks of no group are left out.

    A task of several capabilities counts in each.
    """
    if dimension not in get_args(Dimension):
        raise ConfigError(
            f"{dimension!r} is not known", field="--by", remedy=f"one of {', '.join(get_args(Dimension))}"
        )
    terms = terms or Terms()
    found = []
    for one, other in couples(list(sides), terms):
        groups = {label: _groups(sides[label], dimension) for label in (one, other)}
        for name in sorted(groups[one].keys() & groups[other].keys()):
            both = {label: groups[label][name] for label in (one, other)}
            try:
                analysis = Analysis.of(one, other, both, terms, 1, {})
            except RefusedError:  # no task of this group has scores on both sides
                continue
            test = analysis.primary
            found.append(
                GroupDifference(
                    dimension,
                    name,
                    one,
                    other,
                    len(analysis.pairs.tasks),
                    analysis.interval(),
                    test.p,
                    1.0,
                    test.formula,
                )
            )
    q_values = benjamini_hochberg([line.p for line in found])
    lines = [replace(line, q=q) for line, q in zip(found, q_values, strict=True)]
    return tuple(sorted(lines, key=lambda line: -abs(line.difference.point)))


def _groups(trials: pl.DataFrame, dimension: Dimension) -> dict[str, pl.DataFrame]:
    import polars as pl

    column = COLUMNS.get(dimension, dimension)
    names = trials[column].explode() if dimension == "capability" else trials[column]
    belongs = pl.col(column).list.contains if dimension == "capability" else pl.col(column).eq
    return {name: trials.filter(belongs(name)) for name in names.drop_nulls().unique().to_list()}
