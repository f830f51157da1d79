"""A trial's budgets, as the gateway counts them: a harness that goes on past one is stopped, and the end named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from proctor.agents.contract import AgentResult, Harness, HarnessContext, StopReason

if TYPE_CHECKING:
    from proctor.agents.limits import LimitGuard
    from proctor.models.gateway import Exceeded, TrialAccess

_GRACE_S = 2.0
"""How long a harness may go on after its budget is used up: to see the refusal and end by itself."""

_STOPS = {
    ("trial", "tokens"): StopReason.LIMIT_TOKENS,
    ("trial", "cost_usd"): StopReason.LIMIT_COST,
    ("trial", "calls"): StopReason.LIMIT_CALLS,
    ("run", "tokens"): StopReason.LIMIT_RUN_TOKENS,
    ("run", "cost_usd"): StopReason.LIMIT_RUN_COST,
    ("run", "calls"): StopReason.LIMIT_RUN_CALLS,
}


def stop_of(exceeded: Exceeded) -> StopReason:
    """The end that a budget means."""
    return _STOPS[exceeded.scope, exceeded.budget]


async def run_within(harness: Harness, context: HarnessContext, access: TrialAccess | None) -> AgentResult:
    """The harness' own result; a harness that goes on past its budget is cancelled after a moment.

    Raises what the harness raises.
    """
    if access is None:
        return await harness.run(context)
    result = AgentResult(StopReason.ERROR)
    error: Exception | None = None
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            await access.wait_exceeded()
            await anyio.sleep(_GRACE_S)
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            result = await harness.run(context)
        except Exception as raised:  # carried out of the group, so that it is not wrapped in one
            error = raised
        group.cancel_scope.cancel()
    if error is not None:
        raise error
    return result


def check_budget(access: TrialAccess | None, guard: LimitGuard) -> None:
    """Raise LimitReached when a budget of the gateway is used up."""
    if access is not None and access.exceeded is not None:
        guard.fire(stop_of(access.exceeded), access.exceeded.line())
