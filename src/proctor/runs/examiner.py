"""One trial for real: sandbox, harness, collection, clean room. The engine decides what its end means.

The agent's sandbox is closed before a grading room is asked for (a live deliverable apart), so a trial never waits
for room while it holds some.
"""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import anyio

from proctor.agents.contract import AgentResult, StopReason
from proctor.agents.registry import load_harness
from proctor.agents.runner import run_harness
from proctor.common import ConfigError, InfraError
from proctor.grading import GradeOptions, collect, grade
from proctor.grading.contract import Grade, GradeFinding
from proctor.grading.deliverable import Collected
from proctor.grading.near_miss import in_right_form, misplaced
from proctor.runs.covering import cover_archive
from proctor.runs.equipment import Equipment
from proctor.runs.formats import Stage
from proctor.runs.isolation import Isolation
from proctor.runs.model_access import ModelDesk, gateway_of
from proctor.runs.network import enter_phase, policy_for, with_network
from proctor.runs.outcome import Outcome, Verdict, backoff_s, describe, from_grade, from_model_failure
from proctor.runs.plan import trial_limits
from proctor.runs.preparation import AgentKit
from proctor.runs.text import brief
from proctor.sandbox.contract import Lifecycle, Resources, SandboxLost, SandboxSpec
from proctor.sandbox.net import NetworkPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from proctor.agents.contract import Harness, Room
    from proctor.agents.room import BoundedRoom
    from proctor.models.contract import ModelClient
    from proctor.runs.engine import Examiner
    from proctor.runs.plan import RunPlan, TrialPlan
    from proctor.runs.preparation import Preparation
    from proctor.runs.record import TrialRecord
    from proctor.sandbox import Edge
    from proctor.sandbox.contract import Image, Sandbox
    from proctor.tasks.model import AgentLimits, Task
    from proctor.tasks.predictions import Prediction

_MARGIN_S = 300.0
"""How much longer than its harness a sandbox may live: start, collection and, for a live deliverable, grading."""
MAX_REGRADES = 2
"""How often the same work is graded again when the machinery failed, before the whole attempt is."""
_MAX_ARCHIVE_BYTES = 1 << 30
_NO_KIT = AgentKit()
_BUILT_BY_AGENT = frozenset({errno.ENAMETOOLONG, errno.ELOOP})
_ADMISSION_DEADLINE_S = 24 * 3600.0


@asynccontextmanager
async def opened(plan: RunPlan, preparation: Preparation, playback: Playback | None = None) -> AsyncIterator[Examiner]:
    """An examiner with an Edge of its own and one gateway to all models; leaving it ends every sandbox."""
    from proctor.models.gateway import Gateway
    from proctor.sandbox import Edge

    async with AsyncExitStack() as stack:
        config, names = gateway_of(plan)
        desk = ModelDesk(await stack.enter_async_context(Gateway(config)), names)
        edge = await stack.enter_async_context(Edge(queue_deadline_s=_ADMISSION_DEADLINE_S))
        await edge.ready(Isolation.locked(plan.options).runtime)  # refused now, not once a trial
        if plan.predictions is not None:
            from pathlib import Path

            from proctor.tasks import load_predictions

            yield PredictionExaminer(edge, plan, preparation, load_predictions(Path(plan.predictions)))
        else:
            yield TrialExaminer(edge, plan, preparation, desk, playback)


class Playback(Protocol):
    """What stands between a harness and its sandbox when a trial is done again (`proctor.runs.replay`)."""

    async def begin(self, trial: TrialPlan, box: Sandbox, record: TrialRecord) -> None:
        """The sandbox is there, and the harness has not begun."""
        ...

    def room(self, room: BoundedRoom) -> Room:
        """The room that the harness gets."""
        ...


