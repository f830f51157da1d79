"""The lock of a run and its ledger: an edited lock is found, a completed one is not, an old ledger says so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.runs.conftest import DeskExaminer, make_plan

from proctor.cli.main import main
from proctor.common import RefusedError, digest_file
from proctor.runs.contenders import select
from proctor.runs.engine import execute
from proctor.runs.formats import RunLock, load
from proctor.runs.frame import load_trials
from proctor.runs.ledger import LedgerWriter, make_row, read_ledger
from proctor.runs.lock import make_lock, relock, write_lock
from proctor.runs.session import Session
from proctor.runs.summary import read_run
from proctor.runs.vouching import lock_damage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
async def finished(run_dir: Path, desk: DeskExaminer) -> Path:
    plan = make_plan(2)
    write_lock(run_dir, make_lock(plan, {}))
    await execute(plan, run_dir, desk, concurrency=2)
    return run_dir


def image_found(run: Path) -> RunLock:
    """The lock with the image of a task that could not be had when the run began."""
    lock = load(RunLock, run / "run.json")
    task = lock.tasks[0].model_copy(update={"image_digest": "sha256:" + "1" * 64})
    return lock.model_copy(update={"tasks": [task, *lock.tasks[1:]]})


def heavier(run: Path) -> RunLock:
    lock = load(RunLock, run / "run.json")
    return lock.model_copy(update={"tasks": [lock.tasks[0].model_copy(update={"weight": 9.0}), *lock.tasks[1:]]})


CHANGES: dict[str, Callable[[Path], RunLock]] = {
    "condition": lambda run: load(RunLock, run / "run.json").model_copy(update={"condition": "hard"}),
    "limits": lambda run: load(RunLock, run / "run.json").model_copy(update={"limits": {"steps": 1}}),
    "weights": heavier,
}


@pytest.mark.parametrize("change", CHANGES)
async def test_an_edited_lock_is_damage(finished: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert next(read_ledger(finished).of("run")).data["lock"] == digest_file(finished / "run.json")
    assert main(["show", str(finished)]) == 0
    write_lock(finished, CHANGES[change](finished))
    assert main(["show", str(finished)]) == 1
    assert "DAMAGED: run.json: the lock was changed" in capsys.readouterr().out
    assert main(["show", str(finished), "--failures"]) == 1
    assert "run.json: the lock was changed" in capsys.readouterr().err
    with pytest.raises(RefusedError, match="the lock was changed"):
        select([str(finished)])
    with pytest.raises(RefusedError, match="the lock was changed"):
        Session.resume(finished)


async def test_a_completed_lock_is_named_before_it_is_written(finished: Path) -> None:
    before = (finished / "run.json").read_bytes()
    relock(finished, image_found(finished))
    after = (finished / "run.json").read_bytes()
    assert lock_damage(finished, read_ledger(finished)) is None
    (finished / "run.json").write_bytes(before)  # as a crash between row and file leaves it
    assert lock_damage(finished, read_ledger(finished)) is None
    relock(finished, image_found(finished))  # the resumed run does it again
    (finished / "run.json").write_bytes(before)
    assert lock_damage(finished, read_ledger(finished)) is None
    (finished / "run.json").write_bytes(after)
    with LedgerWriter(finished) as ledger:
        ledger.append("resumed", {"remaining": 0, "scored": 4})
    assert read_run(finished).damage is None
    (finished / "run.json").write_bytes(before)
    assert "the lock was changed" in (read_run(finished).damage or "")


async def test_a_ledger_that_names_no_lock_is_valid_and_says_so(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, prev = b"", read_ledger(finished).rows[0].prev
    for row in read_ledger(finished).rows:
        data = {name: value for name, value in row.data.items() if name != "lock"}
        made, line = make_row(row.seq, row.at, row.kind, data, prev)
        old, prev = old + line, made.hash
    (finished / "ledger.jsonl").write_bytes(old)
    head = {"version": 1, "rows": len(read_ledger(finished).rows), "hash": prev}
    (finished / "ledger.head").write_text(json.dumps(head))
    assert main(["show", str(finished)]) == 0
    assert "the lock is not vouched for" in capsys.readouterr().out
    assert [(one.damage, one.vouched) for one in load_trials([finished]).inputs] == [(None, False)]
    page = finished.parent / "report.json"
    assert main(["report", str(finished), "-o", str(page)]) == 0
    trust = json.loads(page.read_text())["trust"]
    assert any("not vouched for" in line for line in trust["reservations"])
    relock(finished, image_found(finished))
    assert not read_run(finished).vouched, "what came before is still not known"


async def test_what_is_still_written_is_not_damaged(finished: Path) -> None:
    with LedgerWriter(finished):
        with (finished / "ledger.jsonl").open("ab") as file:
            file.write(b'{"half a row')
        assert main(["show", str(finished)]) == 0
    assert main(["show", str(finished)]) == 1
