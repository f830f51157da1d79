"""Whatever an upstream sends, reading it never fails: an answer that cannot be understood is one of a closed list of
faults, and what a good answer counts is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.models.contract import ModelFault, Usage
from proctor.models.gateway.dialects import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES
from proctor.models.gateway.reading import reader_for
from proctor.models.scripted import Answer, ChatRequest
from proctor.models.scripted_forms import events, whole

OPERATIONS = pytest.mark.parametrize("operation", [CHAT, RESPONSES, MESSAGES, COUNT_TOKENS], ids=lambda one: one.name)

WORDS = st.sampled_from([
    "type", "message", "message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta",
    "content_block", "delta", "index", "usage", "choices", "content", "tool_calls", "function", "name", "arguments",
    "id", "model", "response", "response.completed", "response.failed", "output", "error", "text_delta", "text",
    "thinking",
    "input_json_delta", "partial_json", "citation", "citations", "input_tokens", "output_tokens", "prompt_tokens",
    "prompt_tokens_details", "input_tokens_details", "output_tokens_details", "thinking_tokens", "speed",
    "service_tier", "finish_reason", "code", "object", "system_fingerprint",
])  # fmt: skip
SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**20) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=14,
)
EVENTS = st.lists(st.tuples(st.sampled_from(["message", "error", "ping"]), SHAPES | st.binary(max_size=9)), max_size=8)


@OPERATIONS
@given(sent=EVENTS)
def test_no_stream_can_break_its_reader(operation: Any, sent: list[tuple[str, Any]]) -> None:
    reader = reader_for(operation)
    for name, value in sent:
        reader.event(name, value if isinstance(value, bytes) else json.dumps(value).encode())
    reader.close()
    assert reader.fault is None or reader.fault in ModelFault
    for name in Usage.__slots__:
        value = getattr(reader.usage, name)
        assert value is None or value >= 0
    json.dumps(reader.response)


@OPERATIONS
@given(sent=SHAPES | st.binary(max_size=30))
def test_no_whole_answer_can_break_its_reader(operation: Any, sent: Any) -> None:
    reader = reader_for(operation)
    reader.whole(sent if isinstance(sent, bytes) else json.dumps(sent).encode())
    assert (reader.fault is None) == reader.ended
    json.dumps(reader.response)


TEXTS = st.text(max_size=60)


@pytest.mark.parametrize("operation", [CHAT, RESPONSES, MESSAGES], ids=lambda one: one.name)
@given(
    text=TEXTS,
    calls=st.lists(
        st.tuples(st.sampled_from(["bash", "finish"]), st.dictionaries(TEXTS, TEXTS, max_size=2)), max_size=2
    ),
    reasoning=st.none() | TEXTS,
    counts=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)),
)
def test_a_stream_and_a_whole_answer_are_read_alike(
    operation: Any, text: str, calls: list[Any], reasoning: str | None, counts: tuple[int, int, int, int]
) -> None:
    prompt, cached, completion, thought = counts
    usage = {"prompt_tokens": prompt + cached, "completion_tokens": completion,
             "prompt_tokens_details": {"cached_tokens": cached},
             "completion_tokens_details": {"reasoning_tokens": thought}}  # fmt: skip
    answer = Answer(text, tuple(calls), reasoning=reasoning, usage=usage)
    chat = ChatRequest({"model": "m", "stream_options": {"include_usage": True}}, {}, 0, 0, operation.protocol)
    streamed, once = reader_for(operation), reader_for(operation)
    last = []
    for event in events(answer, chat):
        data = event.split(b"data: ", 1)[1].strip()
        last.append(streamed.event("message", data).last)
    streamed.close()
    once.whole(json.dumps(whole(answer, chat)).encode())
    assert last == [False] * (len(last) - 1) + [True], "the last event is known when it comes, and no other"
    for reader in (streamed, once):
        assert (reader.fault, reader.ended, reader.returned_model) == (None, True, "m-scripted")
        found = reader.usage
        assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (
            prompt + cached,
            cached,
            completion,
        )
    assert streamed.usage == once.usage
    if operation is not CHAT:
        mine, theirs = streamed.response, once.response
        assert mine is not None
        assert theirs is not None
        key = "output" if operation is RESPONSES else "content"
        assert mine[key] == theirs[key]


def test_odd_streams_of_messages() -> None:
    """Shapes that no model sends, found by thinking like one that is broken."""
    reader = reader_for(MESSAGES)
    citation = {"type": "citations_delta", "citation": {"cited_text": "x"}}
    broken = {"type": "input_json_delta", "partial_json": '{"a": '}
    for value in (
        {"type": "message_start", "message": {"id": "1", "usage": {"input_tokens": -1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "citations": "none"}},
        {"type": "content_block_delta", "index": 0, "delta": citation},
        {"type": "content_block_delta", "index": 7, "delta": broken},
        {"type": "content_block_delta", "index": {}, "delta": citation},
        {"type": "message_stop"},
    ):
        reader.event("message", json.dumps(value).encode())
    reader.close()
    assert reader.response is not None
    assert [block.get("partial_json") for block in reader.response["content"]] == [None, '{"a": ']
    assert len(reader.response["content"][0]["citations"]) == 2
    assert reader.usage == Usage()
