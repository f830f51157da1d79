"""A step of a trial as a place to branch off: how many calls of the model and of the sandbox came before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.common import ConfigError, RefusedError
from proctor.runs.events import EventLog
from proctor.runs.formats import COUNT

if TYPE_CHECKING:
    from proctor.runs.replay.recorded import Recorded


@dataclass(frozen=True, slots=True)
class Point:
    """The moment before the model is asked for step `step`: `calls` answers and `execs` calls on the sandbox came
    before it."""

    step: int
    calls: int
    execs: int


def find_point(recorded: Recorded, step: int) -> Point:
    """Where a step of the trajectory begins. Raises ConfigError for a step that is none of the agent's, RefusedError
    when it asked no model."""
    steps = recorded.view.trajectory.steps
    if not 1 <= step <= len(steps):
        raise ConfigError(f"there is no step {step}: the trial has {len(steps)}", field="--from")
    chosen = steps[step - 1]
    if chosen.source != "agent":
        agents = ", ".join(str(one.step_id) for one in steps if one.source == "agent")
        raise ConfigError(f"step {step} is the {chosen.source}'s", field="--from",
                          remedy=f"the agent's steps are {agents[:200]}")  # fmt: skip
    if not chosen.llm_call_count:
        raise RefusedError(f"step {step} asked no model, so there is none to go on with", field="--from",
                           remedy="branches need a trial of an agent with a model")  # fmt: skip
    return _by_events(recorded, step) or _by_count(recorded, step)


def _by_events(recorded: Recorded, step: int) -> Point | None:
    """By the order of the event log. None when its steps were written down after the fact (a transcript of a program
    in the sandbox), or stand for several calls each: then their order says nothing of the calls'."""
    calls = execs = number = 0
    before = (0, 0)
    for event in EventLog(recorded.directory).of("model_call", "exec", "step"):
        calls += event.kind == "model_call"
        execs += event.kind == "exec"
        if event.kind != "step":
            continue
        number += 1
        if number == step:
            return Point(step, *before) if calls == before[0] + 1 else None
        if event.data.get("source") == "agent":
            before = (calls, execs)
    return None


def _by_count(recorded: Recorded, step: int) -> Point:
    """By the number of answers before it, for a transcript that tells of every answer that was given."""
    answers = [one.step_id for one in recorded.view.trajectory.steps if one.source == "agent" and one.llm_call_count]
    given = sum(call.protocol != COUNT for call in recorded.calls())
    if len(answers) != given:
        message = f"the agent's transcript tells of {len(answers)} answers of its model, and {given} were given"
        raise RefusedError(f"{message}: which of them step {step} was is not known", field="--from")
    return Point(step, answers.index(step), 0)
