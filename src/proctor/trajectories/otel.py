"""A trajectory as OpenTelemetry spans: OTLP in its JSON form, with the attributes of the GenAI conventions (1.41).

One span `invoke_agent` for the trial; below it one `chat` for each call of a model and one `execute_tool` for each tool
call. Ids follow from the trajectory's own, so exporting twice gives the same spans. ATIF has one time for a step and
none for its parts: a span begins at its step's time and ends after its duration where that is known, else where the
next step begins, and then says so (`proctor.time.estimated`).
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from proctor.trajectories.atif import result_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proctor.trajectories.atif import Content, Step, ToolCall, Trajectory

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
_INTERNAL, _CLIENT = 1, 3
_ERROR = 2
_NANO = 1_000_000_000
_PROVIDERS = {"openai": "openai", "anthropic": "anthropic", "google": "gcp.gen_ai", "gemini": "gcp.gemini",
              "mistral": "mistral_ai", "mistralai": "mistral_ai", "deepseek": "deepseek", "groq": "groq",
              "cohere": "cohere", "xai": "x_ai", "x-ai": "x_ai"}  # fmt: skip


def export_spans(trajectory: Trajectory, *, version: str = "") -> dict[str, Any]:
    """The trajectory as one OTLP `TracesData` document. Texts go in whole: they are what the trajectory holds."""
    writer = _Writer(trajectory)
    resource = {"service.name": "proctor", **({"service.version": version} if version else {})}
    scope = {"name": "proctor.trajectories", **({"version": version} if version else {})}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "schemaUrl": SCHEMA_URL, "spans": list(writer.spans())}],
                "schemaUrl": SCHEMA_URL,
            }
        ]
    }


class _Writer:
    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        name = f"{trajectory.session_id}\0{trajectory.trajectory_id}\0{trajectory.agent.name}"
        if trajectory.trajectory_id is None:
            name += trajectory.model_dump_json(exclude_none=True)
        self._name = name
        self._trace = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._root = self._id("root")
        self._times = self._step_times()

    def spans(self) -> Iterator[dict[str, Any]]:
        """The root span first, then its children in order."""
        steps = self._trajectory.steps
        yield self._agent()
        for position, step in enumerate(steps):
            if step.source != "agent" or step.is_copied_context:
                continue
            begin, end = self._times[position]
            if step.llm_call_count != 0:
                yield self._chat(step, position, begin, end)
            for number, call in enumerate(step.tool_calls or (), 1):
                took = _seconds((call.extra or {}).get("duration_s"))
                stop = end if took is None else begin + took
                yield self._tool(step, call, number, begin, stop, estimated=took is None)
                begin = begin if took is None else stop

    def _agent(self) -> dict[str, Any]:
        agent, totals = self._trajectory.agent, self._trajectory.final_metrics
        times = [time for pair in self._times for time in pair]
        given = next((step for step in self._trajectory.steps if step.source == "user"), None)
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": agent.name,
            "gen_ai.agent.version": agent.version,
            "gen_ai.provider.name": _provider(agent.model_name),
            "gen_ai.request.model": agent.model_name,
            "gen_ai.conversation.id": self._trajectory.trajectory_id or self._trajectory.session_id,
            "gen_ai.usage.input_tokens": totals.total_prompt_tokens if totals else None,
            "gen_ai.usage.output_tokens": totals.total_completion_tokens if totals else None,
            "gen_ai.usage.cache_read.input_tokens": totals.total_cached_tokens if totals else None,
            "gen_ai.system_instructions": _instructions(self._trajectory),
            "gen_ai.input.messages": _messages("user", given.message) if given else None,
            "gen_ai.tool.definitions": _json(agent.tool_definitions) if agent.tool_definitions else None,
            "proctor.cost_usd": totals.total_cost_usd if totals else None,
        }
        span = self._span(f"invoke_agent {agent.name}", self._root, None, _INTERNAL, min(times), max(times), attributes)
        del span["parentSpanId"]
        return span

    def _chat(self, step: Step, position: int, begin: int, end: int) -> dict[str, Any]:
        extra, metrics = step.extra or {}, step.metrics
        latency = _seconds(extra.get("latency_s"))
        # The time of a step of ours is when the answer had come.
        start, stop = (begin, end) if latency is None else (begin - latency, begin)
        asked = extra.get("requested_model") or self._trajectory.agent.model_name or step.model_name
        reason = extra.get("finish_reason")
        error = extra.get("model_error")
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": _provider(asked),
            "gen_ai.request.model": asked,
            "gen_ai.response.model": step.model_name,
            "gen_ai.response.finish_reasons": [reason] if isinstance(reason, str) else None,
            "gen_ai.usage.input_tokens": metrics.prompt_tokens if metrics else None,
            "gen_ai.usage.output_tokens": metrics.completion_tokens if metrics else None,
            "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens if metrics else None,
            "gen_ai.usage.reasoning.output_tokens": (metrics.extra or {}).get("reasoning_tokens") if metrics else None,
            "gen_ai.output.messages": _output(step, reason),
            "error.type": "model_error" if error else None,
            "proctor.step": step.step_id,
            "proctor.cost_usd": metrics.cost_usd if metrics else None,
            "proctor.time.estimated": True if latency is None else None,
        }
        span_id = self._id(f"chat {position}")
        name = f"chat {asked}" if asked else "chat"
        return self._span(name, span_id, self._root, _CLIENT, start, stop, attributes, error=error)

    def _tool(
        self, step: Step, call: ToolCall, number: int, begin: int, end: int, *, estimated: bool
    ) -> dict[str, Any]:
        results = step.observation.results if step.observation else []
        result = result_of(call, results, alone=len(step.tool_calls or ()) == 1)
        error = (result.extra or {}).get("error") if result is not None else None
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.function_name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": call.tool_call_id,
            "gen_ai.tool.call.arguments": _json(call.arguments),
            "gen_ai.tool.call.result": text_of(result.content) if result is not None else None,
            "error.type": "tool_error" if error else None,
            "proctor.step": step.step_id,
            "proctor.time.estimated": True if estimated else None,
        }
        span_id = self._id(f"tool {step.step_id} {number}")
        name = f"execute_tool {call.function_name}"
        return self._span(name, span_id, self._root, _INTERNAL, begin, end, attributes, error=error)

    def _span(
        self, name: str, span_id: str, parent: str | None, kind: int, start: int, end: int,
        attributes: Mapping[str, Any], error: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        span: dict[str, Any] = {
            "traceId": self._trace,
            "spanId": span_id,
            "parentSpanId": parent,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(max(0, start)),
            "endTimeUnixNano": str(max(0, start, end)),
            "attributes": _attributes(attributes),
        }
        if error:
            span["status"] = {"code": _ERROR, "message": str(error)}
        return span

    def _id(self, what: str) -> str:
        return hashlib.sha256(f"{self._name}\0{what}".encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def _step_times(self) -> list[tuple[int, int]]:
        """Begin and end of each step in nanoseconds; a step without a time begins where the one before did."""
        begins: list[int] = []
        for step in self._trajectory.steps:
            begins.append(_nanoseconds(step.timestamp) if step.timestamp else begins[-1] if begins else 0)
        return [(begin, max(begin, later)) for begin, later in zip(begins, [*begins[1:], begins[-1]], strict=True)]


def _seconds(value: Any) -> int | None:
    """A duration in nanoseconds; None for what is none."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
    return int(value * _NANO) if known else None


