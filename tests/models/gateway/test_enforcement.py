"""What a run fixes holds, whatever an agent asks for: model, sampling, provider-side tools, budgets, tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anyio
import pytest
from tests.models.gateway.conftest import Desk, make_config, open_desk

from proctor.common import ConfigError, RefusedError
from proctor.models.gateway import Budgets, Gateway, ModelConfig, Sampling
from proctor.models.gateway.body import BadBody
from proctor.models.gateway.body import _unique as unique
from proctor.models.scripted import Answer, ChatRequest, say

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hi"}]
FIXED = Sampling(temperature=0.0, top_p=0.5, max_tokens=100)


def answer(chat: ChatRequest) -> Answer:
    return say("ok")


@pytest.mark.parametrize(
    ("path", "asked", "bound"),
    [
        ("chat/completions", {"messages": HELLO, "max_tokens": 5000}, "max_tokens"),
        ("chat/completions", {"messages": HELLO, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ("chat/completions", {"messages": HELLO}, "max_tokens"),
        ("chat/completions", {"messages": HELLO, "max_completion_tokens": 9, "max_tokens": 5000}, "max_tokens"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 9, "n_predict": 5000}, "n_predict"),
        ("responses", {"input": "hi", "max_output_tokens": 5000}, "max_output_tokens"),
        ("messages", {"messages": HELLO, "max_tokens": 5000}, "max_tokens"),
    ],
)
async def test_sampling_is_enforced_in_every_protocol(path: str, asked: dict[str, Any], bound: str) -> None:
    async with open_desk(answer, sampling=FIXED, extra_body={"reasoning": {"effort": "low"}}) as desk:
        loose = {**asked, "temperature": 1.9, "top_p": 1, "reasoning": {"effort": "high"}, "x_own": {"a": [1.50]}}
        assert (await desk.post(path, {"model": "m", **loose})).status_code == 200
        sent = desk.upstream.requests[0].body
        assert (sent["temperature"], sent["top_p"], sent[bound]) == (0.0, 0.5, 100)
        assert sent["reasoning"] == {"effort": "low"}
        assert sent["x_own"] == {"a": [1.5]}
        (call,) = desk.calls
        assert call.request["temperature"] == 1.9, "the record holds what was asked"
        assert "temperature: 1.9 → 0.0" in call.changes


async def test_a_smaller_answer_than_allowed_stays_smaller_and_a_seed_is_chats_alone() -> None:
    async with open_desk(answer, sampling=Sampling(seed=7, max_tokens=100)) as desk:
        await desk.post("chat/completions", {"model": "m", "messages": HELLO, "max_tokens": 3, "seed": 1})
        await desk.post("messages", {"model": "m", "messages": HELLO, "max_tokens": 3})
        chat, messages = (request.body for request in desk.upstream.requests)
        assert (chat["max_tokens"], chat["seed"]) == (3, 7)
        assert (messages["max_tokens"], "seed" in messages) == (3, False)
        assert any("seed: not enforced" in change for change in desk.calls[1].changes)


TOOLS: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "chat": (
        "chat/completions",
        [{"type": "function", "function": {"name": "bash"}}, {"type": "web_search"}, {"type": "mystery"}],
        ["function"],
    ),
    "responses": (
        "responses",
        [
            {"type": "function", "name": "bash"}, {"type": "web_search_preview"}, {"type": "code_interpreter"},
            {"type": "file_search", "vector_store_ids": ["v"]}, {"type": "mcp", "server_url": "http://x"},
            {"type": "shell", "environment": {"type": "container_auto"}}, {"type": "local_shell"},
            {"type": "image_generation"}, {"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]},
        ],
        ["function", "local_shell"],
    ),
    "messages": (
        "messages",
        [
            {"name": "bash", "input_schema": {}}, {"type": "bash_20250124", "name": "b"},
            {"type": "web_search_20250305", "name": "web_search"}, {"type": "web_fetch_20250910", "name": "f"},
            {"type": "code_execution_20250825", "name": "c"}, {"type": "text_editor_20250728", "name": "e"},
        ],
        [None, "bash_20250124", "text_editor_20250728"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("protocol", TOOLS)
async def test_provider_side_tools_are_stripped_and_recorded(protocol: str) -> None:
    path, tools, kept = TOOLS[protocol]
    conversation = {"input": "hi"} if protocol == "responses" else {"messages": HELLO, "max_tokens": 9}
    async with open_desk(answer) as desk:
        choice = {"type": "web_search"} if protocol != "messages" else {"type": "tool", "name": "web_search"}
        await desk.post(path, {"model": "m", **conversation, "tools": tools, "tool_choice": choice})
        sent = desk.upstream.requests[0].body
        assert [tool.get("type") for tool in sent["tools"]] == kept
        assert sent["tool_choice"] == ({"type": "auto"} if protocol == "messages" else "auto")
        (call,) = desk.calls
        assert len(call.removed) == len(tools) - len(kept)
        assert all(f"provider tool removed: {name}" in call.flags for name in call.removed)
        assert call.request["tools"] == tools, "the attempt is on record"
    async with open_desk(answer, provider_tools=("web_search*",)) as desk:
        await desk.post(path, {"model": "m", **conversation, "tools": tools})
        types = [str(tool.get("type")) for tool in desk.upstream.requests[0].body["tools"]]
        assert sum(kind.startswith("web_search") for kind in types) == 1


@pytest.mark.parametrize(
    ("path", "body", "gone"),
    [
        ("chat/completions", {"messages": HELLO, "web_search_options": {}}, "web_search_options"),
        (
            "chat/completions",
            {"messages": HELLO, "tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tools",
        ),
        ("chat/completions", {"messages": HELLO, "tools": {"0": {"type": "web_search"}}}, "tools"),
        ("chat/completions", {"messages": HELLO, "models": ["dearer"]}, "models"),
        ("chat/completions", {"messages": HELLO, "fallbacks": [{"model": "dearer"}]}, "fallbacks"),
        ("responses", {"input": "hi", "conversation": "c1"}, "conversation"),
        ("responses", {"input": "hi", "background": True}, "background"),
        ("messages", {"messages": HELLO, "mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ("messages", {"messages": HELLO, "container": "c1"}, "container"),
    ],
)
async def test_what_switches_something_on_at_the_provider_goes(path: str, body: dict[str, Any], gone: str) -> None:
    async with open_desk(answer) as desk:
        await desk.post(path, {"model": "m", **body})
        sent = desk.upstream.requests[0].body
        assert gone not in sent
        assert "tool_choice" not in sent
        assert desk.calls[0].removed


REMOTE = {
    "chat/completions": [
        {"type": "image_url", "image_url": {"url": "https://evil.example/?leak=1"}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "video_url", "video_url": {"url": "https://evil.example/?leak=1"}},
        {"type": "audio_url", "audio_url": {"url": "https://evil.example/?leak=1"}},
        {"type": "file", "file": {"file_data": " https://evil.example/"}},
    ],
    "responses": [
        {"type": "input_image", "image_url": "https://evil.example/?leak=1"},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "input_file", "file_url": "https://evil.example/"},
        {"type": "computer_call_output", "output": {"type": "x", "image_url": "https://evil.example/"}},
        {"id": "file-1"},
    ],
    "messages": [
        {"type": "image", "source": {"type": "url", "url": "https://evil.example/?leak=1"}},
        {"type": "document", "source": {"type": "file", "file_id": "file-1"}},
        {"type": "tool_result", "tool_use_id": "t",
         "content": [{"type": "image", "source": {"type": "url", "url": "https://evil.example/"}}]},
        {"type": "document", "source": {"type": "content", "content": [
            {"type": "image", "source": {"type": "url", "url": "https://evil.example/"}}]}},
    ],
}  # fmt: skip
INLINE = {
    "chat/completions": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}


@pytest.mark.parametrize("path", REMOTE)
async def test_nothing_makes_the_provider_open_an_address_or_a_stored_file(path: str) -> None:
    name = "input" if path == "responses" else "messages"
    async with open_desk(answer) as desk:
        parts = [*REMOTE[path], INLINE[path]]
        await desk.post(path, {"model": "m", name: [{"role": "user", "content": parts}], "max_tokens": 9})
        sent = desk.upstream.requests[0].body[name][0]["content"]
        assert "evil.example" not in json.dumps(sent)
        assert "file-1" not in json.dumps(sent)
        assert sent[-1] == INLINE[path], "what is inside the request stays"
        assert len(desk.calls[0].removed) == len(REMOTE[path])


async def test_another_trials_answer_cannot_be_gone_on_from() -> None:
    async with open_desk(answer) as desk:
        first = (await desk.post("responses", {"model": "m", "input": "hi"})).json()["id"]
        body = {"model": "m", "input": "more", "previous_response_id": first}
        assert (await desk.post("responses", body)).status_code == 200
        other = desk.gateway.open_trial("t2", models=["m"], record=desk.calls.append)
        refused = await desk.http.post(
            f"{desk.url}/responses", json=body, headers={"authorization": f"Bearer {other.token}"}
        )
        assert refused.status_code == 400
        assert desk.calls[-1].flags == ("provider state refused: previous_response_id",)
        assert len(desk.upstream.requests) == 2


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","model":"other","messages":[]}',
        b'{"model":"m","messages":[],"tools":[{"type":"function","type":"web_search"}]}',
        b'{"model":"m","messages":[{"role":"user","content":NaN}]}',
        b'{"model":"m","messages":[]} {}',
        b'["model"]',
        b"",
        b"\xff",
        b'{"model":"m","x":1e999}',
        b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","messages":[],}',
        b'{"model":"m","x":' + b"1" * 5000 + b"}",
        b'{"model":"m","x":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"model":"m","x":[' + b"0," * 300_000 + b"0]}",
        b'{"model":"m","x":"' + b'\\"' * 200_000 + b',[{"' + b",[{" * 100_000,
        b'{"model":"m","Temperature":2,"messages":[]}',
        b'{"model":"m","M\\u006fdel":"other","messages":[]}',
        b'{"model":"m","\\u017ftream":true,"messages":[]}',
        b'{"model":"m","maxTokens":9999,"messages":[]}',
        b'{"model":"m","messages":[],"tools":[{"type":"function","Type":"web_search"}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","imageUrl":"http://x"}]}]}',
    ],
    ids=lambda raw: raw[:24].decode("latin-1"),
)
async def test_a_request_that_two_parsers_could_read_in_two_ways_goes_nowhere(raw: bytes) -> None:
    async with open_desk(answer) as desk:
        headers = {"authorization": f"Bearer {desk.access.token}"}
        reply = await desk.http.post(f"{desk.url}/chat/completions", content=raw, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "bad_request")
        assert desk.upstream.requests == []
        assert desk.calls[0].error


async def test_keys_that_the_agent_is_free_to_choose_are_left_alone() -> None:
    schema = {"type": "object", "properties": {"Type": {"type": "string"}, "Model": {"type": "string"}}}
    tools = [{"name": "t", "input_schema": schema}]
    call = {"type": "tool_use", "id": "c", "name": "t", "input": {"Type": "a", "Model": "b", "File": "c"}}
    messages = [*HELLO, {"role": "assistant", "content": [call]}]
    async with open_desk(answer) as desk:
        reply = await desk.post("messages", {"model": "m", "max_tokens": 9, "tools": tools, "messages": messages})
        assert reply.status_code == 200
        assert desk.upstream.requests[0].body["messages"] == messages
        assert desk.upstream.requests[0].body["tools"] == tools


async def test_what_the_file_fixes_is_fixed_in_every_spelling() -> None:
    async with open_desk(answer, extra_body={"reasoning_effort": "low"}) as desk:
        await desk.chat(ReasoningEffort="high")
        sent = desk.upstream.requests[0].body
        assert (sent["reasoning_effort"], "ReasoningEffort" in sent) == ("low", False)


async def test_what_was_taken_out_is_named_in_few_and_harmless_words() -> None:
    tools = [{"type": f"\x1b[2J\n{number}" + "x" * 10_000} for number in range(300)]
    async with open_desk(answer) as desk:
        await desk.chat(tools=tools)
        (call,) = desk.calls
        assert (len(call.removed), call.removed[-1]) == (101, "and 200 more")
        assert all(len(name) < 200 and name.isprintable() for name in call.removed)


def test_finding_a_key_that_occurs_twice_takes_no_longer_than_reading() -> None:
    """Ten million comparisons for each key, and the whole process stands still for hours."""

    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    pairs = [(Counted(number), 0) for number in range(2000)]
    with pytest.raises(BadBody, match="'1999' occurs twice"):
        unique([*pairs, (Counted(1999), 0)])
    assert Counted.compared < 20_000


async def test_requests_that_wait_take_a_bounded_share_of_memory() -> None:
    """A program opens hundreds of connections and keeps each just below its end."""
    async with open_desk(answer, config=lambda config: replace(config, max_request_bytes=100_000)) as desk:
        headers = {"authorization": f"Bearer {desk.access.token}"}
        leave, statuses = anyio.Event(), []
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        scope |= {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}

        async def one() -> None:
            pieces = [b'{"model":"m","x":"' + b"x" * 90_000, b'","messages":[{"role":"user","content":"hi"}]}', b""]

            async def receive() -> dict[str, Any]:
                if len(pieces) == 2:
                    await leave.wait()
                elif not pieces:
                    await anyio.sleep_forever()
                return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

            async def send(message: dict[str, Any]) -> None:
                if "status" in message:
                    statuses.append(message["status"])
                    if len(statuses) == 4:
                        leave.set()

            await desk.gateway.app(scope, receive, send)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(12):
                    tasks.start_soon(one)
        assert sorted(statuses) == [200] * 8 + [429] * 4
        assert desk.access.held_bytes == 0


@pytest.mark.parametrize(
    ("headers", "path", "body", "status", "code"),
    [
        ({"authorization": "Bearer sk-proctor-wrong"}, "chat/completions", {}, 401, "invalid_token"),
        ({"authorization": ""}, "models", None, 401, "invalid_token"),
        ({}, "chat/completions", {"model": "gpt-x", "messages": []}, 404, "model_not_found"),
        ({}, "embeddings", {}, 404, "not_served"),
        ({}, "files", {}, 404, "not_served"),
        ({"content-encoding": "gzip"}, "chat/completions", {"model": "m"}, 415, "content_encoding"),
        ({"x-api-key": "no", "authorization": ""}, "messages", {}, 401, "invalid_token"),
    ],
)
async def test_what_is_not_allowed_is_refused_in_the_protocols_shape(
    headers: dict[str, str], path: str, body: Any, status: int, code: str
) -> None:
    async with open_desk(answer) as desk:
        reply = await desk.post(path, body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert ("type" in reply.json()) == (path == "messages")
        assert desk.upstream.requests == []


async def test_the_methods_the_size_and_the_health_page() -> None:
    async with open_desk(answer, config=lambda config: replace(config, max_request_bytes=1000)) as desk:
        headers = {"authorization": f"Bearer {desk.access.token}"}
        assert (await desk.http.get(f"{desk.url}/chat/completions", headers=headers)).status_code == 405
        assert (await desk.chat("x" * 2000)).status_code == 413
        health = await desk.http.get(desk.url.removesuffix("/v1") + "/healthz")
        assert health.json() == {"status": "ok"}, "a candidate learns nothing of upstreams"
        names = (await desk.http.get(f"{desk.url}/models", headers=headers)).json()
        assert [one["id"] for one in names["data"]] == ["m"]
        assert (await desk.http.get(f"{desk.url}/models/m", headers=headers)).json()["id"] == "m"


async def test_a_token_is_worth_nothing_after_its_trial_and_for_another_model() -> None:
    async with open_desk(answer) as desk:
        assert (await desk.chat()).status_code == 200
        desk.access.close()
        assert (await desk.chat()).status_code == 401
        assert desk.access.token not in repr(desk.gateway._by_digest)
        assert desk.access.token not in repr(desk.access)
    config = make_config("http://127.0.0.1:9/v1")
    async with Gateway(replace(config, models={**config.models, "n": ModelConfig("n", "up", "n-1")})) as gateway:
        access = gateway.open_trial("t", models=["n"], record=lambda call: None)
        assert gateway.candidates(access, "m") == []
        with pytest.raises(ConfigError, match="there is no model 'z'"):
            gateway.open_trial("t", models=["z"], record=lambda call: None)


# Budgets. Every scripted answer uses 10 + 5 tokens.


@pytest.mark.parametrize(
    ("budgets", "answered", "name"),
    [
        (Budgets(calls=3), 3, "trial calls"),
        (Budgets(tokens=44), 3, "trial tokens"),
        (Budgets(tokens=45), 4, "trial tokens"),
        (Budgets(cost_usd=44e-6), 3, "trial cost_usd"),
    ],
)
async def test_a_budget_is_met_exactly_and_named(budgets: Budgets, answered: int, name: str) -> None:
    prices = {"prompt": 1.0, "completion": 1.0}
    async with open_desk(answer, budgets=budgets, prices=prices) as desk:
        statuses = [(await desk.chat()).status_code for _ in range(6)]
        assert statuses == [200] * answered + [403] * (6 - answered)
        exceeded = await desk.access.wait_exceeded()
        assert f"{exceeded.scope} {exceeded.budget}" == name
        refused = await desk.post("messages", {"model": "m", "messages": HELLO, "max_tokens": 1})
        assert refused.json()["error"]["type"] == "permission_error"
        assert exceeded.line() in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"


async def test_parallel_calls_overshoot_a_budget_by_one_call_at_most() -> None:
    async def slow(chat: ChatRequest) -> Answer:
        await anyio.sleep(0.01)
        return say("ok", usage={"prompt_tokens": 60, "completion_tokens": 50})

    async with open_desk(slow, budgets=Budgets(tokens=1000)) as desk:
        replies: list[int] = []

        async def one(number: int) -> None:
            replies.append((await desk.chat(f"{number}" * 100, max_tokens=50)).status_code)

        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(one, number)
        assert desk.access.usage.tokens == 1100
        assert (replies.count(200), replies.count(403)) == (10, 30)


async def test_the_runs_budget_ends_every_trial_and_is_named() -> None:
    def limited(config: Any) -> Any:
        return replace(config, run_budgets=Budgets(calls=3))

    async with open_desk(answer, config=limited) as desk:
        other = desk.gateway.open_trial("t2", models=["m"], record=desk.calls.append)
        assert [(await desk.chat()).status_code for _ in range(3)] == [200, 200, 200]
        headers = {"authorization": f"Bearer {other.token}"}
        body = {"model": "m", "messages": HELLO}
        assert (await desk.http.post(f"{desk.url}/chat/completions", json=body, headers=headers)).status_code == 403
        assert other.exceeded is not None
        assert (other.exceeded.scope, other.exceeded.budget) == ("run", "calls")
        assert desk.access.exceeded is None, "a trial that was not refused has not ended"


async def test_a_budget_in_dollars_needs_a_price() -> None:
    async with Gateway(make_config("http://127.0.0.1:9/v1")) as gateway:
        with pytest.raises(RefusedError, match="price of m is unknown"):
            gateway.open_trial("t", models=["m"], record=lambda call: None, budgets=Budgets(cost_usd=1.0))


async def test_a_reader_that_leaves_pays_all_the_same() -> None:
    """An agent must not evade its budget by hanging up before the counts come."""
    usage = {"prompt_tokens": 40, "completion_tokens": 60}
    async with open_desk([say("word " * 60, usage=usage, chunk_delay_s=0.01)], budgets=Budgets(tokens=99)) as desk:
        headers = {"authorization": f"Bearer {desk.access.token}"}
        body = {"model": "m", "messages": HELLO, "stream": True}
        async with desk.http.stream("POST", f"{desk.url}/chat/completions", json=body, headers=headers) as reply:
            async for _ in reply.aiter_raw():
                break
        with anyio.fail_after(5):
            exceeded = await desk.access.wait_exceeded()
        assert (exceeded.budget, desk.access.usage.tokens) == ("tokens", 100)
        assert desk.calls[0].usage.completion_tokens == 60


async def test_calls_whose_counts_never_came_are_estimated_for_the_budget_and_unknown_in_the_record(
) -> None:  # fmt: skip
    async with open_desk([say("x" * 3000, usage=None)], budgets=Budgets(tokens=900)) as desk:
        assert (await desk.chat()).status_code == 200
        assert (await desk.chat()).status_code == 403
        assert desk.calls[0].usage.prompt_tokens is None
        assert desk.access.usage.uncounted_calls == 1
        assert desk.access.usage.prompt_tokens == 0


# Pins.


async def test_another_model_or_fingerprint_than_pinned_is_flagged() -> None:
    answers = [say("a", model="m-1", extra={"system_fingerprint": "fp1"}), say("b", model="m-2"),
               say("c", model="m-1", extra={"system_fingerprint": "fp2"})]  # fmt: skip

    def next_answer(chat: ChatRequest) -> Answer:
        return answers[int(chat.messages[0]["content"])]

    async def flags(desk: Desk) -> list[tuple[str, ...]]:
        for number in range(3):
            await desk.chat(str(number))
        return [call.flags for call in desk.calls]

    async with open_desk(next_answer) as desk:  # nothing pinned: the first answer of the run is the measure
        assert await flags(desk) == [(), ("model changed: m-1 → m-2",), ("fingerprint changed: fp1 → fp2",)]
    async with open_desk(next_answer, returns="m-2", fingerprint="fp2") as desk:
        assert await flags(desk) == [
            ("model changed: m-2 → m-1", "fingerprint changed: fp2 → fp1"),
            ("fingerprint unknown: fp2 was pinned and the answer names none",),
            ("model changed: m-2 → m-1",),
        ]


async def test_other_names_of_a_model_mean_the_pinned_one() -> None:
    async with open_desk(answer, aliases=("claude-*",)) as desk:
        body = {"model": "claude-haiku-9", "messages": HELLO, "max_tokens": 5}
        assert (await desk.post("messages", body)).status_code == 200
        assert desk.upstream.requests[0].body["model"] == "m-1"
        assert desk.calls[0].asked_model == "claude-haiku-9"
