"""The engine: every planned trial gets exactly one verdict that stands, whatever happens on the way."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.runs.conftest import DeskExaminer, make_plan

from proctor.agents.contract import AgentResult, StopReason
from proctor.common import ConfigError, InfraError, digest_tree
from proctor.runs.engine import Event, execute
from proctor.runs.formats import Stage, TrialResult, load
from proctor.runs.ledger import verify_ledger
from proctor.runs.outcome import Outcome
from proctor.runs.record import RecordError

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.runs.plan import TrialPlan

pytestmark = pytest.mark.anyio


def no_wait(tries: int, jitter: float) -> float:
    return 0.0


def outcomes(run_dir: Path) -> dict[str, str]:
    return {path.parent.name: load(TrialResult, path).outcome for path in run_dir.glob("trials/*/result.json")}


async def test_a_run_is_planned_first_and_every_trial_is_committed(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan()
    execution = await execute(plan, run_dir, desk, concurrency=2)
    assert not execution.interrupted
    assert {id: str(o) for id, o in outcomes(run_dir).items()} == {
        trial.id: "resolved" if trial.agent.label == "solver" else "unresolved" for trial in plan.trials()
    }
    ledger = verify_ledger(run_dir)
    kinds = [row.kind for row in ledger.rows]
    assert kinds[:7] == ["run"] + ["planned"] * 6
    assert kinds[-1] == "finished"
    assert kinds.count("started") == kinds.count("ended") == 6
    for row in ledger.of("ended"):
        assert row.data["record"] == digest_tree(run_dir / "trials" / row.data["trial"])


async def test_the_seven_stages_have_a_time_each(run_dir: Path, desk: DeskExaminer) -> None:
    execution = await execute(make_plan(1, ("solver",)), run_dir, desk, concurrency=1)
    (result,) = execution.results.values()
    assert [time.stage for time in result.stages] == list(Stage)
    assert all(time.ended_at and time.started_at <= time.ended_at for time in result.stages)


async def test_infrastructure_faults_are_retried_and_the_ledger_says_so(run_dir: Path, desk: DeskExaminer) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if tries < 3:
            raise InfraError(f"the node blinked ({tries})")
        return None

    desk.act = act
    execution = await execute(make_plan(1, ("solver",)), run_dir, desk, concurrency=1, backoff=no_wait)
    (result,) = execution.results.values()
    assert (result.outcome, result.tries) == (Outcome.RESOLVED, 3)
    retries = [row.data["reason"] for row in verify_ledger(run_dir).of("retry")]
    assert retries == ["the node blinked (1)", "the node blinked (2)"]


async def test_a_fault_inside_a_group_of_errors_is_still_a_fault(run_dir: Path, desk: DeskExaminer) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if tries == 1:
            raise ExceptionGroup(
                "tasks", [ValueError("a consequence"), ExceptionGroup("more", [InfraError("the cause")])]
            )
        return None

    desk.act = act
    execution = await execute(make_plan(1, ("solver",)), run_dir, desk, concurrency=1, backoff=no_wait)
    (result,) = execution.results.values()
    assert (result.outcome, result.tries) == (Outcome.RESOLVED, 2)


async def test_a_defect_of_ours_is_an_excluded_trial_not_a_zero_and_not_the_end(
    run_dir: Path, desk: DeskExaminer
) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if trial.task.name == "task-0":
            raise KeyError("a defect")
        return None

    desk.act = act
    execution = await execute(make_plan(2, ("solver",)), run_dir, desk, concurrency=1, backoff=no_wait)
    first, second = (execution.results[f"task-{number}@solver@1"] for number in range(2))
    assert (first.outcome, first.stop, first.tries) == (Outcome.INFRA_ERROR, "internal", 1)
    assert second.outcome is Outcome.RESOLVED


async def test_wrong_input_stops_the_run_with_that_error(run_dir: Path, desk: DeskExaminer) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        raise ConfigError("no such script", field="agent.options.script")

    desk.act = act
    with pytest.raises(ConfigError, match="no such script"):
        await execute(make_plan(3, ("solver",)), run_dir, desk, concurrency=2)
    assert outcomes(run_dir) == {}
    assert list((run_dir / "trials").iterdir()) == []


async def test_three_retries_and_then_infra_error_with_its_reason(run_dir: Path, desk: DeskExaminer) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        raise InfraError("the disk of the node is gone")

    desk.act = act
    execution = await execute(make_plan(1, ("solver",)), run_dir, desk, concurrency=1, backoff=no_wait)
    (result,) = execution.results.values()
    assert (result.outcome, result.tries, result.detail) == (Outcome.INFRA_ERROR, 4, "the disk of the node is gone")
    assert result.verdict is None
    (row,) = verify_ledger(run_dir).of("ended")
    assert row.data["reason"] == "the disk of the node is gone"
    assert "InfraError" in (run_dir / "trials" / result.trial_id / "logs" / "error.log").read_text()


async def test_failures_of_the_agent_are_never_retried(run_dir: Path, desk: DeskExaminer) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        return AgentResult(StopReason.ERROR, detail="ValueError: the harness broke")

    desk.act = act
    plan = make_plan(1, ("idler",))
    execution = await execute(plan, run_dir, desk, concurrency=1, backoff=no_wait)
    (result,) = execution.results.values()
    assert (result.outcome, result.tries, result.stop) == (Outcome.UNRESOLVED, 1, "error")


async def test_resume_runs_what_is_not_scored_and_nothing_else(run_dir: Path, desk: DeskExaminer) -> None:
    broken = {"task-1@solver@1"}

    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if trial.id in broken:
            raise InfraError("unlucky")
        return None

    desk.act = act
    plan = make_plan()
    await execute(plan, run_dir, desk, concurrency=2, backoff=no_wait)
    assert outcomes(run_dir)["task-1@solver@1"] == Outcome.INFRA_ERROR
    broken.clear()
    again = DeskExaminer(desk.desk)
    execution = await execute(plan, run_dir, again, concurrency=2, backoff=no_wait)
    assert list(execution.results) == again.graded == ["task-1@solver@1"]
    assert outcomes(run_dir)["task-1@solver@1"] == Outcome.RESOLVED
    assert load(TrialResult, run_dir / "superseded/task-1@solver@1.1/result.json").outcome is Outcome.INFRA_ERROR
    verify_ledger(run_dir)


async def test_a_changed_task_is_refused_on_resume(run_dir: Path, desk: DeskExaminer) -> None:
    await execute(make_plan(2), run_dir, desk, concurrency=2)
    other = make_plan(2, seed=7)
    with pytest.raises(ConfigError, match="not what the ledger planned"):
        await execute(other, run_dir, desk, concurrency=2)


async def test_stop_cancels_what_runs_and_leaves_whole_trials(run_dir: Path, desk: DeskExaminer) -> None:
    stop, reached = anyio.Event(), anyio.Event()

    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if trial.task.name == "task-1":
            reached.set()
            await anyio.sleep_forever()
        return None

    async def stopper() -> None:
        await reached.wait()
        stop.set()

    desk.act = act
    plan = make_plan(3, ("solver",))
    events: list[Event] = []
    async with anyio.create_task_group() as group:
        group.start_soon(stopper)
        execution = await execute(plan, run_dir, desk, concurrency=1, stop=stop, on_event=events.append)
    assert execution.interrupted
    assert set(outcomes(run_dir)) == {"task-0@solver@1"}
    assert [path.name for path in (run_dir / "trials").iterdir()] == ["task-0@solver@1"]
    ledger = verify_ledger(run_dir)
    assert [row.data["trial"] for row in ledger.of("cancelled")] == ["task-1@solver@1"]
    assert ledger.rows[-1].data == {"interrupted": True}
    desk.act = None
    execution = await execute(plan, run_dir, desk, concurrency=1)
    assert set(execution.results) == {"task-1@solver@1", "task-2@solver@1"}


async def test_a_full_disk_is_one_clear_error_and_loses_nothing(
    run_dir: Path, desk: DeskExaminer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(3, ("solver",))

    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if trial.task.name == "task-1":
            raise RecordError("the disk is full: cannot write x") from OSError(errno.ENOSPC, "No space left")
        return None

    desk.act = act
    with pytest.raises(RecordError, match="disk is full"):
        await execute(plan, run_dir, desk, concurrency=1)
    assert set(outcomes(run_dir)) == {"task-0@solver@1"}
    desk.act = None
    await execute(plan, run_dir, desk, concurrency=1)
    assert len(outcomes(run_dir)) == 3


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 40), torn=st.integers(0, 60))
async def test_resume_from_any_prefix_scores_the_same_trials(
    rows: int, torn: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A crash can leave any prefix of the ledger, and the records that were renamed before it."""
    folder = tmp_path_factory.mktemp("prefix")
    (run_dir := folder / "run").mkdir()
    desk = DeskExaminer(folder)
    plan = make_plan(3)
    await execute(plan, run_dir, desk, concurrency=2)
    expected = outcomes(run_dir)
    lines = (run_dir / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    kept, rest = lines[: rows % (len(lines) + 1)], b"".join(lines[rows % (len(lines) + 1) :])
    (run_dir / "ledger.jsonl").write_bytes(b"".join(kept) + rest[:torn].rpartition(b"\n")[2])
    (run_dir / "ledger.head").unlink()
    for path in (run_dir / "trials").iterdir():
        # What was never started in this past has no record yet.
        if not any(b'"kind":"started"' in line and path.name.encode() in line for line in kept):
            shutil.rmtree(path)
    await execute(plan, run_dir, desk, concurrency=2)
    assert outcomes(run_dir) == expected
    ended = [row.data["trial"] for row in verify_ledger(run_dir).of("ended")]
    assert sorted(ended) == sorted(expected)
