"""The mean of a suite when tasks are repeated and come in clusters (Miller 2024, arXiv 2411.00640).

Repeats are averaged first. Two errors answer two questions and are both given, by name: how far the mean would move
over other tasks of the same population, and how far if the very same tasks were run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proctor.analysis.proportions import Interval


@dataclass(frozen=True, slots=True)
class SuiteMean:
    """The mean over tasks of each task's mean score, with its errors.

    `population`: over other tasks like these, tasks independent (t with T-1 df); it already contains the noise of
    running. `clustered`: the same with tasks of one cluster moving together (t with C-1 df). `rerun`: the same tasks
    run again, nothing else changed. An interval is None where there is nothing to compute it from (one task, one
    cluster, no task with two attempts); a t interval is not clipped to [0, 1].
    """

    mean: float
    tasks: int
    trials: int
    clusters: int
    population_error: float | None
    population: Interval | None
    cluster_error: float | None
    cluster_df: int
    clustered: Interval | None
    rerun_error: float | None
    rerun: Interval | None
    deff: float | None
    """Design effect: how much larger the variance is than if tasks were independent; T / deff tasks' worth of news."""
    icc: float | None
    """ICC(1,1): the share of the variance of a single trial's score that lies between tasks."""
    icc_mean: float | None
    """ICC(1,K): the same for the mean of a task's attempts."""
    notes: tuple[str, ...] = ()
