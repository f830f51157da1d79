"""`proctor replay --actions`: what was done is done again in a rebuilt sandbox, and every observation is compared."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.replay.conftest import Exam, bash

from proctor.cli.main import cli
from proctor.common import ConfigError, RefusedError, digest_tree
from proctor.runs.formats import RunLock, load
from proctor.runs.ledger import LedgerWriter
from proctor.runs.lock import relock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.sandbox

STEADY = [
    bash("printf '1\\n2\\n' > notes.txt && ls && wc -l < notes.txt"),
    {"action": "write", "path": "sub/new.txt", "content": "one\ntwo\n"},
    {"action": "edit", "path": "sub/new.txt", "old_text": "two", "new_text": "three"},
    {"action": "read", "path": "sub/new.txt"},
    {"action": "read", "path": "absent.txt"},
    bash("cat absent.txt; exit 3"),
    bash("printf '%s' '" + "x" * 40_000 + "' | wc -c"),
    bash("date; date +%s.%N; echo 'def f(): return 1' > m.py; python3 -c 'import m; print(m.f())'; ls -l m.py"),
    bash("rm -rf sub; ln -s notes.txt link; printf 42 > answer.txt; printf '\\377\\000' > bytes; cat bytes"),
    {"action": "finish"},
]


def replay(run: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(cli, ["replay", str(run), "toy", "--actions", "--json", *options])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


def test_the_same_trial_replays_with_zero_differences(exam: Exam) -> None:
    code, found = replay(exam.run(STEADY), "--repeat", "2")
    assert code == 0, found
    assert (found["differences"], found["determinism"], found["probes"]) == (0, 1.0, 0)
    levels = found["repeats"][0]["levels"]
    assert levels.count("same") == len(levels) - 1, "dates alone are not as they were"
    assert levels.count("clock") == 1
    assert all(one["level"] == "clock" and one["path"].endswith(".pyc") for one in found["repeats"][0]["disk"])


def test_the_clock_counts_when_one_is_strict(exam: Exam) -> None:
    code, found = replay(exam.run(STEADY), "--strict")
    assert code == 1
    assert found["clock"] >= 1


def test_the_first_difference_is_reported_with_its_likely_cause(exam: Exam) -> None:
    run = exam.run([
        bash("echo steady"),
        bash("python3 -c 'print({str(n) for n in range(40)})'"),
        bash("for i in 1 2 3 4 5 6 7 8; do (sleep 0.0$((RANDOM % 10)); echo $i) & done; wait"),
        bash("od -An -N8 -tx8 /dev/urandom > noise"),
    ])  # fmt: skip
    code, found = replay(run)
    assert code == 1
    first, second, *rest = found["found"]
    assert (first["where"], first["judgement"]["cause"]) == ("call 2", "randomness")
    assert "PYTHONHASHSEED" in first["judgement"]["evidence"]
    assert (second["where"], second["judgement"]["cause"]) == ("call 3", "race")
    assert [one["subject"] for one in rest] == ["/app/noise"]
    assert 0 < found["determinism"] < 1
    assert found["probes"] == 3
    told = CliRunner().invoke(cli, ["replay", str(run), "toy", "--actions", "--no-probe"]).output
    assert "first difference: call 2: python3 -c" in told
    assert "likely cause:" in told


def test_a_changed_task_a_missing_one_and_a_changed_record_are_refused_by_name(exam: Exam) -> None:
    run = exam.run([bash("echo hello")])
    task = exam.folder / "tasks-1" / "toy"
    moved = exam.folder / "moved"
    shutil.copytree(task.parent, moved)
    (task / "instruction.md").write_text("Something else.\n")
    with pytest.raises(RefusedError, match=r"task toy has changed: sha256:\w+ then, sha256:\w+ now"):
        replay(run)
    assert replay(run, "--tasks", str(moved))[0] == 0, "a copy of the same content will do"
    shutil.rmtree(task.parent)
    with pytest.raises(RefusedError, match=r"task toy cannot be loaded.*--tasks"):
        replay(run)
    with pytest.raises(ConfigError, match="no trial is called"):
        CliRunner().invoke(cli, ["replay", str(run), "absent", "--actions"], catch_exceptions=False)
    trial = next((run / "trials").iterdir())
    (trial / "exec.jsonl").write_text("")
    with pytest.raises(RefusedError, match="record was changed"):
        replay(run, "--tasks", str(moved))


def test_another_image_is_refused_by_name(exam: Exam) -> None:
    run = exam.run([bash("echo hello")])
    lock = load(RunLock, run / "run.json")
    moved = lock.tasks[0].model_copy(update={"image_digest": "sha256:" + "1" * 64})
    relock(run, lock.model_copy(update={"tasks": [moved]}))
    with pytest.raises(RefusedError, match=r"image \S+ \(sha256:1+\) of task toy is not here"):
        replay(run)


def test_what_the_record_does_not_hold_cannot_be_replayed(exam: Exam) -> None:
    run = exam.run([{"action": "write", "path": "a", "content": "b"}])
    trial = next((run / "trials").iterdir())
    shutil.rmtree(trial / "blobs")
    with LedgerWriter(run) as ledger:
        row = next(row.data for row in ledger.ledger.of("ended"))
        ledger.append("ended", {**row, "record": digest_tree(trial)})
    with pytest.raises(ConfigError, match="a blob of the trial is missing"):
        replay(run)


def test_a_trial_without_actions_says_so(exam: Exam) -> None:
    with pytest.raises(RefusedError, match="no action is on record"):
        replay(exam.run([{"action": "finish"}]))
