"""The scripted model server: which answer goes to whom, scripts from files, and its command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from proctor.common import ConfigError
from proctor.models import ModelError, ModelSpec, OpenAIChatClient
from proctor.models.scripted import ChatRequest, ScriptedServer, fault, load_answers, main, say

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def texts(script: Any, *conversations: list[dict[str, str]], name: str = "small") -> list[str]:
    """What the server answers to each conversation, one after the other."""
    async with ScriptedServer(script) as server:
        client = OpenAIChatClient(ModelSpec(name, server.base_url, max_retries=0))
        try:
            return [(await client.complete(messages)).text for messages in conversations]
        finally:
            await client.aclose()


def talk(*turns: str) -> list[dict[str, str]]:
    """A conversation: the user's words and the assistant's, in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]


async def test_the_turn_is_told_by_the_conversation() -> None:
    script = [say("one"), say("two")]
    second = talk("a", "one", "b")
    assert await texts(script, second, talk("a"), second, talk("a")) == ["two", "one", "two", "one"]


async def test_repeats_of_a_request_get_one_answer_after_the_other() -> None:
    script = [[say("first"), say("again")]]
    assert await texts(script, *[talk("a")] * 3, talk("b")) == ["first", "again", "again", "first"]


async def test_a_table_is_keyed_by_instruction_or_model() -> None:
    script = {"median": [say("m")], "big": [say("b")], "*": [say("else")]}
    assert await texts(script, talk("fix the median"), talk("fix it")) == ["m", "else"]
    assert await texts(script, talk("fix the median"), name="big") == ["b"]


async def test_a_function_may_answer_later() -> None:
    async def script(request: ChatRequest) -> Any:
        return say(f"{request.turn} {len(request.messages)} {request.body['temperature']}")

    assert await texts(script, talk("a", "b", "c")) == ["1 3 0.0"]


async def test_an_exhausted_script_says_so() -> None:
    with pytest.raises(ModelError, match="the script has 1 turns and is exhausted"):
        await texts([say("x")], talk("a", "b", "c"))


async def test_a_table_without_the_key_is_exhausted() -> None:
    with pytest.raises(ModelError, match="exhausted"):
        await texts({"other": [say("x")]}, talk("a"))


async def test_what_is_not_a_chat_request_is_refused() -> None:
    import httpx

    async with ScriptedServer([]) as server, httpx.AsyncClient(trust_env=False) as client:
        for body in ("{", "[]", "{}", '{"messages": [1]}'):
            reply = await client.post(f"{server.base_url}/chat/completions", content=body)
            assert reply.status_code == 400


async def test_two_servers_side_by_side() -> None:
    async with ScriptedServer([say("a")]) as one, ScriptedServer([fault(500)]) as two:
        assert one.base_url != two.base_url


async def test_a_server_can_be_used_again() -> None:
    server = ScriptedServer([say("a")])
    for _ in range(2):
        async with server:
            client = OpenAIChatClient(ModelSpec("m", server.base_url))
            assert (await client.complete(talk("x"))).text == "a"
            await client.aclose()


@pytest.mark.parametrize("text", ["{", "7", '{"*": 7}', '[{"txt": "a"}]', '[{"tool_calls": [{"name": "x"}]}]'])
def test_a_bad_script_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"script\.json: not a model script"):
        load_answers(path)


def test_the_command_says_how_it_is_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 4
    assert "absent.json" in capsys.readouterr().err


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps([{"text": "hello"}]))
    command = [sys.executable, "-m", "proctor.models.scripted", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.terminate()
