"""The two loops, against a scripted model over real HTTP: the whole conversation, and every way it can go wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from proctor.agents import AgentResult, StopReason, load_harness, run_harness
from proctor.agents.text_loop import END_MARKER, parse_answer
from proctor.models import ModelSpec, OpenAIChatClient
from proctor.models.scripted import Answer, ScriptedServer, call, calls, fault, raw, say

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def play(box: Any, task: Any, recorder: Any, limits: Any) -> Any:
    """Play a model script through a harness; returns the result and the server with the requests it saw."""

    async def play(turns: Any, harness: str = "tool-loop", **more: Any) -> tuple[AgentResult, ScriptedServer]:
        used = more.pop("limits", limits)
        spec = more.pop("spec", {})
        async with ScriptedServer(turns) as server:
            client = OpenAIChatClient(ModelSpec("small", server.base_url, **{"max_retries": 0, **spec}))
            result = await run_harness(
                load_harness(harness),
                sandbox=box,
                task=task,
                recorder=recorder,
                limits=used,
                model=client,
                options=more,
            )
            await client.aclose()
            return result, server

    return play


def sent_results(server: ScriptedServer) -> dict[str, str]:
    """What the model was told about each of its calls."""
    messages = server.requests[-1].messages
    return {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}


async def test_a_whole_conversation(play: Any, recorder: Any, box: Any) -> None:
    result, server = await play(
        [
            calls(
                ("write_file", {"path": "hello.txt", "content": "hello\n"}),
                ("bash", {"command": "cat hello.txt"}),
                text="First the file.",
            ),
            call("finish", message="It says hello."),
        ]
    )
    assert result == AgentResult(StopReason.FINISHED, final_message="It says hello.")
    assert (box.root / "hello.txt").read_text() == "hello\n"
    assert list(sent_results(server).values()) == ["wrote 6 bytes to hello.txt", "exit code: 0\nstdout:\nhello"]
    assert [step.source for step in recorder.steps] == ["system", "user", "agent", "agent"]
    first = recorder.agent_steps[0]
    assert first.message == "First the file."
    assert first.llm_calls == 1
    assert first.usage.prompt_tokens == 10
    assert first.model_name == "small-scripted"
    assert first.extra["requested_model"] == "small"
    assert json.loads(first.tool_calls[0].raw_arguments) == first.tool_calls[0].arguments


async def test_the_conversation_that_is_sent_is_well_formed(play: Any) -> None:
    _, server = await play([calls(("bash", '{"command": '), ("nope", "{}")), say("hm"), call("finish")])
    messages = server.requests[-1].messages
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    for sent in messages[2]["tool_calls"]:
        json.loads(sent["function"]["arguments"])  # endpoints parse the history and refuse it whole
    assert [sent["id"] for sent in messages[2]["tool_calls"]] == [m["tool_call_id"] for m in messages[3:5]]


async def test_errors_go_back_and_the_model_recovers(play: Any, box: Any, recorder: Any) -> None:
    result, server = await play(
        [
            calls(("bash", "ls -la")),
            calls(("shell", {"command": "ls"})),
            calls(("read_file", {})),
            call("edit_file", path="a", old_text="x", new_text="y"),
            call("write_file", path="a", content="x"),
            call("edit_file", path="a", old_text="x", new_text="y"),
            call("finish"),
        ]
    )
    assert result.stop is StopReason.FINISHED
    kinds = [json.loads(text)["error"]["kind"] for text in list(sent_results(server).values())[:4]]
    assert kinds == ["invalid_json", "unknown_tool", "invalid_arguments", "file"]
    assert recorder.agent_steps[0].tool_calls[0].raw_arguments == "ls -la"
    assert (box.root / "a").read_text() == "y"


@pytest.mark.parametrize("sent_id", ["", "same"])
async def test_ids_that_are_missing_or_repeated_are_replaced(play: Any, recorder: Any, sent_id: str) -> None:
    function = {"name": "bash", "arguments": '{"command": "true"}'}
    message = {"content": None, "tool_calls": [{"id": sent_id, "function": function}] * 2}
    reply = raw(json.dumps({"choices": [{"message": message}]}))
    await play([reply, call("finish")])
    ids = [made.call_id for made in recorder.agent_steps[0].tool_calls]
    assert len(set(ids)) == 2
    assert all(ids)


async def test_silence_is_nudged_then_given_up(play: Any, recorder: Any) -> None:
    result, server = await play(lambda _: say("I think I am done."), max_nudges=2)
    assert result.stop is StopReason.GAVE_UP
    assert result.final_message == "I think I am done."
    assert len(server.requests) == 3
    assert [step.source for step in recorder.steps[2:]] == ["agent", "user", "agent", "user", "agent"]


async def test_a_tool_call_resets_the_nudges(play: Any) -> None:
    turns = [say("hm"), call("bash", command="true"), say("hm"), call("bash", command="true"), call("finish")]
    result, _ = await play(turns, max_nudges=1)
    assert result.stop is StopReason.FINISHED


async def test_a_long_output_is_clipped_for_the_model(play: Any) -> None:
    _, server = await play([call("bash", command="seq 100000"), call("finish")], output_chars=1000)
    shown = next(iter(sent_results(server).values()))
    assert len(shown) < 1200
    assert shown.startswith("exit code: 0\nstdout:\n1\n2\n")
    assert shown.endswith("\n100000")
    assert re.search(r"\[… \d+ characters dropped …\]", shown)


BAD_REPLIES = [
    raw("<html>busy</html>"),
    raw(""),
    raw('{"choices": []}'),
    raw('{"choices": [{"message": {"content": 5}}]}'),
    raw("data: {oops\n\n", content_type="text/event-stream"),
]


@pytest.mark.parametrize("harness", ["tool-loop", "text-loop"])
@pytest.mark.parametrize("bad", BAD_REPLIES, ids=range(len(BAD_REPLIES)))
async def test_a_bad_reply_is_recorded_and_asked_for_again(play: Any, recorder: Any, harness: str, bad: Answer) -> None:
    good = replace(call("finish"), text=END_MARKER)
    result, _ = await play([[bad, bad, good]], harness)
    assert result.stop is StopReason.FINISHED
    errors = [step.extra["model_error"] for step in recorder.agent_steps if "model_error" in step.extra]
    assert len(errors) == 2
    assert all("\n" not in error for error in errors)


@pytest.mark.parametrize("harness", ["tool-loop", "text-loop"])
async def test_bad_replies_without_end_are_a_model_error(play: Any, harness: str) -> None:
    result, server = await play(lambda _: raw("busy"), harness, max_bad_replies=2)
    assert result.stop is StopReason.MODEL_ERROR
    assert "the reply is not JSON" in result.detail
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        (fault(500), StopReason.MODEL_ERROR),
        (fault(401), StopReason.MODEL_ERROR),
        (fault(400, code="context_length_exceeded"), StopReason.LIMIT_TOKENS),
    ],
)
async def test_a_model_that_gives_no_answer_ends_the_trial(play: Any, answer: Answer, stop: StopReason) -> None:
    result, server = await play([answer])
    assert result.stop is stop
    assert len(server.requests) == 1


@pytest.mark.slow
async def test_five_hundred_steps_with_every_kind_of_mischief(play: Any, limits: Any, recorder: Any) -> None:
    mischief = [
        call("bash", command="echo x >> log"),
        calls(("bash", "{"), ("bash", "[]"), ("nope", "{}"), ("read_file", '{"path": "\\ud800"}')),
        say(""),
        calls(*[("bash", {"command": "true"})] * 5),
        call("bash", command="head -c 100000 /dev/urandom"),
        calls(("edit_file", {"path": "log", "old_text": "x", "new_text": "y"})),
        calls(("bash", {"command": "true", "surprise": 1}), text="é" * 50),
        say("thinking aloud"),
        call("read_file", path="log", offset=10**9),
    ]

    def script(request: Any) -> Answer:
        if request.repeat == 0 and request.turn % 10 == 4:
            return BAD_REPLIES[request.turn // 10 % len(BAD_REPLIES)]
        return call("finish") if request.turn == 450 else mischief[request.turn % len(mischief)]

    roomy = replace(limits, steps=1000, total_s=120.0)
    result, _ = await play(script, limits=roomy, output_chars=400)
    assert result.stop is StopReason.FINISHED
    assert len(recorder.agent_steps) == 451 + 45
    for step in recorder.steps:
        json.dumps([step.message, [(c.arguments, c.result, c.error) for c in step.tool_calls]]).encode()


async def test_a_text_conversation(play: Any, recorder: Any, box: Any) -> None:
    result, server = await play(
        [
            say("Write it.\n\n```bash\necho hello > hello.txt\n```\n"),
            say("Nothing here."),
            say("```bash\nls\n```\nand\n```bash\npwd\n```"),
            say("Look.\n```sh\ncat hello.txt\n```"),
            say(f"It is there.\n{END_MARKER}"),
        ],
        "text-loop",
    )
    assert result.stop is StopReason.FINISHED
    assert (box.root / "hello.txt").read_text() == "hello\n"
    replies = [m["content"] for m in server.requests[-1].messages if m["role"] == "user"][1:]
    assert replies[0] == "exit code: 0"
    assert "no command" in replies[1]
    assert "2 commands" in replies[2]
    assert replies[3] == "exit code: 0\nstdout:\nhello"
    assert "tools" not in server.requests[0].body
    assert recorder.agent_steps[0].tool_calls[0].name == "bash"


async def test_answers_without_a_command_are_given_up(play: Any) -> None:
    result, server = await play(lambda _: say("hm"), "text-loop", max_format_errors=1)
    assert result.stop is StopReason.GAVE_UP
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("text", "commands", "ended"),
    [
        ("```bash\nls\n```", ["ls"], False),
        ("```bash \r\nls\r\npwd\r\n```\r\n", ["ls\r\npwd"], False),
        ("```python\nprint()\n```\nthen\n```bash\nls\n```", ["ls"], False),
        ("````bash\ncat > a.md <<'X'\n```bash\nls\n```\nX\n````", ["cat > a.md <<'X'\n```bash\nls\n```\nX"], False),
        ("```bash\n```", [], False),
        ("```bash\nls", [], False),
        (f"```bash\nls\n```\n{END_MARKER}", ["ls"], False),
        (f"done\n  {END_MARKER}  \n", [], True),
        (f"I shall write {END_MARKER} later", [], False),
        ("<think>\n```bash\nrm -rf /\n```\n</think>\n```bash\nls\n```", ["ls"], False),
        (f"<think>{END_MARKER}\nnever closed\n{END_MARKER}", [], False),
    ],
)
def test_reading_an_answer(text: str, commands: list[str], ended: bool) -> None:
    assert parse_answer(text) == (commands, ended)


@pytest.mark.data
@pytest.mark.parametrize("name", ["django__django-11119", "psf__requests-1724"])
def test_real_text_answers_have_one_command_each(shared_data: Path, name: str) -> None:
    path = shared_data / "trajectories" / "mini-swe-agent" / f"{name}.traj.json"
    messages = json.loads(path.read_text())["messages"]
    for message in messages:
        if message["role"] == "assistant":
            fences = len(re.findall(r"^```bash", message["content"], re.M))
            commands, _ = parse_answer(message["content"])
            assert len(commands) == fences == 1


@pytest.mark.data
async def test_real_tool_calls_that_do_not_fit_are_answered_not_crashed(
    shared_data: Path, play: Any, recorder: Any
) -> None:
    path = shared_data / "trajectories" / "swe-agent" / "marshmallow-1867.function_calling.traj"
    sent = [made for item in json.loads(path.read_text())["history"] for made in item.get("tool_calls") or ()]
    functions = [made["function"] for made in sent]
    turns = [calls((function["name"], function["arguments"])) for function in functions]
    result, _ = await play([*turns, call("finish")], spec={"stream": False})
    assert result.stop is StopReason.FINISHED
    made = [step.tool_calls[0] for step in recorder.agent_steps[:-1]]
    assert len(made) == len(functions) > 5
    for done, function in zip(made, functions, strict=True):
        assert done.raw_arguments == function["arguments"]
        assert (done.error is None) == (function["name"] == "bash")
