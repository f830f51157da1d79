"""The cluster bootstrap: clusters are drawn with replacement, jointly for every agent and every measure.

A statistic here is a ratio of sums over clusters (a mean over tasks is one), so that all replicates are one matrix
product, and millions of trials need no more than their cluster sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proctor.analysis.means import Codes, Floats

MANY_CLUSTERS = 5000
"""With more clusters than this a bootstrap gives what the normal law gives, which is then used instead."""
_CELLS = 4_000_000
"""Draws held at a time: bounds memory, and does not change the draws."""


@dataclass(frozen=True, slots=True)
class Resampler:
    """Draws of `clusters` clusters out of as many, `resamples` times, from one seed.

    The same seed and number of clusters give the same draws. Clusters have to be in an order that does not depend on
    that of the rows (by name, say) for a number to be computed again.
    """

    clusters: int
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clusters < 1 or self.resamples < 1:
            raise ConfigError("a bootstrap needs clusters and resamples", field="clusters, resamples")

    def counts(self) -> Iterator[Floats]:
        """How often each cluster was drawn: blocks of (resamples, clusters)."""
        import numpy as np

        generator = np.random.default_rng(self.seed)
        size = self.clusters
        step = max(1, _CELLS // size)
        for start in range(0, self.resamples, step):
            rows = min(step, self.resamples - start)
            drawn = generator.integers(size, size=(rows, size))
            drawn += np.arange(rows)[:, None] * size
            yield np.bincount(drawn.ravel(), minlength=rows * size).reshape(rows, size).astype(np.float64)

    def ratios(self, numerators: Floats, denominators: Floats) -> Floats:
        """Replicates of sum(numerators) / sum(denominators), for matrices (clusters, statistics): (resamples,
        statistics). NaN where no cluster with a denominator was drawn. More than `MANY_CLUSTERS` clusters are not drawn
        but replaced by the normal law with their covariance (of the linearised ratios)."""
        import numpy as np

        if self.clusters > MANY_CLUSTERS:
            return self._normal(numerators, denominators)
        both = np.concatenate([numerators, denominators], axis=1)
        width = numerators.shape[1]
        sums = np.concatenate([block @ both for block in self.counts()])
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Floats = np.where(sums[:, width:] > 0, sums[:, :width] / sums[:, width:], np.nan)
        return found

    def _normal(self, numerators: Floats, denominators: Floats) -> Floats:
        import numpy as np

        below = denominators.sum(axis=0)
        if not below.all():
            raise ConfigError("a statistic has no cluster with a denominator", field="denominators")
        ratios = numerators.sum(axis=0) / below
        rest = (numerators - ratios * denominators) / below
        variances, axes = np.linalg.eigh(rest.T @ rest)
        normal = np.random.default_rng(self.seed).standard_normal((self.resamples, len(ratios)))
        found: Floats = ratios + normal * np.sqrt(np.maximum(variances, 0.0)) @ axes.T
        return found


def percentiles(replicates: Floats, level: float) -> tuple[float, float]:
    """The percentile interval of one statistic's replicates; NaN replicates do not count."""
    import numpy as np

    low, high = np.nanquantile(replicates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def by_cluster(values: Floats, codes: Codes, clusters: int) -> Floats:
    """Sums of per-task values (tasks, statistics) over clusters: (clusters, statistics)."""
    import numpy as np

    found = np.zeros((clusters, values.shape[1]))
    np.add.at(found, codes, values)
    return found
