"""From the steps that a harness reported to an ATIF v1.8 trajectory, and the totals of a trial."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from proctor.agents.contract import Step, ToolCall
from proctor.runs.formats import UsageTotals
from proctor.trajectories import atif

if TYPE_CHECKING:
    from proctor.models.contract import Usage


def build_trajectory(
    steps: Sequence[Step],
    *,
    session_id: str,
    trajectory_id: str,
    agent: atif.Agent,
    instruction: str,
    started_at: str,
    notes: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> atif.Trajectory:
    """The trajectory of a trial. When a harness reported no step at all, the instruction it was given is the only
    one."""
    reported = list(steps) or [Step(source="user", message=instruction, timestamp=started_at)]
    totals = total_usage(reported)
    return atif.Trajectory(
        session_id=session_id,
        trajectory_id=trajectory_id,
        agent=agent,
        steps=[_step(number, step) for number, step in enumerate(reported, 1)],
        notes=notes,
        final_metrics=atif.FinalMetrics(
            total_prompt_tokens=totals.prompt_tokens,
            total_completion_tokens=totals.completion_tokens,
            total_cached_tokens=totals.cached_tokens,
            total_cost_usd=totals.cost_usd,
            total_steps=len(reported),
        ),
        extra=_map(extra or {}),
    )


def total_usage(steps: Iterable[Step]) -> UsageTotals:
    """Sum over all model calls. A field that any call left unknown is unknown in the sum."""
    used = [step for step in steps if step.usage is not None]
    calls = sum(step.llm_calls for step in steps)

    def total(name: str) -> Any:
        values = [getattr(step.usage, name) for step in used]
        return None if not values or None in values else sum(values)

    return UsageTotals(
        model_calls=calls,
        prompt_tokens=total("prompt_tokens"),
        cached_tokens=total("cached_tokens"),
        completion_tokens=total("completion_tokens"),
        reasoning_tokens=total("reasoning_tokens"),
        cost_usd=total("cost_usd"),
    )


def _step(number: int, step: Step) -> atif.Step:
    is_agent = step.source == "agent"
    called = is_agent and step.llm_calls > 0
    calls = _unique_ids(number, step.tool_calls)
    extra = _map(step.extra)
    if not called and is_agent and step.reasoning is not None:
        extra["reasoning"] = clean_text(step.reasoning)
    return atif.Step(
        step_id=number,
        timestamp=step.timestamp,
        source=step.source,
        message=clean_text(step.message),
        model_name=step.model_name if is_agent else None,
        reasoning_content=clean_text(step.reasoning) if called and step.reasoning is not None else None,
        tool_calls=[_call(call_id, call) for call_id, call in calls] if is_agent and calls else None,
        observation=_observation(calls) if is_agent else None,
        metrics=_metrics(step.usage) if called and step.usage is not None else None,
        llm_call_count=step.llm_calls if is_agent else None,
        extra=extra or None,
    )


def _unique_ids(number: int, calls: Sequence[ToolCall]) -> list[tuple[str, ToolCall]]:
    """Models repeat or omit call ids; an observation must point at exactly one call, so such ids get a suffix."""
    seen: set[str] = set()
    result = []
    for position, call in enumerate(calls, 1):
        call_id = clean_text(call.call_id)
        if not call_id or call_id in seen:
            call_id = f"{call_id or 'call'}-{number}.{position}"
        seen.add(call_id)
        result.append((call_id, call))
    return result


def _call(call_id: str, call: ToolCall) -> atif.ToolCall:
    extra = {**_map(call.extra), "raw_arguments": clean_text(call.raw_arguments)}
    if call.duration_s is not None:
        extra["duration_s"] = call.duration_s
    if call_id != call.call_id:
        extra["original_call_id"] = clean_text(call.call_id)
    return atif.ToolCall(
        tool_call_id=call_id, function_name=clean_text(call.name), arguments=_map(call.arguments), extra=extra
    )


def _observation(calls: Sequence[tuple[str, ToolCall]]) -> atif.Observation | None:
    results = []
    for call_id, call in calls:
        if call.result is None and call.error is None:
            continue
        content = call.result if call.result is not None else call.error
        results.append(
            atif.ObservationResult(
                source_call_id=call_id,
                content=clean_text(content or ""),
                extra={"error": clean_text(call.error)} if call.error is not None else None,
            )
        )
    return atif.Observation(results=results) if results else None


def _metrics(usage: Usage) -> atif.Metrics:
    extra = {"reasoning_tokens": usage.reasoning_tokens} if usage.reasoning_tokens is not None else None
    return atif.Metrics(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cost_usd=usage.cost_usd,
        extra=extra,
    )


def clean_text(text: str) -> str:
    """Text that every JSON reader takes: lone surrogates become visible escapes (`\\udc80`). All else, control
    characters included, stays as it is; the exact bytes of a command's output are in `exec.jsonl`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def clean(value: Any) -> Any:
    """A JSON value with clean text, text keys and finite numbers; anything else as its text."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return clean_text(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))


def _map(value: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = clean(value)
    return result
