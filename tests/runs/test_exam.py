"""Real exams: real sandboxes, real harnesses, real grading, through the command line."""

from __future__ import annotations

import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.runs.leaks import children, footprint, open_files
from tests.runs.toys import make_toy

from proctor.runs.engine import execute
from proctor.runs.examiner import opened
from proctor.runs.formats import GradeFile, ReceiptFile, RunLock, Stage, TrialResult, load
from proctor.runs.ledger import verify_ledger
from proctor.runs.outcome import Outcome
from proctor.runs.preparation import prepare_all
from proctor.runs.progress import LineProgress
from proctor.runs.record import read_lines
from proctor.runs.request import Request, plan_request

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

NOTHING: dict[str, list[str]] = {"edges": [], "groups": [], "processes": [], "mounts": [], "loops": []}
SLOW_SOLUTION = "#!/bin/sh\nsleep 20 &\nsleep 20\nprintf 42 > /app/answer.txt\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory of this module's own, with the host image in it."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    for name in ("alpha", "beta"):
        make_toy(tmp_path / "toys", name)
    return tmp_path / "toys"


def proctor(home: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "proctor", *map(str, arguments)]
    environment = os.environ | {"PROCTOR_HOME": str(home)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def test_the_oracle_resolves_and_null_does_not(home: Path, toys: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, out, err = finish(proctor(home, "run", toys, "--agent", "oracle", "--agent", "null", "-o", run_dir, "--json"))
    assert code == 0, err
    agents = {row["agent"]: row for row in json.loads(out)["agents"]}
    assert (agents["oracle"]["resolved"], agents["oracle"]["graded"]) == (2, 2), out
    assert (agents["null"]["resolved"], agents["null"]["graded"]) == (0, 2)
    assert footprint(home) == NOTHING
    lock = load(RunLock, run_dir / "run.json")
    assert all(task.image_digest for task in lock.tasks)
    assert [list(task.history) for task in lock.tasks] == [["/app"], ["/app"]], "looked at, and no repository there"
    verify_ledger(run_dir)
    trial = run_dir / "trials" / "alpha@oracle@1"
    result = load(TrialResult, trial / "result.json")
    assert [time.stage for time in result.stages] == list(Stage)
    receipts = load(ReceiptFile, trial / "receipt.json")
    assert receipts.agent
    assert receipts.grading
    assert receipts.agent["end_reason"] == "CLOSED"
    assert any("solve.sh" in line["subject"] for line in read_lines(trial / "exec.jsonl"))
    assert {entry["path"] for entry in json.loads((trial / "diff.json").read_text())["entries"]} >= {"/app/answer.txt"}


SERVICE = "#!/bin/sh\nsetsid sh -c 'echo $$ > /app/pid; while :; do sleep 1; done' > /dev/null 2>&1 &\nsleep 0.3\n"
ALIVE = """\
#!/bin/sh
mkdir -p /logs/verifier
if kill -0 "$(cat /app/pid)" 2>/dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize(("carry", "resolved"), [("live", 1), ("filesystem", 0)])
def test_a_running_service_is_graded_in_place_when_the_task_says_so(
    carry: str, resolved: int, home: Path, tmp_path: Path
) -> None:
    make_toy(tmp_path / "toys", "service", solve=SERVICE, test=ALIVE, more=f'carry = "{carry}"\n')
    run_dir = tmp_path / "run"
    code, out, err = finish(proctor(home, "run", tmp_path / "toys", "--agent", "oracle", "-o", run_dir, "--json"))
    assert code == 0, err
    assert json.loads(out)["agents"][0]["resolved"] == resolved, out
    grade = load(GradeFile, run_dir / "trials" / "service@oracle@1" / "grade.json")
    assert grade.in_place == (carry == "live")
    assert footprint(home) == NOTHING


def test_the_patch_of_a_record_is_graded_again_without_an_agent(home: Path, tmp_path: Path) -> None:
    tasks = Path(__file__).resolve().parents[2] / "examples" / "demo"
    chosen = [argument for name in ("fix-median", "fix-lru-cache", "add-slugify") for argument in ("--task", name)]
    first, second = tmp_path / "first", tmp_path / "second"
    code, _, err = finish(proctor(home, "run", tasks, *chosen, "--agent", "oracle", "-o", first))
    assert code == 0, err
    patch = (first / "trials" / "proctor-demo-fix-median@oracle@1" / "deliverable.patch").read_text()
    rows = [
        {"instance_id": "proctor-demo/fix-median", "model_patch": patch, "model_name_or_path": "elsewhere"},
        {"instance_id": "proctor-demo/fix-lru-cache", "model_patch": "", "model_name_or_path": "elsewhere"},
    ]
    (tmp_path / "preds.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, err = finish(
        proctor(home, "run", tasks, *chosen, "--predictions", tmp_path / "preds.jsonl", "-o", second, "--json")
    )
    assert code == 0, err
    trials = {trial["trial"]: (trial["outcome"], trial["detail"]) for trial in json.loads(out)["trials"]}
    assert trials == {
        "proctor-demo-fix-median@elsewhere@1": ("resolved", ""),
        "proctor-demo-fix-lru-cache@elsewhere@1": ("unresolved", "the patch is empty"),
        "proctor-demo-add-slugify@elsewhere@1": ("unresolved", "there is no prediction for it"),
    }
    assert footprint(home) == NOTHING


@pytest.mark.slow
def test_ctrl_c_leaves_whole_trials_and_no_sandbox_and_the_run_can_be_resumed(home: Path, tmp_path: Path) -> None:
    make_toy(tmp_path / "toys", "quick")
    make_toy(tmp_path / "toys", "slow", solve=SLOW_SOLUTION)
    run_dir = tmp_path / "run"
    process = proctor(home, "run", tmp_path / "toys", "--agent", "oracle", "-o", run_dir)
    wait_for(lambda: (run_dir / "trials" / "quick@oracle@1").exists(), process)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    code, _, err = finish(process)
    assert code == 130, err
    assert time.monotonic() - start < 10
    assert footprint(home) == NOTHING
    assert [path.name for path in (run_dir / "trials").iterdir()] == ["quick@oracle@1"]
    (tmp_path / "toys" / "slow" / "instruction.md").write_text("changed")
    code, _, err = finish(proctor(home, "run", "--resume", run_dir))
    assert code == 4
    assert "changed since the run began: task slow" in err
    (tmp_path / "toys" / "slow" / "instruction.md").write_text("Write 42 to /app/answer.txt.\n")
    code, _out, err = finish(proctor(home, "run", "--resume", run_dir))
    assert code == 0, err
    assert load(TrialResult, run_dir / "trials" / "slow@oracle@1" / "result.json").outcome is Outcome.RESOLVED


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_and_the_next_start_cleans_up(home: Path, tmp_path: Path) -> None:
    make_toy(tmp_path / "toys", "slow", solve=SLOW_SOLUTION)
    run_dir = tmp_path / "run"
    process = proctor(home, "run", tmp_path / "toys", "--agent", "oracle", "-o", run_dir)
    wait_for(lambda: bool(footprint(home)["processes"]) and (run_dir / "trials").exists(), process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    code, _, _ = finish(process, timeout=5)
    # The second signal may meet an interpreter that is already leaving; a shell shows 130 for both.
    assert code in (130, -signal.SIGINT)
    time.sleep(0.5)
    assert footprint(home)["processes"] == []
    code, _, err = finish(proctor(home, "run", "--resume", run_dir))
    assert code == 0, err
    assert footprint(home) == NOTHING


@pytest.mark.slow
def test_fifty_trials_killed_at_random_leave_nothing_behind(home: Path, tmp_path: Path) -> None:
    for number in range(50):
        make_toy(tmp_path / "toys", f"toy-{number}")
    run_dir = tmp_path / "run"
    rng = random.Random(20)
    process = proctor(home, "run", tmp_path / "toys", "--agent", "oracle", "-o", run_dir)
    wait_for(lambda: (run_dir / "ledger.jsonl").exists(), process)
    kept: set[str] = set()
    for _ in range(12):
        time.sleep(0.2 + rng.random())
        process.kill()
        process.communicate()
        now = {path.parent.name for path in run_dir.glob("trials/[!.]*/result.json")}
        assert kept <= now
        kept = now
        process = proctor(home, "run", "--resume", run_dir)
    code, _out, err = finish(process)
    assert code == 0, err
    assert footprint(home) == NOTHING
    outcomes = [load(TrialResult, path).outcome for path in run_dir.glob("trials/*/result.json")]
    assert outcomes == [Outcome.RESOLVED] * 50
    verify_ledger(run_dir)


@pytest.mark.slow
async def test_two_hundred_trials_at_full_concurrency_leak_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROCTOR_HOME", str(home))
    make_toy(tmp_path / "toys", "toy")
    plan = plan_request(Request((str(tmp_path / "toys"),), ("oracle", "null"), attempts=100))
    preparation = await prepare_all(plan, LineProgress(lambda line: None))
    files, processes = open_files(), children()
    (run_dir := tmp_path / "run").mkdir()
    async with opened(plan, preparation) as examiner:
        execution = await execute(plan, run_dir, examiner, concurrency=200)
    outcomes = {
        label: [r.outcome for r in execution.results.values() if r.agent == label] for label in ("oracle", "null")
    }
    assert outcomes == {"oracle": [Outcome.RESOLVED] * 100, "null": [Outcome.UNRESOLVED] * 100}
    assert footprint(home) == NOTHING
    assert (open_files(), children()) == (files, processes)


def wait_for(condition: object, process: subprocess.Popen[str], deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_restores_it(home: Path, tmp_path: Path) -> None:
    """On a terminal Ctrl-C reaches the whole foreground group; the display ends, the cursor is back."""
    make_toy(tmp_path / "toys", "slow", solve=SLOW_SOLUTION)
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "proctor", "run", str(tmp_path / "toys"), "--agent", "oracle", "-o", str(run_dir)]
    child, terminal = pty.fork()
    if child == 0:
        os.execve(command[0], command, os.environ | {"PROCTOR_HOME": str(home), "TERM": "xterm-256color"})
    screen = read_until(terminal, b"execution")
    os.write(terminal, b"\x03")
    screen += read_until(terminal, None)
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert b"1 running" in screen
    assert screen.rfind(b"\x1b[?25h") > screen.rfind(b"\x1b[?25l") >= 0
    assert b"--resume" in screen.rpartition(b"record:")[2]
    assert footprint(home) == NOTHING


def read_until(terminal: int, words: bytes | None, deadline_s: float = 60) -> bytes:
    """What appears on a terminal until `words` do, or until its other end is closed."""
    seen, end = b"", time.monotonic() + deadline_s
    while words is None or words not in seen:
        assert time.monotonic() < end, seen
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    return seen
