"""OpenTelemetry: spans that nest, times that make sense, attributes of the conventions, the same ids each time."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.agents.contract import Step, ToolCall
from proctor.models.contract import Usage
from proctor.runs.trajectory import build_trajectory
from proctor.trajectories.atif import Agent, Trajectory
from proctor.trajectories.otel import export_spans


def trajectory() -> Trajectory:
    call = ToolCall("c1", "bash", {"command": "ls"}, '{"command": "ls"}', result="a\n", duration_s=0.25)
    bad = ToolCall("c2", "bash", {}, "x", result="no", error="invalid_json: no")
    extra = {"requested_model": "openai/gpt-x", "latency_s": 2.0, "finish_reason": "tool_calls"}
    steps = [
        Step("system", "be good", "2026-01-01T00:00:00Z"),
        Step("user", "do it", "2026-01-01T00:00:00Z"),
        Step("agent", "ok", "2026-01-01T00:00:03.5Z", "gpt-x-1", "hm", [call, bad], Usage(10, 4, 3, 1, 0.5), 1, extra),
        Step("agent", "", "2026-01-01T00:00:05Z", "gpt-x-1", llm_calls=2, extra={"model_error": "model: cut"}),
    ]
    return build_trajectory(
        steps, session_id="r", trajectory_id="t", agent=Agent(name="tool-loop", version="1", model_name="openai/gpt-x"),
        instruction="", started_at="2026-01-01T00:00:00Z",
    )  # fmt: skip


def spans_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    return found


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


def check(document: dict[str, Any]) -> None:
    """What the OTLP JSON encoding asks of every span."""
    json.dumps(document, allow_nan=False)
    spans = spans_of(document)
    ids = {span["spanId"] for span in spans}
    assert len(ids) == len(spans)
    assert [span for span in spans if "parentSpanId" not in span] == spans[:1]
    for span in spans:
        assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"])
        assert re.fullmatch(r"[0-9a-f]{16}", span["spanId"])
        assert span.get("parentSpanId", spans[0]["spanId"]) == spans[0]["spanId"]
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        assert attributes(span)["gen_ai.operation.name"] in ("invoke_agent", "chat", "execute_tool")
        assert span["name"].startswith(attributes(span)["gen_ai.operation.name"])


def test_a_trial_becomes_spans_of_the_conventions() -> None:
    document = export_spans(trajectory(), version="1.0")
    check(document)
    root, chat, tool, bad, failed = spans_of(document)
    names = [span["name"] for span in spans_of(document)]
    assert names == ["invoke_agent tool-loop", "chat openai/gpt-x", *["execute_tool bash"] * 2, "chat openai/gpt-x"]
    about = attributes(chat)
    assert (about["gen_ai.provider.name"], about["gen_ai.request.model"], about["gen_ai.response.model"]) == (
        "openai", "openai/gpt-x", "gpt-x-1")  # fmt: skip
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == ("10", "3")
    assert about["gen_ai.usage.cache_read.input_tokens"] == "4"
    said = json.loads(about["gen_ai.output.messages"])[0]
    assert [part["type"] for part in said["parts"]] == ["reasoning", "text", "tool_call", "tool_call"]
    assert int(chat["endTimeUnixNano"]) - int(chat["startTimeUnixNano"]) == 2_000_000_000
    assert "proctor.time.estimated" not in about
    assert json.loads(attributes(tool)["gen_ai.tool.call.arguments"]) == {"command": "ls"}
    assert attributes(tool)["gen_ai.tool.call.result"] == "a\n"
    assert int(tool["endTimeUnixNano"]) - int(tool["startTimeUnixNano"]) == 250_000_000
    assert bad["status"]["code"] == 2
    assert attributes(failed)["error.type"] == "model_error"
    assert attributes(root)["gen_ai.system_instructions"]


def test_the_same_trajectory_gives_the_same_spans() -> None:
    assert export_spans(trajectory()) == export_spans(trajectory())


times = st.none() | st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-01T00:00:09+02:00", "2026-01-01T00:00:01"])


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "agent"]), times, st.integers(0, 2)), min_size=1, max_size=6)
)
def test_any_valid_trajectory_gives_valid_spans(shape: list[tuple[str, str | None, int]]) -> None:
    steps = [
        {"step_id": number, "source": source, "message": "\ud800 x".encode("utf-8", "replace").decode(),
         **({"timestamp": time} if time else {}),
         **({"tool_calls": [{"tool_call_id": str(n), "function_name": "f", "arguments": {}} for n in range(count)],
             "llm_call_count": count} if source == "agent" else {})}
        for number, (source, time, count) in enumerate(shape, 1)
    ]  # fmt: skip
    value = Trajectory.model_validate({"agent": {"name": "a", "version": "1"}, "steps": steps})
    document = export_spans(value)
    check(document)
    assert len(spans_of(document)) == 1 + sum(count + (count > 0) for source, _, count in shape if source == "agent")


@pytest.mark.parametrize("model", ["anthropic/claude", "unheard/of", None])
def test_only_known_providers_are_named(model: str | None) -> None:
    value = Trajectory.model_validate(
        {"agent": {"name": "a", "version": "1", "model_name": model},
         "steps": [{"step_id": 1, "source": "agent", "message": "m"}]})  # fmt: skip
    found = attributes(spans_of(export_spans(value))[1]).get("gen_ai.provider.name")
    assert found == {"anthropic/claude": "anthropic"}.get(model or "")