class TrialExaminer:
    """Lets an agent work in a sandbox and has the result graded. One object serves all trials of a run."""

    def __init__(
        self,
        edge: Edge,
        plan: RunPlan,
        preparation: Preparation,
        desk: ModelDesk,
        playback: Playback | None = None,
    ) -> None:
        self._edge = edge
        self._plan = plan
        self._preparation = preparation
        self._desk = desk
        self._playback = playback
        self._equipment = Equipment(edge)

    async def examine(self, trial: TrialPlan, record: TrialRecord) -> Verdict:
        """The stages of a trial, from admission to the grade. See `Examiner.examine`."""
        image = self._preparation.rooms.get(trial.task.name)
        if image is None:
            return Verdict(Outcome.INFRA_ERROR, "image", self._preparation.missing[trial.task.name])
        limits = trial_limits(trial, self._plan.limits)
        record.stages.enter(Stage.ADMISSION)
        kit = self._preparation.kits.get(trial.agent.label, AgentKit())
        isolation = Isolation.locked(self._plan.options)
        spec = await equipped_spec(self._plan.run_id, trial, image, limits, self._equipment, kit, isolation)
        harness = load_harness(trial.agent.ref)
        services = self._desk.services(trial, harness)
        network = self._network(trial, services)
        box = await self._edge.create(
            with_network(spec, network, online=not trial.task.network.is_none),
            services=services,
            faults=trial.condition.network_faults,
            on_network=record.network_event,
            on_admitted=lambda: record.stages.enter(Stage.START),
        )
        with watched(longest_s(trial.task, limits), record):
            try:
                result = await self._execute(trial, harness, box, limits, record)
                if failed_by_endpoint(result, record):
                    return from_model_failure(result)
                collected = await self._collect(trial.task, box, record)
                if collected.kind == "live":
                    await enter_phase(box, self._live_network(trial), "grading")
                    return from_grade(result, await self._grade(trial.task, collected, image, record))
            except SandboxLost as error:
                # What the caller saw is that the guest is gone; the Edge knows from the kernel's counters why.
                reason = (await box.close()).end_reason or error.reason
                raise SandboxLost(error.message, reason=reason) from error
            finally:
                # Also when cancelled: closing is what frees the machine, and the receipt is part of the record.
                with anyio.CancelScope(shield=True):
                    record.agent_receipt(await box.close())
            return from_grade(result, await self._grade(trial.task, collected, image, record))

    async def _execute(
        self, trial: TrialPlan, harness: Harness, box: Sandbox, limits: AgentLimits, record: TrialRecord
    ) -> AgentResult:
        await wait_until_healthy(box, trial.task)
        if self._playback is not None:
            await self._playback.begin(trial, box, record)
        record.stages.enter(Stage.MODEL_ACCESS)
        services = self._desk.services(trial, harness)
        network = self._network(trial, services)
        try:
            async with self._desk.opened(trial, limits, record, calls=limits.steps if services else None) as models:
                client = self._snapshotting(models.client, box, record) if models else None
                record.stages.enter(Stage.EXECUTION)
                await enter_phase(box, network, "agent")
                result = await run_harness(
                    harness,
                    sandbox=box,
                    task=trial.task,
                    recorder=record,
                    limits=limits,
                    model=client,
                    access=models.access if models else None,
                    endpoint=models.endpoint if models and services else None,
                    user_model=models.user if models else None,
                    instruction=trial.condition.instruction(trial.task, trial.seed),
                    seed=trial.seed,
                    faults=trial.condition.tool_faults,
                    options=trial.agent.options,
                    on_event=record.room_event,
                    wrap_room=self._playback.room if self._playback is not None else (lambda room: room),
                )
        except ConfigError as error:
            # Before the agent has done anything, this is about its options, and a person has to mend them. Later it is
            # about something that the agent asked for, and must not be a way to stop the run.
            if not record.agent_has_acted:
                raise
            record.failure(error)
            result = AgentResult(StopReason.ERROR, error.line())
        record.final_message = result.final_message
        await enter_phase(box, NetworkPolicy() if network is not None else None, "collection")
        return result

    def _network(self, trial: TrialPlan, services: Mapping[str, object]) -> NetworkPolicy | None:
        """What the agent's sandbox may reach beside our services; None: it needs no carried network."""
        asked = policy_for(self._plan.network, trial.task.network.agent)
        return asked or (NetworkPolicy() if services or self._live_network(trial) is not None else None)

    def _live_network(self, trial: TrialPlan) -> NetworkPolicy | None:
        """What the verifier may reach from the agent's own sandbox, where it has to work there."""
        if trial.task.carry.kind != "live":
            return None
        return policy_for(self._plan.network, trial.task.network.verifier)

    def _snapshotting(self, client: ModelClient, box: Sandbox, record: TrialRecord) -> ModelClient:
        """The client, with fork points kept before it is asked, where the run wants them."""
        every = self._plan.options.get("record_snapshots")
        if not every:
            return client
        from proctor.runs.replay.snapshots import SnapshotKeeper, SnapshottingModel

        def note(data: Mapping[str, object]) -> None:
            record.events.write("snapshot", data)

        keeper = SnapshotKeeper(record.directory, int(every), note, secrets=record.secrets)
        return SnapshottingModel(client, keeper, box, record)

    async def _collect(self, task: Task, box: Sandbox, record: TrialRecord) -> Collected:
        record.stages.enter(Stage.COLLECTION)
        if task.carry.kind != "live" and (remaining := await box.kill_all()):
            raise InfraError(f"{remaining} processes of sandbox {box.id} survived being killed")
        try:
            await keep_changes(box, record)
        except OSError as error:
            record.diff([], archive=f"not kept: {blame(error)}")
        try:
            collected = await collect(task, box)
            collected = replace(collected, misplaced=await misplaced(task, box, collected))
        except OSError as error:
            collected = Collected(kind=task.carry.kind, problem=f"what was left cannot be read: {blame(error)}")
        if collected.patch is not None:
            record.put_bytes("deliverable.patch", collected.patch.encode("utf-8", "surrogateescape"))
        return collected

    async def _grade(self, task: Task, collected: Collected, image: Image, record: TrialRecord) -> Grade:
        record.stages.enter(Stage.GRADING_ARCHIVE)
        try:
            verdict = await self._grade_until_graded(task, collected, image, record)
            if verdict.resolved is False and collected.kind == "paths":
                verdict = await self._if_only_the_form(task, collected, image, verdict, record)
        except OSError as error:
            why = f"what was left cannot be carried: {blame(error)}"
            verdict = Grade("unresolved", False, {"reward": 0.0}, carry=task.carry.kind, error=why)
        finally:
            if collected.layer is not None:
                with anyio.CancelScope(shield=True):
                    await self._edge.drop(collected.layer)
        record.graded(verdict)
        return verdict

    async def _grade_until_graded(self, task: Task, collected: Collected, image: Image, record: TrialRecord) -> Grade:
        """The grade; a fault of the machinery is met by grading the same work again, in a new room, before the agent
        would have to work again. Every such fault is a note in the grade. Not for `live`: its tests are in there now.
        """
        faults: list[GradeFinding] = []
        options = replace(grade_options(self._plan, task, record), give_back=False)
        while True:
            verdict = await grade(task, collected, edge=self._edge, image=image, options=options)
            if not verdict.infra or collected.kind == "live" or len(faults) == MAX_REGRADES:
                return replace(verdict, findings=(*faults, *verdict.findings))
            faults.append(GradeFinding("graded-again", verdict.error))
            await anyio.sleep(backoff_s(len(faults), 0.0))

    async def _if_only_the_form(
        self, task: Task, collected: Collected, image: Image, verdict: Grade, record: TrialRecord
    ) -> Grade:
        """The same verdict, with a note when the work passes in the right form: that is why it failed."""
        mended = in_right_form(collected)
        if mended is None:
            return verdict
        again = await self._grade_until_graded(task, mended[0], image, record)
        if not again.resolved or any(finding.severity == "disqualify" for finding in again.findings):
            return verdict
        note = GradeFinding("format-only", f"the same work passes in the right form: {brief(mended[1], 300)}")
        return replace(verdict, findings=(*verdict.findings, note), rooms=verdict.rooms + again.rooms)


