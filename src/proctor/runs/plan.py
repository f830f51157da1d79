"""A run before it starts: dataset x agents x attempts, with an id and a seed for every trial that follow from the
plan alone."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError
from proctor.runs.conditions import Condition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.models.contract import ModelSpec
    from proctor.models.gateway import GatewayConfig
    from proctor.runs.network import NetworkGrant
    from proctor.tasks.model import AgentLimits, DatasetEntry, Task, Unrunnable

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_MAX_SLUG = 80


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """An agent of the plan: harness and model apart. `ref` is how the harness was asked for."""

    label: str
    ref: str
    name: str
    version: str
    model: ModelSpec | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    option_digests: Mapping[str, str] = field(default_factory=dict)
    injected: Mapping[str, str] = field(default_factory=dict)
    """Digests, by name, of what the harness brings into the sandbox."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """One attempt of one agent at one task."""

    id: str
    task: Task
    agent: AgentSpec
    attempt: int
    seed: int
    condition: Condition = field(default_factory=Condition)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a run is going to do. `limits` are the run's overrides, by the field names of AgentLimits."""

    run_id: str
    dataset_name: str
    dataset_version: str
    dataset_digest: str
    sources: tuple[str, ...]
    entries: tuple[DatasetEntry, ...]
    agents: tuple[AgentSpec, ...]
    attempts: int = 1
    seed: int = 0
    limits: Mapping[str, float] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = (Condition(),)
    """What trials run under; the first is what the others are paired with."""
    unrunnable: tuple[Unrunnable, ...] = ()
    predictions: str | None = None
    predictions_digest: str | None = None
    gateway: GatewayConfig | None = None
    """The gateway that a file describes; None: every model given by itself is one."""
    network: NetworkGrant | None = None
    """What tasks may reach at most; None: nothing."""
    options: Mapping[str, Any] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None
    """The trial that this run does again or branches off, as `ParentLock` has it."""
    given: tuple[TrialPlan, ...] = ()
    """The trials, where they do not follow from the rest: those of a trial that is done again."""

    @property
    def condition(self) -> str:
        """The name of the first condition: `plain`, unless the run was given another."""
        return self.conditions[0].name

    def trials(self) -> list[TrialPlan]:
        """All trials, attempt by attempt and task by task, so that agents advance side by side."""
        if self.given:
            return list(self.given)
        check_unique([entry.task.name for entry in self.entries], "task")
        check_unique([agent.label for agent in self.agents], "agent")
        slugs = slug_all([entry.task.name for entry in self.entries])
        labels = slug_all([agent.label for agent in self.agents])
        return [
            TrialPlan(
                id=f"{slugs[entry.task.name]}@{labels[agent.label]}@{attempt}"
                + (f"@{condition.name}" if number else ""),
                task=entry.task,
                agent=agent,
                attempt=attempt,
                seed=trial_seed(self.seed, entry.task.digest, attempt),
                condition=condition,
            )
            for attempt in range(1, self.attempts + 1)
            for entry in self.entries
            for number, condition in enumerate(self.conditions)
            if not condition.leaves_out(entry.task)
            for agent in self.agents
        ]


def trial_seed(run_seed: int, task_digest: str, attempt: int) -> int:
    """A 31-bit seed. It depends neither on the agent nor on the condition, so that both are compared on equal draws."""
    material = f"proctor-trial-seed-1:{run_seed}:{task_digest}:{attempt}".encode()
    return int.from_bytes(hashlib.sha256(material).digest()[:4], "big") >> 1


def slug_all(names: list[str]) -> dict[str, str]:
    """A file-system-safe, unique slug for every name; names that would collide get a piece of their digest."""
    plain = {name: _slug(name) for name in names}
    # Compared without case: two trials must not share a directory on a case-insensitive file system.
    seen: dict[str, int] = {}
    for slug in plain.values():
        seen[slug.lower()] = seen.get(slug.lower(), 0) + 1
    return {
        name: slug if seen[slug.lower()] == 1 else f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        for name, slug in plain.items()
    }


def _slug(name: str) -> str:
    slug = _UNSAFE.sub("-", name).strip(".-") or "x"
    if len(slug) <= _MAX_SLUG:
        return slug
    return f"{slug[: _MAX_SLUG - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def check_unique(names: list[str], what: str) -> None:
    """Raise ConfigError when a name occurs twice: two trials would be one."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(
                f"{what} {name!r} is given twice", field=what, remedy="give it once; use --attempts to repeat"
            )
        seen.add(name)


def effective_limits(task: Task, run_limits: Mapping[str, float]) -> AgentLimits:
    """The limits of a trial: Proctor's defaults, then the task's, then the run's (what a person asks for last
    wins)."""
    return replace(task.agent_limits(), **run_limits)  # type: ignore[arg-type]


def trial_limits(trial: TrialPlan, run_limits: Mapping[str, float]) -> AgentLimits:
    """The limits of a trial with what its condition changes in them; they win, since they
    are what it is about."""
    limits = effective_limits(trial.task, run_limits)
    return replace(limits, **trial.condition.limits(trial.task, limits))  # type: ignore[arg-type]


LIMIT_NAMES: Mapping[str, type] = {
    "total_s": float,
    "tool_call_s": float,
    "steps": int,
    "tokens": int,
    "cost_usd": float,
}
"""What `--limit KEY=VALUE` takes."""
