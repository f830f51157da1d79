"""The sign-flip test: if neither agent is better, each difference could as well have had the other sign.

It assumes nothing of the scores' distribution. The unit that flips is a task, or a whole cluster of tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.analysis.comparison import PValue
from proctor.analysis.paired import membership
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

EXACT_UNITS = 20
"""With at most so many units whose difference is not zero, all sign assignments are enumerated."""
DRAWS = 100_000
"""Monte Carlo sign assignments: the standard error of a p of 0.05 is 0.0007."""


def sign_flip(
    differences: Sequence[float] | NDArray[np.float64],
    clusters: Sequence[str] | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    primary: bool = False,
) -> PValue:
    """Two-sided p of the mean difference under all sign assignments, or under `draws` random ones.

    Exact: the share of assignments whose |sum| is at least the one seen. Monte Carlo: (1 + hits) / (1 + draws), which
    never is too small (Phipson and Smyth 2010). With `clusters`, each cluster's sum has one sign.
    """
    import numpy as np

    units: NDArray[np.float64] = np.asarray(differences, dtype=np.float64)
    if units.size == 0 or not np.isfinite(units).all():
        raise ConfigError("differences must be finite numbers, at least one", field="differences")
    name = "sign-flip"
    if clusters is not None:
        units = np.bincount(membership(clusters), weights=units).astype(np.float64)
        name = "cluster-sign-flip"
    scale = float(np.abs(units).sum())
    # Sums that are equal on paper differ in the last bits; whatever is nearer than this is equal.
    seen = abs(float(units.sum())) - 1e-10 * scale
    moving = units[np.abs(units) > 1e-12]
    if moving.size <= EXACT_UNITS:
        sums = _all_sums(moving)
        p = float(np.count_nonzero(np.abs(sums) >= seen)) / sums.size
        return PValue(f"{name}-exact", p, primary, float(units.sum()), resamples=sums.size)
    hits = _hits(moving, seen, draws, np.random.default_rng(seed))
    p = (1 + hits) / (1 + draws)
    return PValue(f"{name}-monte-carlo", p, primary, float(units.sum()), resamples=draws, seed=seed)


def smallest_p(units: int) -> float:
    """The smallest two-sided p that `units` differences can give: all on one side."""
    return min(1.0, 2.0 ** (1 - units))


def units_needed(alpha: float) -> int:
    """How many units it takes before any result can be significant at `alpha`: 6 at 0.05."""
    count = 1
    while smallest_p(count) > alpha:
        count += 1
    return count


def _all_sums(units: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    sums = np.zeros(1)
    for unit in units:
        sums = np.concatenate([sums + unit, sums - unit])
    return sums


def _hits(units: NDArray[np.float64], seen: float, draws: int, random: np.random.Generator) -> int:
    import numpy as np

    sizes, counts = np.unique(np.abs(units).round(12), return_counts=True)
    grouped = 2 * sizes.size <= units.size
    hits, step = 0, max(1, 8_000_000 // units.size)
    for start in range(0, draws, step):
        rows = min(step, draws - start)
        if grouped:
            # Of n units of one size a Binomial(n, 1/2) number is positive: one draw for all of them.
            positive = random.binomial(counts, 0.5, size=(rows, counts.size))
            sums = (2.0 * positive - counts) @ sizes
        else:
            signs = random.integers(0, 2, size=(rows, units.size), dtype=np.int8)
            # A sign of 2 * bit - 1 sums to twice what the bits select, less everything.
            sums = 2.0 * (signs @ units) - units.sum()
        hits += int(np.count_nonzero(np.abs(sums) >= seen))
    return hits
