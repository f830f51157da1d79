"""Distances between what two runs did: which tools how often, and which calls in which order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from proctor.analysis.means import Floats


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Levenshtein's distance: insertions, deletions and replacements that turn one sequence into the other.

    Bit-parallel (Myers 1999; Hyyrö 2003): a column of the table is held as the bits of one integer, so that sequences
    of thousands of calls take milliseconds.
    """
    if not one or not other:
        return max(len(one), len(other))
    places: dict[Hashable, int] = {}
    for index, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << index
    full, last = (1 << len(one)) - 1, 1 << len(one) - 1
    rises, falls, distance = full, 0, len(one)
    for item in other:
        equal = places.get(item, 0)
        vertical = equal | falls
        horizontal = (((equal & rises) + rises) ^ rises) | equal
        up = falls | (full & ~(horizontal | rises))
        down = rises & horizontal
        distance += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & full, down << 1 & full
        rises, falls = down | (full & ~(vertical | up)), up & vertical
    return distance


def sequence_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """The edit distance over the length of the longer sequence: 0 when equal, 1 when nothing fits."""
    longest = max(len(one), len(other))
    return edit_distance(one, other) / longest if longest else 0.0


def distances(sequences: Sequence[Sequence[Hashable]]) -> Floats:
    """The sequence distance of each pair, as a symmetric matrix. Equal sequences are measured once."""
    import numpy as np

    keys = [tuple(one) for one in sequences]
    found: Floats = np.zeros((len(keys), len(keys)))
    known: dict[tuple[tuple[Hashable, ...], tuple[Hashable, ...]], float] = {}
    for i, one in enumerate(keys):
        for j in range(i):
            pair = (one, keys[j])
            if pair not in known:
                known[pair] = known[pair[::-1]] = sequence_distance(*pair)
            found[i, j] = found[j, i] = known[pair]
    return found


def common_prefix(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """How many items two sequences share before they part."""
    for index, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return index
    return min(len(one), len(other))


def divergence_bits(one: Floats, other: Floats) -> Floats:
    """The Jensen-Shannon divergence, in bits, between rows of counts (Lin 1991): 0 for equal shares, 1 for nothing in
    common. A row without any count has no shares; against it the divergence is NaN."""
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):
        p = one / one.sum(axis=-1, keepdims=True)
        q = other / other.sum(axis=-1, keepdims=True)
        middle = (p + q) / 2
        terms = np.where(p > 0, p * np.log2(p / middle), 0.0) + np.where(q > 0, q * np.log2(q / middle), 0.0)
    found = np.maximum(0.0, terms.sum(axis=-1) / 2)
    known: Floats = np.where((one.sum(axis=-1) > 0) & (other.sum(axis=-1) > 0), found, np.nan)
    return known


def jensen_shannon(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The divergence, in bits, of two tallies. Its square root is a distance."""
    import numpy as np

    names = sorted(one.keys() | other.keys())
    rows = [np.array([[tally.get(name, 0.0) for name in names]], dtype=np.float64) for tally in (one, other)]
    found = float(divergence_bits(*rows)[0])
    if math.isnan(found):
        raise ConfigError("an empty tally has no shares", field="one, other")
    return found
