"""A trajectory of another tool in the making: steps in order, and a list of what could not be carried over.

An importer never drops anything in silence: what ATIF has a place for goes there, what it has none for goes into
`extra` where it is small, and everything else is counted here and named in `losses`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ValidationError

from proctor.common import ConfigError
from proctor.trajectories.atif import (
    Agent,
    FinalMetrics,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    ToolCall,
    Trajectory,
)

Source = Literal["system", "user", "agent"]


@dataclass(frozen=True, slots=True)
class Imported:
    """One trajectory out of a file, as ATIF v1.8; `losses` has a line for each kind of thing that is not in it."""

    trajectory: Trajectory
    format: str
    losses: tuple[str, ...] = ()
    name: str = ""
    """Which one of the file it is, where a file holds several."""


class Losses:
    """Counts what is left out, by name."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, what: str, count: int = 1) -> None:
        """`what` was left out, `count` times more."""
        self._counts[what] += count

    def lines(self) -> tuple[str, ...]:
        """One line each, with the count where it is more than one."""
        return tuple(f"{what} ({count:,} times)" if count > 1 else what for what, count in self._counts.items())


@dataclass(slots=True)
class DraftStep:
    """One step before it is numbered; `results` are (call id or None, content, extra)."""

    source: Source
    message: str = ""
    timestamp: str | None = None
    model_name: str | None = None
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ObservationResult] = field(default_factory=list)
    metrics: Metrics | None = None
    llm_calls: int | None = None
    copied: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def call(self, name: Any, arguments: Any, call_id: Any = None, **extra: Any) -> str:
        """Add a tool call; an id that is missing or taken gets one of its own. Returns the id."""
        taken = {one.tool_call_id for one in self.calls}
        wanted = text_of(call_id) if call_id else f"call-{len(self.calls) + 1}"
        used = wanted if wanted not in taken else f"{wanted}-{len(self.calls) + 1}"
        values, raw = arguments_of(arguments)
        more = plain_map({key: value for key, value in {**extra, **raw}.items() if value is not None})
        self.calls.append(
            ToolCall(tool_call_id=used, function_name=text_of(name) or "unknown", arguments=values, extra=more or None)
        )
        return used

    def result(self, content: Any, call_id: str | None, **extra: Any) -> None:
        """Add what a call gave back; an id that is not of this step becomes none."""
        known = {one.tool_call_id for one in self.calls}
        more = plain_map({key: value for key, value in extra.items() if value is not None})
        if call_id is not None and call_id not in known:
            more["original_call_id"], call_id = call_id, None
        self.results.append(ObservationResult(source_call_id=call_id, content=text_of(content), extra=more or None))

    def finish(self, number: int) -> Step:
        """The step with its number."""
        is_agent = self.source == "agent"
        return Step(
            step_id=number,
            timestamp=self.timestamp,
            source=self.source,
            message=text_of(self.message),
            model_name=self.model_name if is_agent else None,
            reasoning_content=text_of(self.reasoning) if self.reasoning and is_agent else None,
            tool_calls=(self.calls or None) if is_agent else None,
            observation=Observation(results=self.results) if self.results else None,
            metrics=self.metrics if is_agent else None,
            llm_call_count=self.llm_calls if is_agent else None,
            is_copied_context=self.copied,
            extra=plain_map(self.extra) or None,
        )


