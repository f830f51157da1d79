"""Importers: every real file is read, what is lost is named, and no file can do more harm than a clear error."""

from __future__ import annotations

import json
import re
import struct
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from proctor.cli.main import cli
from proctor.common import ConfigError
from proctor.trajectories.atif import dump_trajectory, parse_trajectory
from proctor.trajectories.importer import import_document, import_file

if TYPE_CHECKING:
    from proctor.trajectories.draft import Imported

# file: format, transcripts, steps of the first, tool calls in it, prompt and completion tokens, cost
SHARED: dict[str, tuple[str, int, int, int, int | None, int | None, float | None]] = {
    "atif/openhands_hello-world.trajectory.json": ("ATIF-v1.5", 1, 6, 2, 220, 80, 0.00135),
    "atif/terminus_2_linear-history.trajectory.json": ("ATIF-v1.7", 1, 5, 0, 2252, 160, 0.00723),
    "atif/terminus_2_linear-history.trajectory.cont-1.json": ("ATIF-v1.7", 1, 8, 0, 7802, 1030, 0.029805),
    "atif/terminus_2_timeout.trajectory.json": ("ATIF-v1.5", 1, 4, 3, 982, 145, 0.003905),
    "inspect/log_read_sample.eval": ("inspect", 1, 3, 0, 66, 3, None),
    "inspect/popularity-1.eval": ("inspect", 10, 3, 0, 63, 2, None),
    "inspect/websearch-addition-problem.eval": ("inspect", 1, 2, 0, 587, 33, None),
    "mini-swe-agent/django__django-11119.traj.json": ("mini-swe-agent", 1, 33, 31, 410647, 4645, 0.3148688),
    "mini-swe-agent/psf__requests-1724.traj.json": ("mini-swe-agent", 1, 34, 32, 480998, 8547, 0.4131904),
    "mini-swe-agent/local.traj.json": ("mini-swe-agent", 1, 4, 2, None, None, None),
    "swe-agent/function_calling_simple.traj": ("swe-agent", 1, 7, 5, None, None, None),
    "swe-agent/marshmallow-1867.function_calling.traj": ("swe-agent", 1, 13, 11, 0, 0, 0.0),
}


def calls_of(found: Imported) -> list[Any]:
    return [call for step in found.trajectory.steps for call in step.tool_calls or ()]


@pytest.mark.data
@pytest.mark.parametrize("name", SHARED)
def test_every_file_is_read_and_becomes_valid_atif(name: str, shared_data: Path) -> None:
    found = import_file(shared_data / "trajectories" / name)
    first = found[0]
    totals = first.trajectory.final_metrics
    tokens = (totals.total_prompt_tokens, totals.total_completion_tokens) if totals else (None, None)
    kind, count, steps, calls, prompt, completion, cost = SHARED[name]
    assert (first.format, len(found), len(first.trajectory.steps)) == (kind, count, steps)
    assert (len(calls_of(first)), *tokens) == (calls, prompt, completion)
    assert (totals.total_cost_usd if totals else None) == pytest.approx(cost)
    for one in found:
        assert one.trajectory.schema_version == "ATIF-v1.8"
        again = parse_trajectory(dump_trajectory(one.trajectory))
        assert dump_trajectory(again) == dump_trajectory(one.trajectory)


@pytest.mark.data
def test_no_file_of_the_folder_is_forgotten(shared_data: Path) -> None:
    folder = shared_data / "trajectories"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".json", ".traj", ".eval")}
    reports = {name for name in files if name.endswith(".report.json")}
    assert files - reports == set(SHARED)
    for name in sorted(reports):
        with pytest.raises(ConfigError, match="a verdict, not a transcript"):
            import_file(folder / name)
        found = import_file(folder / name.replace(".report.json", ".traj.json"))[0]
        assert json.loads((folder / name).read_text()) == (found.trajectory.extra or {})["report"]


@pytest.mark.data
def test_a_command_and_its_result_stay_together(shared_data: Path) -> None:
    found = import_file(shared_data / "trajectories" / "mini-swe-agent" / "django__django-11119.traj.json")[0]
    agent = [step for step in found.trajectory.steps if step.source == "agent"]
    assert all(step.observation and len(step.observation.results) == 1 for step in agent)
    assert agent[0].tool_calls
    assert agent[0].tool_calls[0].arguments == {"command": "ls -R"}
    assert agent[0].observation
    assert agent[0].observation.results[0].extra == {"exit_code": 0}
    assert agent[0].reasoning_content
    assert any("raw reply" in loss for loss in found.losses)


