"""A recorded answer as an endpoint would send it: whole, or as a stream of events. Pure functions.

What a stream looked like in time is not in the record, and no harness may depend on it; what it said is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def chat_completion(response: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The chat completion that a record's `response` stands for: as it came, or put together from its parts."""
    if "choices" in response:
        return dict(response)
    message = dict(response.get("message") or {"content": response.get("text"), **_parts(response)})
    calls = [
        {"id": call.get("id") or "", "type": "function",
         "function": {"name": call.get("name") or "", "arguments": call.get("arguments") or ""}}
        for call in message.get("tool_calls") or ()
    ]  # fmt: skip
    spoken: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if message.get("reasoning"):
        spoken["reasoning_content"] = message["reasoning"]
    if calls:
        spoken["tool_calls"] = calls
    reason = response.get("finish_reason") or ("tool_calls" if calls else "stop")
    body: dict[str, Any] = {
        "id": response.get("id") or "chatcmpl-replayed",
        "object": "chat.completion",
        "created": response.get("created") or 0,
        "model": response.get("model") or model,
        "choices": [{"index": 0, "message": spoken, "finish_reason": reason}],
    }
    for name in ("usage", "system_fingerprint"):
        if response.get(name) is not None:
            body[name] = response[name]
    return body


def _parts(response: Mapping[str, Any]) -> dict[str, Any]:
    return {name: response[name] for name in ("tool_calls", "reasoning") if response.get(name)}


def chat_events(body: Mapping[str, Any], *, with_usage: bool) -> Iterator[bytes]:
    """A chat completion as server-sent events, each part of the message in one delta."""
    choice = body["choices"][0]
    message = choice.get("message") or {}
    head = {name: value for name, value in body.items() if name not in ("choices", "usage", "object")}
    head["object"] = "chat.completion.chunk"

    def event(delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        return f"data: {json.dumps(chunk)}\n\n".encode()

    yield event({"role": "assistant", "content": ""})
    for name, value in message.items():
        if name in ("role", "tool_calls") or not value:
            continue
        yield event({name: value})
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, choice.get("finish_reason") or "stop")
    if with_usage and body.get("usage") is not None:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': body['usage']})}\n\n".encode()
    yield b"data: [DONE]\n\n"