def _nanoseconds(text: str) -> int:
    time = datetime.fromisoformat(text)
    time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    delta = time - datetime(1970, 1, 1, tzinfo=UTC)
    return (delta.days * 86_400 + delta.seconds) * _NANO + delta.microseconds * 1000


def _provider(model: Any) -> str | None:
    """The provider by the prefix of the model's name, where it has one of those that the conventions list."""
    return _PROVIDERS.get(str(model).partition("/")[0].lower()) if model else None


def _messages(role: str, content: Content) -> str:
    return _json([{"role": role, "parts": [{"type": "text", "content": text_of(content)}]}])


def _output(step: Step, reason: Any) -> str:
    parts: list[dict[str, Any]] = []
    if step.reasoning_content:
        parts.append({"type": "reasoning", "content": step.reasoning_content})
    if text := text_of(step.message):
        parts.append({"type": "text", "content": text})
    parts += [
        {"type": "tool_call", "id": call.tool_call_id, "name": call.function_name, "arguments": call.arguments}
        for call in step.tool_calls or ()
    ]
    return _json([{"role": "assistant", "parts": parts, "finish_reason": reason if isinstance(reason, str) else ""}])


def _instructions(trajectory: Trajectory) -> str | None:
    texts = [text_of(step.message) for step in trajectory.steps if step.source == "system"]
    return _json([{"type": "text", "content": text} for text in texts[:1]]) if texts else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}
