"""Ask-the-user: who answers, from what, and where questions and answers end up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from proctor.agents import StopReason, load_harness, run_harness
from proctor.common import ConfigError
from proctor.models import ModelSpec, OpenAIChatClient, load_model
from proctor.models.scripted import Answer, ChatRequest, ScriptedServer, call, calls, fault, say
from proctor.tasks import load_any
from proctor.tasks.model import AnswerRule, SimulatedUser

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

RULES = SimulatedUser(
    rules=(AnswerRule(r"(?i)which (file|name)", "Call it hello.txt.", times=1), AnswerRule("name", "As I said.")),
    max_questions=4,
)


@pytest.fixture
def play(box: Any, task: Any, recorder: Any, limits: Any) -> Any:
    """Play a script through the tool loop at a task with a user; returns the result and what the server saw."""

    async def play(turns: Any, user: SimulatedUser | None, player: str = "", **options: Any) -> Any:
        async with ScriptedServer(turns) as server:
            other = OpenAIChatClient(load_model(player)) if player else None
            client = OpenAIChatClient(ModelSpec("small", server.base_url, max_retries=0))
            result = await run_harness(
                load_harness("tool-loop"),
                sandbox=box,
                task=replace(task, user=user),
                recorder=recorder,
                limits=limits,
                model=client,
                user_model=other,
                options=options,
            )
            await client.aclose()
            if other is not None:
                await other.aclose()
            return result, server

    return play


async def test_rules_answer_in_order_and_the_answers_are_on_record(play: Any, recorder: Any) -> None:
    questions = ["Which name?", "which file, again?", "what name?", "Anything else?", "And now?"]
    turns = [call("ask_user", question=question) for question in questions]
    result, server = await play([*turns, call("finish")], RULES, ask_user=True)
    assert result.stop is StopReason.FINISHED
    made = [step.tool_calls[0] for step in recorder.agent_steps[:-1]]
    assert [one.result for one in made[:4]] == [
        "Call it hello.txt.", "I don't know. Please decide for yourself.", "As I said.",
        "I don't know. Please decide for yourself.",
    ]  # fmt: skip
    assert [one.extra["rule"] for one in made[:4]] == [1, None, 2, None]
    assert str(made[4].error).startswith("no_more_questions")
    told = [message["content"] for message in server.requests[-1].messages if message["role"] == "tool"]
    assert told[0] == "Call it hello.txt."
    offered = [tool["function"]["name"] for tool in server.requests[0].body["tools"]]
    assert "ask_user" in offered
    assert "ask_user" in server.requests[0].messages[0]["content"]


@pytest.mark.parametrize(("user", "options"), [(RULES, {}), (None, {"ask_user": True})])
async def test_without_a_user_or_without_being_asked_for_there_is_no_such_tool(
    play: Any, recorder: Any, user: SimulatedUser | None, options: dict[str, Any]
) -> None:
    _, server = await play([call("ask_user", question="May I?"), call("finish")], user, **options)
    assert "ask_user" not in json.dumps(server.requests[0].body["tools"])
    answer = json.loads(recorder.agent_steps[0].tool_calls[0].result)["error"]
    assert answer["kind"] == "unknown_tool"
    assert "ask_user" not in answer["tools"]


async def test_a_model_plays_the_user_from_its_text_alone(play: Any, recorder: Any) -> None:
    user = SimulatedUser(knowledge="The report is for Ada. She likes it short.")
    async with ScriptedServer([say("For Ada."), say("")]) as other:
        turns = [call("ask_user", question="Who is it for?"), call("ask_user", question="How long?"), call("finish")]
        await play(turns, user, f"player@{other.base_url}", ask_user=True)
        first, second = other.requests
    made = [step.tool_calls[0] for step in recorder.agent_steps[:-1]]
    assert [one.result for one in made] == ["For Ada.", user.default]
    assert made[0].extra["answered_by"] == "model"
    assert made[0].extra["usage"]["prompt_tokens"] == 10
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
    # All that it is told: the text of the task, and the questions.
    assert "The report is for Ada." in first.messages[0]["content"]
    assert "Create hello.txt" not in json.dumps(first.body)
    assert first.messages[1:] == [{"role": "user", "content": "Who is it for?"}]


async def test_a_user_that_cannot_answer_is_not_the_agents_fault(play: Any) -> None:
    user = SimulatedUser(knowledge="x")
    with pytest.raises(ConfigError, match="user_model"):
        await play([call("finish")], user, ask_user=True)
    async with ScriptedServer([fault(400)]) as other:
        from proctor.common import InfraError

        with pytest.raises(InfraError, match="plays the user"):
            await play([call("ask_user", question="?")], user, f"p@{other.base_url}", ask_user=True)


async def test_calls_side_by_side(play: Any, recorder: Any, box: Any) -> None:
    (box.root / "a").write_text("A")
    reads = calls(*(("read_file", {"path": "a"}) for _ in range(3)), ("bash", {"command": "echo b > a"}),
                  ("read_file", {"path": "a"}))  # fmt: skip
    await play([reads, call("finish")], None)
    made = recorder.agent_steps[0].tool_calls
    assert [one.result.strip() for one in made] == ["A", "A", "A", "exit code: 0", "b"]
    assert [one.extra.get("beside") for one in made] == [2, 2, 2, None, None]
    # Two commands that wait for each other end only if they really run at once.
    wait = "touch {0}; for i in $(seq 100); do [ -e {1} ] && echo met && exit 0; sleep 0.05; done; exit 1"
    both = calls(*(("bash", {"command": wait.format(x, y)}) for x, y in (("p", "q"), ("q", "p"))), ("finish", {}))
    result, _ = await play([both], None, parallel="all")
    assert result.stop is StopReason.FINISHED
    assert [one.result for one in recorder.agent_steps[-1].tool_calls[:2]] == ["exit code: 0\nstdout:\nmet"] * 2


async def test_what_is_dropped_from_the_conversation_is_a_step(play: Any, recorder: Any) -> None:
    """By budget before a call, and by half when the endpoint refuses one all the same."""
    shout = call("bash", command="head -c 6000 /dev/zero | tr '\\0' x")
    turns = [shout, shout, shout, shout, fault(400, "too long", code="context_length_exceeded"), call("finish")]

    def script(request: ChatRequest) -> Answer:
        # Four characters make a token, so that the loop's estimates are right.
        usage = {"prompt_tokens": len(json.dumps(request.body["messages"])) // 4, "completion_tokens": 5}
        return replace(turns.pop(0), usage=usage)

    result, server = await play(script, None, context_tokens=5000)
    assert result.stop is StopReason.FINISHED
    notes = [step for step in recorder.steps if "context_dropped" in step.extra]
    assert [step.source for step in notes] == ["system", "system"]
    by_budget, by_refusal = (step.extra["context_dropped"] for step in notes)
    assert by_budget["why"] == "it had outgrown its budget"
    assert by_budget["budget"] == 5000
    assert by_refusal["why"] == "the endpoint refused it as too long"
    for dropped in (by_budget, by_refusal):
        assert dropped["tokens_after"] < dropped["tokens_before"]
        assert dropped["results"] or dropped["exchanges"]
    assert "[result dropped to save context:" in json.dumps(server.requests[4].body)
    sizes = [len(json.dumps(request.body["messages"])) for request in server.requests]
    assert sizes[4] < sizes[3] + 1000
    assert sizes[5] < sizes[4]
    # Said before the call that it was done for.
    assert recorder.steps.index(notes[0]) < recorder.steps.index(recorder.agent_steps[4])


async def test_malformed_calls_are_counted_and_no_others(tmp_path: Path) -> None:
    from proctor.agents.contract import ToolCall
    from proctor.agents.tools import is_malformed

    kinds = {"invalid_json": True, "unknown_tool": True, "invalid_arguments": True, "timeout": False, "file": False}
    for kind, counted in kinds.items():
        assert is_malformed(ToolCall("c", "bash", {}, "", error=f"{kind}: what was wrong")) is counted
    assert not is_malformed(ToolCall("c", "bash", {}, ""))


USER = """
[proctor.user]
max_questions = 3
[[proctor.user.rules]]
match = "(?i)colour"
answer = "Green."
"""


def test_a_task_declares_its_user(tmp_path: Path) -> None:
    def write(table: str) -> Path:
        folder = tmp_path / "task"
        (folder / "tests").mkdir(parents=True, exist_ok=True)
        (folder / "environment").mkdir(exist_ok=True)
        (folder / "instruction.md").write_text("Paint it.\n")
        (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        (folder / "task.toml").write_text(f'schema_version = "1.4"\n[proctor]\nimage = "host"\n{table}')
        return folder

    (entry,) = load_any(write(USER)).entries
    assert entry.task.user == SimulatedUser((AnswerRule("(?i)colour", "Green."),), max_questions=3)
    for table, named in {
        "[proctor.user]\n": "either `rules` or `knowledge`",
        '[proctor.user]\nknowledge = "x"\n[[proctor.user.rules]]\nmatch = "a"\nanswer = "b"\n': "either `rules`",
        '[[proctor.user.rules]]\nmatch = "("\nanswer = "b"\n': "not a regular expression",
        '[proctor.user]\nknowledge = "x"\nmax_questions = 0\n': "max_questions",
        '[proctor.user]\nknowledge = "x"\nmood = "bad"\n': "mood",
    }.items():
        with pytest.raises(ConfigError, match=named):
            load_any(write(table))


@pytest.mark.sandbox
@pytest.mark.slow
async def test_a_model_plays_the_user_through_the_gateway_of_the_run(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    import anyio

    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "instruction.md").write_text("Paint it.\n")
    (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    user = '[proctor]\nimage = "host"\n[proctor.user]\nknowledge = "It is to be green."\n'
    (folder / "task.toml").write_text(f'schema_version = "1.4"\n{user}')
    turns = [call("ask_user", question="Which colour?"), call("paint"), call("finish")]
    async with ScriptedServer({"small": turns, "player": [say("Green.")]}) as server:
        words = ["run", str(folder), "--agent", "tool-loop", "--model", f"small@{server.base_url}", "-o",
                 str(tmp_path / "record"), "--option", "ask_user=true",
                 "--option", f"user_model=player@{server.base_url}"]  # fmt: skip
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run(
                [sys.executable, "-m", "proctor", *words], capture_output=True, text=True, check=False, timeout=120,
                env={**os.environ, "PROCTOR_HOME": str(tmp_path / "home")},
            )
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (trial,) = (tmp_path / "record/trials").iterdir()
    result = json.loads((trial / "result.json").read_text())
    assert (result["questions"], result["malformed_calls"], result["tool_calls"]) == (1, 1, 3)
    # The player's call is on record, and not among the agent's.
    assert result["usage"]["model_calls"] == 3
    (line,) = (trial / "user-calls.jsonl").read_text().splitlines()
    assert "It is to be green." in json.loads(line)["request"]["messages"][0]["content"]
    steps = json.loads((trial / "trajectory.json").read_text())["steps"]
    (asked,) = [step for step in steps if "ask_user" in json.dumps(step.get("tool_calls", []))]
    assert asked["observation"]["results"][0]["content"] == "Green."
    assert "It is to be green." not in (trial / "trajectory.json").read_text()
