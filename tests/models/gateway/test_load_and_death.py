"""Five hundred streams at once lose nothing; whoever dies in mid-stream, what was is on record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import httpx
import pytest
from tests.models.gateway.conftest import KEY, Desk, open_desk

from proctor.models.contract import ModelFault
from proctor.models.scripted import Answer, ChatRequest, say
from proctor.runs.calls import unpacked
from proctor.runs.formats import ModelCallLine, parse

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STREAMS = 500


async def test_five_hundred_streams_at_once_lose_nothing() -> None:
    """Every stream is held open until all of them are, so that they really are at once."""
    arrived, everyone = 0, anyio.Event()

    async def answer(chat: ChatRequest) -> Answer:
        nonlocal arrived
        arrived += 1
        if arrived == STREAMS:
            everyone.set()
        await everyone.wait()
        number = int(chat.messages[0]["content"])
        return say(f"{number}:" + f"word{number} " * 20, usage={"prompt_tokens": number, "completion_tokens": 7})

    def wide(config: Any) -> Any:
        from dataclasses import replace

        return replace(config, max_parallel=STREAMS)

    texts: dict[int, str] = {}
    async with open_desk(answer, config=wide) as desk, aiohttp.ClientSession() as session:

        async def one(number: int) -> None:
            body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": str(number)}]}
            headers = {"authorization": f"Bearer {desk.access.token}"}
            async with session.post(f"{desk.url}/chat/completions", json=body, headers=headers) as reply:
                texts[number] = text_of(await reply.read())

        session.connector._limit = 0  # type: ignore[union-attr]
        async with anyio.create_task_group() as group:
            for number in range(STREAMS):
                group.start_soon(one, number)
        assert texts == {number: f"{number}:" + f"word{number} " * 20 for number in range(STREAMS)}
        assert len(desk.calls) == STREAMS
        assert sorted(record.usage.prompt_tokens or 0 for record in desk.calls) == list(range(STREAMS))
        assert desk.access.usage.prompt_tokens == sum(range(STREAMS))
        assert all(record.error is None and record.attempts == 1 for record in desk.calls)


def text_of(stream: bytes) -> str:
    assert stream.endswith(b"data: [DONE]\n\n"), stream[-200:]
    chunks = [json.loads(event[6:]) for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


SLOW = {"*": [{"text": "word " * 200, "chunk_delay_s": 0.05}]}


def upstream(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A slow scripted model in a process of its own, and its base URL."""
    script = folder / "script.json"
    script.write_text(json.dumps(SLOW))
    process = subprocess.Popen(
        [sys.executable, "-m", "proctor.models.scripted", str(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_an_upstream_killed_in_mid_stream_is_a_cut_answer_on_record(tmp_path: Path, path: str) -> None:
    from dataclasses import replace

    process, base_url = await anyio.to_thread.run_sync(upstream, tmp_path)
    try:

        def elsewhere(config: Any) -> Any:
            return replace(config, upstreams={"up": replace(config.upstreams["up"], base_url=base_url)})

        async with open_desk([], config=elsewhere) as desk:
            received = await read_until_cut(desk, path, process)
            (record,) = desk.calls
            assert (record.fault, record.status, record.stream) == (ModelFault.CUT, 200, received)
            assert record.usage.completion_tokens is None
            assert desk.access.usage.uncounted_calls == 1
            assert desk.access.usage.estimated_tokens > 0
    finally:
        process.kill()
        process.wait()


async def read_until_cut(desk: Desk, path: str, process: subprocess.Popen[str]) -> bytes:
    """Read a stream, kill the upstream after a few events, and see it break off."""
    received = b""
    body = {"model": "m", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {desk.access.token}"}
    with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - what is read before the end is looked at
        async with desk.http.stream("POST", f"{desk.url}/{path}", json=body, headers=headers) as reply:
            async for chunk in reply.aiter_raw():
                received += chunk
                if received.count(b"data: ") >= 5:
                    process.kill()
    return received


class Served:
    """`proctor serve gateway` in a process of its own."""

    def __init__(self, folder: Path, base_url: str) -> None:
        self.record = folder / "calls.jsonl"
        (folder / "key").write_text(KEY)
        (folder / "gateway.toml").write_text(
            f'version = 1\n[upstreams.up]\nbase_url = "{base_url}"\nprotocols = ["chat", "messages"]\n'
            f'api_key_file = "key"\n[models.m]\nupstream = "up"\nid = "m-1"\n'
        )
        command = [sys.executable, "-m", "proctor", "serve", "gateway", str(folder / "gateway.toml"), "--port", "0"]
        self.command = command
        self.process = subprocess.Popen(
            [*command, "--record", str(self.record), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.url, self.token = told["base_url"], told["token"]

    def lines(self) -> list[ModelCallLine]:
        return [parse(ModelCallLine, line, name="calls") for line in self.record.read_bytes().splitlines()]

    def end(self, how: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(how)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


async def begin_a_stream(served: Served) -> tuple[httpx.AsyncClient, Any, bytes]:
    client = httpx.AsyncClient(timeout=10, trust_env=False)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    request = client.build_request(
        "POST", f"{served.url}/chat/completions", json=body, headers={"authorization": f"Bearer {served.token}"}
    )
    reply = await client.send(request, stream=True)
    chunks = reply.aiter_raw()
    received = await anext(chunks) + await anext(chunks)
    return client, chunks, received


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_a_gateway_killed_in_mid_stream_leaves_a_whole_record(tmp_path: Path, how: signal.Signals) -> None:
    process, base_url = await anyio.to_thread.run_sync(upstream, tmp_path)
    try:
        served = await anyio.to_thread.run_sync(Served, tmp_path, base_url)
        second = await anyio.run_process([*served.command, "--record", str(served.record)], check=False)
        assert b"another gateway writes to it" in second.stderr
        client, chunks, received = await begin_a_stream(served)
        code, errors = await anyio.to_thread.run_sync(served.end, how)
        with pytest.raises(httpx.HTTPError):
            [chunk async for chunk in chunks]
        await client.aclose()
        assert "Traceback" not in errors
        assert code == (0 if how is signal.SIGINT else -signal.SIGKILL)
        if how is signal.SIGKILL:
            assert served.lines() == [], "it died before it could write"
            with served.record.open("ab") as file:  # and a line may have been cut short
                file.write(b'{"v":1,"seq":2,"torn')
            again = await anyio.to_thread.run_sync(Served, tmp_path, base_url)
            code, errors = await anyio.to_thread.run_sync(again.end, signal.SIGTERM)
            assert (code, "1 calls had not ended" in errors) == (0, True)
        (line,) = served.lines()
        assert (line.fault, line.request["messages"][0]["content"]) == ("cut", "hi")
        if how is signal.SIGINT:
            assert received in unpacked(line.stream or "")
        content = served.record.read_bytes()
        assert content.endswith(b"\n")
        assert KEY.encode() not in content
        assert served.token.encode() not in content
        assert os.listdir(tmp_path).count("calls.jsonl.begun") == 0
    finally:
        process.kill()
        process.wait()
