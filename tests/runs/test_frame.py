"""From run directories and Parquet files to a trials frame: nothing lost, nothing made up, nothing hidden."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from tests.analysis.frames import frame, trial
from tests.runs.conftest import DeskExaminer, make_plan

from proctor.agents.contract import AgentResult, StopReason
from proctor.analysis.aggregate import aggregate, as_json
from proctor.analysis.frame import OUTCOMES, TRIALS, schema
from proctor.analysis.provenance import FORMULAS
from proctor.common import ConfigError, InfraError, digest_file
from proctor.runs.conditions import Condition
from proctor.runs.engine import execute
from proctor.runs.formats import TrialResult, UsageTotals, load
from proctor.runs.frame import load_trials, save_trials, score
from proctor.runs.ledger import LedgerWriter, read_ledger
from proctor.runs.lock import make_lock, write_lock
from proctor.runs.outcome import Outcome
from proctor.runs.summary import read_run, summarise
from proctor.tasks.model import DatasetEntry, Unrunnable

if TYPE_CHECKING:
    from proctor.runs.plan import RunPlan, TrialPlan

pytestmark = pytest.mark.anyio


def detailed_plan() -> RunPlan:
    """Four tasks that say what they are, two attempts."""
    plan = make_plan(
        4, attempts=2, unrunnable=(Unrunnable("gpu-task", "needs a GPU"),), conditions=(Condition("noisy"),)
    )
    entries = [
        DatasetEntry(
            replace(entry.task, difficulty="hard", domain="files", cluster="shared", capabilities=("shell",)),
            split="held_out",
            weight=2.0,
        )
        for entry in plan.entries[:1]
    ]
    return replace(plan, entries=(*entries, *plan.entries[1:]))


@pytest.fixture
async def finished(run_dir: Path, desk: DeskExaminer) -> Path:
    """A run in which something of every kind has happened."""

    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if trial.id == "task-1@solver@1":
            raise InfraError("the node is gone")
        if trial.id == "task-2@solver@1":
            return AgentResult(StopReason.LIMIT_STEPS, "the limit of 30 steps is used up")
        return None

    desk.act = act
    plan = detailed_plan()
    write_lock(run_dir, make_lock(plan, {}))
    await execute(plan, run_dir, desk, concurrency=2, backoff=lambda tries, jitter: 0.0)
    return run_dir


def rows(directory: Path) -> dict[str, dict[str, object]]:
    return {row["trial_id"]: row for row in load_trials([directory]).trials.collect().iter_rows(named=True)}


async def test_every_planned_trial_is_a_row_with_what_lock_and_record_say(finished: Path) -> None:
    found = rows(finished)
    assert len(found) == 2 * 2 * 4 + 2 * 2
    one = found["task-0@solver@1"]
    assert (one["run_id"], one["task"], one["agent"], one["attempt"]) == ("run-test", "task-0", "solver", 1)
    assert (one["difficulty"], one["domain"], one["cluster"]) == ("hard", "files", "shared")
    assert (one["capabilities"], one["split"], one["weight"]) == (["shell"], "held_out", 2.0)
    assert (one["condition"], one["harness"], one["model"]) == ("noisy", "solver", None)
    assert (one["outcome"], one["score"], one["stop"]) == ("resolved", 1.0, "finished")
    assert one["record"] == str(finished / "trials" / "task-0@solver@1")
    assert json.loads(str(one["limits"]))["steps"] == 30
    assert found["task-1@solver@1"]["outcome"] == "infra_error"
    assert found["task-1@solver@1"]["score"] is None
    assert (found["task-2@solver@1"]["outcome"], found["task-2@solver@1"]["score"]) == ("agent_limit", 0.0)
    assert found["task-1@idler@2"]["cluster"] == "task-1", "a task stands alone unless it says otherwise"
    never = found["unrunnable:gpu-task@idler@2"]
    assert (never["outcome"], never["detail"], never["task_digest"]) == ("unrunnable", "needs a GPU", None)


async def test_totals_are_those_of_show(finished: Path) -> None:
    lock = json.loads((finished / "run.json").read_text())
    (finished / "run.json").write_text(json.dumps(lock | {"condition": "plain"}))
    found = aggregate(load_trials([finished]).trials)
    view = read_run(finished)
    for row in summarise(view.trials, ["solver", "idler"], unrunnable=2):
        one = found.of(row.agent)
        assert (one.planned, one.graded, one.resolved) == (row.planned, row.graded, row.resolved)
        assert one.excluded == row.excluded
        assert one.rate is not None
        assert one.rate.point == pytest.approx(row.rate)
        assert one.wilson is not None
        assert (one.wilson.low, one.wilson.high) == (pytest.approx(row.low), pytest.approx(row.high))
        assert (one.worst, one.best) == (pytest.approx(row.worst), pytest.approx(row.best))


async def test_the_source_is_named_by_its_digests(finished: Path) -> None:
    (source,) = load_trials([finished]).inputs
    assert (source.kind, source.name, source.trials, source.unrunnable) == ("run", "run-test", 16, 1)
    assert source.digest == read_ledger(finished).head.hash
    assert source.lock == digest_file(finished / "run.json")
    assert source.damage is None


async def test_a_record_that_was_removed_does_not_leave_the_denominator(finished: Path) -> None:
    folder = finished / "trials" / "task-0@idler@1"
    folder.rename(finished / "hidden")
    one = rows(finished)["task-0@idler@1"]
    assert (one["outcome"], one["score"], one["record"]) == ("unresolved", 0.0, None)
    (source,) = load_trials([finished]).inputs
    assert source.damage == "the record of task-0@idler@1, which ended as unresolved, is missing"


async def test_a_record_that_says_something_else_than_the_ledger_is_damage(finished: Path) -> None:
    path = finished / "trials" / "task-0@idler@1" / "result.json"
    path.write_text(path.read_text().replace('"outcome": "unresolved"', '"outcome": "resolved"'))
    (source,) = load_trials([finished]).inputs
    assert source.damage == "task-0@idler@1 is unresolved in the ledger and resolved in its record"
    assert any("cannot be trusted" in note for note in aggregate(load_trials([finished]).trials, inputs=[source]).notes)


async def test_what_is_not_done_is_planned_or_cancelled(run_dir: Path) -> None:
    plan = make_plan(2, ("solver",))
    write_lock(run_dir, make_lock(plan, {}))
    with LedgerWriter(run_dir) as ledger:
        for one in plan.trials():
            ledger.append("planned", {"trial": one.id, "task": one.task.name, "task_digest": one.task.digest,
                                      "agent": one.agent.label, "attempt": one.attempt, "seed": one.seed})  # fmt: skip
        ledger.append("cancelled", {"trial": "task-1@solver@1", "try": 1})
    assert {name: row["outcome"] for name, row in rows(run_dir).items()} == {
        "task-0@solver@1": "planned",
        "task-1@solver@1": "cancelled",
    }


async def test_a_torn_or_changed_ledger_is_damage_or_refused(finished: Path) -> None:
    path = finished / "ledger.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"torn')
    assert "unfinished" in (load_trials([finished]).inputs[0].damage or "")
    path.write_bytes(whole.replace(b"the node is gone", b"the node is fine"))
    with pytest.raises(ConfigError, match="numbers are made only from a whole chain"):
        load_trials([finished])


async def test_parquet_and_back_gives_the_same_numbers(finished: Path, tmp_path: Path) -> None:
    direct = load_trials([finished]).trials
    save_trials(direct, tmp_path / "out" / "trials.parquet")
    loaded = load_trials([tmp_path / "out" / "trials.parquet"])
    assert loaded.inputs[0].digest == digest_file(tmp_path / "out" / "trials.parquet")
    assert loaded.inputs[0].trials == 20
    assert loaded.trials.collect().equals(direct.with_columns(record=pl.lit(None, pl.String)).collect())
    assert as_json(aggregate(loaded.trials)) == as_json(aggregate(direct))


async def test_runs_and_files_mix_and_the_same_run_twice_is_refused(finished: Path, tmp_path: Path) -> None:
    save_trials(frame([trial("other")]), tmp_path / "other.parquet")
    both = load_trials([finished, tmp_path / "other.parquet"])
    assert [one.kind for one in both.inputs] == ["run", "parquet"]
    assert both.trials.collect().height == 21
    with pytest.raises(ConfigError, match="occurs 2 times"):
        aggregate(load_trials([finished, finished]).trials)


def test_other_number_types_of_other_writers_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "trials.parquet"
    frame([trial("t", steps=3)]).with_columns(
        pl.col("steps").cast(pl.Int64), pl.col("weight").cast(pl.Float32)
    ).write_parquet(path)
    assert load_trials([path]).trials.collect().schema == schema()


def test_what_is_not_a_trials_frame_is_refused_by_name(tmp_path: Path) -> None:
    good = frame([trial("t")])
    good.write_parquet(tmp_path / "later", metadata={"proctor.trials": "2"})
    with pytest.raises(ConfigError, match="a trials frame of version 2"):
        load_trials([tmp_path / "later"])
    for name, bad, words in (
        ("lacks", good.drop("score", "outcome"), "lacks outcome, score"),
        ("more", good.with_columns(pl.lit(1).alias("extra")), "has unknown columns extra"),
        ("type", good.with_columns(pl.lit("high").alias("score")), "column score is String, not Float64"),
    ):
        bad.write_parquet(tmp_path / name)
        with pytest.raises(ConfigError, match=words):
            load_trials([tmp_path / name])
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        load_trials([tmp_path / "text"])
    with pytest.raises(ConfigError, match="there is no such file or directory"):
        load_trials([tmp_path / "absent"])
    with pytest.raises(ConfigError, match="is this a run directory"):
        load_trials([tmp_path])
    with pytest.raises(ConfigError, match="no runs are given"):
        load_trials([])


@pytest.mark.parametrize(
    ("outcome", "rewards", "expected"),
    [
        ("resolved", {}, 1.0),
        ("resolved", {"reward": 3.0}, 1.0),
        ("unresolved", {"reward": 0.4}, 0.4),
        ("unresolved", {"reward": -2.0}, 0.0),
        ("unresolved", {"part": 0.5}, 0.0),
        ("agent_limit", {"reward": 1.0}, 0.0),
        ("disqualified", {"reward": 1.0}, 0.0),
        ("infra_error", {}, None),
        ("verifier_error", {"reward": 0.0}, None),
    ],
)
def test_scores(outcome: str, rewards: dict[str, float], expected: float | None) -> None:
    assert score(result(outcome=Outcome(outcome), rewards=rewards)) == expected


def result(**changes: object) -> TrialResult:
    fields: dict[str, object] = dict(
        run_id="r", trial_id="t@a@1", task="t", task_digest="d", agent="a", attempt=1, seed=1, tries=1,
        outcome=Outcome.RESOLVED, stop="finished", started_at="", ended_at="", duration_s=0.1,
    )  # fmt: skip
    return TrialResult(**(fields | changes))  # type: ignore[arg-type]


async def test_unknown_use_is_null_and_no_use_is_zero(finished: Path) -> None:
    path = finished / "trials" / "task-0@solver@1" / "result.json"
    assert rows(finished)["task-0@solver@1"]["cost_usd"] == 0.0, "there was no call of a model"
    record = load(TrialResult, path)
    used = record.model_copy(update={"usage": UsageTotals(model_calls=2, prompt_tokens=7)})
    path.write_text(used.model_dump_json())
    one = rows(finished)["task-0@solver@1"]
    assert (one["prompt_tokens"], one["completion_tokens"], one["cost_usd"]) == (7, None, None)


def test_the_page_lists_every_column_and_formula() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "design" / "aggregates.md").read_text(encoding="utf-8")
    for name in (*TRIALS, *OUTCOMES, *FORMULAS):
        assert f"`{name}`" in text, name


@pytest.mark.slow
async def test_thousands_of_trials_are_read_in_seconds(run_dir: Path) -> None:
    plan = make_plan(500, ("solver", "idler"), attempts=3)
    write_lock(run_dir, make_lock(plan, {}))
    receipt = json.dumps({"version": 1, "agent": {"peaks": {"cpu_s": 0.25}, "labels": {"x": "y" * 2000}}})
    with LedgerWriter(run_dir) as ledger:
        planned, ended = [], []
        for one in plan.trials():
            facts = {"task": one.task.name, "task_digest": one.task.digest, "agent": one.agent.label}
            planned.append(("planned", {"trial": one.id, **facts, "attempt": one.attempt, "seed": one.seed}))
            ended.append(("ended", {"trial": one.id, "outcome": "resolved", "stop": "finished"}))
            folder = run_dir / "trials" / one.id
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(result(trial_id=one.id, **facts).model_dump_json())
            (folder / "receipt.json").write_text(receipt)
        ledger.extend([*planned, *ended])  # type: ignore[list-item]
    start = time.monotonic()
    loaded = load_trials([run_dir])
    elapsed = time.monotonic() - start
    assert aggregate(loaded.trials).of("solver").resolved == 1500
    assert loaded.trials.select(pl.col("cpu_s").sum()).collect().item() == 750
    assert elapsed < 10, elapsed  # 0.6 s on an idle core
