"""The demonstration's trials, acted out by a tool loop on recorded answers, are replayed without a difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from proctor.cli.main import cli
from proctor.models.scripted import ScriptedServer, call
from proctor.runs.engine import execute
from proctor.runs.examiner import opened
from proctor.runs.lock import make_lock, write_lock
from proctor.runs.preparation import prepare_all
from proctor.runs.progress import LineProgress
from proctor.runs.request import Request, plan_request

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TASKS = ("add-slugify", "fix-duration-parser", "merge-orders", "repair-backup")
NAMES = {"read": "read_file", "write": "write_file", "edit": "edit_file"}


def script(task: str) -> list[Any]:
    """The demonstration's actions as a model's tool calls; a model ends by `finish`."""
    actions = json.loads((EXAMPLES / "demo-agent" / f"{task}.json").read_text())["actions"]
    calls = [call(NAMES.get(one["action"], one["action"]), **{k: v for k, v in one.items() if k != "action"})
             for one in actions]  # fmt: skip
    return calls if actions[-1]["action"] == "finish" else [*calls, call("finish")]


async def examine(out: Path) -> None:
    titles = {task: (EXAMPLES / "demo" / task / "instruction.md").read_text().splitlines()[0] for task in TASKS}
    async with ScriptedServer({title: script(task) for task, title in titles.items()}) as server:
        sources = tuple(str(EXAMPLES / "demo" / task) for task in TASKS)
        plan = plan_request(Request(sources=sources, agents=("tool-loop",), models=(f"m@{server.base_url}",)))
        preparation = await prepare_all(plan, LineProgress(lambda line: None))
        await anyio.Path(out).mkdir()
        write_lock(out, make_lock(plan, preparation.images))
        async with opened(plan, preparation) as examiner:
            execution = await execute(plan, out, examiner, concurrency=2)
    assert all(one.outcome.is_graded for one in execution.results.values()), execution.results


@pytest.mark.sandbox
def test_trials_of_the_demonstration_are_replayed_without_a_difference(tmp_path: Path) -> None:
    anyio.run(examine, tmp_path / "run")
    for task in TASKS:
        for mode in ("--actions", "--model-calls"):
            command = ["replay", str(tmp_path / "run"), task, mode, "--json"]
            done = CliRunner().invoke(cli, command, catch_exceptions=False)
            found = json.loads(done.stdout)
            assert (done.exit_code, found["differences"]) == (0, 0), found
