"""Trials whose agent is a program in the sandbox, with its model behind the gateway: accounting, secrets, budgets."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import zstandard
from tests.runs.toys import make_toy

from proctor.agents.contract import AgentResult, HarnessContext, Step, StopReason
from proctor.common import ConfigError
from proctor.models.gateway import Gateway
from proctor.models.scripted import Answer, ChatRequest, ScriptedServer, call, fault, say
from proctor.runs.calls import unpacked
from proctor.runs.engine import execute
from proctor.runs.events import EventLog
from proctor.runs.examiner import opened
from proctor.runs.lock import make_lock
from proctor.runs.outcome import Outcome
from proctor.runs.preparation import prepare_all
from proctor.runs.progress import LineProgress
from proctor.runs.record import read_lines
from proctor.runs.replay.recorded import read_execs, read_input
from proctor.runs.request import Request, plan_again, plan_request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proctor.runs.formats import TrialResult

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

KEY = "real-key-0123456789abcdef"
PROGRAM = """\
import json, sys, urllib.request, urllib.error
base, token, model = sys.argv[1:4]
bodies = json.loads(sys.argv[4])
for path, body in bodies:
    request = urllib.request.Request(f"{base}/{path}", json.dumps({"model": model, **body}).encode(),
        {"authorization": f"Bearer {token}", "content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            print(reply.status, reply.read().decode(), flush=True)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode(), flush=True)
        if error.code >= 500: sys.exit(1)
open("answer.txt", "w").write("42")
"""
CHAT: tuple[str, dict[str, Any]] = ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TALK = [
    CHAT,
    ("chat/completions", {**CHAT[1], "stream": True}),
    ("responses", {"input": "hi", "tools": [{"type": "web_search"}]}),
    ("messages", {**CHAT[1], "max_tokens": 9, "stream": True}),
]


class Installed:
    """An agent that is a Python program in the sandbox and asks what the test wants."""

    name = "installed"
    version = "1"
    needs_model = True
    protocols = ("chat", "responses", "messages")
    talk: list[tuple[str, dict[str, Any]]] = TALK
    output = ""
    token = ""

    async def run(self, context: HarnessContext) -> AgentResult:
        assert context.endpoint is not None
        Installed.token = context.endpoint.token
        await context.room.write("agent.py", PROGRAM.encode())
        argv = ["python3", "agent.py", context.endpoint.base_url, context.endpoint.token, context.endpoint.model]
        result = await context.room.run([*argv, json.dumps(self.talk)])
        Installed.output = (result.stdout.head + result.stderr.head).decode()
        return AgentResult(StopReason.FINISHED if result.ok else StopReason.ERROR)


@pytest.fixture
def exam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run one trial: `await exam(server, model_file_lines, limits)` gives its result and its directory."""
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EXAM_KEY", KEY)
    make_toy(tmp_path / "toys", "toy")

    async def one(
        base_url: str, more: str = "", *, agent: str = f"agent={__name__}:Installed", **request: Any
    ) -> tuple[TrialResult, Path]:
        model = tmp_path / "model.toml"
        model.write_text(f'name = "m"\nbase_url = "{base_url}"\napi_key_env = "EXAM_KEY"\n{more}')
        request = {"models": (str(model),), **request}
        plan = plan_request(Request((str(tmp_path / "toys"),), (agent,), **request))
        preparation = await prepare_all(plan, LineProgress(lambda line: None))
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        async with opened(plan, preparation) as examiner:
            execution = await execute(plan, run_dir, examiner, concurrency=1, backoff=lambda tries, jitter: 0.0)
        (result,) = execution.results.values()
        return result, run_dir / "trials" / result.trial_id

    return one


async def test_a_program_in_the_sandbox_is_counted_to_the_token_and_holds_no_secret(
    exam: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}
    # The upstream is mean: it repeats the key that it was sent, in an answer and in an error.
    monkeypatch.setattr(Installed, "talk", [*TALK, ("chat/completions", {"messages": [], "n": 1})])

    def answer(chat: Any) -> Any:
        if chat.body.get("n"):
            return fault(400, f"bad request with {chat.headers.get('authorization')}")
        return say(f"you sent {chat.headers.get('authorization') or chat.headers.get('x-api-key')}", usage=usage)

    async with ScriptedServer(answer) as server:
        result, directory = await exam(server.base_url, "prices = { prompt = 1.0, cached = 0.1, completion = 10.0 }\n")
        counted = len(server.requests) - 1
        assert [KEY in str(request.headers) for request in server.requests] == [True] * 5
        assert not any(Installed.token in str(request.headers) for request in server.requests)
    assert (result.outcome, result.stop) == (Outcome.RESOLVED, "finished"), Installed.output
    used = result.usage
    assert (used.model_calls, used.prompt_tokens, used.completion_tokens) == (4, counted * 100, counted * 7)
    assert used.cached_tokens == counted * 40
    assert used.cost_usd == pytest.approx(counted * (60 * 1.0 + 40 * 0.1 + 7 * 10) / 1e6)
    lines = list(read_lines(directory / "model-calls.jsonl"))
    assert [line["protocol"] for line in lines] == ["chat", "chat", "responses", "messages", "chat"]
    assert b"you sent" in unpacked(lines[1]["stream"])
    assert "removed: web_search" in lines[2]["changes"]
    assert Installed.output.count("[redacted]") >= 3
    assert KEY not in Installed.output
    for path in directory.parent.parent.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if path.suffix == ".zst":  # what the sandbox's disk held
                content = zstandard.ZstdDecompressor().stream_reader(content).read()
                assert b"answer.txt" in content
            assert KEY.encode() not in content, path
            if path.name == "model-calls.jsonl":
                assert Installed.token.encode() not in content
                assert all(KEY.encode() not in unpacked(line["stream"]) for line in lines if "stream" in line)


class Careless(Installed):
    """Brings its trial's token into the record in every way that there is."""

    async def run(self, context: HarnessContext) -> AgentResult:
        assert context.endpoint is not None
        token, room = context.endpoint.token, context.room
        Installed.token = token
        await room.write("config.json", json.dumps({"key": token}).encode())
        assert token.encode() in await room.read("config.json")
        result = await room.bash(f"echo {token}; printf '\\377%s' {token} >&2; cat config.json > {token[:20]}.txt")
        assert result.stdout.data.decode().strip() == token
        await room.run(["sh", "-c", 'cat; echo "$1"', "sh", token], env={"PLAIN": token}, stdin=token.encode())
        with contextlib.suppress(OSError):
            await room.read(token)
        context.recorder.log(f"used {token}")
        context.recorder.keep("own.log", token.encode())
        context.recorder.step(Step("agent", f"my key is {token}", "2026-11-30T00:00:00Z"))
        return AgentResult(StopReason.ERROR, f"could not use {token}", final_message=token)


async def test_no_record_holds_the_token_however_an_agent_spills_it(exam: Callable[..., Any]) -> None:
    async with ScriptedServer([]) as server:
        _, directory = await exam(server.base_url, agent=f"agent={__name__}:Careless")
    token, seen = Installed.token.encode(), 0
    for path in directory.parent.parent.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if path.suffix == ".zst":
                content = zstandard.ZstdDecompressor().stream_reader(content).read()
            encoded = re.findall(rb'"base64":"([^"]+)"', content)
            assert not any(token in one for one in (content, *map(base64.b64decode, encoded))), path
            seen += content.count(b"[redacted]***") + sum(b"[redacted]***" in base64.b64decode(one) for one in encoded)
    assert seen >= 14
    lines = list(read_execs(directory))
    # What is kept fits together: what was written is what was read, under the digest that the line names.
    assert lines[0].input == lines[1].digest
    assert b"[redacted]***" in read_input(directory, str(lines[1].digest))
    assert len(EventLog(directory)) == len(list(EventLog(directory).read()))


@pytest.mark.parametrize(
    ("limit", "stop", "answered"), [("tokens=20", "limit:tokens", 2), ("cost_usd=0.00002", "limit:cost", 2)]
)
async def test_a_budget_ends_the_trial_by_name(
    limit: str, stop: str, answered: int, exam: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Installed, "talk", [CHAT] * 5)
    async with ScriptedServer(lambda chat: say("x")) as server:
        prices = "prices = { prompt = 1.0, completion = 1.0 }\n"
        result, directory = await exam(server.base_url, prices, limits=(limit,))
        assert len(server.requests) == answered
    assert (result.outcome, result.stop) == (Outcome.AGENT_LIMIT, stop)
    assert "budget" in result.detail
    assert Installed.output.count("budget_exceeded") == 3
    assert len(list(read_lines(directory / "model-calls.jsonl"))) == 5


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (lambda chat: say("word " * 30, cut_after=3), Outcome.INFRA_ERROR),  # dies in mid-stream, every time
        (lambda chat: fault(503), Outcome.INFRA_ERROR),
        (lambda chat: fault(400), Outcome.RESOLVED),  # refuses what the program asked: the program's business
    ],
    ids=["cut", "overloaded", "refused"],
)
async def test_an_endpoint_that_is_down_is_never_the_programs_fault(
    answer: Any, outcome: Outcome, exam: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Installed, "talk", [("chat/completions", {**CHAT[1], "stream": True})])
    async with ScriptedServer(answer) as server:
        result, directory = await exam(server.base_url, "max_retries = 0\n")
    assert result.outcome is outcome
    assert result.tries == (1 if outcome is Outcome.RESOLVED else 4)
    (line,) = read_lines(directory / "model-calls.jsonl")
    assert line["error"]


