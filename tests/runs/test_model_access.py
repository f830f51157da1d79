"""Trials whose agent is a program in the sandbox, with its model behind the gateway: accounting, secrets, budgets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.runs.toys import make_toy

from proctor.agents.contract import AgentResult, HarnessContext, StopReason
from proctor.models.scripted import ScriptedServer, fault, say
from proctor.runs.calls import unpacked
from proctor.runs.engine import execute
from proctor.runs.examiner import opened
from proctor.runs.outcome import Outcome
from proctor.runs.preparation import prepare_all
from proctor.runs.progress import LineProgress
from proctor.runs.record import read_lines
from proctor.runs.request import Request, plan_request

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
        return AgentResult(StopReason.FINISHED)


@pytest.fixture
def exam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run one trial: `await exam(server, model_file_lines, limits)` gives its result and its directory."""
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EXAM_KEY", KEY)
    make_toy(tmp_path / "toys", "toy")

    async def one(base_url: str, more: str = "", **request: Any) -> tuple[TrialResult, Path]:
        model = tmp_path / "model.toml"
        model.write_text(f'name = "m"\nbase_url = "{base_url}"\napi_key_env = "EXAM_KEY"\n{more}')
        request = {"models": (str(model),), **request}
        plan = plan_request(Request((str(tmp_path / "toys"),), (f"agent={__name__}:Installed",), **request))
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
            assert KEY.encode() not in content, path
            if path.name == "model-calls.jsonl":
                assert Installed.token.encode() not in content
                assert all(KEY.encode() not in unpacked(line["stream"]) for line in lines if "stream" in line)


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


async def test_an_endpoint_that_fails_is_not_the_programs_fault_and_its_token_dies_with_the_trial(
    exam: Callable[..., Any],
) -> None:
    from proctor.models.gateway import Gateway

    gateways: list[Gateway] = []
    enter = Gateway.__aenter__

    async def entered(self: Gateway) -> Gateway:
        gateways.append(self)
        return await enter(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gateway, "__aenter__", entered)
        async with ScriptedServer(lambda chat: say("hi")) as server:
            result, _ = await exam(server.base_url)
    assert result.outcome is Outcome.RESOLVED
    assert gateways[0].access_of(Installed.token) is None
