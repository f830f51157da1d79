"""The harness that runs a task's reference solution, in the agent's sandbox, as the agent would.

A task that its own oracle does not resolve through the whole path cannot tell anything about anybody.
"""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING

import anyio

from proctor.agents.contract import AgentResult, HarnessContext, Room, StopReason, ToolCall
from proctor.agents.steps import NoOptions, acted, said
from proctor.agents.tools import describe
from proctor.common import RefusedError
from proctor.sandbox.contract import ExecResult, FileError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from proctor.sandbox.contract import Sandbox
    from proctor.tasks.model import Solution

SOLUTION_DIR = "/solution"
_OUTPUT_CHARS = 16_000
_CLEAN_UP_S = 10.0

# The task's own shebang may be missing, or come after comment lines, so the shell is chosen here.
_RUN_SCRIPT = 'if command -v bash >/dev/null; then exec bash "$0"; else exec sh "$0"; fi'

# GIT_CEILING_DIRECTORIES would hide the repository; `git apply` needs none, it works on files. `patch` stands in
# where an image has no git.
_APPLY = (
    'cd "$0" && if command -v git >/dev/null; then exec git apply --whitespace=nowarn -; '
    "else exec patch -p1 --batch --forward; fi"
)


class Oracle:
    """Runs `solution/solve.sh`, or applies the gold patch; what it brought with it is removed afterwards."""

    name = "oracle"
    version = "1"
    needs_model = False
    options_model = NoOptions
    sees_solution = True

    async def run(self, context: HarnessContext) -> AgentResult:
        """One step: the solution. Its exit code is reported and decides nothing; the grader does.

        Raises RefusedError for a task without a reference solution.
        """
        solution = context.task.solution
        if solution is None or (solution.script is None and solution.patch is None):
            raise RefusedError(
                f"task {context.task.name} has no reference solution", field="solution", remedy="use another agent"
            )
        context.recorder.step(said("user", context.instruction))
        results: list[ExecResult] = []
        if solution.script is not None:
            results.append(await self._script(context, solution, solution.script))
        elif solution.patch is not None:
            results.append(await self._patch(context, solution.patch))
        failed = [result for result in results if not result.ok]
        detail = describe(failed[0], 200).replace("\n", " | ") if failed else ""
        return AgentResult(StopReason.FINISHED, detail=detail)

    async def _script(self, context: HarnessContext, solution: Solution, script: Path) -> ExecResult:
        box = context.room.sandbox
        await _refuse_existing(box)
        source = solution.directory or script.parent
        await context.room.upload(source, SOLUTION_DIR)
        try:
            argv = ["sh", "-c", _RUN_SCRIPT, f"{SOLUTION_DIR}/{script.relative_to(source)}"]
            return await self._step(context, argv, env=dict(solution.env), note=f"run {script.name}")
        finally:
            await _remove_solution(context.room)

    async def _patch(self, context: HarnessContext, patch: Path) -> ExecResult:
        repository = context.task.carry.repo or context.room.workdir
        argv = ["sh", "-c", _APPLY, repository]
        diff = await anyio.Path(patch).read_bytes()
        return await self._step(context, argv, stdin=diff, note=f"apply {patch.name}")

    async def _step(
        self,
        context: HarnessContext,
        argv: Sequence[str],
        *,
        note: str,
        env: dict[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """Run the command of the solution and record it as one step, even when it is cut."""
        arguments = {"argv": list(argv)}
        call = ToolCall("oracle-1", "run", arguments, json.dumps(arguments))
        try:
            result = await context.room.run(argv, env=env, stdin=stdin)
            call.result, call.duration_s = describe(result, _OUTPUT_CHARS), result.duration_s
            return result
        finally:
            if call.result is None:
                call.error = "cut before it ended"
            context.recorder.step(acted(note, [call]))


async def _remove_solution(room: Room) -> None:
    """Take the solution away again, also when the trial was cut: it is not the agent's work."""
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _CLEAN_UP_S):
        try:
            await room.remove(SOLUTION_DIR)
        except FileError as error:
            if error.errno != errno.ENOENT:
                raise


async def _refuse_existing(box: Sandbox) -> None:
    """An image with a /solution of its own would lose it, so such a task is refused."""
    try:
        await box.stat(SOLUTION_DIR)
    except FileError as error:
        if error.errno == errno.ENOENT:
            return
        raise
    raise RefusedError(f"the image already has {SOLUTION_DIR}", field="environment", remedy="rename it in the image")
