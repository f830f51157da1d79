"""How firm is a ranking? Tasks are drawn again, jointly for every system, and the systems are ranked each time.

What is reported is the chance of being first, an interval for the rank, and Kendall's tau between the rankings of the
resamples and the one that was seen. Systems that tie share their ranks, and a shared first place is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.analysis.resample import Resampler, by_cluster
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from proctor.analysis.means import Floats

EXACT_CLUSTERS = 8
"""With at most so many clusters every resample is enumerated (6435 distinct ones at 8)."""
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Ranked:
    """One system: its mean, its rank (1 is best; ties share the mean of their ranks), and how firm that is."""

    label: str
    mean: float
    rank: float
    p_first: float
    low: float
    high: float
    expected: float
    """The mean of its ranks over the resamples."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Systems from best to worst. `tau` is the mean Kendall tau-b between the ranking of a resample and the one seen;
    `tau_low` is what it exceeds in a share `level` of the resamples. Both are None when the systems are all equal.

    `formula` is `rank/enumerated` when every resample was looked at (then `resamples` counts them and no seed was
    used), else `rank/bootstrap`.
    """

    systems: tuple[Ranked, ...]
    tasks: int
    clusters: int
    tau: float | None
    tau_low: float | None
    level: float
    resamples: int
    seed: int | None
    formula: str


def rank_stability(
    scores: Mapping[str, Sequence[float]],
    clusters: Sequence[Hashable] | None = None,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Ranking:
    """Rank systems by their mean over the same tasks (repeats averaged before), and ask how firm the ranks are.

    Whole clusters of tasks are drawn with replacement. Raises ConfigError when the systems do not have as many scores
    each, or there is nothing to rank.
    """
    import numpy as np

    labels = list(scores)
    lengths = {len(row) for row in scores.values()}
    if len(labels) < 2 or len(lengths) != 1 or 0 in lengths:
        raise ConfigError("a ranking needs two systems and a score of each at the same tasks", field="scores")
    values: Floats = np.array([list(scores[label]) for label in labels], dtype=np.float64).T
    if not np.isfinite(values).all():
        raise ConfigError("a score is missing", field="scores", remedy="keep the tasks that every system has")
    codes = _codes(clusters, len(values))
    count = int(codes.max()) + 1
    sums = by_cluster(values, codes, count)
    sizes = np.bincount(codes, minlength=count).astype(np.float64)
    exact = count <= EXACT_CLUSTERS
    draws = enumerated(count) if exact else sampled(count, resamples, seed)
    ranks, weights = [], []
    for block, weight in draws:
        ranks.append(rank_rows((block @ sums) / (block @ sizes)[:, None]))
        weights.append(weight)
    every, weight = np.concatenate(ranks), np.concatenate(weights)
    weight = weight / weight.sum()
    means = values.mean(axis=0)
    seen = rank_rows(means[None, :])[0]
    taus = kendall_rows(seen, every)
    systems = [_ranked(labels[i], float(means[i]), float(seen[i]), every, weight, i, level) for i in range(len(labels))]
    known = ~np.isnan(taus)
    return Ranking(
        systems=tuple(sorted(systems, key=lambda one: (one.rank, one.expected, one.label))),
        tasks=len(values),
        clusters=count,
        tau=float(np.average(taus[known], weights=weight[known])) if known.any() else None,
        tau_low=_quantile(taus[known], weight[known], 1 - level) if known.any() else None,
        level=level,
        resamples=count**count if exact else resamples,
        seed=None if exact else seed,
        formula="rank/enumerated" if exact else "rank/bootstrap",
    )


def _ranked(label: str, mean: float, rank: float, every: Floats, weight: Floats, index: int, level: float) -> Ranked:
    import numpy as np

    best = every.min(axis=1, keepdims=True)
    firsts = every == best
    share = firsts[:, index] / firsts.sum(axis=1)
    column = every[:, index]
    low, high = (_quantile(column, weight, q) for q in ((1 - level) / 2, (1 + level) / 2))
    return Ranked(label, mean, rank, float(share @ weight), low, high, float(np.average(column, weights=weight)))


def _codes(clusters: Sequence[Hashable] | None, tasks: int) -> NDArray[np.int64]:
    import numpy as np

    if clusters is None:
        return np.arange(tasks)
    if len(clusters) != tasks:
        raise ConfigError(f"{len(clusters)} clusters for {tasks} tasks", field="clusters")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in clusters], dtype=np.int64)


def enumerated(clusters: int) -> Iterator[tuple[Floats, Floats]]:
    """Every way to draw `clusters` out of as many with replacement: how often each, and in how many orders."""
    import numpy as np

    rows = [list(row) for row in _compositions(clusters, clusters)]
    orders = [math.factorial(clusters) / math.prod(map(math.factorial, row)) for row in rows]
    yield np.array(rows, dtype=np.float64), np.array(orders)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def sampled(clusters: int, resamples: int, seed: int) -> Iterator[tuple[Floats, Floats]]:
    """Random draws of clusters, each of weight 1."""
    import numpy as np

    for block in Resampler(clusters, resamples, seed).counts():
        yield block, np.ones(len(block))


def rank_rows(values: Floats) -> Floats:
    """Ranks within each row, 1 for the largest; equal values (to 1e-9) share the mean of their ranks."""
    import numpy as np

    difference = values[:, None, :] - values[:, :, None]
    above = (difference > _TIE).sum(axis=2)
    equal = (np.abs(difference) <= _TIE).sum(axis=2)
    found: Floats = above + (equal + 1) / 2
    return found


def kendall_rows(reference: Floats, rows: Floats) -> Floats:
    """Kendall's tau-b of one ranking with each row; NaN where one of the two is all ties."""
    import numpy as np

    first, second = np.triu_indices(len(reference), 1)
    one = np.sign(reference[first] - reference[second])
    many = np.sign(rows[:, first] - rows[:, second])
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Floats = (many @ one) / np.sqrt((one @ one) * (many * many).sum(axis=1))
    return found


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b of two lists of scores or ranks."""
    import numpy as np

    return float(kendall_rows(np.asarray(one, dtype=np.float64), np.asarray([other], dtype=np.float64))[0])


def _quantile(values: Floats, weights: Floats, q: float) -> float:
    """The smallest value that at least a share `q` of the weight does not exceed."""
    import numpy as np

    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, q - 1e-12)), len(values) - 1)])
