"""The context window: what is dropped is the oldest, is said, and leaves a conversation that endpoints take."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proctor.agents.conversation import Conversation

OPENING = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Count the files."}]


def exchange(number: int, sizes: list[int]) -> list[dict[str, Any]]:
    ids = [f"call-{number}-{index}" for index in range(len(sizes))]
    calls = [{"id": one, "type": "function", "function": {"name": "bash", "arguments": "{}"}} for one in ids]
    message: dict[str, Any] = {"role": "assistant", "content": f"answer {number}"}
    if calls:
        message["tool_calls"] = calls
    results = [
        {"role": "tool", "tool_call_id": one, "content": "x" * size} for one, size in zip(ids, sizes, strict=True)
    ]
    return [message, *results]


def characters(conversation: Conversation) -> int:
    return sum(len(json.dumps(message)) for message in conversation.messages)


_SIZES = st.lists(st.lists(st.integers(0, 5000), max_size=3), min_size=1, max_size=12)


@given(sizes=_SIZES, budget=st.integers(100, 6000), counted=st.none() | st.integers(1, 20_000))
def test_any_conversation_is_kept_within_its_budget_and_stays_whole(
    sizes: list[list[int]], budget: int, counted: int | None
) -> None:
    conversation = Conversation([dict(message) for message in OPENING])
    said = len(OPENING)
    for number, one in enumerate(sizes):
        conversation.add(exchange(number, one))
        said += 1 + len(one)
        conversation.counted(counted)
        before = characters(conversation)
        dropped = conversation.fit(budget)
        messages = conversation.messages
        assert conversation.said == said
        assert messages[: len(OPENING)] == OPENING
        # The newest exchange is whole and untouched.
        assert messages[-(1 + len(one)) :] == exchange(number, one)
        # Every result has its call before it, and every call its result.
        asked = [call["id"] for message in messages for call in message.get("tool_calls", ())]
        assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == asked
        if dropped is not None:
            assert dropped.results or dropped.exchanges
            assert characters(conversation) < before + 80  # the line in place of what was dropped
            assert dropped.tokens_before > budget
            assert dropped.budget == budget
            assert str(dropped.characters) in dropped.line()
            assert conversation.fit(budget) is None or conversation.tokens() > budget
        elif conversation.tokens() > budget:
            # Nothing is left but the opening and the newest exchange, and results that are short already.
            assert sum(message["role"] == "assistant" for message in messages) == 1
        if sum(message["role"] == "assistant" for message in messages) < number + 1:
            gone = number + 1 - sum(message["role"] == "assistant" for message in messages)
            assert messages[len(OPENING)]["content"].startswith(f"[{gone} earlier exchanges")


def test_the_oldest_results_go_first_and_exchanges_only_after_them() -> None:
    conversation = Conversation(OPENING)
    for number in range(4):
        conversation.add(exchange(number, [4000]))
    dropped = conversation.fit(3000)
    assert dropped is not None
    assert (dropped.results, dropped.exchanges) == (("call-0-0", "call-1-0"), 0)
    contents = [message["content"] for message in conversation.messages if message["role"] == "tool"]
    assert contents[0] == "[result dropped to save context: 4000 characters]"
    assert contents[2:] == ["x" * 4000] * 2
    again = conversation.fit(200)
    assert again is not None
    assert again.exchanges == 3


def test_estimates_follow_what_the_endpoint_counts() -> None:
    conversation = Conversation(OPENING)
    conversation.add(exchange(0, [1000]))
    conversation.counted(1000)
    assert conversation.tokens() == 1000
    conversation.add(exchange(1, [1000]))
    assert 1900 < conversation.tokens() < 2100


def test_halving_ends_when_nothing_is_left_to_drop() -> None:
    conversation = Conversation(OPENING)
    for number in range(8):
        conversation.add(exchange(number, [500]))
    rounds = 0
    while conversation.halve() is not None:
        rounds += 1
    assert 1 <= rounds <= 10
    assert sum(message["role"] == "assistant" for message in conversation.messages) == 1