def test_mini_swe_agent_with_tool_calls_and_the_responses_protocol() -> None:
    chat = {
        "trajectory_format": "mini-swe-agent-1.1",
        "info": {"mini_version": "2.4.6", "exit_status": "Submitted", "submission": "diff", "surprise": 1,
                 "model_stats": {"instance_cost": 0.5, "api_calls": 1}, "config": {"model": {"model_name": "m"}}},
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "odd": 1,
             "tool_calls": [{"id": "c1", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
                            {"id": "c1", "function": {"name": "bash", "arguments": "{bad"}}],
             "extra": {"actions": [{"command": "ls"}], "cost": 0.5, "timestamp": 1763509332.5}},
            {"role": "tool", "tool_call_id": "c1", "content": "a", "extra": {"returncode": 1, "raw_output": "a"}},
            {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
        ],
    }  # fmt: skip
    found = import_document(json.dumps(chat).encode())[0]
    agent = found.trajectory.steps[2]
    assert [call.tool_call_id for call in agent.tool_calls or ()] == ["c1", "c1-2"]
    assert (agent.tool_calls or [])[1].extra == {"raw_arguments": "{bad"}
    assert agent.timestamp == "2025-11-18T23:42:12.500000Z"
    assert {"info.surprise: a field that is not known", "messages[].odd: a field that is not known"} <= set(
        found.losses
    )
    assert any("raw output" in loss for loss in found.losses)
    responses = {
        "trajectory_format": "mini-swe-agent-1.1", "info": {},
        "messages": [
            {"role": "user", "content": "u"},
            {"object": "response", "model": "m", "usage": {"input_tokens": 7, "output_tokens": 2}, "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "message", "content": [{"type": "output_text", "text": "go"}]},
                {"type": "function_call", "call_id": "f", "name": "bash", "arguments": '{"command": "pwd"}'}]},
            {"type": "function_call_output", "call_id": "f", "output": "/"},
        ],
    }  # fmt: skip
    step = import_document(json.dumps(responses).encode())[0].trajectory.steps[1]
    assert (step.message, step.reasoning_content, step.metrics and step.metrics.prompt_tokens) == ("go", "hm", 7)
    assert step.observation
    assert step.observation.results[0].content == "/"