class PredictionExaminer:
    """Grades patches that were made elsewhere; there is no agent and no agent's sandbox."""

    def __init__(
        self, edge: Edge, plan: RunPlan, preparation: Preparation, predictions: Mapping[str, Prediction]
    ) -> None:
        self._edge = edge
        self._plan = plan
        self._preparation = preparation
        self._predictions = predictions

    async def examine(self, trial: TrialPlan, record: TrialRecord) -> Verdict:
        """The stages that are left. No prediction counts as an empty one: the instance stays in the denominator."""
        task = trial.task
        prediction = self._predictions.get(task.instance_id or task.name)
        patch = prediction.patch if prediction else ""
        image = self._preparation.rooms.get(task.name)
        if image is None:
            return Verdict(Outcome.INFRA_ERROR, "image", self._preparation.missing[task.name])
        record.stages.enter(Stage.COLLECTION)
        record.put_bytes("deliverable.patch", patch.encode("utf-8", "surrogatepass"))
        record.stages.enter(Stage.GRADING_ARCHIVE)
        with watched(longest_s(task, task.agent_limits()), record):
            options = grade_options(self._plan, task, record)
            verdict = await grade(task, Collected.from_patch(patch), edge=self._edge, image=image, options=options)
        record.graded(verdict)
        why = "" if patch.strip() else "the patch is empty" if prediction else "there is no prediction for it"
        return from_grade(AgentResult(StopReason.FINISHED, why), verdict)


def grade_options(plan: RunPlan, task: Task, record: TrialRecord) -> GradeOptions:
    """How a task of this run is graded: with the network that its verifier asks for, as far as the run allows one."""
    return GradeOptions(network=policy_for(plan.network, task.network.verifier), on_network=record.network_event)