@dataclass(slots=True)
class Draft:
    """A trajectory before it is checked."""

    format: str
    agent: str
    version: str = "unknown"
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    steps: list[DraftStep] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    totals: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    trajectory_id: str | None = None
    agent_extra: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, source: Source, message: Any = "", **more: Any) -> DraftStep:
        """Append a step."""
        step = DraftStep(source, text_of(message), **more)
        self.steps.append(step)
        return step

    def last_agent(self) -> DraftStep | None:
        """The agent's last step, if nothing but observations came after it."""
        return self.steps[-1] if self.steps and self.steps[-1].source == "agent" else None

    def finish(self, *, file: str, name: str = "") -> Imported:
        """The trajectory, checked against ATIF v1.8. Raises ConfigError naming the file and the place."""
        if not self.steps:
            raise ConfigError("there is no step in it", field=file)
        try:
            trajectory = Trajectory(
                session_id=self.session_id,
                trajectory_id=self.trajectory_id,
                agent=Agent(
                    name=self.agent,
                    version=self.version,
                    model_name=self.model,
                    tool_definitions=self.tools,
                    extra=plain_map(self.agent_extra) or None,
                ),
                steps=[step.finish(number) for number, step in enumerate(self.steps, 1)],
                final_metrics=FinalMetrics(**self.totals, total_steps=len(self.steps)),
                extra=plain_map({"imported_from": self.format, **self.extra}),
            )
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ConfigError(first["msg"], field=f"{file}: {place}") from error
        return Imported(trajectory, self.format, self.losses.lines(), name)


def mapping(value: Any) -> Mapping[str, Any]:
    """The value when it is a map, else an empty one: foreign documents hold anything anywhere."""
    return value if isinstance(value, Mapping) else {}


def arguments_of(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tool-call arguments as a map, and what goes into `extra` because they were none: the raw text."""
    if isinstance(value, Mapping):
        return plain_map(value), {}
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return {}, {"raw_arguments": value}
        return (plain_map(parsed), {}) if isinstance(parsed, dict) else ({}, {"raw_arguments": value})
    return {}, {} if value is None else {"raw_arguments": text_of(value)}


def text_of(value: Any) -> str:
    """A text of any shape: None is empty, a list of parts is joined, anything else is its JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return "\n".join(text_of(part.get("text") if isinstance(part, dict) and "text" in part else part)
                         for part in value)  # fmt: skip
    try:
        return text_of(json.dumps(value, ensure_ascii=False, default=str))
    except (ValueError, RecursionError):
        return text_of(str(value))


def plain(value: Any) -> Any:
    """A JSON value that ATIF takes: text keys, text without lone surrogates, finite numbers."""
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, Mapping):
        return {text_of(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float)) else text_of(str(value))


def plain_map(value: Mapping[str, Any]) -> dict[str, Any]:
    """`plain` of a map."""
    result: dict[str, Any] = plain(value)
    return result


def iso(value: Any) -> str | None:
    """A time as ISO 8601: from epoch seconds, or from a text that is ISO already; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e11:
        return datetime.fromtimestamp(value, UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, str):
        try:
            datetime.fromisoformat(value)
        except ValueError:
            return None
        return value
    return None


def count_of(value: Any) -> int | None:
    """A token count, or None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if value >= 0 else None


def cost_of(value: Any) -> float | None:
    """A cost in USD, or None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def openai_metrics(usage: Any, cost: Any = None) -> Metrics | None:
    """The metrics of an OpenAI-shaped `usage`; None when it says nothing."""
    usage = mapping(usage)
    details, completion = mapping(usage.get("prompt_tokens_details")), mapping(usage.get("completion_tokens_details"))
    values: dict[str, Any] = {
        "prompt_tokens": count_of(usage.get("prompt_tokens")),
        "completion_tokens": count_of(usage.get("completion_tokens")),
        "cached_tokens": count_of(details.get("cached_tokens")),
        "cost_usd": cost_of(cost if cost is not None else usage.get("cost")),
    }
    reasoning = count_of(completion.get("reasoning_tokens"))
    if reasoning is not None:
        values["extra"] = {"reasoning_tokens": reasoning}
    return Metrics(**values) if any(value is not None for value in values.values()) else None


def sums(steps: list[DraftStep]) -> dict[str, Any]:
    """Totals over steps; a sum with an unknown part is unknown."""
    used = [step.metrics for step in steps if step.source == "agent" and (step.llm_calls or step.metrics)]

    def total(name: str) -> Any:
        values = [getattr(one, name) if one is not None else None for one in used]
        return None if not values or None in values else sum(values)

    return {
        "total_prompt_tokens": total("prompt_tokens"),
        "total_completion_tokens": total("completion_tokens"),
        "total_cached_tokens": total("cached_tokens"),
        "total_cost_usd": total("cost_usd"),
    }
