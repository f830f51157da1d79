"""The lock of a run: writing it down before the first trial, reading a plan back from it, and saying what differs."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, atomic_write, digest_bytes
from proctor.models.contract import ModelSpec
from proctor.runs.clock import now_iso
from proctor.runs.conditions import locked
from proctor.runs.formats import (
    AgentLock,
    ConditionLock,
    DatasetLock,
    HarnessLock,
    HostFacts,
    ModelLock,
    ParentLock,
    RunLock,
    TaskLock,
    UnrunnableLock,
    dump,
    plain,
)
from proctor.runs.ledger import LedgerWriter
from proctor.runs.plan import effective_limits
from proctor.runs.vouching import is_vouched

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from proctor.runs.plan import AgentSpec, RunPlan


@dataclass(frozen=True, slots=True)
class ImageFact:
    """The image that a task's trials start from."""

    ref: str
    digest: str
    history: Mapping[str, str] = field(default_factory=dict)
    """Proofs that no future is in the git history, by the repository's path."""


def make_lock(
    plan: RunPlan, images: Mapping[str, ImageFact], kits: Mapping[str, Sequence[str]] | None = None
) -> RunLock:
    """The lock of a plan. `images` is by task name; a task whose image could not be had is missing there. `kits` has
    the digests of the layers of an agent's toolkit, by the agent's label."""
    from proctor import __version__

    return RunLock(
        run_id=plan.run_id,
        created_at=now_iso(),
        proctor_version=__version__,
        git_commit=git_commit(Path(plan.sources[0])) if plan.sources else None,
        mode="predictions" if plan.predictions is not None else "agents",
        dataset=DatasetLock(name=plan.dataset_name, version=plan.dataset_version, digest=plan.dataset_digest),
        sources=list(plan.sources),
        tasks=[
            TaskLock(
                name=entry.task.name,
                digest=entry.task.digest,
                path=str(entry.task.path),
                image_ref=images[entry.task.name].ref if entry.task.name in images else None,
                image_digest=images[entry.task.name].digest if entry.task.name in images else None,
                history=dict(images[entry.task.name].history) if entry.task.name in images else {},
                split=entry.split,
                weight=entry.weight,
                difficulty=entry.task.difficulty,
                capabilities=list(entry.task.capabilities),
                domain=entry.task.domain,
                cluster=entry.task.cluster,
                limits=asdict(effective_limits(entry.task, plan.limits)),
                notes=list(entry.task.notes),
            )
            for entry in plan.entries
        ],
        unrunnable=[UnrunnableLock(name=task.name, reason=task.reason) for task in plan.unrunnable],
        agents=[lock_agent(agent, (kits or {}).get(agent.label, ())) for agent in plan.agents],
        attempts=plan.attempts,
        seed=plan.seed,
        limits=dict(plan.limits),
        condition=plan.condition,
        conditions=lock_conditions(plan),
        predictions=plan.predictions,
        predictions_digest=plan.predictions_digest,
        network=plan.network.as_json() if plan.network is not None else None,
        parent=ParentLock(**plan.parent) if plan.parent else None,
        host=host_facts(),
        options=plain(plan.options),
    )


def lock_conditions(plan: RunPlan) -> list[ConditionLock]:
    """The conditions of a plan that change something, as the lock holds them."""
    tasks = [entry.task for entry in plan.entries]
    limits = {task.name: effective_limits(task, plan.limits) for task in tasks}
    return [ConditionLock(**locked(one, tasks, limits)) for one in plan.conditions if one.is_treated]


def lock_agent(agent: AgentSpec, layers: Sequence[str] = ()) -> AgentLock:
    """An agent as the lock holds it."""
    model = None
    if agent.model is not None:
        fields = plain(asdict(agent.model))
        names = ("name", "base_url", "api_key_env")
        model = ModelLock(**{name: fields.pop(name) for name in names}, sampling=fields)
    harness = HarnessLock(ref=agent.ref, name=agent.name, version=agent.version, injected=dict(agent.injected),
                          layers=list(layers))  # fmt: skip
    return AgentLock(label=agent.label, harness=harness, model=model, options=plain(agent.options),
                     option_digests=dict(agent.option_digests))  # fmt: skip


def unlock_model(lock: ModelLock) -> ModelSpec:
    """The model specification that a lock holds."""
    try:
        return ModelSpec(name=lock.name, base_url=lock.base_url, api_key_env=lock.api_key_env, **lock.sampling)
    except TypeError as error:
        raise ConfigError(f"the lock does not describe a model: {error}", field="run.json: agents.model") from error


def write_lock(directory: Path, lock: RunLock) -> None:
    """Write `run.json`, whole or not at all."""
    atomic_write(directory / "run.json", dump(lock))


def relock(directory: Path, lock: RunLock) -> None:
    """Put another lock in the place of the run's own; a ledger that names the lock names the new one first. Nobody
    else may hold the run."""
    with LedgerWriter(directory) as ledger:
        if is_vouched(ledger.ledger):
            ledger.append("relocked", {"lock": digest_bytes(dump(lock))}, durable=True)
        write_lock(directory, lock)


def differences(old: RunLock, new: RunLock) -> list[str]:
    """What has changed since the lock was written that would make old and new trials incomparable, one line each.

    Time, host, git commit and options that only steer the run (concurrency) may differ.
    """
    return list(_differences(old, new))


def _differences(old: RunLock, new: RunLock) -> Iterator[str]:
    for name in ("proctor_version", "mode", "attempts", "seed", "limits", "condition", "network", "predictions_digest"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            yield f"{name}: {before} then, {now} now"
    before, now = ({one.name: one.model_dump() for one in lock.conditions} for lock in (old, new))
    if before != now:
        yield f"conditions: {first_difference(before, now)}"
    tasks = {task.name: task for task in new.tasks}
    for task in old.tasks:
        found = tasks.pop(task.name, None)
        if found is None:
            yield f"task {task.name}: gone"
        elif found.digest != task.digest:
            yield f"task {task.name}: {task.digest} then, {found.digest} now"
        elif None not in (task.image_digest, found.image_digest) and task.image_digest != found.image_digest:
            yield f"image of task {task.name}: {task.image_digest} then, {found.image_digest} now"
        elif task.limits != found.limits:
            yield f"limits of task {task.name}: {first_difference(task.limits, found.limits)}"
    yield from (f"task {name}: new" for name in tasks)
    agents = {agent.label: agent for agent in new.agents}
    for agent in old.agents:
        other = agents.pop(agent.label, None)
        if other is None:
            yield f"agent {agent.label}: gone"
        elif other != agent:
            yield f"agent {agent.label}: {first_difference(agent.model_dump(), other.model_dump())}"
    yield from (f"agent {label}: new" for label in agents)


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str:
    """The first place at which two maps differ, as `key: then, now`."""
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):
                return first_difference(before, now, f"{prefix}{key}.")
            return f"{prefix}{key}: {before} then, {now} now"
    return "the same"


def host_facts() -> HostFacts:
    """The machine that this process runs on."""
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return HostFacts(
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cpus=len(os.sched_getaffinity(0)),
        memory_mb=memory_mb,
        python=platform.python_version(),
    )


def git_commit(path: Path) -> str | None:
    """The commit that the directory of the tasks is checked out at; None when it is not in a repository."""
    folder = path if path.is_dir() else path.parent
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
