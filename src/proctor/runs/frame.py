"""Records of runs, or Parquet files of the same columns, as one trials frame (`proctor.analysis.frame.TRIALS`).

The ledger decides which trials there are and what became of them: a trial whose record is gone keeps the outcome that
the ledger gives it, so that nobody leaves a denominator by deleting a directory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.analysis.frame import TRIALS, schema
from proctor.analysis.provenance import Input
from proctor.common import ConfigError, canonical_json, digest_file
from proctor.runs.formats import RunLock, Stage, TrialResult, UsageTotals, load
from proctor.runs.ledger import Ledger, LedgerError, read_ledger, verify_ledger
from proctor.runs.outcome import Outcome
from proctor.runs.vouching import is_vouched, lock_damage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import polars as pl

    from proctor.runs.formats import AgentLock, TaskLock

_CHUNK = 5000
_MARK = {"proctor.trials": "1"}
"""Version of the columns, in the metadata of a Parquet file that we write."""
_NOTHING = UsageTotals(prompt_tokens=0, cached_tokens=0, completion_tokens=0, reasoning_tokens=0, cost_usd=0.0)


@dataclass(frozen=True, slots=True)
class LoadedTrials:
    """Trials with where they came from. `trials` is lazy: Parquet is read only as far as it is used."""

    trials: pl.LazyFrame
    inputs: tuple[Input, ...]


def load_trials(paths: Iterable[Path]) -> LoadedTrials:
    """Run directories and Parquet files, mixed as you like. Raises ConfigError naming what is wrong with which."""
    import polars as pl

    frames: list[pl.LazyFrame] = []
    inputs: list[Input] = []
    for path in paths:
        frame, found = _parquet(path) if path.is_file() else _run(path)
        frames.append(frame)
        inputs.append(found)
    if not frames:
        raise ConfigError("no runs are given", field="RUN", remedy="give run directories or Parquet files")
    return LoadedTrials(frames[0] if len(frames) == 1 else pl.concat(frames), tuple(inputs))


def save_trials(trials: pl.DataFrame | pl.LazyFrame, path: Path) -> None:
    """Write a trials frame as Parquet, streaming. `record` is left out: the file may travel, the records do not."""
    import polars as pl

    frame = trials.lazy().select(list(TRIALS))
    frame.with_columns(pl.lit(None, pl.String).alias("record")).sink_parquet(path, mkdir=True, metadata=_MARK)


def _parquet(path: Path) -> tuple[pl.LazyFrame, Input]:
    import polars as pl

    try:
        frame = pl.scan_parquet(path)
        version = pl.read_parquet_metadata(path).get("proctor.trials", "1")
        columns = frame.collect_schema()
        rows = int(frame.select(pl.len()).collect().item())
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ConfigError(f"not a Parquet file: {str(error).splitlines()[0]}", field=str(path)) from error
    if version != _MARK["proctor.trials"]:
        raise ConfigError(f"a trials frame of version {version}; this Proctor reads version 1", field=str(path))
    lacking, unknown = TRIALS.keys() - columns.keys(), columns.keys() - TRIALS.keys()
    if lacking or unknown:
        what = [f"lacks {', '.join(sorted(lacking))}"] if lacking else []
        what += [f"has unknown columns {', '.join(sorted(unknown))}"] if unknown else []
        raise ConfigError(f"not a trials frame: it {' and '.join(what)}", field=str(path))
    wanted = schema()
    for name, kind in wanted.items():
        if columns[name] not in (kind, pl.Null) and not (columns[name].is_numeric() and kind.is_numeric()):
            raise ConfigError(f"column {name} is {columns[name]}, not {kind}", field=str(path))
    casts = [pl.col(name).cast(kind) for name, kind in wanted.items() if columns[name] != kind]
    frame = frame.select(list(TRIALS)).with_columns(*casts, pl.lit(None, pl.String).alias("record"))
    return frame, Input("parquet", path.name, str(path), digest_file(path), rows)


def _run(directory: Path) -> tuple[pl.LazyFrame, Input]:
    import polars as pl

    if not directory.is_dir():
        raise ConfigError("there is no such file or directory", field=str(directory), remedy="give a run directory")
    reader = RunReader(directory)
    columns, chunks = schema(), []
    rows: list[dict[str, Any]] = []
    for row in reader.rows():
        rows.append(row)
        if len(rows) == _CHUNK:
            chunks.append(pl.DataFrame(rows, schema=columns))
            rows = []
    chunks.append(pl.DataFrame(rows, schema=columns))
    return pl.concat(chunks).lazy(), reader.source()


class RunReader:
    """The trials of one run directory, one at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.lock = load(RunLock, directory / "run.json")
        self._ledger, self._damage = _ledger(directory)
        self._tasks = {task.name: _task_columns(task) for task in self.lock.tasks}
        self._limits = {task.name: task.limits for task in self.lock.tasks}
        self._changed = {
            (condition.name, name): treated.limits
            for condition in self.lock.conditions
            for name, treated in condition.tasks.items()
        }
        self._agents = {agent.label: _agent_columns(agent) for agent in self.lock.agents}
        self._planned = [row.data for row in self._ledger.of("planned")]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each planned trial, in the order of the plan, then what cannot be run here."""
        ended = {row.data["trial"]: row.data for row in self._ledger.of("ended")}
        without = {row.data["trial"]: str(Outcome.CANCELLED) for row in self._ledger.of("cancelled")}
        without |= {trial: "stopped" for row in self._ledger.of("stopped") for trial in row.data["trials"]}
        for planned in self._planned:
            trial = planned["trial"]
            yield self._row(planned, ended.get(trial), without.get(trial, "planned"))
        yield from self._unrunnable()

    def _unrunnable(self) -> Iterator[dict[str, Any]]:
        """Rows for what the dataset holds and this machine cannot run: the exam is not the smaller for it."""
        for attempt in range(1, self.lock.attempts + 1):
            for task in self.lock.unrunnable:
                for agent in self.lock.agents:
                    yield self._agents[agent.label] | {
                        "run_id": self.lock.run_id,
                        "trial_id": f"unrunnable:{task.name}@{agent.label}@{attempt}",
                        "task": task.name,
                        "cluster": task.name,
                        "attempt": attempt,
                        "condition": self.lock.condition,
                        "outcome": "unrunnable",
                        "detail": task.reason,
                    }

    def source(self) -> Input:
        """The run as an input of numbers; complete once `rows` has been read to its end."""
        directory = self._directory
        return Input(
            kind="run",
            name=self.lock.run_id,
            path=str(directory),
            digest=self._ledger.head.hash,
            trials=len(self._planned),
            lock=digest_file(directory / "run.json"),
            vouched=is_vouched(self._ledger),
            damage=self._damage,
            unrunnable=len(self.lock.unrunnable),
        )

    def _row(self, planned: Mapping[str, Any], ended: Mapping[str, Any] | None, otherwise: str) -> dict[str, Any]:
        task, agent, trial = planned["task"], planned["agent"], planned["trial"]
        try:
            row = {**self._tasks[task], **self._agents[agent]}
        except KeyError as error:
            raise ConfigError(f"the ledger plans a trial of {error}, which the lock does not know",
                              field=str(self._directory / "run.json")) from error  # fmt: skip
        row |= {
            "run_id": self.lock.run_id,
            "trial_id": trial,
            "attempt": planned["attempt"],
            "condition": planned.get("condition", self.lock.condition),
        }
        if changed := self._changed.get((row["condition"], task)):
            row["limits"] = canonical_json({**self._limits[task], **changed}).decode()
        folder = self._directory / "trials" / trial
        if (folder / "result.json").exists():
            return row | self._observed(folder, ended)
        if ended is not None:
            outcome = Outcome(ended["outcome"])
            if outcome is not Outcome.INFRA_ERROR:  # a crash may have come between its removal and its replacement
                self._damaged(f"the record of {trial}, which ended as {outcome}, is missing")
            score = float(outcome is Outcome.RESOLVED) if outcome.is_graded else None
            return row | {"outcome": str(outcome), "stop": ended["stop"], "score": score, "detail": "no record"}
        return row | {"outcome": otherwise}

    def _observed(self, folder: Path, ended: Mapping[str, Any] | None) -> dict[str, Any]:
        result = load(TrialResult, folder / "result.json")
        if ended is not None and ended["outcome"] not in (Outcome.INFRA_ERROR, result.outcome):
            self._damaged(f"{result.trial_id} is {ended['outcome']} in the ledger and {result.outcome} in its record")
        columns = {
            "outcome": str(result.outcome),
            "detail": result.detail,
            "stop": result.stop,
            "score": score(result),
            "returned_models": result.returned_models,
            "record": str(folder),
        }
        # Predictions were made elsewhere: what they took is not known.
        return columns if self.lock.mode == "predictions" else columns | _spent(result, folder)

    def _damaged(self, what: str) -> None:
        self._damage = self._damage or what


def score(result: TrialResult) -> float | None:
    """The score of a trial in [0, 1]: the reward named `reward`, cut to that range, else resolved or not.

    None when the outcome is not graded; 0 when a limit fired or the trial was disqualified, whatever the reward.
    """
    if not result.outcome.is_graded:
        return None
    if result.outcome in (Outcome.AGENT_LIMIT, Outcome.DISQUALIFIED):
        return 0.0
    return min(1.0, max(0.0, result.rewards.get("reward", float(result.outcome is Outcome.RESOLVED))))


def _ledger(directory: Path) -> tuple[Ledger, str | None]:
    try:
        ledger = verify_ledger(directory)
        return ledger, lock_damage(directory, ledger)
    except LedgerError as error:
        damage = error.line()
    try:
        return read_ledger(directory), damage
    except LedgerError as error:
        raise ConfigError(f"the ledger cannot be read: {error.line()}", field=str(directory),
                          remedy="numbers are made only from a whole chain") from error  # fmt: skip


def _task_columns(task: TaskLock) -> dict[str, Any]:
    return {
        "task": task.name,
        "task_digest": task.digest,
        "image_digest": task.image_digest,
        "split": task.split,
        "weight": task.weight,
        "difficulty": task.difficulty,
        "domain": task.domain,
        "capabilities": task.capabilities,
        "cluster": task.cluster or task.name,
        "limits": canonical_json(task.limits).decode(),
    }


def _agent_columns(agent: AgentLock) -> dict[str, Any]:
    return {
        "agent": agent.label,
        "harness": agent.harness.name,
        "harness_version": agent.harness.version,
        "model": agent.model.name if agent.model else None,
    }


def _spent(result: TrialResult, folder: Path) -> dict[str, Any]:
    """What the trial used. No call of a model is a known zero; wall time is that of the stage `execution`."""
    usage = result.usage if result.usage.model_calls else _NOTHING
    wall = [stage.duration_s for stage in result.stages if stage.stage is Stage.EXECUTION]
    return {
        "steps": result.steps,
        "tool_calls": result.tool_calls,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "cost_usd": usage.cost_usd,
        "wall_s": wall[0] if wall else None,
        "cpu_s": _cpu_s(folder / "receipt.json"),
    }


def _cpu_s(receipt: Path) -> float | None:
    """CPU seconds of the agent's sandbox. Read without validation: it is one number of a large file."""
    try:
        agent = json.loads(receipt.read_bytes())["agent"]
        return float(agent["peaks"]["cpu_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
