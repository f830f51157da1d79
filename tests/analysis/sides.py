"""Small trials frames made by hand, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from proctor.analysis.frame import TRIALS, schema

if TYPE_CHECKING:
    import polars as pl

Scores = Mapping[str, Sequence[float | str | None]]


def make_trials(
    agent: str, scores: Scores, *, clusters: Mapping[str, str] | None = None, **columns: Any
) -> pl.DataFrame:
    """A frame with a trial for each score of each task. A text instead of a score is an outcome without one."""
    import polars as pl

    rows = []
    for task, attempts in scores.items():
        for attempt, value in enumerate(attempts, 1):
            row: dict[str, Any] = dict.fromkeys(TRIALS)
            score = value if isinstance(value, (int, float)) else None
            outcome = value if isinstance(value, str) else "resolved" if value == 1 else "unresolved"
            row |= {
                "run_id": "run-1",
                "trial_id": f"{task}@{agent}@{attempt}",
                "task": task,
                "task_digest": f"sha256:{task}",
                "image_digest": "sha256:image",
                "agent": agent,
                "harness": agent,
                "harness_version": "1",
                "returned_models": [],
                "attempt": attempt,
                "outcome": outcome,
                "score": None if score is None else float(score),
                "split": "public",
                "weight": 1.0,
                "capabilities": [],
                "cluster": (clusters or {}).get(task, task),
                "condition": "plain",
                "limits": '{"total_s":180}',
            }
            rows.append(row | columns)
    return pl.DataFrame(rows, schema=schema())


def single(agent: str, passed: str, **columns: Any) -> pl.DataFrame:
    """One attempt at each task: `+` passed, `-` not, `!` infrastructure, `s` stopped, `u` cannot be run here."""
    marks: dict[str, float | str] = {"+": 1.0, "-": 0.0, "!": "infra_error", "s": "stopped", "u": "unrunnable"}
    return make_trials(agent, {f"task-{i:03}": [marks[mark]] for i, mark in enumerate(passed)}, **columns)