def openhands() -> list[dict[str, Any]]:
    reply = {"id": "r1", "model": "m", "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
    call = {"function_name": "execute_bash", "tool_call_id": "t1", "model_response": reply}
    other = {"function_name": "str_replace_editor", "tool_call_id": "t2", "model_response": reply}
    return [
        {"id": 0, "timestamp": "2025-01-01T00:00:00.5", "source": "agent", "action": "system",
         "args": {"content": "sys", "tools": [{"type": "function", "function": {"name": "execute_bash"}}]}},
        {"id": 1, "timestamp": "2025-01-01T00:00:01", "source": "user", "action": "message", "args": {"content": "do"}},
        {"id": 2, "source": "environment", "observation": "agent_state_changed", "content": "", "extras": {}},
        {"id": 3, "timestamp": "2025-01-01T00:00:02", "source": "agent", "action": "run", "tool_call_metadata": call,
         "args": {"command": "ls", "thought": "look", "blocking": False}},
        {"id": 4, "source": "agent", "action": "edit", "tool_call_metadata": other,
         "args": {"path": "/a", "thought": ""}},
        {"id": 5, "source": "agent", "observation": "run", "content": "x", "cause": 3,
         "extras": {"metadata": {"exit_code": 2}}},
        {"id": 6, "source": "agent", "observation": "error", "content": "no", "cause": 4, "extras": {}},
        {"id": 7, "source": "agent", "action": "finish", "args": {"final_thought": "done", "thought": "ok"},
         "llm_metrics": {"accumulated_cost": 0.25,
                         "accumulated_token_usage": {"prompt_tokens": 9, "completion_tokens": 3}}},
    ]  # fmt: skip


@pytest.mark.parametrize("row", [False, True])
def test_openhands_events_of_one_answer_are_one_step(row: bool) -> None:
    value: Any = (
        {"instance_id": "i", "history": openhands(), "metadata": {"agent_class": "CodeActAgent"}}
        if row
        else openhands()
    )
    found = import_document(json.dumps(value).encode())[0]
    assert found.format == "openhands"
    system, user, acted, ended = found.trajectory.steps
    assert (system.source, user.message, acted.message, ended.message) == ("system", "do", "look", "ok")
    assert [(call.function_name, call.arguments) for call in acted.tool_calls or ()] == [
        ("execute_bash", {"command": "ls"}), ("str_replace_editor", {"path": "/a"})]  # fmt: skip
    assert acted.observation
    assert [(one.source_call_id, one.content) for one in acted.observation.results] == [("t1", "x"), ("t2", "no")]
    assert acted.observation.results[0].extra == {"observation": "run", "exit_code": 2}
    assert found.trajectory.final_metrics
    assert found.trajectory.final_metrics.total_cost_usd == 0.25
    assert found.trajectory.agent.tool_definitions
    assert any("agent_state_changed" in loss for loss in found.losses)


def test_swe_agent_without_a_history_says_what_is_missing() -> None:
    turns = [{"action": "ls", "observation": "a", "response": "I look", "execution_time": 0.5, "query": [{}]}]
    found = import_document(json.dumps({"trajectory": turns, "info": {"model_stats": {"tokens_sent": 5}}}).encode())[0]
    step = found.trajectory.steps[0]
    assert step.extra == {"execution_time_s": 0.5}
    assert any("system prompt" in loss for loss in found.losses)
    assert any("query" in loss for loss in found.losses)


def eval_file(path: Path, members: dict[str, bytes], *, size: int | None = None) -> Path:
    """A zip whose members are packed by zstd (method 93), as Inspect writes them."""
    body, directory = b"", b""
    for name, data in members.items():
        packed = zstandard.ZstdCompressor().compress(data)
        fields = (20, 0, 93, 0, 0, zlib.crc32(data), len(packed), len(data) if size is None else size)
        local = b"PK\x03\x04" + struct.pack("<5H3I2H", *fields[:5], *fields[5:], len(name), 0) + name.encode()
        directory += b"PK\x01\x02" + struct.pack("<6H3I5H2I", 20, *fields[:5], *fields[5:], len(name), 0, 0, 0, 0, 0,
                                                 len(body)) + name.encode()  # fmt: skip
        body += local + packed
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, len(members), len(members), len(directory), len(body), 0)
    path.write_bytes(body + directory + end)
    return path


def sample(**more: Any) -> bytes:
    value = {
        "id": "s1", "epoch": 2, "uuid": "u", "scores": {"match": {"value": "C"}}, "attachments": {"h": "long text"},
        "messages": [
            {"role": "user", "content": "attachment://h"},
            {"role": "assistant", "id": "m1", "source": "generate", "content": [
                {"type": "reasoning", "reasoning": "why"}, {"type": "text", "text": "so"},
                {"type": "image", "image": "x"}],
             "tool_calls": [{"id": "c", "function": "bash", "arguments": {"cmd": "attachment://h"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "", "error": {"type": "timeout", "message": "too slow"}},
        ],
        "events": [{"event": "model", "timestamp": "2025-01-01T00:00:00Z", "output": {
            "choices": [{"message": {"id": "m1"}}],
            "usage": {"input_tokens": 5, "output_tokens": 2, "input_tokens_cache_read": 10}}}],
        **more,
    }  # fmt: skip
    return json.dumps(value).encode()


HEADER = json.dumps({"version": 2, "status": "success", "eval": {"model": "o/m", "task": "t"}}).encode()


def test_an_eval_file_packed_by_zstd(tmp_path: Path) -> None:
    path = eval_file(tmp_path / "log.eval", {"samples/s1_epoch_2.json": sample(), "header.json": HEADER})
    found = import_file(path)[0]
    user, agent = found.trajectory.steps
    assert (user.message, agent.message, agent.reasoning_content) == ("long text", "so", "why")
    assert agent.tool_calls
    assert agent.tool_calls[0].arguments == {"cmd": "long text"}
    assert agent.observation
    assert agent.observation.results[0].content == "too slow"
    assert agent.metrics
    assert (agent.metrics.prompt_tokens, agent.metrics.cached_tokens) == (15, 10)
    assert (found.trajectory.extra or {})["scores"] == {"match": {"value": "C"}}
    assert "a part of a message of type image" in found.losses
    path = eval_file(tmp_path / "cut.eval", {"samples/s.json": sample(), "_journal/start.json": HEADER})
    assert any("not finished" in loss for loss in import_file(path)[0].losses)


@pytest.mark.parametrize(
    ("members", "size", "words"),
    [({"header.json": HEADER}, None, "no sample"), ({"x": b"1"}, None, "neither header.json"),
     ({"header.json": HEADER, "samples/a.json": b"[1]"}, None, "not a JSON object"),
     ({"header.json": HEADER, "samples/a.json": b"\xff"}, None, "not JSON"),
     ({"header.json": HEADER, "samples/a.json": sample()}, 1 << 30, "more than"),
     ({"header.json": HEADER, "samples/a.json": sample()}, 7, "damaged")],
)  # fmt: skip
def test_a_bad_eval_file_is_named(tmp_path: Path, members: dict[str, bytes], size: int | None, words: str) -> None:
    path = eval_file(tmp_path / "log.eval", members, size=size)
    with pytest.raises(ConfigError, match=words) as caught:
        import_file(path)
    assert "log.eval" in caught.value.line()


def test_a_deflated_bomb_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "bomb.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", b" " * (64 << 20))
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\x01\x02") + 24
    data[place : place + 4] = struct.pack("<I", 10)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"damaged|unpacked"):
        import_file(path)


KEYS = [
    "role", "content", "extra", "tool_calls", "id", "function", "arguments", "args", "timestamp", "source", "cause",
    "response", "usage", "model", "actions", "choices", "message", "observation", "action", "error",
]  # fmt: skip
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
)


