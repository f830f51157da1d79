"""A trial that is to be done again: its record, and everything that it started from, found again by digest.

What is not as it was then is refused by name; nothing is replayed on something that only looks like it.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from anyio import to_thread

from proctor.common import ConfigError, InfraError, RefusedError, digest_bytes
from proctor.runs.formats import DiffFile, ExecLine, Format, ModelCallLine, RunLock, TrialResult, dump_json, parse
from proctor.runs.lock import first_difference, lock_agent
from proctor.runs.preparation import HISTORY, AgentKit, prepare_kits
from proctor.runs.progress import LineProgress
from proctor.runs.record import read_lines
from proctor.runs.story import TrialView, find_trial, read_trial
from proctor.runs.summary import read_run
from proctor.sandbox.contract import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proctor.runs.formats import AgentLock, TaskLock
    from proctor.runs.plan import AgentSpec, RunPlan, TrialPlan
    from proctor.sandbox.contract import Image
    from proctor.sandbox.images import ImageStore
    from proctor.tasks.model import Task


@dataclass(frozen=True, slots=True)
class Recorded:
    """One trial of a run, with the plan that it came from made again. `image` is the one it started from."""

    view: TrialView
    lock: RunLock
    plan: RunPlan
    trial: TrialPlan
    image: Image
    digest: str | None
    """The digest of the record, as the ledger has it."""
    kit: AgentKit = field(default_factory=AgentKit)
    """What the agent brings: its toolkit lies above the image."""
    notes: tuple[str, ...] = ()
    """What about the agent is not as it was then; it does not hinder a replay, but may explain what it finds."""

    @property
    def directory(self) -> Path:
        """The directory of the record."""
        return self.view.directory

    @property
    def result(self) -> TrialResult:
        """What the trial came to."""
        return self.view.result

    @property
    def diff(self) -> DiffFile | None:
        """What the agent changed on disk."""
        return self.view.diff

    def execs(self) -> Iterator[ExecLine]:
        """The calls on the agent's sandbox, in order."""
        return read_execs(self.directory)

    def calls(self) -> Iterator[ModelCallLine]:
        """The calls of the model, in order."""
        return read_calls(self.directory)

    def given(self, line: ExecLine) -> bytes | None:
        """What a call was given beyond its subject. Raises ConfigError when it is not in the record."""
        return None if line.input is None else read_input(self.directory, line.input)


def read_execs(directory: Path) -> Iterator[ExecLine]:
    """The calls on the agent's sandbox, from `exec.jsonl`."""
    path = directory / "exec.jsonl"
    for number, line in enumerate(read_lines(path), 1):
        yield parse_line(ExecLine, line, f"{path}:{number}")


def read_calls(directory: Path) -> Iterator[ModelCallLine]:
    """The calls of the model, from `model-calls.jsonl`."""
    path = directory / "model-calls.jsonl"
    for number, line in enumerate(read_lines(path), 1):
        yield parse_line(ModelCallLine, line, f"{path}:{number}")


def parse_line(kind: type[Format], line: object, name: str) -> Format:
    """One line of a log of the record, checked."""
    return parse(kind, dump_json(line), name=name)


def read_input(directory: Path, digest: str) -> bytes:
    """The bytes of an input by its digest."""
    path = directory / "blobs" / digest.removeprefix("sha256:")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"a blob of the trial is missing: {error.strerror}", field=str(path)) from error
    if digest_bytes(data) != digest:
        raise ConfigError("a blob of the trial is not what its digest says", field=str(path))
    return data


async def find_recorded(
    run: Path, trial: str, *, tasks: Path | None = None, store: ImageStore | None = None
) -> Recorded:
    """The trial whose id is, or contains, `trial`. `tasks` says where the tasks are now, if they have moved.

    Raises ConfigError for what is not there, RefusedError for what is not as it was: the record, the task or the image.
    """
    from proctor.sandbox import ImageStore

    view = read_run(run)
    if view.lock.mode != "agents":
        raise RefusedError(f"a run of {view.lock.mode} has no agent that could do anything again", field=str(run))
    if view.damage is not None:
        raise RefusedError(f"the ledger is damaged: {view.damage}", field=str(run),
                           remedy="replay only whole records")  # fmt: skip
    found = read_trial(view, find_trial(view, trial))
    if found.intact is False:
        raise RefusedError("the record was changed since it was committed", field=str(found.directory),
                           remedy="restore it; its digest is in the ledger")  # fmt: skip
    plan, planned = _plan_of(view.lock, found.result, tasks)
    shelf = store if store is not None else await to_thread.run_sync(lambda: ImageStore())
    image = await _image_of(view.lock, planned.task, shelf)
    kits = await prepare_kits(plan, shelf, LineProgress(lambda line: None))
    kit = kits.get(planned.agent.label, AgentKit())
    rows = [row.data["record"] for row in view.ledger.of("ended") if row.data["trial"] == found.result.trial_id]
    notes = _notes(view.lock, planned.agent, [layer.digest or "" for layer in kit.layers])
    return Recorded(found, view.lock, plan, planned, image, rows[-1] if rows else None, kit, notes)


