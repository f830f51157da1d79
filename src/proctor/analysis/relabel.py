"""Giving the runs of each task to two versions at random: every way, or many ways.

If the version makes no difference, the runs of a task are exchangeable, and any assignment of them to the versions is
as likely as the one that was seen. That holds whatever the tasks have in common, since only runs change places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from proctor.analysis.means import Floats

EXACT = 20_000
"""With at most so many assignments all of them are looked at."""


@dataclass(frozen=True, slots=True)
class Relabelling:
    """Assignments for tasks with `sizes` (runs of the first version, runs of the second); a task's runs are in that
    order."""

    sizes: tuple[tuple[int, int], ...]
    draws: int = 10_000
    seed: int = 0

    @property
    def total(self) -> int:
        """How many assignments there are."""
        return math.prod(math.comb(first + second, first) for first, second in self.sizes)

    @property
    def exact(self) -> bool:
        """Whether all of them are looked at."""
        return self.total <= EXACT

    @property
    def rows(self) -> int:
        """How many are looked at."""
        return self.total if self.exact else self.draws

    @property
    def smallest_p(self) -> float:
        """The least p there can be. When the versions have equally many runs everywhere, each assignment and its
        opposite give the same size of difference."""
        twins = 2 if all(first == second for first, second in self.sizes) else 1
        least = min(1.0, twins / self.total)
        return least if self.exact else max(least, 1 / (1 + self.draws))

    def masks(self, task: int) -> NDArray[np.bool_]:
        """For each assignment which of the task's runs the first version has: (rows, runs)."""
        import numpy as np

        first, second = self.sizes[task]
        runs = first + second
        if self.exact:
            ways = np.zeros((math.comb(runs, first), runs), dtype=bool)
            for row, chosen in enumerate(combinations(range(runs), first)):
                ways[row, list(chosen)] = True
            stride = math.prod(math.comb(a + b, a) for a, b in self.sizes[:task])
            return ways[np.arange(self.rows) // stride % len(ways)]
        packed = _drawn(first, second, self.rows, self.seed, task)
        return np.unpackbits(packed, axis=1, count=runs).astype(bool)

    def p_value(self, seen: float, found: Floats) -> float:
        """The share of assignments whose statistic is at least what was seen; the one seen counts among drawn ones, so
        that p is never too small (Phipson and Smyth 2010)."""
        import numpy as np

        hits = int(np.count_nonzero(found >= seen - 1e-12 * max(1.0, abs(seen))))
        return hits / self.rows if self.exact else (1 + hits) / (1 + self.rows)


@lru_cache(maxsize=1024)
def _drawn(first: int, second: int, rows: int, seed: int, task: int) -> NDArray[np.uint8]:
    """Random assignments as packed bits. Every measure asks for the same ones, and drawing is what takes time."""
    import numpy as np

    order = np.argsort(np.random.default_rng([seed, task]).random((rows, first + second)), axis=1)
    mask = np.zeros((rows, first + second), dtype=bool)
    np.put_along_axis(mask, order[:, :first], True, axis=1)
    return np.packbits(mask, axis=1)


def two_means(mask: NDArray[np.bool_], values: Floats) -> tuple[Floats, Floats]:
    """The mean of each version's runs under every assignment. `values`: (runs,) or (runs, columns)."""
    first = int(mask[0].sum())
    chosen = mask.astype(float) @ values
    return chosen / first, (values.sum(axis=0) - chosen) / (mask.shape[1] - first)


def excess(mask: NDArray[np.bool_], matrix: Floats) -> Floats:
    """The mean distance between the versions less the mean of those within them, under every assignment.

    Székely's energy statistic, halved, in its unbiased form (no run is paired with itself): about 0 when the version
    makes no difference, and then below it as often as above.
    """
    import numpy as np

    first = mask.astype(float)
    second = 1.0 - first
    a, b = int(mask[0].sum()), int(second[0].sum())
    towards = first @ matrix
    between = np.einsum("ij,ij->i", towards, second) / (a * b)
    within = np.einsum("ij,ij->i", towards, first) / (a * (a - 1))
    other = np.einsum("ij,ij->i", second @ matrix, second) / (b * (b - 1))
    found: Floats = between - (within + other) / 2
    return found


def seen_mask(sizes: Sequence[int]) -> NDArray[np.bool_]:
    """The assignment that was seen, as the one row of a mask."""
    import numpy as np

    first, second = sizes
    return np.array([[True] * first + [False] * second])
