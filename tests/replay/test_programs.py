"""Replays of a program inside the sandbox, and of a run whose models come from a gateway's file."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from tests.agents.programs import CALLER, write_caller
from tests.runs.toys import make_toy

from proctor.common import RefusedError
from proctor.models.scripted import ChatRequest, ScriptedServer, call, say
from proctor.runs.replay.branch import Change, branch
from proctor.runs.replay.recorded import find_recorded

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.models.scripted import Answer

pytestmark = [pytest.mark.sandbox, pytest.mark.anyio]

TELLS = r"""
for number, message in enumerate(answers):
    blocks = [{"type": "text", "text": message.get("content") or "."}]
    print(json.dumps({"type": "assistant", "message": {"id": str(number), "model": "m", "content": blocks}}))
    if "TELLS_LESS" not in os.environ:
        print(json.dumps({"type": "user", "message": {"content": []}}))
print(json.dumps({"type": "result", "result": "done"}))
"""


def model(chat: ChatRequest) -> Answer:
    """Looks, then goes by what it was told to see, then says so."""
    if chat.turn == 0:
        return call("bash", command="date +%s.%N; echo hint > hint; cat hint")
    if chat.turn == 1:
        return call("bash", command="cat hint; [ -e /app/better ] && printf 42 > answer.txt || printf 41 > answer.txt")
    return say("done")


async def invoke(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The command as a person would type it, in a process of its own."""
    command = [sys.executable, "-m", "proctor", *arguments, "--json"]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == code, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr.decode()}
    return found


async def test_a_program_in_the_sandbox_is_replayed_and_branched_off(tmp_path: Path) -> None:
    agent = write_caller(tmp_path, TELLS)
    make_toy(tmp_path / "tasks", "toy")
    run = str(tmp_path / "run")
    async with ScriptedServer(model) as server:
        words = [
            "run",
            str(tmp_path / "tasks"),
            "--agent",
            str(agent),
            "--model",
            f"m@{server.base_url}",
        ]
        ran = await invoke(*words, "-o", run)
        assert ran["agents"][0]["graded"] == 1, ran
        asked = len(server.requests)
        found = await invoke("replay", run, "toy", "--model-calls")
        assert (found["differences"], found["asked"]) == (0, 3), found
        assert len(server.requests) == asked, "nobody but the record was asked"
        refused = await invoke("replay", run, "toy", "--actions", code=5)
        assert "--model-calls" in refused["error"]
        recorded = await find_recorded(tmp_path / "run", "toy")
        steps = [step.step_id for step in recorded.view.trajectory.steps if step.llm_call_count]
        change = Change("write", files={"/app/better": b""})
        done = await branch(recorded, steps[1], change, tmp_path / "branch")
        assert str(done.arms["changed"][0].outcome) == "resolved"
        assert len(server.requests) == asked + 2, "the first answer came from the record"
        assert not done.notes
        write_caller(tmp_path, TELLS, CALLER.replace("[environment]", '[environment]\nTELLS_LESS = "1"'))
        await invoke(*words, "-o", run + "-2")
        recorded = await find_recorded(tmp_path / "run-2", "toy")
        with pytest.raises(RefusedError, match="tells of 1 answers of its model, and 3 were given"):
            await branch(recorded, 3, change, tmp_path / "branch-2")


async def test_a_run_with_a_gateways_file_needs_no_key_to_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_toy(tmp_path / "tasks", "toy")
    gateway = tmp_path / "gateway.toml"
    run = str(tmp_path / "run")
    monkeypatch.setenv("KEY_OF_THE_TEST", "sk-some-long-secret")
    async with ScriptedServer([call("bash", command="printf 42 > answer.txt"), call("finish")]) as server:
        gateway.write_text(f"""
version = 1
[upstreams.here]
base_url = "{server.base_url}"
protocols = ["chat"]
api_key_env = "KEY_OF_THE_TEST"
[models.small]
upstream = "here"
id = "the-real-id"
[models.small.sampling]
temperature = 0.5
seed = 7
""")
        words = ["run", str(tmp_path / "tasks"), "--agent", "tool-loop", "--gateway", str(gateway), "-o", run]
        ran = await invoke(*words)
        assert ran["agents"][0]["resolved"] == 1, ran
        recorded = await find_recorded(tmp_path / "run", "toy")
        done = await branch(recorded, 3, Change(), tmp_path / "branch")
        assert str(done.arms["changed"][0].outcome) == "resolved"
        assert server.requests[-1].body["model"] == "the-real-id"
        assert server.requests[-1].headers["authorization"] == "Bearer sk-some-long-secret"
    monkeypatch.delenv("KEY_OF_THE_TEST")
    found = await invoke("replay", run, "toy", "--model-calls")
    assert (found["differences"], found["asked"]) == (0, 2), found
