"""The harnesses in the real sandbox."""

from __future__ import annotations

import json
import random
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from proctor.agents import AgentResult, StopReason, load_harness, run_harness
from proctor.agents.contract import ToolCall
from proctor.agents.limits import LimitGuard
from proctor.agents.room import BoundedRoom
from proctor.agents.tools import TOOLS, Toolbox
from proctor.common import RefusedError
from proctor.models import ModelSpec, OpenAIChatClient
from proctor.models.scripted import ScriptedServer, call, calls, say
from proctor.sandbox import Resources, SandboxLost, SandboxSpec, create
from proctor.sandbox.contract import EndReason
from proctor.tasks.model import Carry, Solution

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


NASTY = [
    "", "a", "/", "/app", "a/b/c", "../../..", ".", "-rf", "--help", "\n", "\x1b[31m",
    "é", "😀", "\u202e", "$HOME", "*", "`id`",
    "/proc/self/mem", "/proc/1/root/etc/shadow", "/proc/kmsg", "/proc/self/fd/0", "/sys/kernel",
    "/dev/null", "/dev/full", "/dev/zero", "/dev/tty", "link", "loop", "fifo", "dir", "dir/f",
    "x" * 300, "y/" * 3000, "z" * 70_000, "q" * 200_000, "\ud800", "a\0b",
]  # fmt: skip
_HOW_OFTEN = {"offset": 0.2, "limit": 0.2, "timeout_s": 0.2, "replace_all": 0.2}


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path_factory.getbasetemp() / "proctor-home"))


@asynccontextmanager
async def room(**spec: Any) -> AsyncIterator[Any]:
    async with create(SandboxSpec(**{"image": "host", "workdir": "/app", **spec})) as box:
        yield box


async def script(box: Any, task: Any, recorder: Any, limits: Any, *actions: dict[str, Any]) -> list[Any]:
    """Play actions; returns the calls as they were recorded."""
    await run_harness(
        load_harness("scripted"),
        sandbox=box,
        task=task,
        recorder=recorder,
        limits=limits,
        options={"script": list(actions)},
    )
    return [step.tool_calls[0] for step in recorder.agent_steps]


def bash(command: str, **more: Any) -> dict[str, Any]:
    return {"action": "bash", "command": command, **more}


@pytest.fixture
def solved(task: Any, tmp_path: Path) -> Any:
    """A task whose solution needs its folder, its environment and the working directory."""
    folder = tmp_path / "solution"
    folder.mkdir()
    (folder / "answer.txt").write_text("42\n")
    # As published tasks do, comments come before the interpreter line.
    text = '# canary\n#!/bin/bash\n[[ $GREETING == hello ]] || exit 9\ncp "$(dirname "$0")/answer.txt" here.txt\n'
    (folder / "solve.sh").write_text(text)
    solution = Solution(directory=folder, script=folder / "solve.sh", env={"GREETING": "hello"})
    return replace(task, solution=solution)


async def test_the_oracle_solves_and_leaves_no_solution(solved: Any, recorder: Any, limits: Any) -> None:
    async with room() as box:
        result = await run_harness(load_harness("oracle"), sandbox=box, task=solved, recorder=recorder, limits=limits)
        assert result == AgentResult(StopReason.FINISHED)
        assert await box.read("/app/here.txt") == b"42\n"
        assert "solution" not in [entry.name for entry in await box.list("/")]


async def test_an_oracle_that_is_cut_leaves_no_solution(solved: Any, recorder: Any, limits: Any) -> None:
    solved.solution.script.write_text("echo begun; sleep 60\n")
    async with room() as box:
        result = await run_harness(
            load_harness("oracle"), sandbox=box, task=solved, recorder=recorder, limits=replace(limits, total_s=1.0)
        )
        assert result.stop is StopReason.LIMIT_TIME
        assert "begun" in recorder.agent_steps[0].tool_calls[0].result
        assert "solution" not in [entry.name for entry in await box.list("/")]


async def test_an_oracle_is_not_bound_by_the_tool_call_limit(solved: Any, recorder: Any, limits: Any) -> None:
    solved.solution.script.write_text("sleep 1; touch slow\n")
    limits = replace(limits, tool_call_s=0.2)
    async with room() as box:
        result = await run_harness(load_harness("oracle"), sandbox=box, task=solved, recorder=recorder, limits=limits)
        assert result.stop is StopReason.FINISHED
        assert (await box.stat("/app/slow")).kind == "file"


async def test_a_solution_that_removes_itself_is_fine(solved: Any, recorder: Any, limits: Any) -> None:
    solved.solution.script.write_text("rm -rf /solution\n")
    async with room() as box:
        result = await run_harness(load_harness("oracle"), sandbox=box, task=solved, recorder=recorder, limits=limits)
        assert result == AgentResult(StopReason.FINISHED)