def _notes(lock: RunLock, agent: AgentSpec, kit: list[str]) -> tuple[str, ...]:
    """How harness, options and what they name differ from what the lock has."""
    then = next(one for one in lock.agents if one.label == agent.label)
    now = lock_agent(agent, kit)
    pairs = [
        ("harness", then.harness.model_dump(), now.harness.model_dump()),
        ("options", then.options, now.options),
        ("files of options", then.option_digests, now.option_digests),
    ]
    return tuple(f"the agent's {name} are not as they were: {first_difference(before, after)}"
                 for name, before, after in pairs if before != after)  # fmt: skip


def _plan_of(lock: RunLock, result: TrialResult, tasks: Path | None) -> tuple[RunPlan, TrialPlan]:
    from proctor.runs.request import plan_again

    options = {**lock.options, "select": [glob.escape(result.task)]}
    for name in ("stop_when", "gateway", "record_snapshots"):
        options.pop(name, None)
    sources = [str(tasks)] if tasks is not None else lock.sources
    agents = [without_key(agent) for agent in lock.agents if agent.label == result.agent]
    try:
        plan = plan_again(lock.model_copy(update={"options": options, "sources": sources, "agents": agents}))
    except ConfigError as error:
        remedy = "say where its tasks are now with --tasks"
        raise RefusedError(f"task {result.task} cannot be loaded: {error.line()}", field=result.trial_id,
                           remedy=remedy) from error  # fmt: skip
    wanted = (result.task, result.attempt, result.condition)
    planned = next((one for one in plan.trials() if (one.task.name, one.attempt, one.condition.name) == wanted), None)
    if planned is None:
        raise RefusedError(f"task {result.task} is not there any more", field=result.trial_id,
                           remedy="say where its tasks are now with --tasks")  # fmt: skip
    if planned.task.digest != result.task_digest:
        raise RefusedError(
            f"task {result.task} has changed: {result.task_digest} then, {planned.task.digest} now",
            field=str(planned.task.path),
            remedy="check out the version that the run was made with",
        )
    # Ids are made from all tasks and agents of a run, and this plan has one of each.
    return plan, replace(planned, id=result.trial_id, seed=result.seed)


def without_key(agent: AgentLock) -> AgentLock:
    """The agent without the name of its key: what is recorded can be replayed where no key is."""
    if agent.model is None:
        return agent
    return agent.model_copy(update={"model": agent.model.model_copy(update={"api_key_env": None})})


def _stored(store: ImageStore, locked: TaskLock) -> Image | None:
    """The image by its digest, whatever its name means by now; None when it has to be made."""
    assert locked.image_digest is not None
    if store.find_digest(locked.image_digest) is None:
        return None
    try:
        image = store.resolve(locked.image_digest)
    except ImageError:
        return None
    proofs = {f"{HISTORY}{path}": text for path, text in locked.history.items()}
    return replace(image, ref=locked.image_ref or image.ref, labels={**image.labels, **proofs})


async def _image_of(lock: RunLock, task: Task, store: ImageStore) -> Image:
    from proctor.tasks.environment import prepare

    locked = next(one for one in lock.tasks if one.name == task.name)
    if locked.image_digest is None:
        raise RefusedError(f"the run had no image for task {task.name}", field="run.json")
    name = f"image {locked.image_ref} ({locked.image_digest}) of task {task.name}"
    stored = await to_thread.run_sync(_stored, store, locked)
    if stored is not None:
        return stored
    try:
        image = await prepare(task, store=store)
    except (ImageError, InfraError, TimeoutError) as error:
        raise RefusedError(f"{name} cannot be had: {error}", field="image",
                           remedy="import it, or build it as it was") from error  # fmt: skip
    if image.digest != locked.image_digest:
        raise RefusedError(f"{name} is not here; what is made now is {image.digest}", field="image",
                           remedy="import the image that the run was made with")  # fmt: skip
    return image
