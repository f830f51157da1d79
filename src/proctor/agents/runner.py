"""Run one harness in one sandbox: wrap what it may use, let it act, and say with certainty how it ended."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from proctor.agents.contract import AgentResult, Harness, HarnessContext, ModelEndpoint, Recorder, StopReason
from proctor.agents.limits import CountingRecorder, LimitGuard, LimitReached, MeteredModel
from proctor.agents.room import BoundedRoom, OnRoomEvent
from proctor.agents.spending import check_budget, run_within
from proctor.common import ConfigError, InfraError, RefusedError
from proctor.models.contract import ModelClient, ModelError, ModelFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from proctor.agents.contract import Room
    from proctor.agents.faults import ToolFaults
    from proctor.models.gateway import TrialAccess
    from proctor.sandbox.contract import Sandbox
    from proctor.tasks.model import AgentLimits, Task


async def run_harness(
    harness: Harness,
    *,
    sandbox: Sandbox,
    task: Task,
    recorder: Recorder,
    limits: AgentLimits,
    model: ModelClient | None = None,
    access: TrialAccess | None = None,
    workdir: str | None = None,
    instruction: str | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    on_event: OnRoomEvent | None = None,
    faults: ToolFaults | None = None,
    wrap_room: Callable[[BoundedRoom], Room] = lambda room: room,
    endpoint: ModelEndpoint | None = None,
    user_model: ModelClient | None = None,
) -> AgentResult:
    """Let `harness` work on `task` in `sandbox` until it ends or a limit fires.

    The steps go to `recorder` as they happen, each call on the sandbox to `on_event`. `workdir` defaults to the
    task's, then the image's. `access` is the gateway's side of the model, whose budgets end the trial too; `endpoint`
    its address for programs in the sandbox. `faults` makes a share of its tool calls go wrong on purpose; `wrap_room`
    may put another room before the real one (replays). Whatever the harness says, a limit that was passed is the
    result.

    Raises InfraError (SandboxLost among them) when the machinery failed, RefusedError when a limit cannot be
    enforced, ConfigError for options or a model that do not fit. Anything else a harness raises is its own
    failure: StopReason.ERROR, with the traceback in the log.
    """
    _check_fit(harness, model, limits)
    guard = LimitGuard(limits)
    place = workdir or task.environment.workdir or sandbox.spec.workdir or sandbox.image.workdir
    room = BoundedRoom(sandbox, place, guard, user=task.agent_user, on_event=on_event, faults=faults, seed=seed)
    context = HarnessContext(
        instruction=task.instruction if instruction is None else instruction,
        room=wrap_room(room),
        recorder=CountingRecorder(recorder, guard),
        limits=limits,
        model=MeteredModel(model, guard) if model else None,
        task=task if getattr(harness, "sees_solution", False) else replace(task, solution=None),
        seed=seed,
        options=dict(options or {}),
        endpoint=endpoint,
        user_model=user_model,
    )
    try:
        result = await _bounded(harness, context, guard, access)
        check_budget(access, guard)
        if result.stop is not StopReason.MODEL_ERROR:
            guard.check_spent()
        return result
    except LimitReached as limit:
        return limit.result()
    finally:
        room.close()


def _check_fit(harness: Harness, model: ModelClient | None, limits: AgentLimits) -> None:
    if harness.needs_model and model is None:
        raise ConfigError(f"harness {harness.name} needs a model", field="agent.model", remedy="give --model")
    if limits.cost_usd is not None and model is not None and model.spec.prices is None:
        raise RefusedError(
            f"the price of {model.spec.name} is unknown, so this limit cannot be enforced",
            field="limits.cost_usd",
            remedy="give the model's prices (prompt, cached, completion)",
        )


async def _bounded(
    harness: Harness, context: HarnessContext, guard: LimitGuard, access: TrialAccess | None
) -> AgentResult:
    """The harness' own result, or what its end by an exception means."""
    # Commands and model calls are cut at the deadline itself and return what they have; this scope is for a
    # harness that hangs elsewhere, and leaves them time to come back.
    grace_s = min(5.0, max(0.25, 0.05 * guard.limits.total_s))
    try:
        with anyio.move_on_after(guard.remaining_s() + grace_s) as guard.backstop:
            result: Any = await run_within(harness, context, access)
            if isinstance(result, AgentResult):
                return result
            return AgentResult(StopReason.ERROR, f"{harness.name} returned {type(result).__name__}, not AgentResult")
    except Exception as failure:  # a harness is foreign code: whatever it raises has to become a result
        return _meaning(failure, context)
    guard.fire(StopReason.LIMIT_TIME, f"the total time of {guard.limits.total_s:g} s is used up")


def _meaning(failure: Exception, context: HarnessContext) -> AgentResult:
    leaves = list(_leaves(failure))
    for kind in (InfraError, RefusedError, ConfigError, LimitReached):
        for leaf in leaves:
            if isinstance(leaf, kind):
                raise leaf
    for leaf in leaves:
        if isinstance(leaf, ModelError):
            return model_failure(leaf)
    context.recorder.log("".join(traceback.format_exception(failure)).rstrip())
    return AgentResult(StopReason.ERROR, detail=f"{type(failure).__name__}: {failure}".splitlines()[0])


def model_failure(error: ModelError) -> AgentResult:
    """How a trial ends when the model gives no answer: a full context window is a limit, the rest a fault."""
    stop = StopReason.LIMIT_TOKENS if error.fault is ModelFault.CONTEXT else StopReason.MODEL_ERROR
    return AgentResult(stop, detail=error.line())


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
