"""The end of an attempt: its trajectory and its result, from what the record has gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.agents.tools import is_malformed
from proctor.agents.toolset import ASK_USER
from proctor.runs.clock import now_iso
from proctor.runs.export import export_atif
from proctor.runs.formats import TrialResult
from proctor.runs.trajectory import clean, clean_text
from proctor.trajectories import atif
from proctor.trajectories.atif import dump_trajectory

if TYPE_CHECKING:
    from proctor.runs.outcome import Verdict
    from proctor.runs.plan import AgentSpec, RunPlan, TrialPlan
    from proctor.runs.record import TrialRecord


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt this was: the number of tries including it, when it began (wall clock) and how long it took."""

    trial: TrialPlan
    tries: int
    started_at: str
    duration_s: float


def archive(run_id: str, attempt: Attempt, record: TrialRecord, verdict: Verdict) -> TrialResult:
    """Write trajectory.json, result.json and what else is written last; the record is then ready to be committed."""
    record.put_bytes("trajectory.json", dump_trajectory(export_atif(record.directory)))
    result = trial_result(run_id, attempt, record, verdict)
    record.finish(result)
    return result


def start_data(plan: RunPlan, trial: TrialPlan, tries: int, started_at: str) -> dict[str, Any]:
    """The first event of a log: which trial this is, and what its agent was told."""
    parent = {"parent": dict(plan.parent)} if plan.parent else {}
    return {
        "run_id": plan.run_id,
        "trial": trial.id,
        "task": trial.task.name,
        "task_digest": trial.task.digest,
        "attempt": trial.attempt,
        "seed": trial.seed,
        "try": tries,
        "agent": atif_agent(trial.agent).model_dump(exclude_none=True),
        "instruction": clean_text(trial.condition.instruction(trial.task, trial.seed)),
        "started_at": started_at,
        **parent,
    }


def atif_agent(agent: AgentSpec) -> atif.Agent:
    """The agent as ATIF names it: harness and model apart, sampling parameters and options in `extra`."""
    extra: dict[str, Any] = {"label": agent.label, "options": clean(agent.options)}
    if agent.model is not None:
        extra["endpoint"] = agent.model.base_url
        extra["sampling"] = sampling(agent)
    return atif.Agent(
        name=agent.name,
        version=agent.version,
        model_name=agent.model.name if agent.model else None,
        extra=extra,
    )


def sampling(agent: AgentSpec) -> dict[str, Any]:
    """The fixed sampling parameters of an agent's model."""
    if agent.model is None:
        return {}
    names = ("temperature", "top_p", "seed", "max_tokens", "stream", "timeout_s", "max_retries")
    return {name: getattr(agent.model, name) for name in names}


def trial_result(run_id: str, attempt: Attempt, record: TrialRecord, verdict: Verdict) -> TrialResult:
    """`result.json` of an attempt whose verdict stands."""
    trial, grade = attempt.trial, record.grade
    return TrialResult(
        run_id=run_id,
        trial_id=trial.id,
        task=trial.task.name,
        task_digest=trial.task.digest,
        agent=trial.agent.label,
        attempt=trial.attempt,
        seed=trial.seed,
        condition=trial.condition.name,
        tries=attempt.tries,
        outcome=verdict.outcome,
        stop=verdict.stop,
        detail=clean_text(verdict.detail),
        verdict=grade.verdict if grade else None,
        compat_resolved=grade.compat.resolved if grade and grade.compat else None,
        rewards=dict(grade.rewards) if grade else {},
        steps=len(record.steps),
        execs=record.execs,
        tool_calls=sum(len(step.tool_calls) for step in record.steps),
        malformed_calls=sum(is_malformed(call) for step in record.steps for call in step.tool_calls),
        questions=sum(call.name == ASK_USER for step in record.steps for call in step.tool_calls),
        model_errors=record.model_errors,
        injected=record.injected,
        usage=record.usage(),
        returned_models=record.returned_models,
        stages=record.stages.times,
        started_at=attempt.started_at,
        ended_at=now_iso(),
        duration_s=round(attempt.duration_s, 6),
        final_message=clean_text(record.final_message),
    )
