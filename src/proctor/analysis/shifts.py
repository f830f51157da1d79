"""The measures of behaviour, one after the other: how far it moved, its interval, its p, and what to make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proctor.analysis.drift import DriftOptions, Scale, Shift, Verdict
from proctor.analysis.multiplicity import benjamini_hochberg, holm
from proctor.analysis.paired import Estimate, over_clusters, over_tasks
from proctor.analysis.power import z_total
from proctor.analysis.proportions import Interval
from proctor.analysis.relabel import Relabelling, excess, seen_mask, two_means
from proctor.analysis.resample import Resampler, by_cluster, percentiles
from proctor.analysis.sequences import distances, divergence_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proctor.analysis.behaviour import Behaviour
    from proctor.analysis.means import Floats

_FEW_CLUSTERS = 5
"""With fewer a bootstrap interval of the tool mix would say more than is known."""
_NO_COUNT = 1.0  # the divergence of something from nothing at all


@dataclass(frozen=True, slots=True)
class Pool:
    """The runs of both versions at one task."""

    task: str
    cluster: str
    baseline: tuple[Behaviour, ...]
    new: tuple[Behaviour, ...]

    @property
    def runs(self) -> tuple[Behaviour, ...]:
        """Those of the baseline first."""
        return self.baseline + self.new

    @property
    def sizes(self) -> tuple[int, int]:
        """How many of each."""
        return len(self.baseline), len(self.new)


def _failed(run: Behaviour) -> float:
    return sum(action.failed for action in run.actions) / len(run.actions) if run.actions else 0.0


def _repeated(run: Behaviour) -> float:
    return len(run.repeats()) / len(run.actions) if run.actions else 0.0


MEASURES: Mapping[str, tuple[Scale, Callable[[Behaviour], float | None]]] = {
    "tokens": ("ratio", lambda run: run.tokens),
    "calls": ("ratio", lambda run: len(run.actions)),
    "cost": ("ratio", lambda run: run.cost_usd),
    "wall": ("ratio", lambda run: run.wall_s),
    "repetition": ("difference", _repeated),
    "errors": ("difference", _failed),
    "read_only": ("difference", lambda run: run.share("read")),
    "verification": ("difference", lambda run: run.share("verify")),
    "unverified_edits": ("difference", lambda run: run.unverified_edits),
}
"""Measures of a single run. `ratio` compares amounts, `difference` rates and counts."""


def all_shifts(pools: Sequence[Pool], options: DriftOptions) -> tuple[list[Shift], list[str]]:
    """Every measure that can be taken, judged; and what is to be said of those that cannot."""
    found: list[Shift] = []
    notes: list[str] = []
    for name, (scale, measure) in MEASURES.items():
        shift, note = _amounts(name, scale, measure, pools, options)
        found += [shift] if shift else []
        notes += [note] if note else []
    for shift, note in (_tool_mix(pools, options), _sequence(pools, options)):
        found += [shift] if shift else []
        notes += [note] if note else []
    return _judged(found, options), notes


def _amounts(
    name: str,
    scale: Scale,
    measure: Callable[[Behaviour], float | None],
    pools: Sequence[Pool],
    options: DriftOptions,
) -> tuple[Shift | None, str]:
    """A measure of single runs: paired differences of task means, or of their logarithms."""
    import numpy as np

    kept: list[tuple[Pool, Floats]] = []
    zeros = 0
    for pool in pools:
        found = [measure(run) for run in pool.runs]
        if all(value == 0 for value in found) and scale == "ratio":
            zeros += 1
        elif all(value is not None and (scale != "ratio" or value > 0) for value in found):
            kept.append((pool, np.array(found, dtype=np.float64)))
    if not kept:
        return None, "" if zeros == len(pools) else f"{name} is not known of both versions at any task"
    relabelling = Relabelling(tuple(pool.sizes for pool, _ in kept), options.draws, options.seed)
    total, seen = np.zeros(relabelling.rows), []
    for index, (pool, values) in enumerate(kept):
        one, other = _pair(scale, *two_means(relabelling.masks(index), values))
        total += other - one
        first, second = _pair(scale, *two_means(seen_mask(pool.sizes), values))
        seen.append(float(second[0] - first[0]))
    estimate = _estimate(scale, kept, seen)
    means = [two_means(seen_mask(pool.sizes), values) for pool, values in kept]
    back = math.exp if scale == "ratio" else float
    mde = z_total(options.alpha, options.power) * estimate.error if estimate.error else None
    shift = Shift(
        name=name,
        scale=scale,
        baseline=float(np.mean([mean[0][0] for mean in means])),
        new=float(np.mean([mean[1][0] for mean in means])),
        point=back(estimate.point),
        interval=_interval(estimate, options.level, back),
        p=relabelling.p_value(abs(sum(seen)), np.abs(total)),
        p_adjusted=1.0,
        smallest_p=relabelling.smallest_p,
        exact=relabelling.exact,
        tasks=len(kept),
        left_out=len(pools) - len(kept) - zeros,
        tolerance=options.tolerances[name],
        gated=name in options.gated,
        changed=False,
        verdict=None,
        mde=back(mde) if mde is not None else None,
        formula="log-ratio" if scale == "ratio" else "difference",
    )
    return shift, ""


def _pair(scale: Scale, one: Floats, other: Floats) -> tuple[Floats, Floats]:
    import numpy as np

    return (np.log(one), np.log(other)) if scale == "ratio" else (one, other)


def _estimate(scale: Scale, kept: Sequence[tuple[Pool, Floats]], seen: Sequence[float]) -> Estimate:
    """The mean change over tasks with its error: over clusters where there are two, else that of running again."""
    clusters = [pool.cluster for pool, _ in kept]
    if len(set(clusters)) > 1:
        return over_clusters(seen, clusters) if len(set(clusters)) < len(clusters) else over_tasks(seen)
    variance, df = 0.0, 0
    for pool, values in kept:
        for group in (values[: len(pool.baseline)], values[len(pool.baseline) :]):
            if len(group) < 2:
                return Estimate(sum(seen) / len(seen), None, 0, 1, "none")
            spread = float(group.var(ddof=1)) / len(group)
            variance += spread / float(group.mean()) ** 2 if scale == "ratio" else spread
            df += len(group) - 1
    return Estimate(sum(seen) / len(seen), math.sqrt(variance) / len(seen), df, 1, "rerun-t")


def _interval(estimate: Estimate, level: float, back: Callable[[float], float]) -> Interval | None:
    if estimate.error is None:
        return None
    found = estimate.interval(level)
    return Interval(back(found.point), back(found.low), back(found.high), level, found.formula)


def _tool_mix(pools: Sequence[Pool], options: DriftOptions) -> tuple[Shift | None, str]:
    """Jensen-Shannon divergence between the versions' calls by tool, each task's mean tally weighing as it is."""
    import numpy as np

    names = sorted({tool for pool in pools for run in pool.runs for tool in run.tools})
    if not names:
        return None, ""
    tallies = [np.array([[float(run.tools.get(name, 0)) for name in names] for run in pool.runs]) for pool in pools]
    relabelling = Relabelling(tuple(pool.sizes for pool in pools), options.draws, options.seed)
    one, other = (np.zeros((relabelling.rows, len(names))) for _ in range(2))
    pairs = []
    for index, (pool, tally) in enumerate(zip(pools, tallies, strict=True)):
        first, second = two_means(relabelling.masks(index), tally)
        one, other = one + first, other + second
        pairs.append([mean[0] for mean in two_means(seen_mask(pool.sizes), tally)])
    sums = np.array(pairs)
    point = float(_divergence(sums[:, 0].sum(axis=0)[None], sums[:, 1].sum(axis=0)[None])[0])
    return Shift(
        name="tool_mix",
        scale="divergence",
        baseline=None,
        new=None,
        point=point,
        interval=_mix_interval(sums, [pool.cluster for pool in pools], point, options),
        p=relabelling.p_value(point, _divergence(one, other)),
        p_adjusted=1.0,
        smallest_p=relabelling.smallest_p,
        exact=relabelling.exact,
        tasks=len(pools),
        left_out=0,
        tolerance=options.tolerances["tool_mix"],
        gated="tool_mix" in options.gated,
        changed=False,
        verdict=None,
        mde=None,
        formula="jensen-shannon/bits",
    ), ""


def _divergence(one: Floats, other: Floats) -> Floats:
    import numpy as np

    found = divergence_bits(one, other)
    nothing = (one.sum(axis=-1) == 0) & (other.sum(axis=-1) == 0)
    filled: Floats = np.where(nothing, 0.0, np.where(np.isnan(found), _NO_COUNT, found))
    return filled


def _mix_interval(sums: Floats, clusters: Sequence[str], point: float, options: DriftOptions) -> Interval | None:
    """Percentiles over resamples of clusters; the low end is of a quantity that chance can only make larger."""
    import numpy as np

    numbers = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    if len(numbers) < _FEW_CLUSTERS:
        return None
    codes = np.array([numbers[name] for name in clusters])
    width = sums.shape[2]
    both = by_cluster(sums.reshape(len(sums), -1), codes, len(numbers))
    drawn = np.concatenate([block @ both for block in Resampler(len(numbers), 2000, options.seed).counts()])
    low, high = percentiles(_divergence(drawn[:, :width], drawn[:, width:]), options.level)
    return Interval(point, low, high, options.level, "bootstrap/cluster")


def _sequence(pools: Sequence[Pool], options: DriftOptions) -> tuple[Shift | None, str]:
    """The distance between versions beyond that within them; needs two runs of each version at a task."""
    import numpy as np

    kept = [pool for pool in pools if min(pool.sizes) > 1]
    if not kept:
        return None, "sequences of calls were not compared: two single runs always differ; run each version twice"
    relabelling = Relabelling(tuple(pool.sizes for pool in kept), options.draws, options.seed)
    total, seen, within, between = np.zeros(relabelling.rows), [], [], []
    for index, pool in enumerate(kept):
        matrix = distances([run.sequence for run in pool.runs])
        total += excess(relabelling.masks(index), matrix)
        seen.append(float(excess(seen_mask(pool.sizes), matrix)[0]))
        a = len(pool.baseline)
        within.append(float(matrix[:a, :a].sum()) / (a * (a - 1)))
        between.append(float(matrix[:a, a:].mean()))
    clusters = [pool.cluster for pool in kept]
    alone = Estimate(sum(seen) / len(seen), None, 0, 1, "none")
    estimate = over_clusters(seen, clusters) if len(set(clusters)) > 1 else alone
    return Shift(
        name="sequence",
        scale="distance",
        baseline=float(np.mean(within)),
        new=float(np.mean(between)),
        point=estimate.point,
        interval=_interval(estimate, options.level, float),
        p=relabelling.p_value(sum(seen), total),
        p_adjusted=1.0,
        smallest_p=relabelling.smallest_p,
        exact=relabelling.exact,
        tasks=len(kept),
        left_out=len(pools) - len(kept),
        tolerance=options.tolerances["sequence"],
        gated="sequence" in options.gated,
        changed=False,
        verdict=None,
        mde=z_total(options.alpha, options.power) * estimate.error if estimate.error else None,
        formula="energy/edit-distance",
    ), ""


def _judged(shifts: Sequence[Shift], options: DriftOptions) -> list[Shift]:
    """Holm over the gated measures, Benjamini and Hochberg over those that are only shown; then verdicts."""
    adjusted: dict[str, float] = {}
    for gated, adjust in ((True, holm), (False, benjamini_hochberg)):
        group = [shift for shift in shifts if shift.gated is gated]
        adjusted |= dict(zip((shift.name for shift in group), adjust([s.p for s in group]), strict=True))
    found = []
    for shift in shifts:
        p = adjusted[shift.name]
        verdict, reason = _verdict(shift, p, options.alpha)
        found.append(replace(shift, p_adjusted=p, changed=p <= options.alpha,
                             verdict=verdict if shift.gated else None, reason=reason))  # fmt: skip
    return found


def _verdict(shift: Shift, p: float, alpha: float) -> tuple[Verdict, str]:
    """Fail: a change is shown and it is beyond the tolerance. Pass: the interval lies within it, and this many runs
    could have shown a change. Else it is not known."""
    within = shift.tolerance.holds
    if p <= alpha and not within(shift.point):
        return "fail", "a change beyond the tolerance"
    if shift.smallest_p > alpha:
        return "inconclusive", f"so few runs can show nothing (the least p is {shift.smallest_p:.3g})"
    if shift.interval is None:
        return "inconclusive", "no interval: too few tasks, or single runs at one task"
    if within(shift.interval.low) and within(shift.interval.high):
        return "pass", "within the tolerance"
    return "inconclusive", "neither within the tolerance for sure nor shown to be beyond it"