def failed_by_endpoint(result: AgentResult, record: TrialRecord) -> bool:
    """Whether the model's endpoint, and not the agent, is why a harness stopped. A program in the sandbox that breaks
    cannot say so itself: it counts when the last thing its model did was to be down."""
    if result.stop is StopReason.MODEL_ERROR:
        return record.endpoint_failed
    return result.stop is StopReason.ERROR and record.endpoint_down


def longest_s(task: Task, limits: AgentLimits) -> float:
    """After how many seconds a trial that was admitted must have ended: everything in it has a deadline of its own,
    so passing this one means that something of ours hangs. Grading may run the tests three times."""
    return limits.total_s + 3 * (task.verifier.timeout_s + _MARGIN_S)


@contextmanager
def watched(seconds: float, record: TrialRecord) -> Iterator[None]:
    """Raise InfraError, naming the stage, when the body takes longer than `seconds`."""
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        stage = record.stages.current
        raise InfraError(f"the trial hangs: {seconds:g} s are over and it is still in stage {stage}")


def room_spec(run_id: str, trial: TrialPlan, image: Image, limits: AgentLimits, kit: AgentKit = _NO_KIT) -> SandboxSpec:
    """The agent's sandbox: what the task's environment asks for, what the agent brings on top of it, no network, and a
    life a little longer than the harness's."""
    environment = trial.task.environment
    memory_mb = environment.memory_mb + kit.memory_mb
    return SandboxSpec(
        image=image,
        layers=kit.layers,
        resources=Resources(cpus=environment.cpus, memory_mb=memory_mb, disk_mb=environment.storage_mb),
        lifecycle=Lifecycle(ttl_s=longest_s(trial.task, limits) + _MARGIN_S),
        workdir=environment.workdir,
        env=environment.env,
        labels={"run": run_id, "trial": trial.id, "role": "agent"},
    )


async def equipped_spec(
    run_id: str,
    trial: TrialPlan,
    image: Image,
    limits: AgentLimits,
    equipment: Equipment,
    kit: AgentKit = _NO_KIT,
    isolation: Isolation = Isolation(),  # noqa: B008, RUF100 - frozen value
) -> SandboxSpec:
    """The agent's sandbox with its own toolkit and the programs that the trial's condition puts into it."""
    spec = isolation.of(room_spec(run_id, trial, image, limits, kit))
    if programs := trial.condition.programs(trial.task):
        spec = replace(spec, layers=(*kit.layers, await equipment.layer(spec, programs)))
    return spec


async def wait_until_healthy(box: Sandbox, task: Task) -> None:
    """Poll the environment's health check, as Docker does. Raises InfraError when it never succeeds."""
    check = task.environment.healthcheck
    if check is None:
        return
    timeout_s = float(check.get("timeout_sec", 30.0))
    grace_ends = anyio.current_time() + float(check.get("start_period_sec", 0.0))
    failures = 0
    while failures < int(check.get("retries", 3)):
        starting = anyio.current_time() < grace_ends
        result = await box.exec(check["command"], timeout_s=timeout_s)
        if result.ok:
            return
        failures += not starting
        await anyio.sleep(float(check.get("start_interval_sec" if starting else "interval_sec", 5.0)))
    raise InfraError(f"the environment of {task.name} never became healthy: exit code {result.exit_code}",
                     field="environment.healthcheck")  # fmt: skip


def blame(error: OSError) -> str:
    """One line on an error met in reading what the agent left on its disk, if only the agent can have caused it: a path
    longer than any system call takes, links in a circle. That must not be a way out of the denominator.

    Raises InfraError for every other error: then the host is at fault, or we are.
    """
    if error.errno not in _BUILT_BY_AGENT:
        raise InfraError(f"the disk of the sandbox cannot be read: {error.strerror or error}") from error
    return brief(describe(error), 200)


async def keep_changes(box: Sandbox, record: TrialRecord) -> None:
    """Keep what the agent changed on disk: the list always, the content unless it is very large."""
    entries = await box.diff()
    total = sum(entry.size for entry in entries)
    if total > _MAX_ARCHIVE_BYTES:
        record.diff(entries, archive=f"not kept: {total} bytes are more than {_MAX_ARCHIVE_BYTES}")
        return
    archive = record.directory / "diff.tar.zst"
    await box.export_diff(archive)
    if record.secrets and not await anyio.to_thread.run_sync(cover_archive, archive, record.secrets):
        archive.unlink()
        record.diff(entries, archive="not kept: the token of the trial is part of a name")
        return
    record.diff(entries)
