"""The pieces of docs/agents.md, taken out of the page and used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from proctor.agents import HARNESSES, StopReason, load_harness, run_harness
from proctor.agents.recipe import PLACEHOLDERS, recipe_names
from proctor.agents.scripted import load_script
from proctor.agents.text_loop import Options as TextOptions
from proctor.agents.tool_loop import Options as ToolOptions
from proctor.agents.tools import Toolbox
from proctor.models import ModelSpec, OpenAIChatClient, load_model
from proctor.models.scripted import ScriptedServer, load_answers, say
from proctor.tasks.model import AgentLimits

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def table(*heads: str) -> list[list[str]]:
    """The rows of the table with these heads, cells without backticks."""
    _, _, rest = PAGE.read_text().partition("| " + " | ".join(heads) + " |\n")
    rows = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_every_harness_is_listed() -> None:
    rows = [row[0] for row in table("name", "needs a model", "what it does")]
    assert rows[: len(HARNESSES)] == list(HARNESSES)
    assert sorted(rows[len(HARNESSES)].split("`, `")) == recipe_names()


def test_every_command_line_agent_is_listed_with_its_version_and_protocols() -> None:
    rows = {row[0]: row for row in table("agent", "packages", "speaks", "exercised")}
    assert sorted(rows) == recipe_names()
    for name, row in rows.items():
        harness = load_harness(name)
        assert row[1].startswith(f"{harness.version} (")
        assert row[2] == "`, `".join(harness.protocols)  # type: ignore[attr-defined]


def test_every_placeholder_is_listed() -> None:
    rows = table("placeholder", "stands for")
    names = [name.strip("`{}$ ") for row in rows for name in row[0].split(",")]
    assert sorted(names) == sorted(PLACEHOLDERS)


def test_every_option_is_listed_with_its_default() -> None:
    rows = {row[0]: row for row in table("option", "loop", "default", "meaning")}
    fields = {**TextOptions.model_fields, **ToolOptions.model_fields}
    assert rows.keys() == fields.keys()
    for name, field in fields.items():
        assert rows[name][2] in (str(field.default), "built in")


def test_every_limit_is_listed_with_its_default() -> None:
    rows = {row[0]: row[1] for row in table("limit", "default", "when it fires")}
    for name, default in rows.items():
        assert getattr(AgentLimits(), name) == (None if default == "none" else float(default))


def test_the_action_script_is_one(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(blocks("json")[0])
    assert [name for name, _ in load_script(str(path), "any")] == [
        "bash", "write_file", "edit_file", "read_file", "finish",
    ]  # fmt: skip


async def test_the_error_is_what_a_model_gets(box: Any, task: Any, recorder: Any, limits: Any) -> None:
    (box.root / "app.py").write_text("x\nx\n")
    script = [{"action": "edit", "path": "app.py", "old_text": "x", "new_text": "y"}]
    await run_harness(
        load_harness("scripted"), sandbox=box, task=task, recorder=recorder, limits=limits, options={"script": script}
    )
    assert json.loads(recorder.agent_steps[0].tool_calls[0].result) == json.loads(blocks("json")[1])


def test_every_kind_of_error_is_listed() -> None:
    listed = re.search(r"^Kinds: (.*?)\.\n", PAGE.read_text(), re.M | re.S)
    assert listed is not None
    source = Path(Toolbox.run.__code__.co_filename).read_text()
    raised = set(re.findall(r'ToolError\(\s*"([a-z_]+)"', source))
    assert raised <= set(re.findall(r"`([a-z_]+)`", listed[1]))


def test_the_model_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(next(block for block in blocks("toml") if "base_url" in block))
    spec = load_model(str(path))
    assert spec.prices == {"prompt": 0.5, "cached": 0.05, "completion": 2.0}


async def test_the_model_script_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "script.json"
    path.write_text(blocks("json")[2])
    assert len(load_answers(path)["*"]) == 2
    async with ScriptedServer.from_file(path) as server:
        client = OpenAIChatClient(ModelSpec("m", server.base_url))
        assert (await client.complete([{"role": "user", "content": "x"}])).attempts == 2
        await client.aclose()


async def test_the_test_example_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[0], "docs/agents.md", "exec"), names)
    assert json.loads(await names["example"]()) == {"message": "done"}


async def test_the_harness_example_runs(
    box: Any, task: Any, recorder: Any, limits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_shot_of_the_docs.py").write_text(blocks("python")[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    harness = load_harness("one_shot_of_the_docs:OneShot")
    async with ScriptedServer([say("echo hello > hello.txt")]) as server:
        client = OpenAIChatClient(ModelSpec("m", server.base_url))
        result = await run_harness(harness, sandbox=box, task=task, recorder=recorder, limits=limits, model=client)
        await client.aclose()
    assert result.stop is StopReason.FINISHED
    assert (box.root / "hello.txt").read_text() == "hello\n"


def test_every_command_of_the_page_is_understood() -> None:
    """The words of each `proctor` command parse; the runs themselves are in the end-to-end tests."""
    from proctor.cli.main import cli

    for block in blocks("sh"):
        for line in block.splitlines():
            program, verb, *words = line.split()
            assert program == "proctor"
            command = cli.get_command(None, verb)  # type: ignore[arg-type]
            assert command is not None
            command.make_context(verb, list(words))
