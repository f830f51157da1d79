"""From the event log of a trial to its trajectory: ATIF v1.8 is an export, the log is the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError
from proctor.runs.events import EVENTS, EventLog, step_of
from proctor.runs.trajectory import build_trajectory
from proctor.trajectories.atif import Agent, Trajectory

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.agents.contract import Step


def export_atif(directory: Path) -> Trajectory:
    """The trajectory that the event log in `directory` tells. Raises ConfigError when the log has no beginning."""
    facts: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    steps: list[Step] = []
    for event in EventLog(directory).of("start", "tools", "step"):
        if event.kind == "start":
            facts = dict(event.data)
        elif event.kind == "tools":
            tools = list(event.data["definitions"])
        else:
            steps.append(step_of(event.data))
    if facts is None:
        raise ConfigError("the log does not begin with a `start` event", field=str(directory / EVENTS))
    agent = facts["agent"]
    return build_trajectory(
        steps,
        session_id=facts["run_id"],
        trajectory_id=facts["trial"],
        agent=Agent(
            name=agent["name"],
            version=agent["version"],
            model_name=agent.get("model_name"),
            tool_definitions=tools,
            extra=agent.get("extra"),
        ),
        instruction=facts["instruction"],
        started_at=facts["started_at"],
        extra={
            "proctor": {"task": facts["task"], "task_digest": facts["task_digest"], "attempt": facts["attempt"]}
            | ({"parent": facts["parent"]} if facts.get("parent") else {})
        },
    )
