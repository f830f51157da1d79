"""Signals in the course of a trial, each by exactly what makes it and by what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.analysis.test_drift import run
from tests.analysis.test_signals import names, observed, with_results

from proctor.analysis.causes import judge
from proctor.analysis.course import budget_left
from proctor.analysis.numbers import claimed, unsupported, values_in
from proctor.analysis.observed import FindingSeen, Observed, Pointer, State
from proctor.analysis.signals import signals


def states(contents: str, path: str = "/app/a.py") -> tuple[State, ...]:
    return tuple(State(path, letter, f"exec.jsonl#{number}") for number, letter in enumerate(contents, 1))


@pytest.mark.parametrize(
    ("contents", "seen"), [("ABA", True), ("ABCA", True), ("AABBA", True), ("AAB", False), ("ABC", False), ("", False)]
)
def test_a_cycle_is_a_return_after_two_changes(contents: str, seen: bool) -> None:
    found = {signal.name: signal for signal in signals(observed(states=states(contents)))}
    assert ("cycle" in found) is seen
    if seen:
        first, last = found["cycle"].evidence
        assert (first.place, int(last.place)) == ("1", len(contents))
        assert found["cycle"].certainty == "fact"


def test_two_files_are_no_cycle_of_one() -> None:
    assert "cycle" not in names(observed(states=states("AB") + states("A", "/app/b.py")))


E, GOOD, BAD = ("E", "ok", False), ("T", "passed", False), ("T", "1 failed", True)


@pytest.mark.parametrize(
    ("course", "lost"),
    [
        ([E, GOOD, E, BAD], True),
        ([E, GOOD, E, BAD, E, BAD], True),
        ([E, GOOD, E, BAD, E, GOOD], False),
        ([E, BAD, E, GOOD], False),
        ([E, GOOD, BAD], False),
        ([E, GOOD, E], False),
    ],
)
def test_progress_is_destroyed_when_the_same_check_passed_before(
    course: list[tuple[str, str, bool]], lost: bool
) -> None:
    assert ("destroyed progress" in names(with_results(course))) is lost
    assert "destroyed progress" not in names(replace(with_results(course), outcome="resolved"))


def test_an_injected_failure_destroys_nothing_and_stops_nobody() -> None:
    seen = with_results([E, GOOD, E, BAD])
    actions = (*seen.behaviour.actions[:-1], replace(seen.behaviour.actions[-1], injected=True))
    seen = replace(seen, behaviour=replace(seen.behaviour, actions=actions))
    assert not {"destroyed progress", "last check failed", "early stop"} & names(seen)


def test_stopping_early_needs_most_of_every_limit_left() -> None:
    seen = replace(with_results([E, BAD]), steps=2, limits={"steps": 10, "total_s": 100.0})
    assert budget_left(seen) == pytest.approx(0.8)
    assert {"early stop", "last check failed"} <= names(seen)
    long = replace(seen, behaviour=replace(seen.behaviour, wall_s=50.0))
    assert "early stop" not in names(long)
    assert "last check failed" in names(long)
    assert budget_left(replace(seen, limits={})) is None
    assert "early stop" not in names(replace(seen, stop="limit:steps"))


def test_a_tool_that_was_offered_and_never_used() -> None:
    offered = {"/opt/exam/runs": Pointer("trajectory.json", "/steps/1/message", "/opt/exam/runs")}
    assert "tool unused" in names(observed(offered=offered))
    base = run("RF")
    used = replace(base, actions=(replace(base.actions[0], text="bash /opt/exam/runs load.sql"), base.actions[1]))
    assert "tool unused" not in names(Observed(used, "unresolved", "finished", offered=offered))


def test_format_is_the_cause_only_by_a_second_grading_and_after_what_is_missing() -> None:
    note = FindingSeen("format-only", "the same work passes in the right form: moved", "note")
    cause = judge(observed(findings=(note,))).cause
    assert cause is not None
    assert (cause.name, cause.certainty) == ("format", "fact")
    assert cause.text == note.detail


def test_a_full_context_is_seen_and_is_no_cause() -> None:
    place = Pointer("trajectory.json", "/steps/2/extra/finish_reason", "length")
    seen = observed(pressure=(("an answer was cut off by its length", place),))
    assert "context pressure" in names(seen)
    assert judge(seen).cause.name == "unclassified"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "known", "left"),
    [
        ("the total is 4711", "nothing", ["4711"]),
        ("the total is 4,711.50", "sum: 4711.5", []),
        ("about 12.3 %", "0.12345", []),
        ("rounded 3.14", "3.14159", []),
        ("sum 579", "123 and 456", []),
        ("ratio 2.50", "5 and 2", []),
        ("in 2024, on 2024-11-30, 3 of 10, version 1.2", "", []),
        ("id abc123456 and 0x123456", "", []),
        ("1234 twice 1234", "", ["1234", "1234"]),
        ("0.00123", "0.00124", ["0.00123"]),
    ],
)
def test_numbers_that_stand_nowhere(text: str, known: str, left: list[str]) -> None:
    assert unsupported(text, values_in(known)) == left


@given(st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 3)), max_size=20), st.text(max_size=40))
def test_what_is_on_record_is_never_called_invented(numbers: list[float], between: str) -> None:
    text = f" {between} ".join(f"{number:.3f}" for number in numbers)
    assert unsupported(text, values_in(text)) == []
    assert len(claimed(text)) <= len(text)
