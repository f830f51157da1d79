"""A small statistics library."""

from collections import Counter


def median(values):
    """The median of a non-empty sequence of numbers."""
    if not values:
        raise ValueError("median of an empty sequence")
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def mode(values):
    """The most common value; the smallest one of several."""
    counts = Counter(values)
    best = max(counts.values())
    return min(value for value, count in counts.items() if count == best)