@given(st.sampled_from(["mini", "swe", "turns", "openhands", "inspect", "atif", "list"]), st.lists(junk, max_size=4))
def test_whatever_is_inside_is_read_or_refused(kind: str, items: list[Any]) -> None:
    shapes: dict[str, Any] = {
        "mini": {"messages": items, "info": {"exit_status": 1}, "trajectory_format": "mini-swe-agent-1"},
        "swe": {"history": [{"role": "user"}, *items], "info": items[:1]},
        "turns": {"trajectory": [{"action": 1}, *items]},
        "openhands": [{"action": "message", "source": "user"}, *items],
        "inspect": {"status": 1, "eval": {}, "samples": [{"messages": items, "events": items}]},
        "atif": {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": items},
        "list": [{"role": "user"}, *items],
    }
    document = json.dumps(shapes[kind]).encode()
    with suppress(ConfigError):  # any other error is a defect
        for one in import_document(document):
            assert parse_trajectory(dump_trajectory(one.trajectory)).steps


def test_the_command_line_shows_and_converts(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(openhands()))
    run = CliRunner()
    told = run.invoke(cli, ["show", str(path)])
    assert told.exit_code == 0
    assert "$ ls" in told.output
    assert "not carried over" in told.output
    atif = run.invoke(cli, ["show", str(path), "--format", "atif"])
    assert parse_trajectory(atif.stdout.encode()).schema_version == "ATIF-v1.8"
    assert "[3]" not in run.invoke(cli, ["show", str(path), "--steps", "1..2"]).output
    for words, *arguments in (("is not a range", "--steps", "5..2"), ("fits 0 of 1", "nope")):
        bad = run.invoke(cli, ["show", str(path), *arguments])
        assert isinstance(bad.exception, ConfigError)
        assert words in bad.exception.line()


def test_older_atif_becomes_newer_and_loses_nothing_in_silence() -> None:
    value = {
        "schema_version": "ATIF-v1.4", "session_id": "s", "agent": {"name": "a", "version": "1"},
        "steps": [{"step_id": 1, "source": "agent", "message": "m", "tool_calls": [
            {"tool_call_id": "c", "function_name": "sub", "arguments": {}}], "observation": {"results": [
                {"source_call_id": "c", "subagent_trajectory_ref": [{"session_id": "elsewhere"}]}]}}],
    }  # fmt: skip
    found = import_document(json.dumps(value).encode())[0]
    assert found.format == "ATIF-v1.4"
    assert found.trajectory.schema_version == "ATIF-v1.8"
    assert found.trajectory.steps[0].observation
    kept = found.trajectory.steps[0].observation.results[0].extra or {}
    assert kept["subagent_sessions"] == [{"session_id": "elsewhere"}]
    assert any("subagent" in loss for loss in found.losses)


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "trajectories.md").read_text()
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/trajectories.md", "exec"), {})
    assert parse_trajectory((tmp_path / "new.json").read_bytes()).steps[1].tool_calls
