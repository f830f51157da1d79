"""A run that is killed or interrupted leaves whole trials only, and resuming finishes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proctor.common import digest_tree
from proctor.runs.formats import TrialResult, load
from proctor.runs.ledger import verify_ledger
from proctor.runs.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
TASKS = 30


def start(run_dir: Path, sleep_s: float = 0.05) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.runs.driver", str(run_dir), str(TASKS), str(sleep_s)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def check_whole(run_dir: Path) -> set[str]:
    """Every visible trial is complete; returns their ids."""
    ids = set()
    for path in (run_dir / "trials").glob("[!.]*"):
        assert load(TrialResult, path / "result.json").outcome is Outcome.RESOLVED
        assert (path / "trajectory.json").exists()
        ids.add(path.name)
    return ids


def check_finished(run_dir: Path) -> None:
    ids = check_whole(run_dir)
    assert len(ids) == TASKS
    assert not list((run_dir / "trials").glob(".*"))
    ended = {row.data["trial"]: row.data["record"] for row in verify_ledger(run_dir).of("ended")}
    assert ended == {one: digest_tree(run_dir / "trials" / one) for one in ids}


@pytest.mark.slow
def test_kill_9_at_random_points_and_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    kept: set[str] = set()
    rng = random.Random(4711)
    for _ in range(8):
        process = start(run_dir)
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.wait()
        if (run_dir / "trials").exists():
            now = check_whole(run_dir)
            assert kept <= now
            kept = now
    process = start(run_dir, sleep_s=0.0)
    assert process.wait(timeout=60) == 0
    check_finished(run_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_in_good_order(number: signal.Signals, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, sleep_s=0.5)
    time.sleep(0.4)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == 130
    ids = check_whole(run_dir)
    assert len(ids) < TASKS
    assert not list((run_dir / "trials").glob(".*"))
    ledger = verify_ledger(run_dir)
    assert ledger.rows[-1].data == {"interrupted": True}
    started, ended = ({row.data["trial"] for row in ledger.of(kind)} for kind in ("started", "ended"))
    assert started - ended == {row.data["trial"] for row in ledger.of("cancelled")}
    assert start(run_dir, sleep_s=0.0).wait(timeout=60) == 0
    check_finished(run_dir)


FULL_DISK = """
set -eu
mount -t tmpfs -o size=400k tmpfs "$1"
"$2" -m tests.runs.driver "$1/run" 30 0 > "$3/first" || echo $? > "$3/code"
ls -A "$1/run/trials" > "$3/trials"
mount -o remount,size=64m "$1"
"$2" -m tests.runs.driver "$1/run" 30 0
cp -a "$1/run" "$3/run"
"""


@pytest.mark.sandbox
def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    """On a real full file system, in a mount namespace of its own."""
    (small := tmp_path / "small").mkdir()
    (out := tmp_path / "out").mkdir()
    command = ["unshare", "-m", "sh", "-c", FULL_DISK, "sh", str(small), sys.executable, str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)
    ready, message = (out / "first").read_text().splitlines()
    assert ready == "ready"
    assert "the disk is full: cannot write" in message
    assert "--resume" in message
    assert (out / "code").read_text().strip() == "6"
    trials = (out / "trials").read_text().split()
    assert 0 < len(trials) < TASKS
    assert not any(name.startswith(".") for name in trials)
    check_finished(out / "run")
