"""Made-up runs on disk, with a whole ledger and real record files, for tests and for bench/report.py."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proctor.common import digest_file, digest_json, digest_tree
from proctor.runs.formats import (
    AgentLock,
    DatasetLock,
    DiffFile,
    DiffItem,
    FindingEntry,
    FindingsFile,
    GradeFile,
    HarnessLock,
    HostFacts,
    ModelLock,
    ReceiptFile,
    RunLock,
    Stage,
    StageTime,
    TaskLock,
    TestResult,
    TrialResult,
    UsageTotals,
    dump,
)
from proctor.runs.ledger import LedgerWriter
from proctor.trajectories.atif import Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

AT = "2026-01-02T03:04:05Z"


@dataclass(frozen=True)
class MadeRun:
    """What to make. `skill` is each agent's chance to resolve a task; `text` goes wherever a candidate could write."""

    tasks: int = 4
    attempts: int = 1
    skill: Mapping[str, float] = field(default_factory=lambda: {"one": 0.8, "two": 0.3})
    text: str = "all is well"
    name: str = "task"
    dataset: str = "made"
    run_id: str = "run-made"
    steps: int = 3
    in_place: bool = False
    network: str = "none"
    odd: Mapping[int, str] = field(default_factory=dict)
    """Trial number -> its outcome, instead of the drawn one (`infra_error`, `planned`, …)."""
    findings: Sequence[FindingEntry] = ()
    facts: bool = True
    harnesses: Mapping[str, str] = field(default_factory=dict)
    """Agent -> its harness; `loop` for the others."""
    seed: int = 1


