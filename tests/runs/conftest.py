"""Fixtures for the runs room: a plan over small tasks, and an examiner that works in this process on real files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.agents.contract import AgentResult, Step, StopReason
from proctor.common import digest_json
from proctor.grading.contract import Grade
from proctor.runs.clock import now_iso
from proctor.runs.formats import Stage
from proctor.runs.outcome import Verdict, from_grade
from proctor.runs.plan import AgentSpec, RunPlan, TrialPlan
from proctor.tasks.model import Carry, DatasetEntry, Environment, Task, Verifier

if TYPE_CHECKING:
    from proctor.runs.record import TrialRecord


def make_task(name: str) -> Task:
    return Task(
        name=name,
        path=Path("/tasks") / name,
        digest=digest_json(name),
        instruction=f"Do {name}.",
        environment=Environment(image="host"),
        verifier=Verifier(kind="reward"),
        carry=Carry(kind="filesystem"),
        solution=None,
    )


def make_agent(label: str) -> AgentSpec:
    return AgentSpec(label=label, ref=label, name=label, version="1")


def make_plan(
    tasks: int = 3, agents: tuple[str, ...] = ("solver", "idler"), attempts: int = 1, **more: object
) -> RunPlan:
    return RunPlan(
        run_id="run-test",
        dataset_name="toys",
        dataset_version="1",
        dataset_digest=digest_json(tasks),
        sources=("/tasks",),
        entries=tuple(DatasetEntry(make_task(f"task-{number}")) for number in range(tasks)),
        agents=tuple(make_agent(label) for label in agents),
        attempts=attempts,
        **more,  # type: ignore[arg-type]
    )


Act = Callable[[TrialPlan, int], Awaitable[AgentResult | None]]


@dataclass
class DeskExaminer:
    """Really does and grades a small piece of work: the agent writes a file below `desk`, the grader reads it.

    `act` is called before the work, with the number of the try; it may raise, wait, or return how the harness
    stopped.
    """

    desk: Path
    act: Act | None = None
    tries: dict[str, int] = field(default_factory=dict)
    graded: list[str] = field(default_factory=list)

    async def examine(self, trial: TrialPlan, record: TrialRecord) -> Verdict:
        self.tries[trial.id] = self.tries.get(trial.id, 0) + 1
        for stage in (Stage.ADMISSION, Stage.START, Stage.MODEL_ACCESS, Stage.EXECUTION):
            record.stages.enter(stage)
        result = AgentResult(StopReason.FINISHED)
        if self.act is not None:
            result = await self.act(trial, self.tries[trial.id]) or result
        answer = self.desk / f"{trial.id}.txt"
        if trial.agent.label == "solver":
            answer.write_text(str(trial.seed))
            record.step(Step(source="agent", message="wrote the answer", timestamp=now_iso()))
        await anyio.lowlevel.checkpoint()
        record.stages.enter(Stage.COLLECTION)
        found = answer.read_text() if answer.exists() else None
        record.stages.enter(Stage.GRADING_ARCHIVE)
        resolved = found == str(trial.seed)
        grade = Grade("resolved" if resolved else "unresolved", resolved, {"reward": float(resolved)})
        record.graded(grade)
        self.graded.append(trial.id)
        return from_grade(result, grade)


@pytest.fixture
def desk(tmp_path: Path) -> DeskExaminer:
    folder = tmp_path / "desk"
    folder.mkdir()
    return DeskExaminer(folder)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder
