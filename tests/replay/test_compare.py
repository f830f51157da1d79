"""Comparing one observation with another, and naming the likely cause: functions of values."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.runs.formats import ExecLine, StreamLine
from proctor.runs.replay.actions import names_reached
from proctor.runs.replay.compare import Cause, Level, compare, judge
from proctor.runs.replay.masks import file_without_times, without_chance, without_times

if TYPE_CHECKING:
    from pathlib import Path


def line(stdout: str = "", *, command: str = "x", stderr: str = "", **changes: object) -> ExecLine:
    values: dict[str, object] = dict(
        seq=1, started_at="2026-11-30T08:43:00Z", kind="bash", subject=command, duration_s=0.1, limit_s=20.0,
        exit_code=0, stdout=StreamLine(text=stdout, total=len(stdout)), stderr=StreamLine(text=stderr, total=0),
    )  # fmt: skip
    return ExecLine(**(values | changes))  # type: ignore[arg-type]


@given(st.text(max_size=60))
def test_whatever_is_equal_is_the_same_and_masks_change_nothing_twice(text: str) -> None:
    assert compare(line(text), line(text)) == (Level.SAME, None)
    assert without_times(without_times(text)) == without_times(text)


CLOCK = [
    ("1 passed in 0.12s", "1 passed in 3.4s"),
    ("===== 3 passed in 0.01s ======", "==== 3 passed in 10.01s ====="),
    ("Mon Nov 30 14:44:00 UTC 2026", "Tue Dec  1 01:02:03 UTC 2026"),
    ("-rw-r--r-- 1 root root 5 Nov 30 14:44 a.txt", "-rw-r--r-- 1 root root 5 Dec  1 09:01 a.txt"),
    ("2026-11-30T08:43:00.123Z start", "2026-12-01T00:00:00Z start"),
    ("1796028180.25", "1796028190"),
    ("real\t0m1.204s", "real\t0m0.9s"),
]


@pytest.mark.parametrize(("then", "now"), CLOCK)
def test_what_only_the_clock_changed_is_called_so(then: str, now: str) -> None:
    level, found = compare(line(then), line(now))
    assert level is Level.CLOCK
    assert found is not None
    assert judge(line(then), [line(now)]).cause is Cause.TIME


@pytest.mark.parametrize(
    ("then", "now"),
    [("3 passed", "2 passed"), ("a.txt", "b.txt"), ("median 3.5", "median 4.5"), ("port 8080", "port 8081"),
     ("exit 10", "exit 1"), ("version 1.2.3", "version 1.2.4")],
)  # fmt: skip
def test_what_the_clock_cannot_have_changed_is_different(then: str, now: str) -> None:
    assert compare(line(then), line(now))[0] is Level.DIFFERENT


def test_every_part_of_an_observation_counts() -> None:
    base = line("a", stderr="b")
    for changed, part in (
        (line("a", stderr="c"), "stderr"),
        (line("c", stderr="b"), "stdout"),
        (line("a", stderr="b", exit_code=1), "exit_code"),
        (line("a", stderr="b", exit_code=None, signal=9), "exit_code"),
        (line("a", stderr="b", timed_out=True), "timed_out"),
        (line("a", stderr="b", digest="sha256:1"), "digest"),
        (line("a", stderr="b", error="FileError: no"), "error"),
    ):
        level, found = compare(base, changed)
        assert level is Level.DIFFERENT
        assert found
        assert found.part == part


CAUSES = [
    (Cause.RANDOMNESS, "<object at 0x7f12ab34cd56>", ["<object at 0x7f99ab34cd00>"], "cat a"),
    (Cause.RANDOMNESS, "fco_01a22d2c-c33e-79b0-904f-b73158b0b206", ["fco_01a22d2c-d13f-77a3-8939-df55ba10dd02"], "x"),
    (Cause.RANDOMNESS, "/tmp/tmpabcdef12/x", ["/tmp/tmpzyxwvu98/x"], "mktemp"),
    (Cause.RANDOMNESS, "0.5", ["0.7", "0.2"], "python3 -c 'import random; print(round(random.random(), 1))'"),
    (Cause.RACE, "a\nb\nc", ["c\na\nb"], "make all"),
    (Cause.RACE, "a 1", ["a 2", "a 1"], "(./one & ./two & wait)"),
    (Cause.NETWORK, "200 OK", ["curl: (6) Could not resolve host: example.org"], "./fetch"),
    (Cause.NETWORK, "version 1", ["version 2"], "pip download thing"),
    (Cause.ENVIRONMENT, "4 cpus", ["2 cpus", "2 cpus"], "nproc"),
    (Cause.UNKNOWN, "4 cpus", ["2 cpus"], "nproc"),
]


@pytest.mark.parametrize(("cause", "then", "now", "command"), CAUSES)
def test_the_cause_is_told_by_evidence(cause: Cause, then: str, now: list[str], command: str) -> None:
    judgement = judge(line(then, command=command), [line(text, command=command) for text in now])
    assert judgement.cause is cause, judgement
    assert judgement.evidence


def test_a_hash_seed_that_stills_the_output_is_evidence_of_chance() -> None:
    free, fixed = [line("{a, b}"), line("{b, a}")], [line("{a, b}"), line("{a, b}")]
    judgement = judge(line("{b, c, a}"), free, seeded=fixed)
    assert judgement.cause is Cause.RANDOMNESS
    assert "PYTHONHASHSEED" in judgement.evidence


def test_what_the_host_saw_on_the_network_is_evidence(tmp_path: Path) -> None:
    events = [{"v": 1, "kind": "lookup", "at": 1796028180.05, "name": "a.example"},
              {"v": 1, "kind": "lookup", "at": 1796028999.0, "name": "later.example"}]  # fmt: skip
    (tmp_path / "network.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    then = line("1", command="./fetch")
    assert names_reached(tmp_path, then) == ["a.example"]
    judgement = judge(then, [line("2", command="./fetch")], reached=["a.example"])
    assert judgement.cause is Cause.NETWORK
    assert "a.example" in judgement.evidence


def test_a_limit_met_in_one_of_two_is_a_matter_of_time() -> None:
    assert judge(line("x"), [line("", timed_out=True, exit_code=None, signal=9)]).cause is Cause.TIME


def test_a_later_difference_may_follow_from_an_earlier_one() -> None:
    assert "earlier" in judge(line("x"), [line("y")], first=False).evidence


def test_files_that_hold_times_are_looked_into() -> None:
    def compiled(mtime: int, flags: int = 0) -> bytes:
        return b"\xa7\r\r\n" + struct.pack("<III", flags, mtime, 10) + b"code"

    assert file_without_times("/a/x.pyc", compiled(1)) == file_without_times("/a/x.pyc", compiled(2))
    assert file_without_times("/a/x.pyc", compiled(1, 1)) != file_without_times("/a/x.pyc", compiled(2, 1))
    assert file_without_times("/a/x.bin", compiled(1)[:12] + b"\xff") != file_without_times("/a/x.bin", compiled(2))

    def index(mtime: int, name: bytes = b"a.py") -> bytes:
        entry = struct.pack(">10I", mtime, 0, mtime, 0, 1, mtime, 33188, 0, 0, 5) + b"s" * 20
        entry += struct.pack(">H", len(name)) + name
        entry += b"\0" * (8 - len(entry) % 8)
        return b"DIRC" + struct.pack(">II", 2, 2) + entry + entry + bytes([mtime]) * 20

    path = "/app/.git/index"
    assert file_without_times(path, index(1)) == file_without_times(path, index(2))
    assert file_without_times(path, index(1)) != file_without_times(path, index(1, b"b.py"))
    for torn in range(0, len(index(1)), 7):
        file_without_times(path, index(1)[:torn])
    assert without_chance("pid 17") == without_chance("pid 18")
