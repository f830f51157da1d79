"""Transcripts of command-line agents: real ones as far as we have them, and whatever a candidate may write instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.agents.recipe import FORMATS
from proctor.agents.transcripts import MAX_STEPS, TranscriptError, read_transcript

SAMPLES = Path(__file__).parent / "transcripts"
READABLE = [form for form in FORMATS if form != "none"]


@pytest.mark.parametrize("form", READABLE)
def test_a_real_session_of_each_agent(form: str) -> None:
    """Recorded from the real programs: one command, its output, and a last word."""
    (sample,) = SAMPLES.glob(f"{form}.*")
    told = read_transcript(form, sample.read_bytes())
    assert told.losses == []
    agent = [step for step in told.steps if step.source == "agent"]
    calls = [call for step in agent for call in step.tool_calls]
    # mini-swe-agent ends by a command of its own, which has no result.
    assert len(calls) == (2 if form == "mini-swe-agent" else 1)
    command = calls[0].arguments.get("command") or calls[0].arguments.get("cmd")
    assert "proctor-was-here" in str(command)
    assert "root" in str(calls[0].result)
    assert calls[0].error is None
    assert len(agent) == 2
    assert all("claimed_usage" in step.extra and step.usage is None and step.llm_calls == 1 for step in agent)
    if form != "mini-swe-agent":
        assert told.final_message == "All done."
    assert [step.timestamp for step in told.steps] == sorted(step.timestamp for step in told.steps)


@pytest.mark.data
def test_the_shared_trajectories_of_mini_swe_agent(shared_data: Path) -> None:
    for path in (shared_data / "trajectories/mini-swe-agent").glob("*__*.traj.json"):
        told = read_transcript("mini-swe-agent", path.read_bytes())
        document = json.loads(path.read_bytes())
        assert sum(step.source == "agent" for step in told.steps) == document["info"]["model_stats"]["api_calls"]
        assert told.losses == []


_JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_KEYS = [
    "type", "role", "content", "message", "messages", "payload", "part", "state", "tool_calls", "function", "arguments",
    "id", "call_id", "tool_use_id", "input", "output", "usage", "tokens", "timestamp", "extra", "info", "text", "model",
    "item", "time", "start", "end", "response", "is_error",
]  # fmt: skip
_WORDS = [
    "assistant", "user", "system", "tool", "exit", "response_item", "message", "function_call", "function_call_output",
    "tool_use", "tool_result", "text", "thinking", "result", "step_start", "step_finish", "session_meta",
    "turn_context", "token_usage_record", "event_msg", "task_complete",
]  # fmt: skip
_SHAPED: Any = st.recursive(
    st.sampled_from(_WORDS) | st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=6),
    max_leaves=25,
)


@pytest.mark.parametrize("form", READABLE)
@given(values=st.lists(_SHAPED | _JSON, max_size=6), noise=st.binary(max_size=20))
def test_any_bytes_are_steps_or_one_line_that_says_why_not(form: str, values: list[Any], noise: bytes) -> None:
    lines = [json.dumps(value).encode() for value in values]
    for data in (b"\n".join([*lines, noise]), json.dumps({"messages": values, "info": values[:1]}).encode(), noise):
        try:
            told = read_transcript(form, data)
        except TranscriptError as error:
            reason = str(error)
            assert len(reason.splitlines()) == 1
            continue
        for step in told.steps:
            assert isinstance(step.message, str)
            assert step.source in ("system", "user", "agent")
            assert step.timestamp
            assert all(isinstance(call.arguments, dict) and call.call_id for call in step.tool_calls)


@pytest.mark.parametrize("form", READABLE)
def test_a_flood_is_cut_and_named(form: str) -> None:
    events: dict[str, dict[str, Any]] = {
        "claude": {"type": "user", "message": {"content": "x"}},
        "qwen": {"type": "user", "message": {"content": "x"}},
        "codex": {"type": "response_item", "payload": {"type": "message", "role": "user", "content": "x"}},
        "opencode": {"type": "step_start", "part": {}},
        "mini-swe-agent": {"role": "user", "content": "x"},
    }
    many = [events[form]] * (MAX_STEPS + 3)
    data = json.dumps({"messages": many}) if form == "mini-swe-agent" else "\n".join(map(json.dumps, many))
    told = read_transcript(form, data.encode())
    assert len(told.steps) == MAX_STEPS
    assert told.losses == [f"3 steps after the first {MAX_STEPS}"]


@pytest.mark.parametrize("form", READABLE)
@pytest.mark.parametrize("depth", [61, 600, 100_000])
def test_what_is_nested_too_deeply_to_be_walked_is_not_taken(form: str, depth: int) -> None:
    """Else a candidate could make the host run out of stack, and leave the denominator as an error of ours."""
    deep = b'{"type":"user","message":{"content":' + b"[" * depth + b"]" * depth + b"}}"
    for data in (deep, b'{"messages":[' + deep + b"]}", b"[" * depth):
        with pytest.raises(TranscriptError):
            read_transcript(form, data)


def test_numbers_that_json_does_not_have_and_halves_of_characters() -> None:
    content = '[{"type":"text","text":"\\ud800 half"},{"type":"tool_use","id":"1","name":"x","input":{"a":"\\udc00"}}]'
    line = '{"type":"assistant","message":{"content":' + content + "}}"
    told = read_transcript("claude", line.encode())
    assert "half" in told.steps[0].message
    assert len(told.steps[0].tool_calls) == 1
    with pytest.raises(TranscriptError):
        read_transcript("claude", line.replace('"1"', "NaN").encode())
