"""Public against held-out tasks: a gap may mean that the public ones were seen before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
