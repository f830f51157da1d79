"""`proctor show`: tables with denominators, a story that cannot harm the reader's terminal, JSON for machines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.conftest import DeskExaminer, make_plan

from proctor.agents.contract import AgentResult, StopReason
from proctor.cli.main import main
from proctor.common import InfraError
from proctor.runs.engine import execute
from proctor.runs.lock import make_lock, write_lock
from proctor.runs.outcome import Outcome
from proctor.runs.summary import read_run, summarise, wilson
from proctor.runs.table import MOST_MARKS, weighted
from proctor.runs.text import duration, safe, shorten
from proctor.tasks.model import Unrunnable

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.runs.plan import TrialPlan

pytestmark = pytest.mark.anyio


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
    plan = make_plan(4)
    write_lock(run_dir, make_lock(plan, {}))
    await execute(plan, run_dir, desk, concurrency=2, backoff=lambda tries, jitter: 0.0)
    return run_dir


def show(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["show", *arguments]) == code
    return capsys.readouterr().out


async def test_every_rate_has_its_denominators(finished: Path) -> None:
    view = read_run(finished)
    solver, idler = summarise(view.trials, ["solver", "idler"])
    assert (solver.planned, solver.graded, solver.resolved) == (4, 3, 2)
    assert solver.excluded == {"infra_error": 1}
    assert solver.outcomes == {"agent_limit": 1, "infra_error": 1, "resolved": 2}
    assert (solver.worst, solver.best) == (0.5, 0.75)
    assert (solver.low, solver.high) == wilson(2, 3)
    assert (idler.planned, idler.graded, idler.resolved, idler.excluded) == (4, 4, 0, {})


async def test_the_table_prints_them(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, str(finished))
    assert "1 infra_error" in text
    assert "1 of 4 planned trials are excluded" in text
    assert "the node is gone" in text
    assert "chain whole" in text
    line = next(line for line in text.splitlines() if line.startswith("solver"))
    assert line.split()[1:4] == ["4", "3", "2"]


async def test_many_attempts_are_counted_not_drawn(
    run_dir: Path, desk: DeskExaminer, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(1, attempts=MOST_MARKS + 1)
    write_lock(run_dir, make_lock(plan, {}))
    await execute(plan, run_dir, desk, concurrency=4)
    line = next(line for line in show(capsys, str(run_dir)).splitlines() if line.startswith("task-0"))
    assert line.split() == ["task-0", "✓13", "✗13"]


async def test_a_trial_is_told_by_a_part_of_its_id(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, str(finished), "task-0@solver")
    assert "task-0@solver@1: resolved" in text
    assert "wrote the answer" in text
    assert "grade: resolved" in text
    assert "stopped: finished" in text


async def test_json_has_both(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(show(capsys, str(finished), "--json"))
    assert whole["ledger"]["ok"]
    assert [row["graded"] for row in whole["agents"]] == [3, 4]
    assert len(whole["trials"]) == 8
    one = json.loads(show(capsys, str(finished), "task-2@solver@1", "--json"))
    assert one["result"]["outcome"] == "agent_limit"
    assert one["grade"]["verdict"] == "resolved"
    assert one["intact"] is True


async def test_a_changed_record_is_reported(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "trials" / "task-0@idler@1" / "grade.json"
    path.write_text(path.read_text().replace('"unresolved"', '"resolved"'))
    assert "CHANGED since it was committed" in show(capsys, str(finished), "task-0@idler", code=1)


async def test_a_changed_outcome_is_reported_in_the_table(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "trials" / "task-0@idler@1" / "result.json"
    path.write_text(path.read_text().replace('"outcome": "unresolved"', '"outcome": "resolved"'))
    text = show(capsys, str(finished), code=1)
    assert "DAMAGED: trial task-0@idler@1 ended as unresolved, but its record says resolved" in text


async def test_a_changed_ledger_is_reported(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b"the node is gone", b"the node is fine"))
    assert "DAMAGED: ledger.jsonl:" in show(capsys, str(finished), code=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["task"], "fits 8 trials"),
        (["nothing"], "no trial is called"),
    ],
)
async def test_an_unclear_trial_is_bad_input(
    finished: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(finished), *arguments]) == 4
    assert words in capsys.readouterr().err


def test_what_is_no_run_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 4
    assert "is this a run directory?" in capsys.readouterr().err


async def test_repeats_are_averaged_by_task_first(run_dir: Path, desk: DeskExaminer) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        limit = trial.attempt == 2 and trial.task.name == "task-0"
        return AgentResult(StopReason.LIMIT_TIME) if limit else None

    desk.act = act
    plan = make_plan(2, ("solver",), attempts=2)
    write_lock(run_dir, make_lock(plan, {}))
    await execute(plan, run_dir, desk, concurrency=2)
    (row,) = summarise(read_run(run_dir).trials, ["solver"])
    assert (row.graded, row.resolved, row.tasks, row.rate) == (4, 3, 2, 0.75)
    assert (row.low, row.high) == wilson(1.5, 2)


async def test_weights_of_the_dataset_are_shown_beside(run_dir: Path, desk: DeskExaminer) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        return AgentResult(StopReason.LIMIT_TIME) if trial.task.name == "task-0" else None

    desk.act = act
    plan = make_plan(2, ("solver",))
    entries = (replace(plan.entries[0], weight=3.0), plan.entries[1])
    write_lock(run_dir, make_lock(replace(plan, entries=entries), {}))
    await execute(plan, run_dir, desk, concurrency=1)
    assert weighted(read_run(run_dir)) == ["solver: 25.0 % by the dataset's weights"]
    write_lock(run_dir, make_lock(plan, {}))
    assert weighted(read_run(run_dir)) == []


async def test_what_was_not_run_is_excluded_by_name(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan(2, ("solver",))
    write_lock(run_dir, make_lock(plan, {}))
    await execute(plan, run_dir, desk, concurrency=1)
    for name in ("trials/task-1@solver@1/result.json",):
        (run_dir / name).unlink()
    (row,) = summarise(read_run(run_dir).trials, ["solver"])
    assert (row.planned, row.graded, row.excluded) == (2, 1, {"not_run": 1})


async def test_what_cannot_be_run_here_stays_in_the_count(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan(2, ("solver",), attempts=2, unrunnable=(Unrunnable("gpu-task", "needs a GPU"),))
    write_lock(run_dir, make_lock(plan, {}))
    await execute(plan, run_dir, desk, concurrency=1)
    view = read_run(run_dir)
    (row,) = view.rows()
    assert (row.planned, row.graded, row.excluded, row.worst) == (6, 4, {"unrunnable": 2}, 4 / 6)
    assert [dict(row.data) for row in view.ledger.of("unrunnable")] == [{"task": "gpu-task", "reason": "needs a GPU"}]


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.277533),
        (5, 10, 0.236593, 0.763407),
        (3, 10, 0.107791, 0.603222),
        (10, 10, 0.722467, 1.0),
        (17, 20, 0.639581, 0.947631),
        (42, 100, 0.327984, 0.517935),
    ],
)
def test_wilson_against_known_values(k: int, n: int, low: float, high: float) -> None:
    assert wilson(k, n) == pytest.approx((low, high), abs=1e-6)


@given(st.integers(1, 5000), st.floats(0, 1))
def test_wilson_holds_the_rate_and_stays_in_range(n: int, p: float) -> None:
    low, high = wilson(p * n, n)
    assert 0 <= low <= p + 1e-9
    assert p - 1e-9 <= high <= 1


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_that_is_shown_can_move_the_cursor(text: str) -> None:
    for line in shorten(text):
        assert not any(
            (char < " " and char != "\t") or "\x7f" <= char <= "\x9f" or char in "\u202e\u2066" for char in line
        )
        line.encode()


def test_foreign_text_is_shortened() -> None:
    assert "left out" in safe("x" * 10_000)
    assert len(shorten("\n".join(map(str, range(1000))))) == 19


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12ms"), (2.54, "2.5s"), (75, "1m15s"), (3 * 3600 + 62, "3h01m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_outcomes_are_the_closed_list() -> None:
    graded = {"resolved", "unresolved", "agent_limit", "disqualified"}
    assert {str(outcome) for outcome in Outcome if outcome.is_graded} == graded
    assert {str(outcome) for outcome in Outcome} - graded == {"infra_error", "verifier_error", "cancelled"}
