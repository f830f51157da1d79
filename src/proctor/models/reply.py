"""What endpoints send, made into one shape: whole replies, streamed deltas, usage and cost. Pure functions of values.

Formats: the OpenAI chat-completions API and what its many look-alikes make of it. Whatever is not an answer
becomes a BadReply with one line that says what was wrong.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proctor.models.contract import ModelToolCall, Usage

if TYPE_CHECKING:
    from collections.abc import Mapping


class BadReply(Exception):
    """The reply is not a chat completion."""


class ErrorReply(Exception):
    """The reply is an error object: its message, `code` and `type` as the endpoint gave them."""

    def __init__(self, message: str, code: str, kind: str) -> None:
        self.message = message
        self.code = code
        self.kind = kind
        super().__init__(message)


@dataclass(slots=True)
class Draft:
    """An answer in the making; `ModelAnswer` is made from it once the whole is there."""

    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ModelToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    returned_model: str | None = None
    usage: Mapping[str, Any] | None = None
    raw: dict[str, Any] = field(default_factory=dict)


def strict_json(text: str) -> Any:
    """JSON as RFC 8259 has it: no NaN or Infinity, no number that only infinity could hold. Raises ValueError."""
    try:
        return _STRICT.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is out of range")
    return value


def well_formed(value: Any) -> Any:
    """`value` with every text valid Unicode: halves of surrogate pairs are joined, lone ones replaced.

    JSON can hold lone surrogates, and a stream may cut a pair in two; no file could hold them.
    """
    if isinstance(value, str):
        if value.isascii():
            return value
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {well_formed(name): well_formed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [well_formed(item) for item in value]
    return value


def parse_json(text: str) -> Mapping[str, Any]:
    """A reply's JSON object. Raises BadReply, or ErrorReply when it is an error object."""
    if not text.strip():
        raise BadReply("the reply is empty")
    try:
        value = strict_json(text)
    except ValueError as error:
        raise BadReply(f"the reply is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadReply(f"the reply is a JSON {type(value).__name__}, not an object")
    if problem := error_of(value):
        raise problem
    return value


def error_of(value: Mapping[str, Any]) -> ErrorReply | None:
    """The error object in a reply, if that is what it is (`{"error": …}` or `{"object": "error", …}`)."""
    error = value.get("error")
    if error is None and value.get("object") == "error":
        error = value
    if not error:
        return None
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or json.dumps(error)
        return ErrorReply(str(message), str(error.get("code") or ""), str(error.get("type") or ""))
    return ErrorReply(str(error), "", "")


def whole_answer(value: Mapping[str, Any], *, is_well_formed: bool = False) -> Draft:
    """A non-streamed reply. Raises BadReply when it holds no answer."""
    if not is_well_formed:
        value = well_formed(value)
    choice = _first_choice(value)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadReply("the reply's choice has no message")
    calls = [
        ModelToolCall(_text_of(call.get("id")), _text_of(function.get("name")), _arguments_text(function))
        for call, function in _functions(message.get("tool_calls"))
    ]
    return Draft(
        text=_content_text(message.get("content")) or _text_of(message.get("refusal")),
        reasoning=_reasoning_of(message),
        tool_calls=calls,
        finish_reason=_string(choice.get("finish_reason")),
        returned_model=_string(value.get("model")),
        usage=_mapping(value.get("usage")),
        raw=dict(value),
    )


def _first_choice(value: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = value.get("choices")
    if not isinstance(choices, list):
        raise BadReply("the reply has no list of choices")
    if not choices:
        raise BadReply("the reply's list of choices is empty")
    if not isinstance(choices[0], dict):
        raise BadReply("the reply's choice is not an object")
    return choices[0]


def _functions(calls: Any) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadReply("the reply's tool_calls is not a list")
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise BadReply("a tool call of the reply has no function")
        pairs.append((call, function))
    return pairs


def _arguments_text(function: Mapping[str, Any]) -> str:
    """The raw arguments; some endpoints send the object itself instead of its text."""
    arguments = function.get("arguments")
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _content_text(content: Any) -> str:
    """Content as text: a string, or the text parts of a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    raise BadReply(f"the reply's content is a JSON {type(content).__name__}")


def _reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Reasoning text, under either of the names that endpoints use."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(value := message.get(key), str) and value:
            return value
    return None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None


_STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


@dataclass(slots=True)
class _PartialCall:
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Assembler:
    """Streamed chunks in, one answer out.

    Tool-call deltas belong together by `index`; without one by id, else to the last call. An index that comes
    again with another id is another call (some endpoints number every parallel call 0).
    """

    def __init__(self) -> None:
        self.started = False
        """True once a chunk brought text, reasoning or a tool call."""
        self.finish_reason: str | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_PartialCall] = []
        self._by_index: dict[int, _PartialCall] = {}
        self._model: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._meta: dict[str, Any] = {}
        self._choices = 0

    def add(self, data: str) -> None:
        """Take one event's data. Raises BadReply or ErrorReply."""
        self.take(parse_json(data))

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Take one event that has been parsed. Raises BadReply."""
        self._model = _string(chunk.get("model")) or self._model
        self._usage = _mapping(chunk.get("usage")) or self._usage
        for key in ("id", "created", "system_fingerprint"):
            if chunk.get(key) is not None:
                self._meta.setdefault(key, chunk[key])
        choices = chunk.get("choices")
        if choices is None or choices == []:
            return
        choice = _first_choice(chunk)
        if choice.get("index", 0) != 0:
            return
        self._choices += 1
        self.finish_reason = _string(choice.get("finish_reason")) or self.finish_reason
        # A few endpoints end a stream with the whole message instead of a last delta; it repeats what came.
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._delta(delta)
        elif delta is not None:
            raise BadReply("a chunk's delta is not an object")

    def _delta(self, delta: Mapping[str, Any]) -> None:
        text, reasoning = _content_text(delta.get("content")) or _text_of(delta.get("refusal")), _reasoning_of(delta)
        if text:
            self._text.append(text)
        if reasoning:
            self._reasoning.append(reasoning)
        calls = delta.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise BadReply("a chunk's tool_calls is not a list")
        for call in calls or ():
            if not isinstance(call, dict):
                raise BadReply("a chunk's tool call is not an object")
            self._call(call)
        self.started = self.started or bool(text or reasoning or calls)

    def _call(self, delta: Mapping[str, Any]) -> None:
        partial = self._partial(delta.get("index"), _text_of(delta.get("id")))
        function = delta.get("function")
        if not isinstance(function, dict):
            return
        name = _text_of(function.get("name"))
        # The name comes whole in the first delta, or again in every one; in pieces only from very few endpoints.
        if name and name != partial.name:
            partial.name += name
        if arguments := _arguments_text(function):
            partial.arguments.append(arguments)

    def _partial(self, index: Any, call_id: str) -> _PartialCall:
        known: _PartialCall | None
        if isinstance(index, int):
            known = self._by_index.get(index)
        elif call_id:
            known = next((call for call in self._calls if call.call_id == call_id), None)
        else:
            known = self._calls[-1] if self._calls else None
        if known is None or (call_id and known.call_id and known.call_id != call_id):
            known = _PartialCall(call_id)
            self._calls.append(known)
            if isinstance(index, int):
                self._by_index[index] = known
        known.call_id = known.call_id or call_id
        return known

    def answer(self) -> Draft:
        """The whole. Raises BadReply when no choice ever came."""
        if not self._choices:
            raise BadReply("the stream had no choices")
        calls = [
            ModelToolCall(call.call_id, well_formed(call.name), well_formed("".join(call.arguments)))
            for call in self._calls
        ]
        text, reasoning = well_formed("".join(self._text)), well_formed("".join(self._reasoning)) or None
        raw = {
            **self._meta,
            "model": self._model,
            "message": {
                "content": text,
                "reasoning": reasoning,
                "tool_calls": [{"id": c.call_id, "name": c.name, "arguments": c.arguments} for c in calls],
            },
            "finish_reason": self.finish_reason,
            "usage": self._usage,
        }
        return Draft(text, reasoning, calls, self.finish_reason, self._model, self._usage, raw)


def usage_of(usage: Mapping[str, Any] | None, prices: Mapping[str, float] | None) -> Usage:
    """Token counts and their cost. What the endpoint does not say is None, and so is a cost that depends on it."""
    if usage is None:
        return Usage()
    prompt_details = _mapping(usage.get("prompt_tokens_details")) or {}
    completion_details = _mapping(usage.get("completion_tokens_details")) or {}
    prompt, completion = count_of(usage.get("prompt_tokens")), count_of(usage.get("completion_tokens"))
    cached = count_of(prompt_details.get("cached_tokens"))
    if cached is None:
        cached = count_of(usage.get("prompt_cache_hit_tokens"))
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=count_of(completion_details.get("reasoning_tokens")),
        cost_usd=cost_of(prompt, cached, completion, prices),
    )


def cost_of(
    prompt: int | None,
    cached: int | None,
    completion: int | None,
    prices: Mapping[str, float] | None,
    *,
    cache_write: int | None = None,
) -> float | None:
    """USD for one call: `prompt` counts tokens read from a cache and written to one too, and these have prices of
    their own.

    None when a price or a count that matters is unknown. An endpoint that does not mention cached tokens has
    charged none at the lower price.
    """
    if prices is None or prompt is None or completion is None:
        return None
    cached = min(cached or 0, prompt)
    written = min(cache_write or 0, prompt - cached)
    amounts = {
        "prompt": prompt - cached - written, "cached": cached, "cache_write": written, "completion": completion,
    }  # fmt: skip
    total = 0.0
    for name, amount in amounts.items():
        if not amount:
            continue
        if name not in prices:
            return None
        total += amount * prices[name]
    return total / 1_000_000


def count_of(value: Any) -> int | None:
    """A token count, or None for anything that is not a whole number of at least zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value >= 0 and float(value).is_integer() else None
