"""`proctor replay --model-calls`: recorded answers stand in for the model, and what is asked otherwise is reported."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.toys import make_toy

from proctor.cli.main import cli
from proctor.common import RefusedError, digest_tree
from proctor.models.reply import Assembler, whole_answer
from proctor.models.scripted import Answer, ScriptedServer, call, calls, raw, say
from proctor.models.sse import EventDecoder
from proctor.runs.engine import execute
from proctor.runs.examiner import opened
from proctor.runs.ledger import LedgerWriter
from proctor.runs.lock import make_lock, write_lock
from proctor.runs.preparation import prepare_all
from proctor.runs.progress import LineProgress
from proctor.runs.replay.compare import Level
from proctor.runs.replay.requests import MAX_CHANGES, diverges
from proctor.runs.replay.wire import chat_completion, chat_events
from proctor.runs.request import Request, plan_request

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.models.scripted import Script

SOLVE: list[Any] = [
    calls(("bash", {"command": "ls; date +%s.%N"}), ("read_file", {"path": "absent"}), text="I look."),
    raw(b"", content_type="application/json"),
    call("write_file", path="answer.txt", content="42"),
    Answer(reasoning="done, I think", tool_calls=(("bash", "not json"),)),
    say("finished?"),
    call("finish", message="done"),
]
TEXT: list[Any] = [say("```bash\nprintf 42 > answer.txt; cat answer.txt\n```"), say("hm"), say("TASK_FINISHED")]


def turns(script: list[Any]) -> Script:
    """The script as a function of how often it was asked: one answer is no chat completion, so it is asked again."""
    served = iter(script)
    return lambda chat: next(served)


async def examine(folder: Path, harness: str, script: list[Any], *, stream: bool = True) -> Path:
    make_toy(folder / "tasks", "toy")
    model = folder / "model.toml"
    async with ScriptedServer(turns(script)) as server:
        model.write_text(f'name = "m"\nbase_url = "{server.base_url}"\nstream = {str(stream).lower()}\n')
        request = Request(sources=(str(folder / "tasks"),), agents=(harness,), models=(str(model),))
        plan, out = plan_request(request), folder / "run"
        preparation = await prepare_all(plan, LineProgress(lambda line: None))
        out.mkdir()
        write_lock(out, make_lock(plan, preparation.images))
        async with opened(plan, preparation) as examiner:
            execution = await execute(plan, out, examiner, concurrency=1)
    assert [str(result.outcome) for result in execution.results.values()] == ["resolved"]
    return out


def replay(run: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(cli, ["replay", str(run), "toy", "--model-calls", "--json", *options])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.sandbox
@pytest.mark.parametrize(("harness", "script", "stream"), [("tool-loop", SOLVE, True), ("tool-loop", SOLVE, False),
                                                           ("text-loop", TEXT, True)])  # fmt: skip
def test_a_trial_runs_again_on_its_answers_without_a_difference(
    tmp_path: Path, harness: str, script: list[Any], stream: bool
) -> None:
    run = anyio.run(lambda: examine(tmp_path, harness, script, stream=stream))
    code, found = replay(run, "-o", str(tmp_path / "again"))
    assert code == 0, found
    assert found["differences"] == 0
    assert (found["asked"], found["extra"], found["unasked"]) == (len(script), 0, 0)
    assert found["outcome"] == {"then": "resolved", "now": "resolved"}
    assert all(one["level"] == "clock" for one in found["divergences"]), "the time is in the output, and asked about"
    lock = json.loads((tmp_path / "again" / "run.json").read_text())
    assert lock["parent"]["trial"] == f"toy@{harness}+m@1"
    assert lock["parent"]["kind"] == "model-calls"
    assert "parent: made from" in CliRunner().invoke(cli, ["show", str(tmp_path / "again"), "toy"]).output
    with pytest.raises(RefusedError, match="proctor replay"):
        CliRunner().invoke(cli, ["run", "--resume", str(tmp_path / "again")], catch_exceptions=False)


@pytest.mark.sandbox
def test_what_is_asked_otherwise_is_reported(tmp_path: Path) -> None:
    run = anyio.run(lambda: examine(tmp_path, "tool-loop", SOLVE))
    trial = next((run / "trials").iterdir())
    lines = [json.loads(line) for line in (trial / "model-calls.jsonl").read_text().splitlines()]
    lines[2]["request"]["messages"][1]["content"] = "Write 43 to /app/answer.txt.\n"
    kept = lines[:-1]
    (trial / "model-calls.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    with LedgerWriter(run) as ledger:
        row = next(row.data for row in ledger.ledger.of("ended"))
        ledger.append("ended", {**row, "record": digest_tree(trial)})
    code, found = replay(run)
    assert code == 1
    third = next(one for one in found["divergences"] if one["call"] == 3)
    change = next(one for one in third["changes"] if one["level"] == "different")
    assert change["path"] == "messages[1].content"
    assert "Write 43" in change["then"]
    assert "Write 42" in change["now"]
    assert found["extra"] >= 1, "the record has one answer less than is asked for"
    told = CliRunner().invoke(cli, ["replay", str(run), "toy", "--model-calls"]).output
    assert "request 3 differs" in told
    assert "more than the record has answers for" in told


@pytest.mark.sandbox
def test_without_a_model_there_is_nothing_to_stand_in_for(exam: Any) -> None:
    run = exam.run([{"action": "bash", "command": "true"}])
    with pytest.raises(RefusedError, match="no call of a model is on record"):
        replay(run)
    assert shutil.which("true")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
requests = st.dictionaries(st.sampled_from(["model", "messages", "tools", "x"]), json_values, max_size=4)


@given(requests, requests)
def test_requests_diverge_exactly_when_they_differ(then: dict[str, Any], now: dict[str, Any]) -> None:
    then, now = {**then, "model": "m"}, {**now, "model": "m"}
    assert diverges(1, then, then) is None
    found = diverges(1, then, now)
    canonical = [{k: v for k, v in one.items() if v not in ([], None)} for one in (then, now)]
    same = json.dumps(canonical[0], sort_keys=True) == json.dumps(canonical[1], sort_keys=True)
    assert (found is None) == same


def test_a_divergence_is_bounded_and_knows_the_clock() -> None:
    many = {"messages": [str(number) for number in range(100)]}
    found = diverges(3, many, {"messages": ["x"] * 100})
    assert found is not None
    assert (found.call, len(found.changes), found.more) == (3, MAX_CHANGES, 100 - MAX_CHANGES)
    clock = diverges(1, {"messages": ["took 1.5s"]}, {"messages": ["took 2.5s"]})
    assert clock is not None
    assert clock.level is Level.CLOCK
    ids = [{"messages": [f"session 881bb877-83de-46d5-b904-{tail} in 1s"]} for tail in ("3e4ec94c28ae", "c4bd0322e259")]
    drawn = diverges(1, *ids)
    assert drawn is not None
    assert (drawn.level, drawn.by_chance) == (Level.DIFFERENT, True)
    assert not found.by_chance


texts = st.text(max_size=20).map(lambda text: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


@given(texts, texts, st.lists(st.tuples(texts, texts, texts), max_size=3), st.booleans())
def test_an_answer_is_the_same_after_the_wire(
    text: str, reasoning: str, sent: list[tuple[str, str, str]], streamed: bool
) -> None:
    response = {
        "message": {
            "content": text, "reasoning": reasoning or None,
            "tool_calls": [{"id": f"{one}-{n}", "name": f"f{name}", "arguments": arguments}
                           for n, (one, name, arguments) in enumerate(sent)],
        },
        "model": "m", "finish_reason": "stop", "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }  # fmt: skip
    body = chat_completion(response, "m")
    if streamed:
        decoder, assembler = EventDecoder(), Assembler()
        for event in decoder.feed(b"".join(chat_events(body, with_usage=True))):
            if event.data != "[DONE]":
                assembler.add(event.data)
        draft = assembler.answer()
    else:
        draft = whole_answer(body)
    assert (draft.text, draft.reasoning or "") == (text, reasoning)
    assert [(c.call_id, c.name, c.arguments) for c in draft.tool_calls] == [
        (f"{one}-{n}", f"f{name}", arguments) for n, (one, name, arguments) in enumerate(sent)
    ]
    assert draft.usage == response["usage"]
