"""A scripted answer in each wire protocol: OpenAI chat completions and responses, Anthropic messages. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proctor.models.scripted import Answer, ChatRequest

Protocol = Literal["chat", "responses", "messages"]

_MADE_BY_MODEL = frozenset({"function_call", "custom_tool_call", "local_shell_call", "reasoning"})


def turn_of(protocol: Protocol, body: Mapping[str, Any]) -> int:
    """How many answers the conversation of a request holds. Raises LookupError or TypeError for what is none."""
    if protocol != "responses":
        return sum(message["role"] == "assistant" for message in body["messages"])
    items = body["input"]
    if isinstance(items, str):
        return 0
    made = [item.get("role") == "assistant" or item.get("type") in _MADE_BY_MODEL for item in items]
    return sum(now and not before for before, now in zip([False, *made], made, strict=False))


def first_user_text(protocol: Protocol, body: Mapping[str, Any]) -> str:
    """What the person said first."""
    items = body["input"] if protocol == "responses" else body["messages"]
    if isinstance(items, str):
        return items
    return next((_text(item.get("content")) for item in items if item.get("role") == "user"), "")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def whole(answer: Answer, chat: ChatRequest) -> dict[str, Any]:
    """The answer as one object."""
    return {"chat": _chat, "responses": _response, "messages": _message}[chat.protocol](answer, chat)


def events(answer: Answer, chat: ChatRequest) -> Iterator[bytes]:
    """The answer as server-sent events: text in small pieces, arguments in pieces, usage where the protocol has it."""
    return {"chat": _chat_events, "responses": _response_events, "messages": _message_events}[chat.protocol](
        answer, chat
    )


def error_body(protocol: Protocol, message: str) -> bytes:
    """An error object."""
    error = {"message": message, "type": "invalid_request_error"}
    return json.dumps({"type": "error", "error": error} if protocol == "messages" else {"error": error}).encode()


# Shared.


def _pieces(text: str, size: int = 24) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


def _calls(answer: Answer, chat: ChatRequest) -> list[tuple[str, str, str]]:
    """Id, name and argument text of each tool call."""
    return [
        (
            f"call_{chat.turn}_{number}",
            name,
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        )
        for number, (name, arguments) in enumerate(answer.tool_calls)
    ]


def _model(answer: Answer, chat: ChatRequest) -> str:
    return answer.model or f"{chat.body.get('model')}-scripted"


def _counts(answer: Answer) -> tuple[int, int, int, int] | None:
    """Prompt, cached, completion and reasoning tokens of the scripted usage, which is written as chat has it."""
    if answer.usage is None:
        return None
    usage = answer.usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0), reasoning


def _event(name: str | None, data: Mapping[str, Any]) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode("utf-8", "surrogatepass")


# Chat completions.


def _chat_finish(answer: Answer) -> str:
    return answer.finish_reason or ("tool_calls" if answer.tool_calls else "stop")


def _chat_calls(answer: Answer, chat: ChatRequest) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in _calls(answer, chat)
    ]


def _chat_envelope(answer: Answer, chat: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{chat.turn}", "object": kind, "created": 0, "model": _model(answer, chat), **answer.extra}


def _chat(answer: Answer, chat: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = _chat_calls(answer, chat)
    reply = _chat_envelope(answer, chat, "chat.completion")
    reply["choices"] = [{"index": 0, "message": message, "finish_reason": _chat_finish(answer)}]
    if answer.usage is not None:
        reply["usage"] = answer.usage
    return reply


def _chat_events(answer: Answer, chat: ChatRequest) -> Iterator[bytes]:
    def chunk(delta: Mapping[str, Any] | None, **more: Any) -> bytes:
        reply = _chat_envelope(answer, chat, "chat.completion.chunk")
        reply["choices"] = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None, **more}]
        reply["usage"] = answer.usage if delta is None else None
        return _event(None, reply)

    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(answer.reasoning or ""):
        yield chunk({"reasoning_content": piece})
    for piece in _pieces(answer.text):
        yield chunk({"content": piece})
    for index, sent in enumerate(_chat_calls(answer, chat)):
        function = sent["function"]
        yield chunk({"tool_calls": [{"index": index, **sent, "function": {**function, "arguments": ""}}]})
        for piece in _pieces(function["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, finish_reason=_chat_finish(answer))
    if answer.usage is not None and (chat.body.get("stream_options") or {}).get("include_usage"):
        yield chunk(None)
    yield b"data: [DONE]\n\n"


# Responses.


def _response_usage(answer: Answer) -> dict[str, Any] | None:
    if (counts := _counts(answer)) is None:
        return None
    prompt, cached, completion, reasoning = counts
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }


def _response_output(answer: Answer, chat: ChatRequest) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        output.append({"id": f"rs_{chat.turn}", "type": "reasoning", "summary": summary})
    if answer.text:
        content = [{"type": "output_text", "text": answer.text, "annotations": []}]
        output.append({"id": f"msg_{chat.turn}", "type": "message", "role": "assistant", "status": "completed",
                       "content": content})  # fmt: skip
    for call_id, name, arguments in _calls(answer, chat):
        output.append({"id": f"fc_{call_id}", "type": "function_call", "status": "completed", "call_id": call_id,
                       "name": name, "arguments": arguments})  # fmt: skip
    return output


def _response(answer: Answer, chat: ChatRequest, *, output: bool = True) -> dict[str, Any]:
    return {
        "id": f"resp_{chat.turn}",
        "object": "response",
        "created_at": 0,
        "status": "completed" if output else "in_progress",
        "model": _model(answer, chat),
        "output": _response_output(answer, chat) if output else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "temperature": chat.body.get("temperature"),
        "top_p": chat.body.get("top_p"),
        "usage": _response_usage(answer) if output else None,
        **answer.extra,
    }


def _response_events(answer: Answer, chat: ChatRequest) -> Iterator[bytes]:
    sequence = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal sequence
        sequence += 1
        return _event(kind, {"type": kind, "sequence_number": sequence, **fields})

    yield event("response.created", response=_response(answer, chat, output=False))
    for index, item in enumerate(_response_output(answer, chat)):
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress"} if "status" in item else item
        if item["type"] == "message":
            yield event("response.output_item.added", output_index=index, item={**begun, "content": []})
            part = item["content"][0]
            yield event("response.content_part.added", **place, content_index=0, part={**part, "text": ""})
            for piece in _pieces(part["text"]):
                yield event("response.output_text.delta", **place, content_index=0, delta=piece, logprobs=[])
            yield event("response.output_text.done", **place, content_index=0, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, content_index=0, part=part)
        elif item["type"] == "function_call":
            yield event("response.output_item.added", output_index=index, item={**begun, "arguments": ""})
            for piece in _pieces(item["arguments"]):
                yield event("response.function_call_arguments.delta", **place, delta=piece)
            yield event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            yield event("response.output_item.added", output_index=index, item={**item, "summary": []})
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=_response(answer, chat))


# Messages.


def _message_usage(answer: Answer) -> dict[str, Any]:
    prompt, cached, completion, _ = _counts(answer) or (0, 0, 0, 0)
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _message_blocks(answer: Answer, chat: ChatRequest) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": "c2NyaXB0ZWQ="})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call_id, name, arguments in _calls(answer, chat):
        try:
            value = json.loads(arguments)
        except ValueError:
            value = {"malformed": arguments}
        blocks.append({"type": "tool_use", "id": f"toolu_{call_id}", "name": name, "input": value})
    return blocks


def _stop_reason(answer: Answer) -> str:
    return answer.finish_reason or ("tool_use" if answer.tool_calls else "end_turn")


def _message(answer: Answer, chat: ChatRequest) -> dict[str, Any]:
    return {
        "id": f"msg_{chat.turn}",
        "type": "message",
        "role": "assistant",
        "model": _model(answer, chat),
        "content": _message_blocks(answer, chat),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": None,
        "usage": _message_usage(answer),
        **answer.extra,
    }


def _block_deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a block is without its content, and the deltas that bring it."""
    if block["type"] == "thinking":
        thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(block["thinking"])]
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {"thinking": "", "signature": ""}, [*thoughts, signature]
    if block["type"] == "text":
        return {"text": ""}, [{"type": "text_delta", "text": piece} for piece in _pieces(block["text"])]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in _pieces(text)]


def _message_events(answer: Answer, chat: ChatRequest) -> Iterator[bytes]:
    usage = _message_usage(answer)
    start = {**_message(answer, chat), "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    yield _event("message_start", {"type": "message_start", "message": start})
    for index, block in enumerate(_message_blocks(answer, chat)):
        empty, deltas = _block_deltas(block)
        started = {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield _event("content_block_start", started)
        if index == 0:
            yield _event("ping", {"type": "ping"})
        for delta in deltas:
            yield _event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})
        yield _event("content_block_stop", {"type": "content_block_stop", "index": index})
    delta = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
    counts = {"output_tokens": usage["output_tokens"]}
    yield _event("message_delta", {"type": "message_delta", "delta": delta, "usage": counts})
    yield _event("message_stop", {"type": "message_stop"})
