"""Signals, the one primary cause, cards whose statements are checked, and an account that adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.analysis.test_drift import run

from proctor.analysis.behaviour import tool_action
from proctor.analysis.cards import Statement, card_lines, checked, holds, make_card, with_statements
from proctor.analysis.causes import ENDED, MEANINGS, account, judge
from proctor.analysis.frame import OUTCOMES
from proctor.analysis.observed import FindingSeen, Observed, Pointer, TestSeen
from proctor.analysis.signals import signals

if TYPE_CHECKING:
    from collections.abc import Sequence


def observed(letters: str = "RETF", outcome: str = "unresolved", stop: str = "finished", **more: Any) -> Observed:
    return Observed(run(letters), outcome, stop, **{"changed": ("app/a.py",), **more})


def graded(target: str, kept: str) -> tuple[TestSeen, ...]:
    groups = (("fail_to_pass", target), ("pass_to_pass", kept))
    return tuple(
        TestSeen(f"{group}.{number}", group, "passed" if mark == "+" else "failed", mark == "+")
        for group, marks in groups for number, mark in enumerate(marks)
    )  # fmt: skip


def names(seen: Observed) -> set[str]:
    return {signal.name for signal in signals(seen)}


FINDING = FindingSeen("forged-report", "a second report", "disqualify")
NOT_RUN = FindingSeen("not-run", "the patch is empty", "note")
LYING = "All tests pass now."


@pytest.mark.parametrize(
    ("seen", "name", "certainty"),
    [
        (observed(outcome="infra_error", stop="sandbox:GUEST_LOST"), "host fault", "fact"),
        (observed(outcome="verifier_error", grade_error="no report"), "verifier fault", "fact"),
        (observed(call_errors={"trajectory.json#/steps/1/tool_calls/0": "sandbox: gone"}), "tool fault", "fact"),
        (observed(model_errors=2), "model errors", "fact"),
        (observed(outcome="agent_limit", stop="limit:steps"), "budget end", "fact"),
        (observed(stop="gave_up"), "gave up", "fact"),
        (observed(findings=(NOT_RUN,)), "missing deliverable", "fact"),
        (observed("RF", changed=()), "no attempt", "fact"),
        (observed(findings=(FINDING,)), "constraint broken", "fact"),
        (observed("REF", final_message=LYING), "claim without event", "heuristic"),
        (observed("REF", final_message="I wrote the report to /app/out.json."), "claim without event", "heuristic"),
        (observed(tests=graded("++", "+-")), "regression broken", "fact"),
        (observed(tests=graded("+-", "++")), "partial target", "fact"),
        (observed("RRRF"), "identical repeat", "fact"),
        (observed(call_errors={"trajectory.json#/steps/1/tool_calls/0": "invalid_json: x"}), "invalid calls", "fact"),
        (observed("TEEF"), "no verification", "heuristic"),
        (observed("RF", final_message="I'm sorry, but I can't help with that."), "refusal", "heuristic"),
    ],
)
def test_what_is_seen(seen: Observed, name: str, certainty: str) -> None:
    found = {signal.name: signal for signal in signals(seen)}
    assert name in found
    assert found[name].certainty == certainty
    assert found[name].evidence, "a signal without evidence is an opinion"


@pytest.mark.parametrize(
    ("seen", "name"),
    [
        (observed("RETF", final_message=LYING), "claim without event"),
        (observed("REF", final_message="I wrote it to /app/a.py."), "claim without event"),
        (observed("RREETF"), "identical repeat"),
        (observed("rrrrrF"), "identical repeat"),
        (observed("RETF"), "no verification"),
        (observed("RETF", final_message="I cannot help it, I like tests."), "refusal"),
        (observed(tests=graded("++", "++")), "partial target"),
        (observed(tests=graded("--", "++")), "partial target"),
        (observed(changed=None), "no attempt"),
    ],
)
def test_what_is_not_seen(seen: Observed, name: str) -> None:
    assert name not in names(seen)


def with_results(pattern: Sequence[tuple[str, str, bool]]) -> Observed:
    """Calls as (letter, answer, failed)."""
    base = run("".join(letter for letter, _, _ in pattern))
    actions = tuple(
        replace(action, result=answer, failed=failed)
        for action, (_, answer, failed) in zip(base.actions, pattern, strict=True)
    )
    return Observed(replace(base, actions=actions), "unresolved", "finished", changed=("a",))


def test_an_edit_test_loop_is_four_rounds_of_the_same_failure() -> None:
    rounds = [("E", "ok", False), ("T", "3 failed", True)]
    assert "edit-test loop" in names(with_results(rounds * 4))
    assert "edit-test loop" not in names(with_results(rounds * 3))
    progress = [(letter, f"{number} {answer}", failed) for number, (letter, answer, failed) in enumerate(rounds * 4)]
    assert "edit-test loop" not in names(with_results(progress))
    assert "last check failed" in names(with_results(rounds))


def test_an_error_made_again_unchanged() -> None:
    action = tool_action("bash", {"command": "pytest -k x"}, result="no", failed=True, evidence="exec.jsonl#1")
    seen = Observed(replace(run(""), actions=(action, action)), "unresolved", "finished")
    assert "unhandled error" in names(seen)


def test_the_order_of_precedence() -> None:
    # Integrity research, section 5.2: host, tool, timeout, missing, format, constraint, claim, regression, partial.
    everything: dict[str, Any] = {
        "findings": (NOT_RUN, FINDING), "final_message": LYING, "tests": graded("+-", "-"),
        "call_errors": {"trajectory.json#/steps/1/tool_calls/0": "sandbox: x"},
    }  # fmt: skip
    seen = observed("REF", outcome="infra_error", stop="limit:steps", **everything)
    order = []
    for change in (
        {"outcome": "agent_limit"}, {"call_errors": {}}, {"stop": "finished"}, {"findings": (FINDING,)},
        {"findings": ()}, {"final_message": ""}, {"tests": graded("+-", "+")}, {"tests": graded("--", "+")},
    ):  # fmt: skip
        order.append(judge(seen).cause)
        seen = replace(seen, **change)  # type: ignore[arg-type]
    order.append(judge(seen).cause)
    found = [cause.name for cause in order if cause]
    assert found == [
        "host",
        "tool",
        "budget",
        "missing",
        "constraint",
        "claim",
        "regression",
        "partial",
        "unclassified",
    ]
    assert [name for name in MEANINGS if name != "format"] == found
    assert judge(observed(outcome="resolved")).cause is None


def test_a_cause_that_rests_on_a_guess_says_so() -> None:
    cause = judge(observed("REF", final_message=LYING)).cause
    assert cause is not None
    assert (cause.name, cause.certainty) == ("claim", "heuristic")


@given(
    st.lists(st.tuples(st.sampled_from(OUTCOMES), st.sampled_from(["RETF", "F", "RRRR"]), st.booleans()), max_size=30)
)
def test_the_account_adds_up(trials: list[tuple[str, str, bool]]) -> None:
    judged = [
        judge(observed(letters, outcome, "limit:steps" if limit else "finished"))
        for outcome, letters, limit in trials
        if outcome in ENDED
    ]
    found = account(judged, [("a", outcome) for outcome, _, _ in trials if outcome not in ENDED])
    assert found.planned == len(trials) == sum(found.counts.values())
    assert found.reconciles
    assert sum(sum(counts.values()) for counts in found.by_agent.values()) == len(trials)


RECORD = {"grade.json#/tests/0": '{"test_id": "fail_to_pass.0"}', "result.json#/stop": "finished"}


def resolve(pointer: Pointer) -> str | None:
    return RECORD.get(str(pointer))


@pytest.mark.parametrize(
    ("evidence", "right"),
    [
        ((Pointer("result.json", "/stop", "finished"),), True),
        ((Pointer("result.json", "/stop"),), True),
        ((Pointer("result.json", "/stop", "gave_up"),), False),
        ((Pointer("result.json", "/nowhere"),), False),
        ((Pointer("result.json", "/stop", "finished"), Pointer("else.json", "")), False),
        ((), False),
    ],
)
def test_a_statement_holds_only_with_evidence(evidence: tuple[Pointer, ...], right: bool) -> None:
    assert holds(Statement("It ended.", "fact", evidence), resolve) is right


def test_what_a_model_says_without_evidence_is_dropped_and_counted() -> None:
    card = checked(make_card(judge(observed(tests=graded("+-", "")))), resolve)
    true = Statement("It finished.", "heuristic", (Pointer("result.json", "/stop", "finish"),), source="a-model")
    invented = Statement("It cheated.", "fact", (Pointer("exec.jsonl", "99", "rm -rf"),), source="a-model")
    more = with_statements(card, (true,), (invented,), resolve)
    assert true in more.right
    assert invented not in more.wrong
    assert more.dropped == card.dropped + 1
    text = "\n".join(card_lines(more))
    assert "statements were dropped" in text
    assert "unresolved, partial: 1 of 2 target tests fail (fact)" in text
