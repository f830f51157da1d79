"""Upstreams that fail: what is tried again, what never is, what a reader sees, and that every call is on record."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from tests.models.gateway.conftest import make_config, open_desk, with_upstream

from proctor.common import InfraError
from proctor.models import ModelError, ModelFault, ModelSpec, OpenAIChatClient
from proctor.models.gateway import Gateway, GatewayTransport, ModelConfig, UpstreamConfig
from proctor.models.gateway.config import Circuit, Health, Limits, Retries, Timeouts
from proctor.models.scripted import Answer, ChatRequest, ScriptedServer, call, fault, raw, say

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

FAST = Retries(base_s=0.001, cap_s=0.002)
PATHS = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
async def test_what_may_go_away_is_tried_again(status: int) -> None:
    async with open_desk([[fault(status), fault(status), say("at last")]]) as desk:
        reply = await desk.chat()
        assert reply.status_code == 200
        assert reply.headers["x-proctor-attempts"] == "3"
        (record,) = desk.calls
        assert (record.attempts, [one.status for one in record.tries]) == (3, [status, status])
        assert len(desk.waits) == 2
        assert desk.access.usage.calls == 1


@pytest.mark.parametrize("path", PATHS)
async def test_the_last_error_reaches_the_client_unchanged_and_tells_it_not_to_go_on(path: str) -> None:
    body = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}, "request_id": "r1"}
    script = lambda chat: raw(json.dumps(body), status=529)  # noqa: E731
    async with open_desk(script, config=with_upstream(retries=replace(FAST, max_retries=2))) as desk:
        reply = await desk.post(path, {"model": "m", **PATHS[path]})
        assert (reply.status_code, reply.json()) == (529, body)
        assert reply.headers["x-should-retry"] == "false"
        assert (desk.calls[0].attempts, desk.calls[0].fault) == (3, ModelFault.OVERLOADED)
        assert desk.access.usage.tokens == 0


@pytest.mark.parametrize(("asked", "tries"), [("7", 2), ("100000", 1)])
async def test_retry_after_is_honoured_up_to_a_point(asked: str, tries: int) -> None:
    async with open_desk([[fault(429, retry_after=asked), say("ok")]]) as desk:
        reply = await desk.chat()
        assert (reply.status_code, len(desk.upstream.requests)) == ((200, 2) if tries == 2 else (429, 1))
        assert all(7.0 <= wait < 8.0 for wait in desk.waits)
        if tries == 1:
            assert "asks to wait 100000 s" in str(desk.calls[0].error)


async def test_nothing_is_tried_again_once_a_byte_was_passed_on() -> None:
    async with open_desk([[say("word " * 40, cut_after=4), say("never")]]) as desk:
        received = b""

        async def read() -> None:
            nonlocal received
            body = {"model": "m", **PATHS["chat/completions"], "stream": True}
            headers = {"authorization": f"Bearer {desk.access.token}"}
            async with desk.http.stream("POST", f"{desk.url}/chat/completions", json=body, headers=headers) as reply:
                async for chunk in reply.aiter_raw():
                    received += chunk

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        assert received.count(b"data: ") == 4
        assert len(desk.upstream.requests) == 1
        (record,) = desk.calls
        assert (record.fault, record.attempts, record.stream) == (ModelFault.CUT, 1, received)
        assert record.usage.prompt_tokens is None, "what was used is unknown, not zero"


async def test_a_whole_answer_that_broke_off_is_tried_again() -> None:
    async with open_desk([[say("word " * 40, cut_after=1), say("whole")]]) as desk:
        assert (await desk.chat()).json()["choices"][0]["message"]["content"] == "whole"
        assert desk.calls[0].attempts == 2


async def test_a_stream_that_begins_with_an_error_is_tried_again() -> None:
    busy = raw('event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n',
               content_type="text/event-stream")  # fmt: skip
    async with open_desk([[busy, say("ok")]]) as desk:
        reply = await desk.post("messages", {"model": "m", **PATHS["messages"], "stream": True})
        assert b"message_stop" in reply.content
        assert desk.calls[0].attempts == 2


@pytest.mark.parametrize("path", PATHS)
async def test_an_upstream_that_is_not_there(path: str, dead_url: str) -> None:
    async with open_desk([], config=with_upstream(base_url=dead_url, retries=replace(FAST, max_retries=1))) as desk:
        reply = await desk.post(path, {"model": "m", **PATHS[path]})
        assert reply.status_code == 502
        assert "cannot be reached" in reply.json()["error"]["message"]
        assert dead_url not in reply.text, "a candidate has no business with the address"
        (record,) = desk.calls
        assert (record.fault, record.attempts) == (ModelFault.UNREACHABLE, 2)
        assert dead_url in str(record.error)


@pytest.mark.parametrize(
    ("timeouts", "answer", "words"),
    [
        (Timeouts(first_byte_s=0.1), say("x", delay_s=5), "no first byte within 0.1 s"),
        (Timeouts(total_s=0.2), say("word " * 100, chunk_delay_s=0.05), "no whole answer within 0.2 s"),
        (Timeouts(idle_s=0.1), say("word " * 100, chunk_delay_s=1), "nothing came for 0.1 s"),
    ],
    ids=["first byte", "total", "idle"],
)
async def test_every_timeout_ends_a_try(timeouts: Timeouts, answer: Answer, words: str) -> None:
    change = with_upstream(timeouts=timeouts, retries=replace(FAST, max_retries=0))
    async with open_desk([answer], config=change) as desk:
        with anyio.fail_after(4):
            try:
                reply = await desk.chat(stream=True)
                assert reply.status_code == 504
            except httpx.RemoteProtocolError:
                assert desk.calls[0].stream
        assert (desk.calls[0].fault, words in str(desk.calls[0].error)) == (ModelFault.TIMEOUT, True)


async def test_an_open_circuit_leaves_an_upstream_alone_and_closes_again() -> None:
    healthy = False

    def answer(chat: ChatRequest) -> Answer:
        return say("ok") if healthy else fault(503)

    change = with_upstream(retries=replace(FAST, max_retries=0), circuit=Circuit(failures=2, open_s=0.3))
    async with open_desk(answer, config=change) as desk:
        assert [(await desk.chat()).status_code for _ in range(4)] == [503, 503, 502, 502]
        assert len(desk.upstream.requests) == 2, "the last two were not even tried"
        assert "left alone" in str(desk.calls[3].error)
        assert desk.gateway.health() == {"status": "degraded"}
        healthy = True
        await anyio.sleep(0.35)
        assert [(await desk.chat()).status_code for _ in range(2)] == [200, 200]
        assert desk.gateway.health() == {"status": "ok"}


async def test_a_probe_opens_the_circuit_before_a_trial_has_to(dead_url: str) -> None:
    health = Health(interval_s=0.02)
    change = with_upstream(base_url=dead_url, health=health, circuit=Circuit(failures=2, open_s=60))
    async with open_desk([], config=change) as desk:
        with anyio.fail_after(5):
            while desk.gateway.health()["status"] == "ok":  # noqa: ASYNC110 - the probe tells nobody
                await anyio.sleep(0.01)
        details = desk.gateway.health(details=True)["upstreams"]["up"]
        assert (details["circuit"], details["tries"]) == ("open", 0)
        assert "cannot reach" in details["probe"]


async def test_a_fallback_is_taken_and_never_silent(dead_url: str) -> None:
    def change(config: Any) -> Any:
        dead = UpstreamConfig("dead", dead_url, retries=replace(FAST, max_retries=1))
        config = replace(config, upstreams={**config.upstreams, "dead": dead})
        first = ModelConfig("m", "dead", "best", fallback=("second",))
        return replace(config, models={"m": first, "second": ModelConfig("second", "up", "second-1")})

    async with open_desk([say("ok")], config=change) as desk:
        assert (await desk.chat()).status_code == 200
        (record,) = desk.calls
        assert (record.asked_model, record.model, record.pinned_model) == ("m", "second", "second-1")
        assert record.flags[0].startswith("fallback: m → second: cannot reach")
        assert [one.upstream for one in record.tries] == ["dead", "dead"]


async def test_a_refusal_takes_no_fallback() -> None:
    def change(config: Any) -> Any:
        models = {"m": replace(config.models["m"], fallback=("n",)), "n": ModelConfig("n", "up", "n-1")}
        return replace(config, models=models)

    async with open_desk(lambda chat: fault(400), config=change) as desk:
        assert (await desk.chat()).status_code == 400
        assert len(desk.upstream.requests) == 1


@asynccontextmanager
async def counting() -> AsyncIterator[tuple[list[int], Any]]:
    """A script that notes how many requests it was answering at a time."""
    now, most = 0, [0]

    async def answer(chat: ChatRequest) -> Answer:
        nonlocal now
        now += 1
        most[0] = max(most[0], now)
        await anyio.sleep(0.01)
        now -= 1
        return say("ok")

    yield most, answer


@pytest.mark.parametrize("where", ["upstream", "model", "trial"])
async def test_no_more_calls_at_a_time_than_allowed(where: str) -> None:
    def change(config: Any) -> Any:
        limits = Limits(max_concurrent=3)
        if where == "upstream":
            return with_upstream(limits=limits)(config)
        if where == "model":
            return replace(config, models={"m": replace(config.models["m"], limits=limits)})
        return replace(config, max_parallel=3)

    async with (
        counting() as (most, answer),
        open_desk(answer, config=change) as desk,
        anyio.create_task_group() as group,
    ):
        for number in range(20):
            group.start_soon(desk.chat, str(number))
    assert most == [3]
    assert len(desk.calls) == 20


async def test_no_more_calls_a_minute_than_allowed() -> None:
    async with open_desk(lambda chat: say("ok"), config=with_upstream(limits=Limits(requests_per_minute=1200))) as desk:
        start = anyio.current_time()
        async with anyio.create_task_group() as group:
            for number in range(130):
                group.start_soon(desk.chat, str(number))
        # A burst of six seconds' worth (120) goes at once; the other ten are 50 ms apart.
        assert anyio.current_time() - start >= 0.45
        assert any(record.queued_s > 0 for record in desk.calls)


async def test_an_answer_whose_record_cannot_be_written_never_ends() -> None:
    def full(record: Any) -> None:
        raise InfraError("the disk is full")

    async with open_desk([say("word " * 20)]) as desk:
        desk.access.record = full
        for stream in (True, False):
            with pytest.raises((httpx.RemoteProtocolError, httpx.HTTPStatusError)):
                (await desk.chat(stream=stream)).raise_for_status()
        assert isinstance(desk.access.failure, InfraError)
        assert (await desk.chat()).status_code == 401, "nothing more is answered"


async def test_a_trial_that_ends_has_its_calls_in_flight_on_record() -> None:
    async with open_desk([say("word " * 100, chunk_delay_s=0.05)]) as desk, anyio.create_task_group() as group:

        async def read() -> None:
            with pytest.raises(httpx.HTTPError):
                await desk.chat(stream=True)

        group.start_soon(read)
        while not desk.upstream.requests:  # noqa: ASYNC110 - the upstream is another program
            await anyio.sleep(0.01)
        desk.access.close()
        (record,) = desk.calls
        assert record.error == "the trial ended before the answer did"


# The client of our own harnesses, behind the gateway.


@asynccontextmanager
async def own_client(script: Any, **spec: Any) -> AsyncIterator[tuple[OpenAIChatClient, list[Any]]]:
    calls: list[Any] = []
    async with ScriptedServer(script) as server:
        config = with_upstream(retries=FAST)(make_config(server.base_url, id="m"))
        async with Gateway(config) as gateway:
            access = gateway.open_trial("t", models=["m"], record=calls.append)
            transport = GatewayTransport(gateway, access)
            client = OpenAIChatClient(ModelSpec("m", server.base_url, **spec), transport=transport)
            yield client, calls
            await client.aclose()


HI = [{"role": "user", "content": "hi"}]


async def test_our_own_client_gets_the_answer_the_tries_and_the_time_of_the_last_one() -> None:
    async with own_client([[fault(503), call("bash", command="ls")]]) as (client, calls):
        answer = await client.complete(HI, [{"type": "function", "function": {"name": "bash"}}])
        assert (answer.tool_calls[0].name, answer.attempts) == ("bash", 2)
        assert answer.usage.prompt_tokens == 10
        assert (len(calls), calls[0].attempts) == (1, 2)
        assert answer.latency_s <= calls[0].latency_s + 0.1


async def test_our_own_client_begins_anew_when_an_answer_broke_off() -> None:
    async with own_client([[say("word " * 40, cut_after=4), say("whole")]]) as (client, calls):
        answer = await client.complete(HI)
        assert (answer.text, answer.attempts) == ("whole", 2)
        assert [record.fault for record in calls] == [ModelFault.CUT, None]


@pytest.mark.parametrize(
    ("turn", "kind", "words", "attempts"),
    [
        (fault(400, "maximum context length exceeded"), ModelFault.CONTEXT, "maximum context length", 1),
        (fault(403, "no"), ModelFault.REFUSED, "status 403", 1),
        ([fault(503)] * 9, ModelFault.OVERLOADED, "status 503", 6),
        (raw("<html>"), ModelFault.BAD_REPLY, "not JSON", 1),
    ],
)
async def test_our_own_client_tells_faults_apart(turn: Any, kind: ModelFault, words: str, attempts: int) -> None:
    async with own_client([turn]) as (client, _):
        with pytest.raises(ModelError, match=words) as caught:
            await client.complete(HI)
        assert (caught.value.fault, caught.value.attempts) == (kind, attempts)


async def test_retries_end_before_the_callers_time_does() -> None:
    async with own_client(lambda chat: fault(503, retry_after="1")) as (client, calls):
        with anyio.fail_after(3), pytest.raises(ModelError, match="status 503"):
            await client.complete(HI)
        assert "no time is left" in calls[0].error
