"""The host's half of the channel: only a whole, honest report can become `resolved`."""

from __future__ import annotations

import hashlib
import hmac
import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.grading.contract import TestOutcome, TestStatus
from proctor.grading.flaky import settle, unsettled
from proctor.grading.report import parse_report
from proctor.grading.sentinels import SentinelPlan, plan_sentinels
from proctor.grading.verdict import StrictVerdict, judge

NONCE = b"n" * 32
F2P, P2P = ("m.py::test_new",), ("m.py::test_old",)
PLAN = plan_sentinels([*F2P, *P2P])
Frames = list[dict[str, Any]]


def phases(test_id: str, outcome: str = "passed", seen: str = "nothing", xfail: str = "") -> Frames:
    parts = [("setup", "passed", "nothing", ""), ("call", outcome, seen, xfail), ("teardown", "passed", "nothing", "")]
    return [{"t": "phase", "id": test_id, "when": w, "outcome": o, "seen": s, "xfail": x} for w, o, s, x in parts]


def honest() -> Frames:
    return [
        {"t": "start", "runner": "pytest", "python": "3.11.2"},
        {"t": "collected", "count": 2},
        *phases(F2P[0]),
        *phases(P2P[0]),
        *phases(f"m.py::{PLAN.decoys[-1]}", "failed", "error"),
        *phases(f"../tmp/x.py::{PLAN.must_pass}"),
        *phases(f"../tmp/x.py::{PLAN.must_fail}", "failed", "error"),
        {"t": "end", "code": 1},
    ]


def encode(frames: Frames, nonce: bytes = NONCE, *, renumber: bool = True) -> bytes:
    out, mac = b"", b""
    for number, frame in enumerate(frames):
        numbered = {**frame, "seq": number} if renumber else frame
        body = json.dumps(numbered, sort_keys=True, separators=(",", ":")).encode()
        mac = hmac.new(nonce, mac + body, hashlib.sha256).hexdigest().encode()
        out += mac + b" " + body + b"\n"
    return out


def verdict_of(raw: bytes, plan: SentinelPlan = PLAN, **changes: Any) -> StrictVerdict:
    report = parse_report(raw, NONCE, runner="pytest")
    return judge(report, plan, **{"runner": "pytest", "fail_to_pass": F2P, "pass_to_pass": P2P, **changes})


def test_an_honest_report_resolves() -> None:
    assert verdict_of(encode(honest())).verdict == "resolved"


@given(st.data())
def test_no_cut_of_the_bytes_resolves(data: st.DataObject) -> None:
    raw = encode(honest())
    end = data.draw(st.integers(0, len(raw) - 1))
    assert verdict_of(raw[:end]).verdict != "resolved"


@given(st.data())
def test_no_changed_byte_resolves(data: st.DataObject) -> None:
    raw = bytearray(encode(honest()))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    assert verdict_of(bytes(raw)).verdict != "resolved"


@given(st.data())
def test_no_report_with_a_numbered_frame_missing_doubled_or_moved_resolves(data: st.DataObject) -> None:
    frames = [{**frame, "seq": number} for number, frame in enumerate(honest())]
    index = data.draw(st.integers(0, len(frames) - 1))
    change = data.draw(st.sampled_from(["drop", "double", "move"]))
    frame = frames.pop(index)
    if change == "double":
        frames[index:index] = [frame, frame]
    elif change == "move":
        frames.insert((index + data.draw(st.integers(1, len(frames)))) % (len(frames) + 1), frame)
    assert verdict_of(encode(frames, renumber=False)).verdict != "resolved"


@given(st.binary(max_size=400))
def test_bytes_of_others_never_resolve(raw: bytes) -> None:
    assert verdict_of(raw).verdict != "resolved"
    assert not raw or verdict_of(encode(honest()) + raw).verdict != "resolved"


def test_frames_made_with_another_nonce_are_forged() -> None:
    report = parse_report(encode(honest(), b"x" * 32), NONCE, runner="pytest")
    assert (report.forged, report.started) == (True, False)
    assert verdict_of(encode(honest(), b"x" * 32)).verdict == "error"


def without(name: str) -> Frames:
    return [f for f in honest() if name not in str(f.get("id", ""))]


