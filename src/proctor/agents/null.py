"""The harness that does nothing: a task that it resolves is not a task."""

from __future__ import annotations

from proctor.agents.contract import AgentResult, HarnessContext, StopReason
from proctor.agents.steps import NoOptions, acted, said


class Null:
    """Ends at once."""

    name = "null"
    version = "1"
    needs_model = False
    options_model = NoOptions

    async def run(self, context: HarnessContext) -> AgentResult:
        """Record the instruction and that nothing was done."""
        context.recorder.step(said("user", context.instruction))
        context.recorder.step(acted("(does nothing)"))
        return AgentResult(StopReason.FINISHED)
