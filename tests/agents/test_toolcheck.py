"""The regression tests of the tools: they pass where tools work, and name the tool that is broken where one is not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from proctor import sandbox
from proctor.agents.toolcheck import CASES, check_tools
from proctor.agents.tools import TOOLS
from proctor.cli.main import cli
from proctor.sandbox.contract import Output

pytestmark = [pytest.mark.sandbox, pytest.mark.anyio]


class Broken:
    """A sandbox in which one thing does not work as it should."""

    def __init__(self, inner: Any, fault: str) -> None:
        self._inner = inner
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def exec(self, command: Any, **more: Any) -> Any:
        if self._fault == "keep":
            more["keep"] = False
        result = await self._inner.exec(command, **more)
        if self._fault == "exit code":
            return replace(result, exit_code=0 if result.exit_code is not None else None)
        if self._fault == "stderr":
            return replace(result, stderr=Output())
        return result

    async def read(self, path: str, **more: Any) -> bytes:
        data: bytes = await self._inner.read(path, **more)
        return data[:-1] if self._fault == "read" else data

    async def write(self, path: str, data: bytes, **more: Any) -> None:
        if self._fault == "write":
            data = data.decode("utf-8", "replace").encode()
        if self._fault == "mode":
            more["mode"] = 0o644
        await self._inner.write(path, data, **more)


def test_every_tool_has_a_case() -> None:
    assert {call.tool for case in CASES for call in case.calls} >= set(TOOLS)
    assert {case.tool for case in CASES} - {"any tool"} == set(TOOLS)


@pytest.mark.slow
async def test_a_broken_tool_is_named() -> None:
    expected = {
        "exit code": {"bash"}, "stderr": {"bash"}, "keep": {"bash"}, "read": {"read_file", "edit_file"},
        "write": {"edit_file"}, "mode": {"write_file"},
    }  # fmt: skip
    quick = [case for case in CASES if "too long" not in case.what]
    async with sandbox.create(sandbox.SandboxSpec(image="host")) as box:
        for fault, tools in expected.items():
            chosen = [case for case in quick if case.tool in tools]
            outcomes = await check_tools(Broken(box, fault), chosen)  # type: ignore[arg-type]
            assert {outcome.tool for outcome in outcomes if not outcome.ok} == tools, (fault, outcomes)
            assert all(outcome.problem for outcome in outcomes if not outcome.ok)


@pytest.mark.slow
def test_the_command_prints_every_case_and_its_exit_code_says_the_same(tmp_path: Any) -> None:
    done = CliRunner().invoke(cli, ["doctor", "--tools", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert [check["what"] for check in document["checks"]] == [case.what for case in CASES]
    assert {check["problem"] for check in document["checks"]} == {""}
    recipe = tmp_path / "agent.toml"
    lines = ["version = 1", 'name = "absent"', 'agent_version = "1"', 'command = ["absent"]']
    recipe.write_text("\n".join([*lines, '[probe]\ncommand = ["/bin/absent-agent"]\nexpect = "1"']))
    done = CliRunner().invoke(cli, ["doctor", "--tools", "--agent", str(recipe)])
    assert done.exit_code == 1
    assert "absent does not run in this image" in done.output
    for words in (["--image", "host2"], ["--agent", "codex"], ["--tools", "--agent", "tool-loop"]):
        assert CliRunner().invoke(cli, ["doctor", *words]).exit_code in (2, 1)
