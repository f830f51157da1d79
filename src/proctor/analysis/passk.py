"""pass@k (at least one of k attempts succeeds) and pass^k (all k do): unbiased, never beyond the attempts made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proctor.analysis.proportions import Interval


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Both measures at one k, averaged over the `tasks` that have at least k graded attempts.

    `left_out` counts the tasks that have fewer.
    """

    k: int
    tasks: int
    left_out: int
    pass_at: Interval
    pass_hat: Interval


@dataclass(frozen=True, slots=True)
class Curve:
    """Points for k = 1, 2, … as far as the attempts carry; `ends` says why it does not go on."""

    points: tuple[CurvePoint, ...]
    ends: str
