"""Public against held-out tasks: a gap may mean that the public ones were seen before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.analysis.rates import difference, rate_interval

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from proctor.analysis.means import Codes, Floats
    from proctor.analysis.proportions import Interval

PUBLIC = "public"
HIDDEN = ("held_out", "private")
"""Splits whose tasks nobody outside has seen; together they are the held-out side."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Success on public minus success on held-out tasks, with its interval.

    `alarm` fires by `rule`; then the held-out rate is the agent's headline.
    `adjusted` is the same gap with public tasks weighted to the difficulties of the held-out ones (None when
    difficulties are not known or do not overlap): a gap that goes away there may be one of difficulty.
    """

    public_tasks: int
    held_out_tasks: int
    public: Interval
    held_out: Interval
    gap: Interval
    adjusted: Interval | None
    alarm: bool
    rule: str
    notes: tuple[str, ...] = ()


def split_gap(
    means: Floats,
    clusters: Codes,
    hidden: NDArray[np.bool_],
    difficulty: Codes | None = None,
    *,
    level: float = 0.95,
    margin: float = 0.0,
    agents: int = 1,
) -> Gap | None:
    """The gap of one agent; None when one of the sides has no graded task.

    `hidden` says which tasks are held out; `difficulty` are codes, negative where it is not known. An alarm is a claim,
    so that it goes by the exact form of the intervals (Clopper and Pearson's) and holds its error rate over all
    `agents` (Bonferroni): it fires when the interval at level 1 - (1 - level) / agents lies above `margin`.
    """
    if not hidden.any() or hidden.all():
        return None

    def sides(confidence: float, *, exact: bool = False) -> tuple[Interval, Interval]:
        public, held_out = (
            rate_interval(means[side], clusters[side], level=confidence, exact=exact) for side in (~hidden, hidden)
        )
        return public, held_out

    shared = 1 - (1 - level) / agents
    public, held_out = sides(level)
    strict = difference(*sides(shared, exact=True))
    adjusted, notes = _adjusted(means, clusters, hidden, difficulty, level)
    share = f" ({level * 100:g} % shared by {agents} agents)" if agents > 1 else ""
    return Gap(
        public_tasks=int((~hidden).sum()),
        held_out_tasks=int(hidden.sum()),
        public=public,
        held_out=held_out,
        gap=difference(public, held_out),
        adjusted=adjusted,
        alarm=strict.low > margin,
        rule=f"alarm when the low end of the gap's exact {shared * 100:.4g} % interval{share} is above "
        f"{margin * 100:g} points; here it is {strict.low * 100:.1f}",
        notes=tuple(notes),
    )


def _adjusted(
    means: Floats, clusters: Codes, hidden: NDArray[np.bool_], difficulty: Codes | None, level: float
) -> tuple[Interval | None, list[str]]:
    """The gap by direct standardisation: within difficulties that both sides have, public tasks weigh as held-out
    ones."""
    import numpy as np

    if difficulty is None or (difficulty < 0).all():
        return None, ["difficulties are not known: the gap may be one of difficulty"]
    strata = np.intersect1d(difficulty[hidden], difficulty[~hidden])
    strata = strata[strata >= 0]
    if not len(strata):
        return None, ["no difficulty has both public and held-out tasks: the gap may be one of difficulty"]
    inside = np.isin(difficulty, strata)
    notes = []
    if left_out := int((~inside).sum()):
        notes.append(f"tasks left out of the adjusted gap (difficulty unknown, or on one side only): {left_out}")
    weights = np.zeros(len(means))
    for stratum in strata:
        here = difficulty == stratum
        weights[here & ~hidden] = (here & hidden).sum() / (here & ~hidden).sum()
    public, held_out = inside & ~hidden, inside & hidden
    one = rate_interval(means[public], clusters[public], weights[public], level=level)
    other = rate_interval(means[held_out], clusters[held_out], level=level)
    return difference(one, other, formula="newcombe/standardised"), notes
