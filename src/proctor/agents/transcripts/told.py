"""What all readers of transcripts share: tolerant access to JSON that somebody else wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from proctor.agents.contract import Step, ToolCall
from proctor.agents.steps import timestamp
from proctor.agents.text import clip
from proctor.models.reply import strict_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_STEPS = 5000
"""How many steps of one transcript are taken."""
_TEXT_CHARS = 200_000
_SHOWN = 5
_MAX_DEPTH = 60
"""How deeply a transcript's JSON may be nested: deeper than any agent's, and far from what recursion can walk."""


class TranscriptError(ValueError):
    """Nothing in the transcript can be used; the message says why in one line."""


@dataclass(slots=True)
class Told:
    """An agent's account of a trial."""

    steps: list[Step] = field(default_factory=list)
    final_message: str = ""
    losses: list[str] = field(default_factory=list)
    _open: dict[str, ToolCall] = field(default_factory=dict)

    def call(self, call_id: Any, name: Any, arguments: Any) -> ToolCall:
        """A tool call, waiting for its result. Arguments are an object, or text that may be JSON."""
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        made = ToolCall(
            text(call_id) or f"call-{len(self._open) + 1}", text(name) or "unknown", {}, clip(raw, _TEXT_CHARS)
        )
        parsed = parsed_json(raw)
        if isinstance(parsed, dict):
            made.arguments = parsed
        else:
            made.error = "the arguments are not a JSON object"
        self._open[made.call_id] = made
        return made

    def result(
        self, call_id: Any, content: Any, *, failed: bool = False, extra: Mapping[str, Any] | None = None
    ) -> None:
        """The result of an earlier call; without such a call it is a loss."""
        made = self._open.pop(text(call_id), None)
        if made is None:
            self.lose(f"a result of an unknown call {text(call_id)[:40]!r}")
            return
        made.result = text(content)
        if failed:
            made.error = "the agent says that it failed"
        made.extra.update(extra or {})

    def lose(self, what: str) -> None:
        """Name something that could not be taken over (the first few)."""
        if len(self.losses) < _SHOWN:
            self.losses.append(what)

    def close(self) -> Told:
        """Mark calls that never got a result, and steps that have no time of their own."""
        for made in self._open.values():
            made.error = made.error or "no result in the transcript"
        if not self.steps:
            raise TranscriptError(self.losses[0] if self.losses else "the transcript has no steps")
        last = next((step.timestamp for step in self.steps if step.timestamp), "") or timestamp()
        for step in self.steps:
            if not step.timestamp:
                step.timestamp = last
                step.extra["undated"] = True
            last = step.timestamp
        return self


def lines(data: bytes, told: Told) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file with one on each line; other lines are losses."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        value = parsed_json(line)
        if isinstance(value, dict):
            yield value
        else:
            told.lose(f"line {number} is not a JSON object")


def parsed_json(data: bytes | str) -> Any:
    """The JSON value; None for anything that is none, has numbers that JSON does not have, or is nested so deeply that
    whoever walks through it would run out of stack."""
    try:
        value = strict_json(data if isinstance(data, str) else data.decode("utf-8", "replace"))
    except ValueError:
        return None
    level = _containers([value])
    for _ in range(_MAX_DEPTH):
        if not level:
            return value
        level = _containers(part for item in level for part in (item.values() if isinstance(item, dict) else item))
    return None


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]


def mapping(value: Any) -> dict[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; anything else is no objects."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """Text, however it is wrapped: a string, or parts with a `text`; at most so many characters of it."""
    if isinstance(value, str):
        return clip(value, _TEXT_CHARS)
    if isinstance(value, list):
        return clip(
            "\n".join(str(part.get("text", f"[{part.get('type', '?')}]")) for part in items(value)), _TEXT_CHARS
        )
    return "" if value is None else clip(str(value), _TEXT_CHARS)


def moment(value: Any) -> str:
    """A time as ISO 8601 in UTC: from such text, from seconds, or from milliseconds; empty, if it is none of them."""
    try:
        if isinstance(value, str):
            found = datetime.fromisoformat(value.replace("Z", "+00:00"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found = datetime.fromtimestamp(value / 1000 if value > 1e11 else value, UTC)
        else:
            return ""
        found = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
        return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return ""


def spoke(message: str, at: Any, calls: list[ToolCall], *, model: Any = None, reasoning: str | None = None) -> Step:
    """A step of the agent that came from one answer of its model."""
    name = text(model) or None
    return Step("agent", message, moment(at), model_name=name, reasoning=reasoning, tool_calls=calls, llm_calls=1)


def claimed(usage: Any) -> dict[str, int]:
    """The whole numbers of a usage object, by the name that the agent gives them."""
    return {
        str(name): number
        for name, number in mapping(usage).items()
        if isinstance(number, int) and not isinstance(number, bool)
    }
