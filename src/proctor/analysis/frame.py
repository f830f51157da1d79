"""The one table that every statistic is computed from: a row for each planned trial.

A *trials frame* is a polars DataFrame with exactly the columns of `TRIALS`. It is read from the records of runs
(`proctor.runs.frame`), or from a Parquet file of the same columns. Unknown is null, never zero. A trial that has
no verdict (infrastructure, verifier error, cancelled, never started) keeps its row, with a null score and its
outcome, so that denominators can always be printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

TRIALS: dict[str, str] = {
    "run_id": "String",
    "trial_id": "String",
    "task": "String",
    "task_digest": "String",  # null for what is unrunnable
    "image_digest": "String",
    "agent": "String",  # the label under which it was run
    "harness": "String",
    "harness_version": "String",
    "model": "String",  # requested id; null for a harness without a model
    "returned_models": "List(String)",
    "attempt": "Int32",
    "outcome": "String",  # one of OUTCOMES
    "detail": "String",
    "stop": "String",
    "score": "Float64",  # in [0, 1]; null when there is no verdict; agent_limit and disqualified score 0
    "split": "String",
    "weight": "Float64",
    "difficulty": "String",
    "domain": "String",
    "capabilities": "List(String)",
    "cluster": "String",  # tasks of one repository or template share it; the task itself by default
    "condition": "String",  # `plain`, or the name of the perturbation, fault profile or ablation it ran under
    "limits": "String",  # canonical JSON
    "steps": "Int32",
    "tool_calls": "Int32",
    "prompt_tokens": "Int64",
    "cached_tokens": "Int64",
    "completion_tokens": "Int64",
    "cost_usd": "Float64",
    "wall_s": "Float64",
    "cpu_s": "Float64",
    "record": "String",  # directory of the trial's record, for evidence; null when read from Parquet
}

OUTCOMES = (
    "resolved",
    "unresolved",
    "agent_limit",
    "disqualified",
    "infra_error",
    "verifier_error",
    "cancelled",
    "stopped",
    "planned",
    "unrunnable",
)
"""Every value of `outcome`: the closed list of DESIGN.md, and three for trials that have none of them. `stopped`: a
stopping rule left it out; `planned`: it was not run (yet); `unrunnable`: the dataset holds the task, but it cannot be
run where the run was: it stays in the count, with its reason in `detail`."""

GRADED = ("resolved", "unresolved", "agent_limit", "disqualified")
"""Outcomes that count in a denominator. The others are excluded, with their reason, and shown."""

PLAIN = "plain"
"""The condition of a trial that nothing was done to."""


def under(agent: str, condition: str) -> str:
    """An agent as it is shown beside itself: with the condition that it ran under, if that is not plain."""
    return agent if condition == PLAIN else f"{agent}, {condition}"


def schema() -> pl.Schema:
    """`TRIALS` as a polars schema (imported lazily: polars is an extra)."""
    import polars as pl

    types = {
        "String": pl.String(),
        "Int32": pl.Int32(),
        "Int64": pl.Int64(),
        "Float64": pl.Float64(),
        "List(String)": pl.List(pl.String()),
    }
    return pl.Schema({name: types[kind] for name, kind in TRIALS.items()})