def make_run(directory: Path, made: MadeRun | None = None) -> Path:
    """Write the run; returns its directory."""
    made = made or MadeRun()
    directory.mkdir(parents=True)
    draw = random.Random(made.seed)
    lock = _lock(made)
    (directory / "run.json").write_bytes(dump(lock))
    plan = [
        {"trial": f"t{number}", "task": task.name, "task_digest": task.digest, "agent": agent.label, "attempt": attempt,
         "seed": number}
        for number, (task, agent, attempt) in enumerate(
            (task, agent, attempt) for task in lock.tasks for agent in lock.agents
            for attempt in range(1, made.attempts + 1)
        )
    ]  # fmt: skip
    run = {"run_id": made.run_id, "planned": len(plan), "lock": digest_file(directory / "run.json")}
    with LedgerWriter(directory, clock=lambda: AT) as ledger:
        ledger.extend([("run", run), *(("planned", row) for row in plan)])
        ended = []
        for number, row in enumerate(plan):
            hard = 0.25 * ((number // (len(lock.agents) * made.attempts)) % 3 - 1)
            won = draw.random() < made.skill[row["agent"]] - hard
            outcome = made.odd.get(number, "resolved" if won else "unresolved")
            if outcome == "planned":
                continue
            folder = directory / "trials" / row["trial"]
            _record(folder, row, outcome, made, draw)
            ended.append(("ended", {"trial": row["trial"], "try": 1, "outcome": outcome, "stop": "finished",
                                    "record": digest_tree(folder)}))  # fmt: skip
        ledger.extend(ended)
    return directory


def _lock(made: MadeRun) -> RunLock:
    facts: list[dict[str, Any]] = [
        {"difficulty": ("easy", "medium", "hard")[n % 3], "capabilities": (["shell"], ["shell", "sql"], ["web"])[n % 3],
         "split": "held_out" if n % 4 == 3 else "public", "domain": ("data", "systems")[n % 2]} if made.facts else {}
        for n in range(made.tasks)
    ]  # fmt: skip
    return RunLock(
        run_id=made.run_id,
        created_at=AT,
        proctor_version="0",
        dataset=DatasetLock(name=made.dataset, version="1", digest=digest_json(made.tasks)),
        sources=[],
        tasks=[
            TaskLock(name=f"{made.name}-{n:04d}", digest=digest_json([made.name, n]), path="/tasks",
                     limits={"steps": 30.0},                     **facts[n])
            for n in range(made.tasks)
        ],
        agents=[
            AgentLock(label=label, harness=HarnessLock(ref="loop", name=made.harnesses.get(label, "loop"), version="1"),
                      model=ModelLock(name=f"model-{label}", base_url="http://127.0.0.1"))
            for label in made.skill
        ],
        attempts=made.attempts,
        seed=made.seed,
        limits={},
        host=HostFacts(kernel="k", machine="m", cpus=1, memory_mb=1, python="3"),
    )  # fmt: skip


def _record(folder: Path, row: Mapping[str, Any], outcome: str, made: MadeRun, draw: random.Random) -> None:
    folder.mkdir(parents=True)
    graded = outcome in ("resolved", "unresolved", "agent_limit", "disqualified")
    won = outcome == "resolved"
    tokens = draw.randrange(2_000, 9_000) * (2 if row["agent"] == next(iter(made.skill)) else 1)
    took = draw.uniform(5, 50)
    files = {
        "result.json": TrialResult(
            run_id=made.run_id, trial_id=row["trial"], task=row["task"], task_digest=row["task_digest"],
            agent=row["agent"], attempt=row["attempt"], seed=row["seed"], tries=1, outcome=outcome, stop="finished",
            detail=made.text, verdict=("resolved" if won else "unresolved") if graded else None,
            rewards={"reward": float(won)} if graded else {}, steps=made.steps, execs=made.steps, tool_calls=made.steps,
            usage=UsageTotals(model_calls=made.steps, prompt_tokens=tokens, cached_tokens=0,
                              completion_tokens=tokens // 9, reasoning_tokens=0, cost_usd=tokens * 2e-6),
            returned_models=[f"model-{row['agent']}"],
            stages=[StageTime(stage=Stage.EXECUTION, started_at=AT, ended_at=AT, duration_s=took)],
            started_at=AT, ended_at=AT, duration_s=took, final_message=made.text,
        ),
        "trajectory.json": Trajectory.model_validate(_trajectory(row, made)),
        "findings.json": FindingsFile(findings=list(made.findings)),
        "receipt.json": ReceiptFile(agent=_receipt(made, took), grading=[] if made.in_place else [_receipt(made, 1.0)]),
        "diff.json": DiffFile(entries=[DiffItem(path=f"/app/{made.text}", change="modified", kind="file", size=7)]),
    }  # fmt: skip
    if graded:
        files["grade.json"] = GradeFile(
            verdict="resolved" if won else "unresolved", resolved=won, rewards={"reward": float(won)},
            tests=[TestResult(test_id=made.text, group="fail_to_pass", status="passed" if won else "failed", ok=won)],
            in_place=made.in_place, carry="patch", rooms=0 if made.in_place else 1,
        )  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(dump(content))


def _trajectory(row: Mapping[str, Any], made: MadeRun) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": made.text}]
    steps += [
            {
                "step_id": number,
                "source": "agent",
                "timestamp": AT,
                "message": made.text,
                "reasoning_content": made.text,
                "tool_calls": [
                    {"tool_call_id": "c", "function_name": "bash" if number % 2 else made.text or "tool",
                     "arguments": {"command": made.text} if number % 2 else {made.text: made.text}}
                ],
                "observation": {"results": [{"source_call_id": "c", "content": f"{made.text}\n" * 8}]},
            }
            for number in range(2, made.steps + 1)
    ]  # fmt: skip
    agent = {"name": row["agent"], "version": "1", "model_name": f"model-{row['agent']}"}
    return {"session_id": made.run_id, "trajectory_id": row["trial"], "agent": agent, "steps": steps}


def _receipt(made: MadeRun, took: float) -> dict[str, Any]:
    return {
        "tier": "container/native", "kernel": made.text, "image_ref": "host", "image_digest": "sha256:00",
        "network": made.network, "end_reason": "CLOSED", "peaks": {"cpu_s": took / 3, "memory_bytes": 9_000_000},
    }  # fmt: skip
