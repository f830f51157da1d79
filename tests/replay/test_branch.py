"""`proctor replay --from STEP`: the state of a step, one thing changed, and on with a live model."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from tests.runs.toys import make_toy

from proctor.common import ConfigError, RefusedError
from proctor.models.scripted import ChatRequest, ScriptedServer, call, say
from proctor.models.spec import load_model
from proctor.runs.engine import execute
from proctor.runs.examiner import opened
from proctor.runs.formats import SnapshotsFile, TrialResult, load
from proctor.runs.ledger import read_ledger
from proctor.runs.lock import make_lock, write_lock
from proctor.runs.preparation import prepare_all
from proctor.runs.progress import LineProgress
from proctor.runs.record import read_lines
from proctor.runs.replay.actions import replay_actions
from proctor.runs.replay.branch import Change, branch, read_files, read_reply, score_of, worth_of
from proctor.runs.replay.point import find_point
from proctor.runs.replay.recorded import find_recorded
from proctor.runs.replay.snapshots import SnapshotKeeper, snapshot_at, why_not_restorable
from proctor.runs.request import Request, plan_request, read_every
from proctor.runs.story import parent_of
from proctor.sandbox import Edge, SandboxSpec
from proctor.trajectories.atif import read_trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from proctor.models.scripted import Answer
    from proctor.runs.replay.branch import Branches

pytestmark = [pytest.mark.sandbox, pytest.mark.anyio]

PLAN = [
    call(
        "bash",
        command="echo begun > note.txt; rm notes.txt; mkdir d; chown 7:7 d; echo x > d/f; ln -s f d/l; chmod 4711 d/f",
    ),
    call("read_file", path="note.txt"),
    call("bash", command="cat note.txt"),
]
"""What the model does in any case: three steps (3, 4 and 5 of the trajectory), the disk changed in the first."""


def model(chat: ChatRequest) -> Answer:
    """Goes on by what it last saw: `begun` leads it astray, `42` to the answer."""
    if chat.turn < len(PLAN):
        return PLAN[chat.turn]
    seen = next(m["content"] for m in reversed(chat.messages) if m["role"] == "tool" and "wrote" not in m["content"])
    if chat.turn == len(PLAN):
        answer = "42" if "42" in seen else "41"
        return call("bash", command=f"printf {answer} > answer.txt; ls -R; stat -c %u:%g:%a d d/f")
    return call("finish", message="done") if chat.turn == len(PLAN) + 1 else say("?")


@asynccontextmanager
async def examined(folder: Path, *, snapshots: str | None = None) -> AsyncIterator[tuple[Path, ScriptedServer]]:
    """A finished run of one unresolved trial, and the model that is still there to go on with."""
    make_toy(folder / "tasks", "toy")
    async with ScriptedServer(model) as server:
        request = Request(sources=(str(folder / "tasks"),), agents=("tool-loop",), models=(f"m@{server.base_url}",),
                          record_snapshots=snapshots)  # fmt: skip
        plan, out = plan_request(request), folder / "run"
        preparation = await prepare_all(plan, LineProgress(lambda line: None))
        await anyio.Path(out).mkdir()
        write_lock(out, make_lock(plan, preparation.images))
        async with opened(plan, preparation) as examiner:
            execution = await execute(plan, out, examiner, concurrency=1)
        assert [str(one.outcome) for one in execution.results.values()] == ["unresolved"]
        yield out, server


async def branched(run: Path, step: int, change: Change, out: Path, **more: Any) -> Branches:
    return await branch(await find_recorded(run, "toy"), step, change, out, **more)


@pytest.mark.parametrize("snapshots", [None, "every"])
async def test_a_changed_result_leads_elsewhere_and_the_branch_names_its_parent(
    tmp_path: Path, snapshots: str | None
) -> None:
    async with examined(tmp_path, snapshots=snapshots) as (run, _):
        done = await branched(run, 5, Change("result", result=b"42\n"), tmp_path / "out")
    assert done.restored == ("snapshot" if snapshots else "replay")
    (result,) = done.arms["changed"]
    assert str(result.outcome) == "resolved", result
    record = tmp_path / "out" / "trials" / result.trial_id
    assert "parent: a branch off toy@tool-loop+m@1" in parent_of(read_trajectory(record / "trajectory.json"))
    row = next(read_ledger(tmp_path / "out").of("run"))
    assert (row.data["parent"]["step"], row.data["parent"]["kind"]) == (5, "branch")
    lines = list(read_lines(record / "exec.jsonl"))
    assert [bool(line.get("replayed")) for line in lines] == [bool(snapshots)] * 2 + [False] * 2
    listed = lines[-1]["stdout"]["text"]
    assert listed.endswith("7:7:755\n0:0:4711\n"), "owners and special bits are restored too"
    assert "note.txt" in listed
    entries = {one["path"]: one["change"] for one in json.loads((record / "diff.json").read_text())["entries"]}
    assert entries["/app/notes.txt"] == "deleted"
    assert {"/app/note.txt", "/app/answer.txt", "/app/d/f", "/app/d/l"} <= entries.keys()


async def test_a_changed_file_and_a_changed_reply_and_a_second_ask(tmp_path: Path) -> None:
    async with examined(tmp_path) as (run, server):
        source = tmp_path / "note"
        source.write_text("42\n")
        wrote = await branched(run, 4, read_files((f"/app/note.txt={source}",)), tmp_path / "w")
        assert str(wrote.arms["changed"][0].outcome) == "resolved"
        # A branch can be done again itself, and branched off: what the host changed is in its record.
        parent = await find_recorded(tmp_path / "w", "toy")
        async with Edge(pool_size=1) as edge:
            assert (await replay_actions(parent, edge)).differences == 0
        further = await branch(parent, 6, Change(), tmp_path / "w2")
        assert str(further.arms["changed"][0].outcome) == "resolved"
        reply = tmp_path / "reply.json"
        act = {"name": "bash", "arguments": {"command": "printf 42 > answer.txt"}}
        reply.write_text(json.dumps({"text": "I know", "tool_calls": [act, {"name": "finish", "arguments": {}}]}))
        asked = len(server.requests)
        said = await branched(run, 3, read_reply(reply), tmp_path / "r")
        assert str(said.arms["changed"][0].outcome) == "resolved"
        assert len(server.requests) == asked, "the reply ends the trial, so nobody else is asked"
        again = await branched(run, 5, Change(), tmp_path / "n")
        assert str(again.arms["changed"][0].outcome) == "unresolved"
        assert len(server.requests) == asked + 3, "steps 5, 6 and 7 were asked live, 3 and 4 were not"


async def test_branches_in_pairs_estimate_what_the_change_was_worth(tmp_path: Path) -> None:
    async with examined(tmp_path, snapshots="every") as (run, server):
        before = len(server.requests)
        done = await branched(run, 5, Change("result", result=b"42\n"), tmp_path / "out", count=3)
        seeds = [request.body.get("seed") for request in server.requests[before:]]
    assert {arm: [str(one.outcome) for one in results] for arm, results in done.arms.items()} == {
        "changed": ["resolved"] * 3, "original": ["unresolved"] * 3}  # fmt: skip
    assert sorted(set(seeds)) == [0, 1, 2], "each pair has a seed of its own, the same in both arms"
    assert done.worth is not None
    assert done.worth.pairs == ((1.0, 0.0),) * 3
    interval = done.worth.interval()
    assert done.worth.estimate.point == 1.0
    assert interval.low < 1.0 == interval.high, "no number of branches makes a certainty"
    assert any("temperature is 0" in note for note in done.notes)


async def test_a_state_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    async with examined(tmp_path, snapshots="2") as (run, _):
        recorded = await find_recorded(run, "toy")
        assert (find_point(recorded, 5).calls, find_point(recorded, 5).execs) == (2, 2)
        assert [step for step in range(3, 8) if snapshot_at(recorded.directory, step)] == [3, 5, 7]
        for step, words in ((2, "is the user's"), (99, "no step 99")):
            with pytest.raises(ConfigError, match=words):
                find_point(recorded, step)
        with pytest.raises(RefusedError, match="no call on the sandbox"):
            await branched(run, 7, Change("result", result=b""), tmp_path / "x")
        with pytest.raises(ConfigError, match="not an empty directory"):
            await branched(run, 5, Change(), run)
        for command, words in (
            ("truncate -s 2T holes", "when it is laid out"),
            ("mkfifo pipe", "/app/pipe is neither"),
        ):
            async with Edge(pool_size=1) as edge, await edge.create(SandboxSpec(workdir="/app")) as box:
                await box.exec(command)
                await box.export_diff(tmp_path / "odd.tar.zst")
            assert words in str(why_not_restorable(tmp_path / "odd.tar.zst"))
        archive = recorded.directory / "snapshots" / "5.tar.zst"
        archive.write_bytes(archive.read_bytes() + b"x")
        with pytest.raises((ConfigError, RefusedError), match=r"not what the record says|was changed"):
            await branched(run, 5, Change(), tmp_path / "y")


async def test_a_harness_that_does_something_else_ends_the_branch_by_name(tmp_path: Path) -> None:
    make_toy(tmp_path / "tasks", "toy")
    plan = [call("bash", command="echo $RANDOM $RANDOM $RANDOM"), call("bash", command="true"), call("finish")]
    async with ScriptedServer(plan) as server:
        request = Request(sources=(str(tmp_path / "tasks"),), agents=("tool-loop",), models=(f"m@{server.base_url}",))
        planned, out = plan_request(request), tmp_path / "run"
        preparation = await prepare_all(planned, LineProgress(lambda line: None))
        await anyio.Path(out).mkdir()
        write_lock(out, make_lock(planned, preparation.images))
        async with opened(planned, preparation) as examiner:
            await execute(planned, out, examiner, concurrency=1)
        done = await branched(out, 4, Change(), tmp_path / "branch")
    result = load(TrialResult, tmp_path / "branch" / "trials" / done.arms["changed"][0].trial_id / "result.json")
    assert (str(result.outcome), result.stop) == ("infra_error", "refused")
    assert "call 1 came out differently in stdout" in result.detail


async def test_snapshots_share_what_did_not_change_and_stay_within_their_bound(tmp_path: Path) -> None:
    notes: list[Any] = []
    async with Edge(pool_size=1) as edge, await edge.create(SandboxSpec()) as box:
        keeper = SnapshotKeeper(tmp_path, 1, notes.append, max_bytes=150_000)
        for step in range(1, 13):
            if step > 2:
                await box.exec(f"head -c 30000 /dev/urandom > /f{step % 3}; rm -f /gone; sleep 60 & true")
            await keeper.due(step, step - 1, box)
            await keeper.due(step, step - 1, box)
    kept = load(SnapshotsFile, tmp_path / "snapshots.json").snapshots
    assert [one.step for one in kept] == list(range(1, 13)), "each step once"
    assert kept[0].file == kept[1].file or kept[0].note
    files = list((tmp_path / "snapshots").iterdir())
    assert sum(path.stat().st_size for path in files) <= 150_000
    assert {one.file for one in kept if one.file} == {path.name for path in files}
    assert kept[-1].file is not None, "the newest stays"
    assert any(one.note and "more than 150000 bytes" in one.note for one in kept)
    assert len(notes) == 12
    assert all(one["took_s"] >= 0 for one in notes)


def test_what_a_person_gets_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for pair, words in (("a", "PATH=FILE"), ("a=b", "absolute path"), ("/a=" + str(path), "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            read_files((pair,))
    path.write_text("just text")
    assert (read_reply(path).reply or {})["text"] == "just text"
    for content, words in (('{"say": 1}', "unknown key"), ('{"tool_calls": [1]}', "no list of objects")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=words):
            read_reply(path)
    for text in ("never", "0", "-1"):
        with pytest.raises(ConfigError, match="--record-snapshots"):
            read_every(text)
    assert (read_every("every"), read_every("5")) == (1, 5)
    assert load_model("m@http://127.0.0.1:1/v1").name == "m"


def test_excluded_branches_leave_their_pair(tmp_path: Path) -> None:
    def result(outcome: str, reward: float | None = None) -> TrialResult:
        return TrialResult(
            run_id="r", trial_id="t", task="t", task_digest="d", agent="a", attempt=1, seed=1, tries=1, outcome=outcome,
            stop="x", rewards={} if reward is None else {"reward": reward}, started_at="", ended_at="", duration_s=0,
        )  # type: ignore[arg-type]  # fmt: skip

    assert score_of(result("resolved")) == 1.0
    assert score_of(result("unresolved", 0.25)) == 0.25
    assert score_of(result("infra_error")) is None
    worth = worth_of((result("resolved"), result("infra_error")), (result("unresolved"), result("resolved")))
    assert worth.pairs == ((1.0, 0.0),)