async def test_a_service_that_the_solution_starts_lives_on(solved: Any, recorder: Any, limits: Any) -> None:
    solved.solution.script.write_text(
        "setsid sh -c 'while sleep 0.05; do date +%N > /tmp/beat; done' >/dev/null 2>&1 &\n"
    )
    async with room() as box:
        await run_harness(load_harness("oracle"), sandbox=box, task=solved, recorder=recorder, limits=limits)
        beats: set[bytes] = set()
        with anyio.fail_after(20):  # a busy machine is slow, a dead service gives the same beat for ever
            while len(beats) < 3:
                await anyio.sleep(0.1)
                beats.add(await box.read("/tmp/beat"))


async def test_a_solution_folder_of_the_image_is_not_overwritten(solved: Any, recorder: Any, limits: Any) -> None:
    async with room() as box:
        await box.mkdir("/solution")
        with pytest.raises(RefusedError, match="already has /solution"):
            await run_harness(load_harness("oracle"), sandbox=box, task=solved, recorder=recorder, limits=limits)


async def test_a_gold_patch_in_a_repository_of_somebody_else(
    task: Any, recorder: Any, limits: Any, tmp_path: Path
) -> None:
    patch = tmp_path / "gold.patch"
    patch.write_text("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n")
    task = replace(task, solution=Solution(patch=patch), carry=Carry(kind="patch", repo="/app/repo"))
    async with room() as box:
        made = await box.exec("mkdir repo && cd repo && git init -q && echo a > x.py && chown -R 1000:1000 .")
        assert made.ok, made.error_text
        result = await run_harness(load_harness("oracle"), sandbox=box, task=task, recorder=recorder, limits=limits)
        assert result == AgentResult(StopReason.FINISHED)
        assert await box.read("/app/repo/x.py") == b"b\n"


async def test_a_background_service_lives_on_between_calls(task: Any, recorder: Any, limits: Any) -> None:
    serve = "cd /tmp && echo ok > page && python3 -m http.server 8123 --bind 127.0.0.1 &"
    fetch = (
        "import time, urllib.request\n"
        "for _ in range(50):\n"
        "    try:\n"
        "        print(urllib.request.urlopen('http://127.0.0.1:8123/page').read().decode())\n"
        "        break\n"
        "    except OSError:\n"
        "        time.sleep(0.1)\n"
    )
    async with room() as box:
        start = time.monotonic()
        made = await script(box, task, recorder, limits, bash(serve), bash(f'python3 -c "{fetch}"'))
        assert made[0].error is None
        assert made[0].duration_s < 3
        assert "ok" in made[1].result
        assert time.monotonic() - start < 10


async def test_a_time_out_kills_every_descendant(task: Any, recorder: Any, limits: Any) -> None:
    command = "(setsid sh -c 'trap \"\" TERM; sleep 771' &) ; echo begun; sleep 772"
    async with room() as box:
        made = await script(
            box,
            task,
            recorder,
            limits,
            bash(command, timeout_s=0.5),
            bash("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -ao 'sleep 77[12]' | wc -l"),
        )
        assert made[0].error.startswith("timeout: ")
        assert "begun" in made[0].result
        assert made[1].result == "exit code: 0\nstdout:\n0"


async def test_what_goes_wrong_inside_is_told_to_the_model(task: Any, recorder: Any, limits: Any) -> None:
    async with room(resources=Resources(memory_mb=256, disk_mb=64, pids=64)) as box:
        made = await script(
            box,
            task,
            recorder,
            limits,
            {"action": "read", "path": "/proc"},
            {"action": "read", "path": "/dev/zero"},
            {"action": "write", "path": "/proc/nothing", "content": "x"},
            {"action": "write", "path": "/etc", "content": "x"},
            bash("python3 -c 'x = bytearray(2 << 30)'"),
            bash("kill -SEGV $$"),
            bash("dd if=/dev/zero of=/app/full bs=1M count=200"),
            bash("rm -rf /app"),
            bash("pwd"),
        )
        assert [done.error and done.error.partition(":")[0] for done in made[:4]] == ["file"] * 4
        assert made[4].error == "oom: killed: out of memory"
        assert made[5].result == "killed by signal 11"
        assert "No space left" in made[6].result
        assert "chdir: No such file" in made[8].result


async def test_an_agent_user_has_no_more_rights_through_the_tools(task: Any, recorder: Any, limits: Any) -> None:
    task = replace(task, agent_user="nobody")
    async with room() as box:
        await box.write("/app/secret", b"s3cret", mode=0o600)
        await box.write("/app/open", b"for all", mode=0o644)
        await box.exec("install -d -o nobody /app/mine")
        made = await script(
            box,
            task,
            recorder,
            limits,
            {"action": "read", "path": "secret"},
            {"action": "read", "path": "open"},
            {"action": "write", "path": "/etc/passwd", "content": "x"},
            {"action": "write", "path": "mine/file", "content": "x"},
            bash("id -un; cat secret"),
        )
        assert made[0].error.startswith("file: ")
        assert made[1].result == "for all"
        assert made[2].error.startswith("file: ")
        assert made[3].error is None
        assert "nobody" in made[4].result
        assert "s3cret" not in made[4].result


