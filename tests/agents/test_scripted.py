"""The scripted, null and oracle harnesses, over a plain directory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from proctor.agents import StopReason, load_harness, run_harness
from proctor.common import ConfigError, RefusedError
from proctor.tasks.model import Carry, Solution

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def play(box: Any, task: Any, recorder: Any, limits: Any, script: Any, **options: Any) -> Any:
    return await run_harness(
        load_harness("scripted"),
        sandbox=box,
        task=task,
        recorder=recorder,
        limits=limits,
        options={"script": script, **options},
    )


async def test_a_script_acts_through_the_tools(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    result = await play(
        box,
        task,
        recorder,
        limits,
        [
            {"action": "write", "path": "hello.txt", "content": "helo\n"},
            {"action": "edit", "path": "hello.txt", "old_text": "helo", "new_text": "hello"},
            {"action": "bash", "command": "cat hello.txt"},
            {"action": "finish", "message": "done"},
            {"action": "bash", "command": "touch never"},
        ],
    )
    assert result.stop is StopReason.FINISHED
    assert result.final_message == "done"
    assert (box.root / "hello.txt").read_text() == "hello\n"
    assert not (box.root / "never").exists()
    shown = [step.tool_calls[0].result for step in recorder.agent_steps]
    assert shown[2] == "exit code: 0\nstdout:\nhello"
    assert all(step.llm_calls == 0 for step in recorder.agent_steps)


async def test_a_failing_action_does_not_end_the_script(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    script = [{"action": "read", "path": "absent"}, {"action": "bash", "command": "touch after"}]
    result = await play(box, task, recorder, limits, script)
    assert result.stop is StopReason.FINISHED
    assert (box.root / "after").exists()
    assert recorder.agent_steps[0].tool_calls[0].error.startswith("file: ")


async def test_stop_on_error_gives_up(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    script = [{"action": "read", "path": "absent"}, {"action": "bash", "command": "touch after"}]
    result = await play(box, task, recorder, limits, script, stop_on_error=True)
    assert result.stop is StopReason.GAVE_UP
    assert "action 1" in result.detail
    assert not (box.root / "after").exists()


@pytest.mark.parametrize("name", ["add-a-file.json", "org__add-a-file.json", "add-a-file.toml"])
async def test_a_folder_has_a_script_per_task(
    box: Any, task: Any, recorder: Any, limits: Any, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    json_text = json.dumps({"actions": [{"action": "bash", "command": "touch seen"}]})
    toml_text = '[[actions]]\naction = "bash"\ncommand = "touch seen"\n'
    (folder / name).write_text(toml_text if name.endswith("toml") else json_text)
    await play(box, task, recorder, limits, str(folder))
    assert (box.root / "seen").exists()


async def test_a_task_without_a_script_does_nothing(
    box: Any, task: Any, recorder: Any, limits: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    result = await play(box, task, recorder, limits, str(folder))
    assert result.stop is StopReason.FINISHED
    assert recorder.agent_steps == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read the script"),
        ('{"action": []}', "unknown key"),
        ('{"actions": {}}', "not a list"),
        ('[{"action": "rm"}]', "actions[1]"),
        ("[7]", "actions[1]"),
    ],
)
async def test_a_bad_script_is_one_clear_error(
    box: Any, task: Any, recorder: Any, limits: Any, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        await play(box, task, recorder, limits, str(path))
    assert words in caught.value.line()
    assert "script.json" in caught.value.line()


async def test_an_unknown_option_is_named(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    with pytest.raises(ConfigError, match=r"agent\.options\.speed.*scripted takes: script"):
        await play(box, task, recorder, limits, [], speed=3)


async def test_null_does_nothing(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    result = await run_harness(load_harness("null"), sandbox=box, task=task, recorder=recorder, limits=limits)
    assert result.stop is StopReason.FINISHED
    assert list(box.root.iterdir()) == []


async def test_oracle_applies_a_gold_patch(box: Any, task: Any, recorder: Any, limits: Any, tmp_path: Path) -> None:
    (box.root / "greet.py").write_text("print('helo')\n")
    patch = tmp_path / "gold.patch"
    patch.write_text("--- a/greet.py\n+++ b/greet.py\n@@ -1 +1 @@\n-print('helo')\n+print('hello')\n")
    task = replace(task, solution=Solution(patch=patch), carry=Carry(kind="patch", repo=str(box.root)))
    result = await run_harness(load_harness("oracle"), sandbox=box, task=task, recorder=recorder, limits=limits)
    assert result.stop is StopReason.FINISHED
    assert result.detail == ""
    assert (box.root / "greet.py").read_text() == "print('hello')\n"


async def test_oracle_reports_a_patch_that_does_not_apply(
    box: Any, task: Any, recorder: Any, limits: Any, tmp_path: Path
) -> None:
    patch = tmp_path / "gold.patch"
    patch.write_text("--- a/absent.py\n+++ b/absent.py\n@@ -1 +1 @@\n-a\n+b\n")
    task = replace(task, solution=Solution(patch=patch), carry=Carry(kind="patch", repo=str(box.root)))
    result = await run_harness(load_harness("oracle"), sandbox=box, task=task, recorder=recorder, limits=limits)
    assert result.stop is StopReason.FINISHED
    assert "exit code: 1" in result.detail


async def test_oracle_without_a_solution_is_refused(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    with pytest.raises(RefusedError, match="no reference solution"):
        await run_harness(load_harness("oracle"), sandbox=box, task=task, recorder=recorder, limits=limits)


async def test_only_the_oracle_sees_the_solution(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    seen = []

    class Curious:
        name, version, needs_model = "curious", "1", False

        async def run(self, context: Any) -> Any:
            seen.append(context.task.solution)
            return await load_harness("null").run(context)

    task = replace(task, solution=Solution(directory=task.path))
    await run_harness(Curious(), sandbox=box, task=task, recorder=recorder, limits=limits)
    assert seen == [None]