async def test_a_program_that_hangs_up_cannot_blame_the_endpoint(
    exam: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: Installed, context: HarnessContext) -> AgentResult:
        assert context.endpoint is not None
        code = PROGRAM.replace("timeout=20", "timeout=1")
        await context.room.write("agent.py", code.encode())
        endpoint = context.endpoint
        argv = ["python3", "agent.py", endpoint.base_url, endpoint.token, endpoint.model, json.dumps([CHAT])]
        result = await context.room.run(argv)
        return AgentResult(StopReason.FINISHED if result.ok else StopReason.ERROR)

    monkeypatch.setattr(Installed, "run", run)
    async with ScriptedServer([say("late", delay_s=8.0)]) as server:
        result, directory = await exam(server.base_url)
    assert (result.outcome, result.tries) == (Outcome.UNRESOLVED, 1)
    (line,) = read_lines(directory / "model-calls.jsonl")
    assert "before it was answered" in line["error"]


async def test_the_token_dies_with_the_trial(exam: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gateways: list[Gateway] = []
    enter = Gateway.__aenter__

    async def entered(self: Gateway) -> Gateway:
        gateways.append(self)
        return await enter(self)

    monkeypatch.setattr(Gateway, "__aenter__", entered)
    monkeypatch.setattr(Installed, "talk", [CHAT])
    async with ScriptedServer(lambda chat: say("hi")) as server:
        result, _ = await exam(server.base_url)
    assert result.outcome is Outcome.RESOLVED
    assert gateways[0].access_of(Installed.token) is None


GATEWAY = """
version = 1
[upstreams.up]
base_url = "{base_url}"
protocols = ["chat", "responses", "messages"]
api_key_env = "EXAM_KEY"
[models.best]
upstream = "up"
id = "best-1"
sampling = {{ temperature = 0.0 }}
[models.other]
upstream = "up"
id = "other-1"
[budgets.run]
calls = 3
"""


async def test_a_gateways_file_governs_a_run_and_is_in_its_lock(
    exam: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Installed, "talk", [("messages", {**CHAT[1], "max_tokens": 9, "temperature": 1})] * 4)
    file = tmp_path / "gateway.toml"
    async with ScriptedServer(lambda chat: say("hi")) as server:
        file.write_text(GATEWAY.format(base_url=server.base_url))
        result, _ = await exam(server.base_url, models=("best",), gateway=str(file))
        assert [(one.body["model"], one.body["temperature"]) for one in server.requests] == [("best-1", 0.0)] * 3
    assert (result.outcome, result.stop) == (Outcome.AGENT_LIMIT, "limit:run_calls")
    again = Request((str(tmp_path / "toys"),), (f"agent={__name__}:Installed",), models=("best",), gateway=str(file))
    lock = make_lock(plan_request(again), {})
    assert lock.options["gateway"]["config"]["models"]["best"]["id"] == "best-1"
    assert KEY not in lock.model_dump_json()
    assert plan_again(lock).gateway == plan_request(again).gateway
    file.write_text(file.read_text().replace("0.0", "0.5"))
    with pytest.raises(ConfigError, match="changed since the run began"):
        plan_again(lock)
    with pytest.raises(ConfigError, match="one of: best, other"):
        plan_request(replace(again, models=("none",)))


async def test_our_own_harness_meets_the_gateways_budgets_by_name(exam: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    async with ScriptedServer(lambda chat: call("bash", command="true")) as server:
        budget = "[budgets.trial]\ncalls = 2\n"
        file.write_text(GATEWAY.format(base_url=server.base_url).replace("[budgets.run]\ncalls = 3\n", budget))
        result, directory = await exam(server.base_url, agent="tool-loop", models=("best",), gateway=str(file))
        assert len(server.requests) == 2
    assert (result.outcome, result.stop, result.tries) == (Outcome.AGENT_LIMIT, "limit:calls", 1)
    assert result.detail == "the trial's budget of 2 calls is used up (2)"
    assert len(list(read_lines(directory / "model-calls.jsonl"))) == 3


@pytest.mark.slow
async def test_a_run_killed_in_mid_stream_is_resumed_to_a_whole_record(tmp_path: Path) -> None:
    make_toy(tmp_path / "toys", "toy")
    asked = anyio.Event()

    async def answer(chat: ChatRequest) -> Answer:
        if len(server.requests) == 1:
            asked.set()
            return say("word " * 500, chunk_delay_s=0.1)
        return call("bash", command="printf 42 > answer.txt") if chat.turn == 0 else call("finish")

    environment = {**os.environ, "PROCTOR_HOME": str(tmp_path / "home")}
    proctor = [sys.executable, "-m", "proctor", "run"]
    run_dir = tmp_path / "run"
    async with ScriptedServer(answer) as server:
        first = [*proctor, str(tmp_path / "toys"), "--agent", "tool-loop", "--model", f"m@{server.base_url}"]
        process = await anyio.open_process([*first, "-o", str(run_dir)], env=environment, stdout=None, stderr=None)
        with anyio.fail_after(60):
            await asked.wait()
            await anyio.sleep(0.5)  # the stream is under way
        process.kill()
        await process.wait()
        assert not list((run_dir / "trials").glob("toy*")), "no half of a trial is to be seen"
        done = await anyio.run_process([*proctor, "--resume", str(run_dir), "--json"], env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    (directory,) = (run_dir / "trials").glob("toy*")
    result = json.loads((directory / "result.json").read_text())
    assert (result["outcome"], result["usage"]["model_calls"]) == ("resolved", 2)
    assert result["usage"]["prompt_tokens"] == 20
    assert not any("error" in line for line in read_lines(directory / "model-calls.jsonl"))
