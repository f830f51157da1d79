"""The client against a real HTTP server on loopback: answers, faults, retries, time-outs, redaction."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from typing import Any

import anyio
import pytest

from proctor.common import ConfigError
from proctor.models import ModelError, ModelFault, ModelSpec, OpenAIChatClient
from proctor.models.scripted import Answer, ScriptedServer, call, calls, fault, raw, say

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]
TOOL = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
BEGUN = 'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


async def ask(turn: Any, *, tools: Any = (), **spec: Any) -> Any:
    """One answer to one request; the waits between tries are skipped."""
    answer, _, _ = await ask_watched(turn, tools=tools, **spec)
    return answer


async def ask_watched(turn: Any, *, tools: Any = (), **spec: Any) -> tuple[Any, ScriptedServer, list[float]]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with ScriptedServer([turn]) as server:
        client = OpenAIChatClient(
            ModelSpec(name="small", base_url=server.base_url, **spec), rng=random.Random(7), sleep=sleep
        )
        try:
            return await client.complete(HELLO, tools), server, waits
        except ModelError as error:
            error.waits = waits  # type: ignore[attr-defined]
            error.server = server  # type: ignore[attr-defined]
            raise
        finally:
            await client.aclose()


@BOTH
async def test_a_text_answer(stream: bool) -> None:
    answer = await ask(say("Grüße, 世界 🌍", reasoning="hm", model="small-2026-01"), stream=stream)
    assert answer.text == "Grüße, 世界 🌍"
    assert answer.reasoning == "hm"
    assert answer.finish_reason == "stop"
    assert (answer.requested_model, answer.returned_model) == ("small", "small-2026-01")
    assert answer.attempts == 1
    assert (answer.first_token_s is not None) == stream


@BOTH
async def test_tool_calls_keep_their_raw_arguments(stream: bool) -> None:
    turn = calls(("bash", {"command": "echo 'ä' && ls -la /some/long/path"}), ("finish", '{"message": '), text="now")
    answer = await ask(turn, tools=TOOL, stream=stream)
    assert [sent.name for sent in answer.tool_calls] == ["bash", "finish"]
    assert json.loads(answer.tool_calls[0].arguments) == {"command": "echo 'ä' && ls -la /some/long/path"}
    assert answer.tool_calls[1].arguments == '{"message": '
    assert answer.tool_calls[0].call_id != answer.tool_calls[1].call_id
    assert answer.finish_reason == "tool_calls"
    assert answer.text == "now"


@BOTH
async def test_usage_and_cost(stream: bool) -> None:
    usage = {
        "prompt_tokens": 1000,
        "completion_tokens": 100,
        "prompt_tokens_details": {"cached_tokens": 400},
        "completion_tokens_details": {"reasoning_tokens": 30},
    }
    prices = {"prompt": 2.0, "cached": 0.5, "completion": 10.0}
    answer = await ask(say("x", usage=usage), stream=stream, prices=prices)
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (1000, 400)
    assert (answer.usage.completion_tokens, answer.usage.reasoning_tokens) == (100, 30)
    assert answer.usage.cost_usd == pytest.approx((600 * 2 + 400 * 0.5 + 100 * 10) / 1e6)


@BOTH
async def test_missing_usage_is_unknown(stream: bool) -> None:
    answer = await ask(say("x", usage=None), stream=stream, prices={"prompt": 1.0, "completion": 1.0})
    assert answer.usage.prompt_tokens is None
    assert answer.usage.cost_usd is None


async def test_an_unknown_price_is_an_unknown_cost() -> None:
    answer = await ask(say("x"))
    assert answer.usage.prompt_tokens == 10
    assert answer.usage.cost_usd is None


async def test_sampling_parameters_are_sent_and_open_ones_are_not() -> None:
    _, server, _ = await ask_watched(say("x"), temperature=0.2, seed=11, top_p=None, extra_body={"effort": "low"})
    body = server.requests[0].body
    assert (body["temperature"], body["seed"], body["effort"]) == (0.2, 11, "low")
    assert "top_p" not in body
    assert "max_tokens" not in body
    assert "tools" not in body


@BOTH
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
async def test_what_may_go_away_is_tried_again(stream: bool, status: int) -> None:
    answer, server, waits = await ask_watched([fault(status), fault(status), say("at last")], stream=stream)
    assert answer.text == "at last"
    assert answer.attempts == 3
    assert len(server.requests) == 3
    assert len(waits) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 301])
async def test_what_will_not_go_away_is_not_tried_again(status: int) -> None:
    with pytest.raises(ModelError) as caught:
        await ask(fault(status, "no such luck"))
    assert caught.value.fault is ModelFault.REFUSED
    assert caught.value.status == status
    assert caught.value.attempts == 1
    assert "no such luck" in caught.value.line()


async def test_tries_are_bounded() -> None:
    with pytest.raises(ModelError, match=r"status 503.*after 3 tries") as caught:
        await ask(fault(503), max_retries=2)
    assert caught.value.fault is ModelFault.OVERLOADED
    assert caught.value.attempts == 3


async def test_retry_after_is_honoured() -> None:
    _, _, waits = await ask_watched([fault(429, retry_after="7"), say("x")])
    assert 7.0 <= waits[0] <= 7.5


async def test_an_endless_retry_after_ends_at_once() -> None:
    with pytest.raises(ModelError, match="asks to wait 86400 s") as caught:
        await ask(fault(429, retry_after="86400"))
    assert caught.value.attempts == 1


@BOTH
async def test_a_connection_cut_in_the_answer_is_tried_again(stream: bool) -> None:
    long = "word " * 200
    answer = await ask([Answer(text=long, cut_after=3), say("whole")], stream=stream)
    assert answer.text == "whole"
    assert answer.attempts == 2


async def test_nobody_listening_is_unreachable() -> None:
    async with ScriptedServer([]) as server:
        address = server.base_url

    async def sleep(_: float) -> None:
        return None

    client = OpenAIChatClient(ModelSpec("m", address, max_retries=1), sleep=sleep)
    with pytest.raises(ModelError, match="cannot reach") as caught:
        await client.complete(HELLO)
    assert caught.value.fault is ModelFault.UNREACHABLE
    assert caught.value.attempts == 2
    await client.aclose()


async def test_no_connection_in_time() -> None:
    async def sleep(_: float) -> None:
        return None

    # A full queue of connections: further ones hang, as behind a firewall that drops them.
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        client = OpenAIChatClient(ModelSpec("m", address, connect_timeout_s=0.2, max_retries=1), sleep=sleep)
        with pytest.raises(ModelError, match=r"no connection to .* within 0\.2 s after 2 tries") as caught:
            await client.complete(HELLO)
        assert caught.value.fault is ModelFault.UNREACHABLE
        await client.aclose()


async def test_a_reply_in_a_broken_encoding() -> None:
    with pytest.raises(ModelError, match="cannot be decoded") as caught:
        await ask(Answer(body=b"this is not gzip", headers={"content-encoding": "gzip"}))
    assert caught.value.fault is ModelFault.BAD_REPLY


@BOTH
async def test_a_hung_endpoint_is_cut(stream: bool) -> None:
    with anyio.fail_after(3), pytest.raises(ModelError, match=r"no whole answer within 0\.2 s") as caught:
        await ask(say("late", delay_s=30), stream=stream, timeout_s=0.2, max_retries=0)
    assert caught.value.fault is ModelFault.TIMEOUT


async def test_no_first_token_in_time() -> None:
    with pytest.raises(ModelError, match=r"no first token within 0\.2 s"):
        await ask(say("late", delay_s=30), timeout_s=20, first_token_timeout_s=0.2, max_retries=0)


async def test_a_slow_answer_after_its_first_token_has_the_whole_time() -> None:
    answer = await ask(say("x" * 240, chunk_delay_s=0.05), first_token_timeout_s=0.3, timeout_s=20)
    assert answer.text == "x" * 240
    assert answer.latency_s > 0.3


async def test_a_dripping_endpoint_is_cut_by_the_total_time() -> None:
    with pytest.raises(ModelError, match="no whole answer"):
        await ask(say("x" * 2400, chunk_delay_s=0.05), timeout_s=0.4, max_retries=0)


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (raw(""), "the reply is empty"),
        (raw("<html>busy</html>", content_type="text/html"), "the reply is not JSON"),
        (raw('{"choices": ['), "the reply is not JSON"),
        (raw("[1, 2]"), "is a JSON list"),
        (raw("[" * 100_000), "the reply is not JSON"),
        (raw("{}"), "has no list of choices"),
        (raw('{"choices": []}'), "list of choices is empty"),
        (raw('{"choices": [7]}'), "choice is not an object"),
        (raw('{"choices": [{}]}'), "has no message"),
        (raw('{"choices": [{"message": {"content": 7}}]}'), "content is a JSON int"),
        (raw('{"choices": [{"message": {"tool_calls": {}}}]}'), "tool_calls is not a list"),
        (raw('{"choices": [{"message": {"tool_calls": [{"id": "a"}]}}]}'), "has no function"),
        (raw(b"\xff\xfe\x00"), "the reply is not JSON"),
        (raw("data: {oops\n\n", content_type="text/event-stream"), "the reply is not JSON"),
        (raw("data: {}\n\ndata: [DONE]\n\n", content_type="text/event-stream"), "had no choices"),
        (raw('data: {"choices": [{"delta": 5}]}\n\n', content_type="text/event-stream"), "delta is not an object"),
    ],
)
async def test_a_bad_reply_is_one_clear_error(turn: Answer, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        await ask(turn)
    assert words in caught.value.line()
    assert "\n" not in caught.value.line()
    assert len(caught.value.line()) < 400
    assert caught.value.fault is ModelFault.BAD_REPLY
    assert caught.value.attempts == 1
    assert len(caught.value.excerpt) <= 2000


@BOTH
async def test_a_reply_without_end_is_refused(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.models.client.MAX_REPLY_BYTES", 10_000)
    with pytest.raises(ModelError, match="longer than 10000 bytes") as caught:
        await ask(say("x" * 20_000), stream=stream)
    assert caught.value.fault is ModelFault.BAD_REPLY


async def test_a_bad_reply_keeps_the_start_of_what_came() -> None:
    with pytest.raises(ModelError) as caught:
        await ask(raw("<html>bad gateway page</html>"))
    assert caught.value.excerpt == "<html>bad gateway page</html>"


async def test_an_error_object_in_mid_stream() -> None:
    stream = (
        'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"error":{"message":"out of cheese","code":400}}\n\n'
    )
    with pytest.raises(ModelError, match="out of cheese") as caught:
        await ask(raw(stream, content_type="text/event-stream"))
    assert caught.value.fault is ModelFault.REFUSED


async def test_an_overload_in_mid_stream_is_tried_again() -> None:
    stream = BEGUN + 'data: {"error":{"message":"busy","type":"overloaded_error"}}\n\n'
    answer = await ask([raw(stream, content_type="text/event-stream"), say("ok")])
    assert (answer.text, answer.attempts) == ("ok", 2)


async def test_an_error_object_with_status_200() -> None:
    with pytest.raises(ModelError, match="no such model"):
        await ask(raw('{"error": "no such model"}'))


async def test_an_endpoint_that_ignores_stream() -> None:
    reply = {"model": "m", "choices": [{"message": {"content": "whole"}, "finish_reason": "stop"}]}
    answer = await ask(raw(json.dumps(reply)), stream=True)
    assert answer.text == "whole"


async def test_a_full_context_window_is_told_apart() -> None:
    with pytest.raises(ModelError) as caught:
        await ask(fault(400, "too many tokens", code="context_length_exceeded"))
    assert caught.value.fault is ModelFault.CONTEXT


@BOTH
async def test_the_key_is_sent_and_never_kept(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-very-secret-1234"
    monkeypatch.setenv("TEST_MODEL_KEY", key)
    turn = calls(("bash", f'{{"command": "echo {key}"}}'), text=f"your key is {key}")
    answer, server, _ = await ask_watched(turn, stream=stream, api_key_env="TEST_MODEL_KEY")
    assert server.requests[0].headers["authorization"] == f"Bearer {key}"
    assert key not in repr(answer)
    assert "[redacted]" in answer.text


async def test_the_key_is_not_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-very-secret-1234"
    monkeypatch.setenv("TEST_MODEL_KEY", key)
    with pytest.raises(ModelError) as caught:
        await ask(fault(401, f"bad key {key}"), api_key_env="TEST_MODEL_KEY")
    assert key not in caught.value.line() + caught.value.excerpt
    assert "check $TEST_MODEL_KEY" in caught.value.line()


async def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_MODEL_KEY", raising=False)
    with pytest.raises(ConfigError, match="TEST_MODEL_KEY is not set"):
        OpenAIChatClient(ModelSpec("m", "http://127.0.0.1:1/v1", api_key_env="TEST_MODEL_KEY"))


async def test_cancelling_a_call_leaves_the_client_usable() -> None:
    async with ScriptedServer([[say("late", delay_s=30), say("soon")]]) as server:
        client = OpenAIChatClient(ModelSpec("m", server.base_url))
        with anyio.move_on_after(0.2) as scope:
            await client.complete(HELLO)
        assert scope.cancelled_caught
        assert (await client.complete(HELLO)).text == "soon"
        await client.aclose()


async def test_a_connection_is_used_again_after_a_stream() -> None:
    async with ScriptedServer(lambda request: say(str(request.repeat))) as server:
        client = OpenAIChatClient(ModelSpec("m", server.base_url))
        for _ in range(3):
            await client.complete(HELLO)
        pool = client._http._transport._pool  # type: ignore[union-attr, attr-defined]
        assert len(pool.connections) == 1
        await client.aclose()


async def test_a_hundred_calls_at_once() -> None:
    async with ScriptedServer([call("bash", command="true")]) as server:
        client = OpenAIChatClient(ModelSpec("m", server.base_url))
        answers: list[Any] = []

        async def one() -> None:
            answers.append(await client.complete(HELLO))

        async with anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(one)
        assert {answer.tool_calls[0].name for answer in answers} == {"bash"}
        assert len(answers) == 100
        await client.aclose()