async def test_the_images_own_user_is_the_agents(task: Any, recorder: Any, limits: Any) -> None:
    async with room(user="nobody", workdir="/tmp") as box:
        made = await script(
            box,
            task,
            recorder,
            limits,
            {"action": "write", "path": "mine", "content": "x"},
            {"action": "write", "path": "/etc/passwd", "content": "x"},
            bash("stat -c %U mine"),
        )
        assert made[1].error.startswith("file: ")
        assert made[2].result == "exit code: 0\nstdout:\nnobody"


async def test_an_edited_script_stays_executable(task: Any, recorder: Any, limits: Any) -> None:
    async with room() as box:
        await box.write("/app/run.sh", b"#!/bin/sh\necho old\n", mode=0o755)
        edit = {"action": "edit", "path": "run.sh", "old_text": "old", "new_text": "new"}
        made = await script(box, task, recorder, limits, edit, bash("./run.sh"))
        assert made[1].result == "exit code: 0\nstdout:\nnew"


async def test_a_sandbox_that_ends_under_the_harness_is_raised(task: Any, recorder: Any, limits: Any) -> None:
    async with room() as box:

        async def end() -> None:
            await anyio.sleep(0.5)
            await box.close(EndReason.KILLED)

        async with anyio.create_task_group() as group:
            group.start_soon(end)
            with pytest.raises(SandboxLost):
                await script(box, task, recorder, limits, bash("sleep 30"), bash("true"))


@pytest.mark.slow
async def test_no_arguments_can_break_the_tools(limits: Any) -> None:
    rng = random.Random(20)
    values: list[Any] = [*NASTY, 1, None, True, 1.5, [], {}, -1, 10**30]
    async with room(resources=Resources(memory_mb=256, disk_mb=64, pids=64)) as box:
        await box.exec(
            "ln -s /etc/passwd link; ln -s loop loop; mkfifo fifo; mkdir dir; echo hi > dir/f; chmod 0 dir/f"
        )
        for _ in range(300):
            tools = Toolbox(BoundedRoom(box, "/app", LimitGuard(replace(limits, tool_call_s=0.5))))
            name = rng.choice(list(TOOLS))
            arguments = {
                field: rng.choice(values)
                for field in TOOLS[name].model_fields
                if rng.random() < _HOW_OFTEN.get(field, 0.95)
            }
            made = ToolCall("c", name, {}, json.dumps(arguments))
            with anyio.fail_after(20):
                await tools.run(made)
            assert made.result is not None
            made.result.encode()
            json.dumps(made.arguments, ensure_ascii=False).encode()


async def test_a_binary_flood_is_cut_for_the_model_and_counted(task: Any, recorder: Any, limits: Any) -> None:
    async with room() as box:
        made = await script(box, task, recorder, limits, bash("head -c 20000000 /dev/urandom"), bash("echo after"))
        assert "bytes dropped" in made[0].result
        assert len(made[0].result) < 17_000
        assert made[1].result == "exit code: 0\nstdout:\nafter"


async def test_the_tool_loop_end_to_end(task: Any, recorder: Any, limits: Any) -> None:
    turns = [
        calls(
            ("write_file", {"path": "fib.py", "content": "print([0, 1, 1, 2, 3, 6])\n"}),
            ("bash", {"command": "python3 fib.py"}),
        ),
        call("edit_file", path="fib.py", old_text="6", new_text="5"),
        call("bash", command="python3 fib.py"),
        call("finish", message="fixed"),
    ]
    async with room() as box, ScriptedServer(turns) as server:
        client = OpenAIChatClient(ModelSpec("small", server.base_url))
        result = await run_harness(
            load_harness("tool-loop"), sandbox=box, task=task, recorder=recorder, limits=limits, model=client
        )
        await client.aclose()
        assert result == AgentResult(StopReason.FINISHED, final_message="fixed")
        assert await box.read("/app/fib.py") == b"print([0, 1, 1, 2, 3, 5])\n"
    assert "[0, 1, 1, 2, 3, 5]" in recorder.agent_steps[2].tool_calls[0].result


async def test_the_text_loop_end_to_end(task: Any, recorder: Any, limits: Any) -> None:
    turns = [say("```bash\necho hello > hello.txt; pwd\n```"), say("There.\nTASK_FINISHED")]
    async with room() as box, ScriptedServer(turns) as server:
        client = OpenAIChatClient(ModelSpec("small", server.base_url))
        result = await run_harness(
            load_harness("text-loop"), sandbox=box, task=task, recorder=recorder, limits=limits, model=client
        )
        await client.aclose()
        assert result.stop is StopReason.FINISHED
        assert await box.read("/app/hello.txt") == b"hello\n"
    assert recorder.agent_steps[0].tool_calls[0].result == "exit code: 0\nstdout:\n/app"
