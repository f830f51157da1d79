"""A trajectory as lines that a person reads: each step with what was thought, said, called and answered, and what it
took. Long results are folded; whatever came from a sandbox or a model is made safe to print.
"""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from proctor.runs.text import brief, duration, safe, shorten
from proctor.trajectories.atif import result_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from proctor.trajectories.atif import ObservationResult, Step, ToolCall, Trajectory
    from proctor.trajectories.draft import Imported

Line = tuple[str, str]
"""A style, and the text of one line."""


def steps_text(trajectory: Trajectory, first: int = 1, last: int | None = None) -> Iterator[Line]:
    """The steps `first` to `last` (from 1, both included)."""
    begun = next((step.timestamp for step in trajectory.steps if step.timestamp), None)
    steps = trajectory.steps[first - 1 : last]
    if first > 1 or len(steps) < len(trajectory.steps):
        yield "dim", f"steps {first} to {first + len(steps) - 1} of {len(trajectory.steps)}"
    for step in steps:
        yield from step_text(step, begun)


def step_text(step: Step, begun: str | None = None) -> Iterator[Line]:
    """One step; its time is told from `begun` on."""
    yield "bold cyan", " · ".join([f"[{step.step_id}] {step.source}", *_took(step, begun)])
    extra = step.extra or {}
    if step.is_copied_context:
        yield "dim", "  (context copied from an earlier session)"
    yield from indented("dim italic", step.reasoning_content or "")
    yield from indented("", text_of(step.message))
    if extra.get("model_error"):
        yield "red", f"  no answer: {safe(str(extra['model_error']))}"
    results = list(step.observation.results) if step.observation else []
    for call in step.tool_calls or ():
        yield from _call(call)
        result = result_of(call, results, alone=len(step.tool_calls or ()) == 1)
        if result is not None:
            results.remove(result)
            yield from _result(result)
    for result in results:
        yield from _result(result)


def _took(step: Step, begun: str | None) -> Iterator[str]:
    """When, by which model, and at what cost in tokens, money and time."""
    if step.timestamp:
        yield f"+{duration(max(0.0, _seconds(begun, step.timestamp)))}" if begun else step.timestamp
    if step.model_name:
        yield safe(step.model_name)
    extra = step.extra or {}
    if isinstance(latency := extra.get("latency_s"), (int, float)):
        yield f"answered in {duration(latency)}"
    if isinstance(attempts := extra.get("attempts"), int) and attempts > 1:
        yield f"{attempts} tries"
    if (metrics := step.metrics) is not None:
        yield _tokens(metrics.prompt_tokens, metrics.completion_tokens, metrics.cached_tokens)
        if metrics.cost_usd is not None:
            yield f"${metrics.cost_usd:.4f}"


def _tokens(prompt: int | None, completion: int | None, cached: int | None) -> str:
    if prompt is None and completion is None:
        return "tokens unknown"
    shown = " + ".join("?" if count is None else f"{count:,}" for count in (prompt, completion))
    return f"{shown} tokens" + (f" ({cached:,} cached)" if cached else "")


def _seconds(begin: str | None, end: str) -> float:
    times = [datetime.fromisoformat(text) for text in (begin or end, end)]
    first, last = (time if time.tzinfo is not None else time.replace(tzinfo=UTC) for time in times)
    return (last - first).total_seconds()


def _call(call: ToolCall) -> Iterator[Line]:
    """A command as it would be typed; any other call with its arguments, long ones below it."""
    took = (call.extra or {}).get("duration_s")
    time = f"  ({duration(took)})" if isinstance(took, (int, float)) and took >= 0.05 else ""
    command = call.arguments.get("command", call.arguments.get("argv"))
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    if isinstance(command, str):
        first, *rest = shorten(command) or [""]
        yield "green", f"  $ {first}{'' if rest else time}"
        yield from (("green", f"    {line}") for line in rest)
        others = {key: value for key, value in call.arguments.items() if key not in ("command", "argv")}
        if others:
            yield "green", f"    with {', '.join(f'{safe(key)}={_shown(value)}' for key, value in others.items())}"
        return
    short = {key: value for key, value in call.arguments.items() if not _is_long(value)}
    shown = ", ".join(f"{safe(key)}={_shown(value)}" for key, value in short.items())
    raw = (call.extra or {}).get("raw_arguments")
    if not call.arguments and isinstance(raw, str) and raw not in ("", "{}"):
        shown = brief(raw, 200)
    yield "green", f"  {safe(call.function_name)}({shown}){time}"
    for key, value in call.arguments.items():
        if _is_long(value):
            yield "green", f"    {safe(key)}:"
            yield from indented("green", value, prefix="      ")


def _shown(value: Any) -> str:
    return brief(value) if isinstance(value, str) else brief(json.dumps(value, ensure_ascii=False)).strip("'")


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and ("\n" in value.rstrip("\n") or len(value) > 100)


def _result(result: ObservationResult) -> Iterator[Line]:
    failed = bool(result.extra and result.extra.get("error"))
    text = text_of(result.content)
    if not text.strip():
        yield "dim", "    (no output)"
    yield from indented("red" if failed else "dim", text, prefix="    ")


def indented(style: str, text: str, prefix: str = "  ") -> Iterator[Line]:
    """A text folded to its first and last lines; nothing when it is blank."""
    if text.strip():
        yield from ((style, prefix + line) for line in shorten(text))


def imported_text(found: Imported, first: int = 1, last: int | None = None) -> Iterator[Line]:
    """A foreign transcript: what it is, what was lost in reading it, and its steps."""
    trajectory, agent = found.trajectory, found.trajectory.agent
    model = f" with {safe(agent.model_name)}" if agent.model_name else ""
    label = f" ({safe(found.name)})" if found.name else ""
    who = f"{safe(agent.name)} {safe(agent.version)}{model}"
    yield "bold", f"{who}: {len(trajectory.steps)} steps, {found.format}{label}"
    if (totals := trajectory.final_metrics) is not None:
        parts = [_tokens(totals.total_prompt_tokens, totals.total_completion_tokens, totals.total_cached_tokens)]
        parts.append("cost unknown" if totals.total_cost_usd is None else f"${totals.total_cost_usd:.4f}")
        yield "", ", ".join(parts)
    yield from losses_text(found.losses)
    yield "", ""
    yield from steps_text(trajectory, first, last)


def losses_text(losses: Iterable[str]) -> Iterator[Line]:
    """What an import left out."""
    for loss in losses:
        yield "yellow", f"not carried over: {safe(loss)}"
