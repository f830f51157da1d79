"""Several claims at once: the more is tested, the more is found by chance.

Holm for claims ("A beats B"): the chance of a single false one stays below the level. Benjamini and Hochberg for
exploratory tables: the share of false ones among those shown does. Written out here because importing statsmodels for
ten lines costs a command seconds; the tests hold them against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given (Holm 1979): compare each with the level itself."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(_ascending(p_values)):
        running = max(running, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, running)
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (q-values), in the order given (Benjamini and Hochberg 1995)."""
    count, running = len(p_values), 1.0
    adjusted = [1.0] * count
    for rank, index in reversed(list(enumerate(_ascending(p_values), 1))):
        running = min(running, p_values[index] * count / rank)
        adjusted[index] = running
    return adjusted


def bonferroni(p_values: Sequence[float]) -> list[float]:
    """Each p-value times their number: simplest, and never better than Holm."""
    _ascending(p_values)
    return [min(1.0, p * len(p_values)) for p in p_values]


def _ascending(p_values: Sequence[float]) -> list[int]:
    for p in p_values:
        if not 0 <= p <= 1:
            raise ConfigError(f"{p} is not a p-value", field="p_values", remedy="numbers from 0 to 1")
    return sorted(range(len(p_values)), key=p_values.__getitem__)
