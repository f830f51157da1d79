"""ATIF: real files of other tools are read; what we write is valid v1.8; every rule of the schema bites."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.agents.contract import Step, ToolCall
from proctor.common import ConfigError
from proctor.models.contract import Usage
from proctor.runs.trajectory import build_trajectory, clean_text, total_usage
from proctor.trajectories.atif import Agent, dump_trajectory, parse_trajectory, read_trajectory

if TYPE_CHECKING:
    from pathlib import Path

TIME = "2026-11-30T08:43:00Z"
SHARED = {
    "openhands_hello-world.trajectory.json": ("ATIF-v1.5", 6),
    "terminus_2_linear-history.trajectory.json": ("ATIF-v1.7", 5),
    "terminus_2_linear-history.trajectory.cont-1.json": ("ATIF-v1.7", 8),
    "terminus_2_timeout.trajectory.json": ("ATIF-v1.5", 4),
}


@pytest.mark.data
@pytest.mark.parametrize("name", SHARED)
def test_files_of_other_tools_are_read_and_survive_a_round_trip(name: str, shared_data: Path) -> None:
    path = shared_data / "trajectories" / "atif" / name
    trajectory = read_trajectory(path)
    assert (trajectory.schema_version, len(trajectory.steps)) == SHARED[name]
    written = json.loads(dump_trajectory(trajectory))
    assert written == _without_nulls(json.loads(path.read_bytes()))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def document(**changes: Any) -> dict[str, Any]:
    step = {
        "step_id": 1,
        "source": "agent",
        "message": "looking",
        "timestamp": TIME,
        "llm_call_count": 1,
        "tool_calls": [{"tool_call_id": "a", "function_name": "bash", "arguments": {"command": "ls"}}],
        "observation": {"results": [{"source_call_id": "a", "content": "x"}]},
        "metrics": {"prompt_tokens": 3, "cost_usd": 0.1},
    }
    whole = {
        "schema_version": "ATIF-v1.8",
        "agent": {"name": "n", "version": "1"},
        "steps": [step | changes.pop("step", {})],
    }
    return whole | changes


def test_the_document_of_these_tests_is_valid() -> None:
    assert parse_trajectory(json.dumps(document()).encode()).minor == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": "ATIF-v1.9"},
        {"schema_version": "1.8"},
        {"surprise": 1},
        {"steps": []},
        {"agent": {"name": "n"}},
        {"agent": {"name": "n", "version": "1", "kind": "x"}},
        {"step": {"step_id": 2}},
        {"step": {"step_id": 0}},
        {"step": {"source": "tool"}},
        {"step": {"source": "user"}},
        {"step": {"timestamp": "yesterday"}},
        {"step": {"surprise": 1}},
        {"step": {"llm_call_count": -1}},
        {"step": {"llm_call_count": 0}},
        {"step": {"llm_call_count": 0, "metrics": None, "reasoning_content": "hm"}},
        {"step": {"observation": {"results": [{"source_call_id": "b", "content": "x"}]}}},
        {"step": {"metrics": {"cost_usd": float("nan")}}},
        {"step": {"message": [{"type": "text"}]}},
        {"step": {"message": [{"type": "text", "text": "a", "source": {"media_type": "image/png", "path": "p"}}]}},
        {"step": {"message": [{"type": "image", "source": {"media_type": "image/bmp", "path": "p"}}]}},
        {"step": {"message": [{"type": "image", "source": {"media_type": "audio/wav", "path": "p"}}]}},
        {"step": {"observation": {"results": [{"subagent_trajectory_ref": [{"trajectory_id": "gone"}]}]}}},
        {"subagent_trajectories": [document()]},
        {"subagent_trajectories": [document(trajectory_id="t"), document(trajectory_id="t")]},
    ],
    ids=str,
)
def test_what_the_schema_forbids_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_trajectory(json.dumps(document(**changes)).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {
            "step": {
                "message": [{"type": "audio", "source": {"media_type": "audio/mp3", "path": "p", "duration_sec": 1.5}}]
            }
        },
        {"step": {"is_copied_context": True, "reasoning_effort": "high", "extra": {"k": [1]}}},
        {"step": {"observation": {"results": [{"subagent_trajectory_ref": [{"trajectory_path": "sub.json"}]}]}}},
        {
            "step": {"observation": {"results": [{"subagent_trajectory_ref": [{"trajectory_id": "t"}]}]}},
            "subagent_trajectories": [document(trajectory_id="t")],
        },
        {"schema_version": "ATIF-v1.0"},
    ],
    ids=str,
)
def test_what_the_schema_allows_is_read(changes: dict[str, Any]) -> None:
    parse_trajectory(json.dumps(document(**changes)).encode())


def test_a_bad_place_is_named() -> None:
    with pytest.raises(ConfigError, match=r"t\.json: steps\.0\.step_id"):
        parse_trajectory(json.dumps(document(step={"step_id": "one"})).encode(), name="t.json")


def build(steps: list[Step]) -> Any:
    agent = Agent(name="n", version="1")
    return build_trajectory(steps, session_id="s", trajectory_id="t", agent=agent, instruction="do", started_at=TIME)


def test_steps_become_a_valid_trajectory_with_raw_arguments_and_linked_results() -> None:
    good = ToolCall("c1", "bash", {"command": "ls"}, '{"command": "ls"}', result="a b", duration_s=0.5)
    bad = ToolCall("c1", "bash", {}, "{not json", error="arguments are not JSON")
    steps = [
        Step("user", "do", TIME),
        Step("agent", "", TIME, "m", "thinking", [good, bad], Usage(10, 2, 5, None, None), 1),
    ]
    trajectory = parse_trajectory(dump_trajectory(build(steps)))
    assert [step.step_id for step in trajectory.steps] == [1, 2]
    first, second = trajectory.steps[1].tool_calls or []
    assert first.extra
    assert first.extra["raw_arguments"] == '{"command": "ls"}'
    assert second.extra
    assert second.extra["raw_arguments"] == "{not json"
    assert second.extra["original_call_id"] == "c1"
    observation = trajectory.steps[1].observation
    assert observation
    assert [(r.source_call_id, r.content) for r in observation.results] == [
        (first.tool_call_id, "a b"),
        (second.tool_call_id, "arguments are not JSON"),
    ]
    metrics = trajectory.final_metrics
    assert metrics
    assert (metrics.total_prompt_tokens, metrics.total_completion_tokens, metrics.total_cost_usd) == (10, 5, None)


def test_a_step_without_a_model_call_has_no_metrics() -> None:
    step = Step("agent", "scripted", TIME, reasoning="none", usage=Usage(1, 1, 1), llm_calls=0)
    written = parse_trajectory(dump_trajectory(build([step]))).steps[0]
    assert (written.llm_call_count, written.metrics, written.reasoning_content) == (0, None, None)
    assert written.extra == {"reasoning": "none"}


def test_a_trial_without_steps_has_the_instruction_as_its_only_step() -> None:
    assert [step.message for step in build([]).steps] == ["do"]


def test_an_unknown_part_makes_the_sum_unknown() -> None:
    steps = [Step("agent", "", TIME, usage=Usage(1, None, 2, None, 0.5), llm_calls=1),
             Step("agent", "", TIME, usage=Usage(3, 1, 4, None, None), llm_calls=2)]  # fmt: skip
    totals = total_usage(steps)
    assert (totals.model_calls, totals.prompt_tokens, totals.cached_tokens, totals.cost_usd) == (3, 4, None, None)


ANY_TEXT = st.text(st.characters(exclude_categories=[]))
JSON = st.recursive(
    st.none() | st.integers() | st.floats() | ANY_TEXT, lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner)
)


@given(message=ANY_TEXT, result=ANY_TEXT, raw=ANY_TEXT, call_id=ANY_TEXT, arguments=st.dictionaries(ANY_TEXT, JSON))
def test_any_text_from_inside_survives(
    message: str, result: str, raw: str, call_id: str, arguments: dict[str, Any]
) -> None:
    call = ToolCall(call_id, "bash", arguments, raw, result=result)
    content = dump_trajectory(build([Step("agent", message, TIME, tool_calls=[call])]))
    step = parse_trajectory(content).steps[0]
    assert step.message == clean_text(message)
    assert step.observation
    assert step.observation.results[0].content == clean_text(result)
    content.decode("ascii")


@given(st.text())
def test_text_without_lone_surrogates_is_not_touched(text: str) -> None:
    assert clean_text(text) == text
