"""Millions of trials from Parquet to every number of `proctor.analysis.aggregate`: seconds and peak memory.

    scripts/bench aggregate [--trials N] [--agents N] [--tasks N] [--clusters N] [--file PATH] [--json]

The trials are made up, in the columns and with the variety of real ones; making them is not measured. Loading and
aggregating run in a process of their own, whose peak is that of the resident set. `cpu_s` is what the process used on
all cores; on a busy machine the wall time is longer than on an idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S, LIMIT_MB = 30.0, 4096.0


def make(path: Path, trials: int, agents: int, tasks: int, clusters: int) -> None:
    """Write a Parquet file of made-up trials, in the order a run has them: attempt, task, agent."""
    import numpy as np
    import polars as pl

    from proctor.analysis.frame import schema

    random = np.random.default_rng(1)
    attempts = -(-trials // (agents * tasks))
    skill, hard = random.normal(0, 0.7, agents), random.normal(0, 1.5, tasks)
    digests = [f"sha256:{number:064x}" for number in range(tasks)]
    facts = pl.DataFrame(
        {
            "task": [f"bench/repository-{number % clusters}/issue-{number}" for number in range(tasks)],
            "task_digest": digests,
            "image_digest": digests,
            "split": random.choice(["public", "held_out"], tasks, p=[0.7, 0.3]),
            "weight": random.choice([0.5, 1.0, 2.0], tasks),
            "difficulty": random.choice(["easy", "medium", "hard"], tasks),
            "domain": random.choice(["web", "data", "systems", "files", "games"], tasks),
            "capabilities": [["coding", "shell"] if number % 3 else ["coding"] for number in range(tasks)],
            "cluster": [f"repository-{number % clusters}" for number in range(tasks)],
        }
    ).with_row_index("at_task")
    import pyarrow.parquet as parquet

    writer = None
    for attempt in range(1, attempts + 1):
        rows = tasks * agents
        at_task, at_agent = np.repeat(np.arange(tasks), agents), np.tile(np.arange(agents), tasks)
        won = random.random(rows) < 1 / (1 + np.exp(hard[at_task] - skill[at_agent]))
        odd = random.random(rows)
        outcome = np.where(won, "resolved", "unresolved")
        outcome = np.where(odd < 0.02, "infra_error", np.where(odd > 0.97, "agent_limit", outcome))
        tokens = random.lognormal(10, 1, rows).astype(np.int64)
        frame = pl.DataFrame({"at_task": at_task.astype(np.uint32), "at_agent": at_agent, "outcome": outcome})
        frame = frame.join(facts, on="at_task", how="left", maintain_order="left").with_columns(
            pl.lit("run-of-the-bench").alias("run_id"),
            pl.format("{}@agent-{}@{}", "task", "at_agent", pl.lit(attempt))
            .str.replace_all("/", "-")
            .alias("trial_id"),
            pl.format("agent-{}", "at_agent").alias("agent"),
            pl.lit("tool-loop").alias("harness"),
            pl.lit("1").alias("harness_version"),
            pl.format("model-{}", "at_agent").alias("model"),
            pl.concat_list(pl.format("model-{}-2026", "at_agent")).alias("returned_models"),
            pl.lit(attempt).alias("attempt"),
            pl.lit("").alias("detail"),
            pl.lit("finished").alias("stop"),
            pl.when(pl.col("outcome") != "infra_error")
            .then((pl.col("outcome") == "resolved").cast(pl.Float64))
            .alias("score"),
            pl.when(pl.lit(attempt % 10 == 0)).then(pl.lit("noisy")).otherwise(pl.lit("plain")).alias("condition"),
            pl.lit('{"cost_usd":null,"steps":30,"tokens":null,"tool_call_s":20,"total_s":180}').alias("limits"),
            pl.Series("steps", random.integers(2, 60, rows)),
            pl.Series("tool_calls", random.integers(1, 60, rows)),
            pl.Series("prompt_tokens", tokens),
            pl.Series("cached_tokens", tokens // 2),
            pl.Series("completion_tokens", tokens // 10),
            pl.Series("cost_usd", tokens * 3e-6),
            pl.Series("wall_s", random.lognormal(4, 1, rows)),
            pl.Series("cpu_s", random.lognormal(1, 1, rows)),
            pl.lit(None).alias("record"),
        )
        table = frame.select([pl.col(name).cast(kind) for name, kind in schema().items()]).head(trials).to_arrow()
        trials -= len(table)
        writer = writer or parquet.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    if writer:
        writer.close()


def measure(path: Path) -> dict[str, Any]:
    """Load and aggregate the file; seconds of each part and the peak resident set in MB."""
    start = time.monotonic()
    from proctor.analysis.aggregate import aggregate, as_json
    from proctor.runs.frame import load_trials

    loaded = load_trials([path])
    read = time.monotonic()
    result = aggregate(loaded.trials, inputs=loaded.inputs)
    done = time.monotonic()
    text = json.dumps(as_json(result))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "trials": result.planned,
        "graded": result.graded,
        "agents": len(result.summaries),
        "tasks": result.tasks,
        "file_mb": round(path.stat().st_size / 1e6, 1),
        "open_and_digest_s": round(read - start, 2),
        "aggregate_s": round(done - read, 2),
        "total_s": round(done - start, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss / 1024, 1),
        "json_kb": round(len(text) / 1e3, 1),
        "cpus": len(os.sched_getaffinity(0)),
    }


def main() -> None:
    """Make the file, measure in a child, print, and fail when a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3_000_000)
    parser.add_argument("--agents", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--clusters", type=int, default=400)
    parser.add_argument("--file", type=Path, help="use this file; make it when it is not there")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "trials.parquet"
        if not path.exists():
            print(f"making {options.trials:,} trials …", file=sys.stderr)
            make(path, options.trials, options.agents, options.tasks, options.clusters)
        child = [sys.executable, __file__, "--measure", str(path)]
        found = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{name:20} {value:>12,}")
    if found["total_s"] > LIMIT_S or found["peak_mb"] > LIMIT_MB:
        sys.exit(f"above the limits: {LIMIT_S:g} s and {LIMIT_MB:g} MB")


if __name__ == "__main__":
    main()
