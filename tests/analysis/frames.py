"""Small trials frames for tests."""

from __future__ import annotations

from typing import Any

import polars as pl

from proctor.analysis.frame import schema


def trial(task: str, outcome: str = "resolved", *, agent: str = "a", attempt: int = 1, **more: Any) -> dict[str, Any]:
    """One row. The score follows from the outcome unless it is given."""
    score = {"resolved": 1.0, "unresolved": 0.0, "agent_limit": 0.0, "disqualified": 0.0}.get(outcome)
    condition = more.get("condition", "plain")
    return {
        "run_id": "run",
        "trial_id": f"{task}@{agent}@{attempt}@{condition}",
        "task": task,
        "task_digest": f"sha256:{task}",
        "agent": agent,
        "harness": "h",
        "harness_version": "1",
        "attempt": attempt,
        "outcome": outcome,
        "score": score,
        "split": "public",
        "weight": 1.0,
        "capabilities": [],
        "cluster": task,
        "condition": "plain",
        **more,
    }


def frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows as a trials frame; what they do not say is null."""
    return pl.DataFrame(rows, schema=schema())
