"""The official clients through the gateway: out comes what the upstream sent, and what it counted is on record."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from tests.models.gateway.conftest import KEY, Desk, open_desk

from proctor.models.scripted import Answer, ChatRequest, calls, fault, raw, say

pytestmark = pytest.mark.anyio

USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 30,
    "prompt_tokens_details": {"cached_tokens": 100},
    "completion_tokens_details": {"reasoning_tokens": 12},
}
PRICES = {"prompt": 2.0, "cached": 0.5, "completion": 10.0}
COST = (20 * 2 + 100 * 0.5 + 30 * 10) / 1e6
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
TOOL_TURN = Answer("let me look", (("bash", {"command": "ls 'ä'"}), ("finish", {})), reasoning="hm", usage=USAGE,
                   extra={"x_unknown": {"kept": [1, 2.50, None]}})  # fmt: skip


def openai_client(desk: Desk) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=desk.url, api_key=desk.access.token, max_retries=0)


def anthropic_client(desk: Desk) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=desk.url.removesuffix("/v1"), api_key=desk.access.token, max_retries=0)


@BOTH
async def test_chat_completions(stream: bool) -> None:
    async with open_desk([TOOL_TURN], prices=PRICES) as desk, openai_client(desk) as client:
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        if stream:
            text, names, chunks = "", [], []
            async for chunk in await client.chat.completions.create(**ask, stream=True):
                chunks.append(chunk)
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    names += [c.function.name for c in choice.delta.tool_calls or () if c.function and c.function.name]
            assert all(chunk.usage is None for chunk in chunks), "we asked for usage, the client did not"
            assert chunks[0].model_extra is not None
            assert chunks[0].model_extra["x_unknown"] == {"kept": [1, 2.5, None]}
        else:
            answer = await client.chat.completions.create(**ask)
            message = answer.choices[0].message
            text, names = message.content, [c.function.name for c in message.tool_calls or ()]  # type: ignore[union-attr]
            assert message.model_extra == {"reasoning_content": "hm"}
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == 120
        assert (text, names) == ("let me look", ["bash", "finish"])
        check(desk, "chat", stream)


@BOTH
async def test_responses(stream: bool) -> None:
    async with open_desk([TOOL_TURN], prices=PRICES) as desk, openai_client(desk) as client:
        if stream:
            async with client.responses.stream(model="m", input="hi") as events:
                kinds = [event.type async for event in events]
                answer: Any = await events.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
        else:
            answer = await client.responses.create(model="m", input="hi")
        assert answer.output_text == "let me look"
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        assert answer.usage.input_tokens == 120
        check(desk, "responses", stream)


@BOTH
async def test_messages(stream: bool) -> None:
    async with open_desk([TOOL_TURN], prices=PRICES) as desk, anthropic_client(desk) as client:
        ask: Any = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
        if stream:
            async with client.messages.stream(**ask) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**ask)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert answer.content[2].input == {"command": "ls 'ä'"}  # type: ignore[union-attr]
        assert answer.usage.cache_read_input_tokens == 100
        count = await client.messages.count_tokens(model="m", messages=ask["messages"])
        assert count.input_tokens > 0
        assert desk.access.usage.calls == 1, "counting uses nothing"
        assert desk.upstream.requests[0].headers["anthropic-version"]
        del desk.calls[1:]
        check(desk, "messages", stream)


def check(desk: Desk, operation: str, stream: bool) -> None:
    """Upstream saw the key and the pinned model, never the token; the record has the counts and no secret."""
    (seen,) = desk.upstream.requests
    assert seen.body["model"] == "m-1"
    sent = " ".join(seen.headers.values())
    assert KEY in sent
    assert desk.access.token not in sent
    (call,) = desk.calls
    assert (call.operation, call.streamed, call.fault, call.error) == (operation, stream, None, None)
    usage = call.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (120, 100, 30)
    assert usage.reasoning_tokens == (None if operation == "messages" else 12)
    assert usage.cost_usd == pytest.approx(COST)
    assert (desk.access.usage.tokens, desk.access.usage.cost_usd) == (150, pytest.approx(COST))
    assert (call.asked_model, call.pinned_model, call.returned_model) == ("m", "m-1", "m-1-scripted")
    assert call.request["model"] == "m"
    assert (call.first_token_s is not None) == stream
    assert call.response is not None
    assert "let me look" in json.dumps(call.response)
    assert KEY not in repr(call)
    assert desk.access.token not in repr(call)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_every_byte_of_an_answer_is_the_upstreams(path: str) -> None:
    body = {"model": "m-1", "input": "hi", "messages": [{"role": "user", "content": "hi"}], "stream": True,
            "stream_options": {"include_usage": True}, "max_tokens": 5}  # fmt: skip
    async with open_desk([TOOL_TURN]) as desk:
        direct = await desk.http.post(f"{desk.upstream.base_url}/{path}", json=body)
        through = await desk.post(path, body)
        assert through.content == direct.content
        assert desk.calls[0].stream == direct.content
        assert desk.upstream.requests[0].body == desk.upstream.requests[1].body
        assert desk.calls[0].changes == ()


async def test_a_request_that_needs_no_change_goes_on_byte_for_byte() -> None:
    odd = b'{ "model":"m-1",\n"messages" : [{"role":"user","content":"\\u00e4\\ud800"}],"n":1.50, "x":[1e2,{"y":null}]}'
    received: list[bytes] = []

    def answer(chat: ChatRequest) -> Answer:
        return say("ok")

    async with open_desk(answer) as desk:
        starts = desk.gateway.upstreams["up"].start

        async def start(protocol: Any, path: str, headers: Any, body: bytes) -> Any:
            received.append(body)
            return await starts(protocol, path, headers, body)

        desk.gateway.upstreams["up"].start = start  # type: ignore[method-assign]
        headers = {"authorization": f"Bearer {desk.access.token}", "content-type": "application/json"}
        reply = await desk.http.post(f"{desk.url}/chat/completions", content=odd, headers=headers)
        assert reply.status_code == 200
        renamed = odd.replace(b'"m-1"', b'"m"')
        reply = await desk.http.post(f"{desk.url}/chat/completions", content=renamed, headers=headers)
        assert reply.status_code == 200
    assert received[0] == odd
    # One member is changed, and every other keeps its own spelling.
    assert received[1] == (
        b'{"model":"m-1","messages" : [{"role":"user","content":"\\u00e4\\ud800"}],"n":1.50,"x":[1e2,{"y":null}]}'
    )


@BOTH
async def test_errors_survive_with_status_and_body(stream: bool) -> None:
    body = {"error": {"message": "no such thing", "type": "weird", "param": "x", "code": "E42", "more": [1]}}
    async with open_desk([raw(json.dumps(body), status=422)]) as desk:
        reply = await desk.chat(stream=stream)
        assert (reply.status_code, reply.json()) == (422, body)
        (call,) = desk.calls
        assert (call.status, str(call.fault), call.attempts) == (422, "refused", 1)
        assert json.loads(call.raw or b"") == body
        assert desk.access.usage.tokens == 0


async def test_an_error_of_anthropic_reaches_its_client_as_what_it_is() -> None:
    async with open_desk([fault(400, "prompt is too long")]) as desk, anthropic_client(desk) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("calls_made", [calls(("bash", '{"broken": '), text="x")])
async def test_malformed_tool_arguments_survive(calls_made: Answer) -> None:
    async with open_desk([calls_made]) as desk:
        reply = await desk.chat()
        assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"broken": '
