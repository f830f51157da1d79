"""The end truth: real SWE-bench tasks, solved by a loop on recorded answers, are replayed without a difference.

Building their images takes a package index and minutes: `pytest -m heavy tests/replay/test_swe.py`.
"""

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

pytestmark = [pytest.mark.heavy, pytest.mark.sandbox]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TASKS = {"psf__requests-1142": "test_requests.py", "pallets__flask-5063": "tests/test_cli.py"}


def answers(task: Path, tests: str) -> list[Any]:
    """What a model that knows the reference patch would do: look, apply it by a command, run the tests, finish."""
    patch = json.loads((task / "instance.json").read_text())["patch"]
    return [
        call("bash", command="git status --short; git log --oneline | head -3; ls"),
        call("write_file", path="/tmp/fix.patch", content=patch),
        call("bash", command="git apply -v /tmp/fix.patch && rm /tmp/fix.patch && git diff --stat"),
        call("bash", command=f"python -m pytest -q -x {tests} 2>&1 | tail -5"),
        call("finish", message="applied"),
    ]


async def solve(shared: Path, out: Path) -> None:
    scripts = {name: answers(shared / "swe" / name, tests) for name, tests in TASKS.items()}
    keys = {json.loads((shared / "swe" / name / "instance.json").read_text())["problem_statement"][:60]: name
            for name in TASKS}  # fmt: skip
    async with ScriptedServer({key: scripts[name] for key, name in keys.items()}) as server:
        request = Request(
            sources=(str(shared / "swe"),),
            agents=("tool-loop",),
            models=(f"m@{server.base_url}",),
            select=tuple(TASKS),
            limits=("tool_call_s=300", "total_s=900"),
        )
        plan = plan_request(request)
        preparation = await prepare_all(plan, LineProgress(print))
        await anyio.Path(out).mkdir()
        write_lock(out, make_lock(plan, preparation.images))
        async with opened(plan, preparation) as examiner:
            execution = await execute(plan, out, examiner, concurrency=1)
    assert {one.task: str(one.outcome) for one in execution.results.values()} == dict.fromkeys(TASKS, "resolved")


def test_mini_swe_agent_is_replayed_without_a_difference(tmp_path: Path) -> None:
    """The agent's packages are fetched the first time."""
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    plan = [call("bash", command="ls > proof.txt; date"), call("bash", command=submit)]
    run = tmp_path / "run"

    async def work() -> None:
        async with ScriptedServer(plan) as server:
            task = str(EXAMPLES / "demo" / "fix-median")
            asked = plan_request(Request(sources=(task,), agents=("mini-swe-agent",), models=(f"m@{server.base_url}",)))
            preparation = await prepare_all(asked, LineProgress(print))
            await anyio.Path(run).mkdir()
            write_lock(run, make_lock(asked, preparation.images, preparation.kit_digests))
            async with opened(asked, preparation) as examiner:
                await execute(asked, run, examiner, concurrency=1)

    anyio.run(work)
    done = CliRunner().invoke(cli, ["replay", str(run), "fix", "--model-calls", "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["differences"], found["asked"]) == (0, 0, 2), found


@pytest.mark.data
def test_real_tasks_are_solved_and_replayed_without_a_difference(shared_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    anyio.run(solve, shared_data, run)
    for task in TASKS:
        for options in (["--actions", "--repeat", "2"], ["--model-calls"]):
            done = CliRunner().invoke(cli, ["replay", str(run), task, "--json", *options], catch_exceptions=False)
            found = json.loads(done.stdout)
            assert (done.exit_code, found["differences"]) == (0, 0), found
