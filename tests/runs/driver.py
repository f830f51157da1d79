"""A run in a process of its own, so that tests can signal and kill it: `python driver.py DIR TASKS SLEEP_S`."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from tests.runs.conftest import DeskExaminer, make_plan

from proctor.common import ProctorError
from proctor.runs.engine import execute, single_error

if TYPE_CHECKING:
    from proctor.agents.contract import AgentResult
    from proctor.runs.plan import TrialPlan


async def main(directory: Path, tasks: int, sleep_s: float) -> bool:
    """Run it; SIGINT and SIGTERM stop it in good order. True when it was interrupted."""
    desk = directory.parent / "desk"
    await anyio.Path(desk).mkdir(exist_ok=True)
    await anyio.Path(directory).mkdir(exist_ok=True)

    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        await anyio.sleep(random.random() * sleep_s)
        return None

    stop = anyio.Event()

    async def listen() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                stop.set()

    with single_error():
        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            print("ready", flush=True)
            plan = make_plan(tasks, ("solver",))
            execution = await execute(plan, directory, DeskExaminer(desk, act), concurrency=4, stop=stop)
            group.cancel_scope.cancel()
    return execution.interrupted


if __name__ == "__main__":
    try:
        sys.exit(130 if anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])) else 0)
    except ProctorError as error:
        print(error.line(), flush=True)
        sys.exit(error.exit_code)
