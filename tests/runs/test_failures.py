"""Causes and cards from real records, and pointers back into them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runs.toys import make_toy

from proctor.agents.conversation import Conversation
from proctor.agents.tool_loop import note
from proctor.analysis.behaviour import Action, tool_action
from proctor.analysis.cards import holds, make_card
from proctor.analysis.observed import Pointer
from proctor.runs.behaviour import excused
from proctor.runs.failures import Resolver, read_failures
from proctor.runs.frame import load_trials, save_trials
from proctor.runs.ledger import verify_ledger
from proctor.runs.told import network_faults, pressure
from proctor.runs.trajectory import build_trajectory
from proctor.trajectories.atif import Agent, dump_trajectory


@pytest.fixture
def record(tmp_path: Path) -> Path:
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "result.json").write_text('{"stop": "finished", "a/b": {"c~d": [1, "two"]}}')
    (folder / "exec.jsonl").write_text('{"seq": 1, "subject": "ls"}\n{"seq": 7, "subject": "pytest -q"}\n')
    (tmp_path / "secret.json").write_text('{"key": "x"}')
    return folder


@pytest.mark.parametrize(
    ("pointer", "text"),
    [
        (Pointer("result.json", "/stop"), "finished"),
        (Pointer("result.json", "/a~1b/c~0d/1"), "two"),
        (Pointer("result.json", "/a~1b/c~0d"), '[1, "two"]'),
        (Pointer("exec.jsonl", "7"), '{"seq": 7, "subject": "pytest -q"}'),
        (Pointer("exec.jsonl", "2"), None),
        (Pointer("result.json", "/nothing"), None),
        (Pointer("result.json", "stop"), None),
        (Pointer("result.json", "/a~1b/c~0d/9"), None),
        (Pointer("missing.json", "/stop"), None),
        (Pointer("../secret.json", "/key"), None),
    ],
)
def test_what_stands_at_a_place(record: Path, pointer: Pointer, text: str | None) -> None:
    assert Resolver(record)(pointer) == text


def test_a_link_out_of_the_record_is_not_followed(record: Path) -> None:
    (record / "link.json").symlink_to(record.parent / "secret.json")
    assert Resolver(record)(Pointer("link.json", "/key")) is None


def test_a_conversation_that_the_tool_loop_shortened_is_context_pressure(tmp_path: Path) -> None:
    conversation = Conversation([{"role": "system", "content": "s"}])
    for number in range(3):
        conversation.add([{"role": "tool", "tool_call_id": f"call-{number}", "content": "x" * 9000}])
    steps: list[Any] = []
    note(SimpleNamespace(recorder=SimpleNamespace(step=steps.append)), conversation.fit(5000))  # type: ignore[arg-type]
    trajectory = build_trajectory(steps, session_id="s", trajectory_id="t", agent=Agent(name="tool-loop", version="2"),
                                  instruction="i", started_at="2026-01-01T00:00:00Z")  # fmt: skip
    (tmp_path / "trajectory.json").write_bytes(dump_trajectory(trajectory))
    [(what, place)] = pressure(trajectory, "finished", "")
    assert what == "the conversation was shortened"
    assert place.span == Resolver(tmp_path)(place) == "it had outgrown its budget"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two toys and three agents: one right, one idle, one that writes a wrong answer and claims that it checked."""
    folder = tmp_path_factory.mktemp("failures")
    for name in ("alpha", "beta"):
        make_toy(folder / "toys", name)
    script = [
        {"action": "read", "path": "/etc/hostname"}, {"action": "read", "path": "/etc/hostname"},
        {"action": "read", "path": "/etc/hostname"}, {"action": "write", "path": "/app/answer.txt", "content": "41"},
        {"action": "finish", "message": "All tests pass."},
    ]  # fmt: skip
    (folder / "wrong.json").write_text(json.dumps({"actions": script}))
    command = [sys.executable, "-m", "proctor", "run", str(folder / "toys"), "--agent", "oracle", "--agent", "null"]
    command += ["--agent", "scripted", "--option", f"script={folder / 'wrong.json'}", "-o", str(folder / "run")]
    done = subprocess.run(
        command, env=os.environ | {"PROCTOR_HOME": str(folder / "home")}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.sandbox
def test_the_account_is_that_of_the_ledger(run_dir: Path) -> None:
    found = read_failures(load_trials([run_dir]).trials.collect())
    ledger = verify_ledger(run_dir)
    assert found.account.planned == len(list(ledger.of("planned"))) == 6
    ended = Counter(row.data["outcome"] for row in ledger.of("ended"))
    assert {outcome: sum(causes.values()) for outcome, causes in found.account.by_outcome.items()} == ended
    assert found.account.reconciles
    assert found.account.counts == {"resolved": 2, "missing": 2, "claim": 2}
    assert found.unread == 0


@pytest.mark.slow
@pytest.mark.sandbox
def test_every_statement_of_every_card_holds(run_dir: Path) -> None:
    found = read_failures(load_trials([run_dir]).trials.collect())
    for one in found.judged:
        assert one.seen.behaviour.record is not None
        card = make_card(one)
        for statement in (*card.right, *card.wrong):
            assert holds(statement, Resolver(Path(one.seen.behaviour.record))), statement
    assert [card.dropped for card in found.cards()] == [0] * 4
    liar = next(card for card in found.cards() if card.agent == "scripted")
    assert (liar.cause, liar.certainty) == ("claim", "heuristic")
    assert {statement.text.split()[0] for statement in liar.wrong} >= {"It", "2"}


@pytest.mark.slow
@pytest.mark.sandbox
def test_without_records_only_outcomes_speak(run_dir: Path, tmp_path: Path) -> None:
    trials = load_trials([run_dir]).trials.collect()
    save_trials(trials, tmp_path / "trials.parquet")
    found = read_failures(load_trials([tmp_path / "trials.parquet"]).trials.collect())
    assert found.unread == 6
    assert found.account.counts == {"resolved": 2, "unclassified": 4}
    assert found.account.reconciles


@pytest.mark.sandbox
def test_work_that_only_has_the_wrong_form_is_found_by_a_second_grading(tmp_path: Path) -> None:
    root = make_toy(tmp_path, "toy", more='carry = "paths"\ncarry_paths = ["/app/answer.txt"]\n')
    (root / "tests" / "test.sh").write_text(
        "#!/bin/sh\nmkdir -p /logs/verifier\n"
        'if printf "42\\n" | cmp -s - /app/answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
    )
    scripts = {
        "fenced": "printf '```\\n42\\n```\\n' > answer.txt", "elsewhere": "mkdir out; echo 42 > out/answer.txt",
        "wrong": "mkdir out; echo 41 > out/answer.txt", "right": "echo 42 > answer.txt",
    }  # fmt: skip
    command = [sys.executable, "-m", "proctor", "run", str(root), "-o", str(tmp_path / "run")]
    for label, text in scripts.items():
        actions = tmp_path / f"{label}.json"
        actions.write_text(json.dumps([{"action": "bash", "command": text}, {"action": "finish"}]))
        command += ["--agent", f"{label}=scripted", "--option", f"{label}.script={actions}"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = read_failures(load_trials([tmp_path / "run"]).trials.collect())
    causes = {one.seen.behaviour.agent: one.cause and one.cause.name for one in found.judged}
    assert causes["right"] is None
    assert causes["fenced"] == causes["elsewhere"] == "format"
    assert causes["wrong"] != "format"
    assert {one.seen.outcome for one in found.judged if one.cause} == {"unresolved"}, "the grade itself stays"
    for card in found.cards():
        assert card.dropped == 0


def test_a_network_that_was_broken_on_purpose_is_nobodys_failure(tmp_path: Path) -> None:
    lines = [
        {"kind": "connection", "at": 1.0, "decision": "allowed", "name": "api.example"},
        {"kind": "request", "at": 1.5, "decision": "allowed", "name": "api.example", "status": 503, "fault": "status"},
    ]
    (tmp_path / "network.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = network_faults(tmp_path / "network.jsonl")
    assert found == {"network.jsonl#2": ("api.example", "network: status")}
    assert Resolver(tmp_path)(Pointer.parse("network.jsonl#2", "503")) is not None
    assert network_faults(tmp_path / "none.jsonl") == {}

    def call(command: str, *, failed: bool) -> Action:
        return tool_action("bash", {"command": command}, result="", failed=failed, evidence="exec.jsonl#1")

    calls = [call("curl http://api.example/v1", failed=True), call("curl http://other.example/", failed=True),
             call("curl http://api.example/v2", failed=False)]  # fmt: skip
    assert [one.injected for one in excused(calls, frozenset({"api.example"}))] == [True, False, False]
