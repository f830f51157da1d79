"""Running the tool calls of one answer: in the order that they were sent, or side by side where that is safe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proctor.agents.contract import HarnessContext, Step, ToolCall
    from proctor.agents.tools import Toolbox

Parallel = Literal["none", "reads", "all"]
"""Which calls of one answer run side by side: `none`; neighbours that only `read`; or `all` but `finish`, for models
that are told that their calls run at once."""
_READING = frozenset({"read_file"})
_LAST = frozenset({"finish"})


async def act(context: HarnessContext, tools: Toolbox, step: Step, parallel: Parallel = "none") -> None:
    """Run the step's tool calls, then record it; also when a limit cuts it: what was done so far is evidence."""
    try:
        for batch in batches(step.tool_calls, parallel):
            if len(batch) == 1:
                await tools.run(batch[0])
                continue
            for call in batch:
                call.extra["beside"] = len(batch) - 1
            async with anyio.create_task_group() as group:
                for call in batch:
                    group.start_soon(tools.run, call)
    finally:
        for call in step.tool_calls:
            if call.result is None and call.error is None:
                call.error = "not completed: the trial ended"
        context.recorder.step(step)


def batches(calls: Sequence[ToolCall], parallel: Parallel) -> Iterator[list[ToolCall]]:
    """The calls in groups that may run side by side, in the order that they were sent."""
    batch: list[ToolCall] = []
    for call in calls:
        joins = call.name in _READING if parallel == "reads" else parallel == "all" and call.name not in _LAST
        if not joins and batch:
            yield batch
            batch = []
        batch.append(call)
        if not joins:
            yield batch
            batch = []
    if batch:
        yield batch