CASES: dict[str, tuple[Frames, str]] = {
    "no start": (honest()[1:], "error"),
    "no end": (honest()[:-1], "unresolved"),
    "id missing": (without(F2P[0]), "unresolved"),
    "id twice": ([*honest()[:2], *phases(F2P[0]), *honest()[2:]], "unresolved"),
    "sentinel pair missing": (without("x.py"), "unresolved"),
    "decoy missing": (without(PLAN.decoys[-1]), "unresolved"),
    "must-fail passed": (
        [*without(PLAN.must_fail)[:-1], *phases(f"x.py::{PLAN.must_fail}"), honest()[-1]],
        "unresolved",
    ),
    "decoy passed": (
        [*without(PLAN.decoys[-1])[:-1], *phases(f"m.py::{PLAN.decoys[-1]}"), honest()[-1]],
        "unresolved",
    ),
    "conflict": ([*without(F2P[0])[:-1], *phases(F2P[0], "passed", "error"), honest()[-1]], "unresolved"),
    "skipped": ([*without(F2P[0])[:-1], *phases(F2P[0], "skipped", "skip"), honest()[-1]], "unresolved"),
    "raised xfail": (
        [*without(F2P[0])[:-1], *phases(F2P[0], "skipped", "xfail", "raised"), honest()[-1]],
        "unresolved",
    ),
    "xpass": ([*without(F2P[0])[:-1], *phases(F2P[0], "passed", "nothing", "mark"), honest()[-1]], "unresolved"),
    "frame after end": ([*honest(), {"t": "collected", "count": 1}], "error"),
    "unknown frame": ([*honest()[:2], {"t": "verdict", "resolved": True}, *honest()[2:]], "error"),
    "unknown field": ([*honest()[:1], {"t": "collected", "count": 2, "x": 1}, *honest()[2:]], "error"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_odd_does_not_resolve(case: str) -> None:
    frames, expected = CASES[case]
    assert verdict_of(encode(frames)).verdict == expected


def test_a_run_that_was_cut_short_does_not_resolve() -> None:
    assert verdict_of(encode(honest()), ended_by="EXEC_TIMEOUT").verdict == "unresolved"


def test_a_task_without_expected_tests_is_an_error() -> None:
    assert verdict_of(encode(honest()), fail_to_pass=(), pass_to_pass=()).verdict == "error"


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=20))
def test_sentinel_names_are_new_and_distinct(expected: list[str]) -> None:
    plan = plan_sentinels(expected)
    names = [plan.module, plan.must_pass, plan.must_fail, *plan.decoys]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name.startswith("test_") for name in names)
    assert not set(names) & set(expected)


def test_sentinel_names_are_no_names_of_other_tests() -> None:
    """Tests that a dataset does not list, or lists by their docstrings, have names of the same words."""
    words = ("field", "name", "choices", "display", "empty", "value", "default")
    listed = [f"{' '.join(words)} (app.tests.FieldTests)"]
    real = {f"test_{'_'.join(some)}" for count in (1, 2, 3) for some in product(words, repeat=count)}
    for _ in range(300):
        plan = plan_sentinels(listed)
        assert not real & {plan.module, plan.must_pass, plan.must_fail, *plan.decoys}


def outcome(status: TestStatus, group: str = "pass_to_pass") -> TestOutcome:
    return TestOutcome("t", group, status, status is TestStatus.PASSED)  # type: ignore[arg-type]


P, F = TestStatus.PASSED, TestStatus.FAILED


@pytest.mark.parametrize(
    ("statuses", "again", "ok", "unstable"),
    [
        ([P], False, True, False),
        ([F], True, False, False),
        ([F, F], False, False, False),
        ([F, P], True, False, True),
        ([F, P, P], False, True, True),
        ([F, P, F], False, False, True),
    ],
)
def test_reruns_decide_by_majority(statuses: list[TestStatus], again: bool, ok: bool, unstable: bool) -> None:
    runs = [[outcome(status)] for status in statuses]
    assert unsettled(runs) is again
    (settled,) = settle(runs)
    assert (settled.ok, settled.unstable) == (ok, unstable)


def test_fail_to_pass_is_never_run_again() -> None:
    assert not unsettled([[outcome(F, "fail_to_pass"), outcome(F)]])
    assert not unsettled([[outcome(F, "fail_to_pass")]])
