"""The table of outcomes: who is at fault, and who gets another try."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.agents.contract import AgentResult, StopReason
from proctor.common import ConfigError, InfraError, RefusedError
from proctor.grading.contract import Grade, GradeFinding
from proctor.runs.outcome import MAX_RETRIES, Outcome, backoff_s, from_error, from_grade, from_model_failure, may_retry
from proctor.sandbox.contract import EndReason, FileError, GuestProtocolError, LaunchError, SandboxLost

OUR_ENDS = (
    EndReason.GUEST_LOST,
    EndReason.EDGE_LOST,
    EndReason.KILLED,
    EndReason.TTL,
    EndReason.IDLE,
    EndReason.CLOSED,
)
AGENT_ENDS = (EndReason.OOM, EndReason.PIDS, EndReason.DISK, EndReason.NET_DENIED)
CHEAT = Grade("resolved", True, {}, findings=(GradeFinding("forged", "x", "disqualify"),))
ODD = Grade("resolved", True, {}, findings=(GradeFinding("odd", "x", "review"),))
RESOLVED = Grade("resolved", True, {"reward": 1.0})
UNRESOLVED = Grade("unresolved", False, {"reward": 0.0})


@pytest.mark.parametrize(
    ("error", "grading", "outcome", "retried"),
    [
        (InfraError("node"), False, Outcome.INFRA_ERROR, True),
        (LaunchError("clone3"), False, Outcome.INFRA_ERROR, True),
        (GuestProtocolError("frame"), False, Outcome.INFRA_ERROR, True),
        *((SandboxLost("x", reason=reason), False, Outcome.INFRA_ERROR, True) for reason in OUR_ENDS),
        # The candidate exhausted what it had been given: its own doing, so no retry and no way out of the denominator.
        *((SandboxLost("x", reason=reason), False, Outcome.AGENT_LIMIT, False) for reason in AGENT_ENDS),
        # The same in a grading room is not the candidate's sandbox any more.
        (SandboxLost("x", reason=EndReason.OOM), True, Outcome.INFRA_ERROR, True),
        (ValueError("a defect of ours"), False, Outcome.INFRA_ERROR, False),
        (ValueError("a defect of ours"), True, Outcome.INFRA_ERROR, False),
        (RefusedError("no usage reported, so no token limit"), False, Outcome.INFRA_ERROR, False),
        (FileError("not a directory", errno=20, path="/x"), True, Outcome.VERIFIER_ERROR, False),
        (ConfigError("tests/ is missing"), True, Outcome.VERIFIER_ERROR, False),
    ],
)  # fmt: skip
def test_errors(error: Exception, grading: bool, outcome: Outcome, retried: bool) -> None:
    verdict = from_error(error, during_grading=grading)
    assert (verdict.outcome, verdict.retryable) == (outcome, retried)
    assert verdict.detail


@pytest.mark.parametrize(
    ("stop", "grade", "outcome", "retried"),
    [
        (StopReason.FINISHED, RESOLVED, Outcome.RESOLVED, False),
        (StopReason.FINISHED, UNRESOLVED, Outcome.UNRESOLVED, False),
        (StopReason.GAVE_UP, UNRESOLVED, Outcome.UNRESOLVED, False),
        (StopReason.GAVE_UP, RESOLVED, Outcome.RESOLVED, False),
        (StopReason.ERROR, UNRESOLVED, Outcome.UNRESOLVED, False),
        (StopReason.MODEL_ERROR, UNRESOLVED, Outcome.UNRESOLVED, False),
        (StopReason.LIMIT_TIME, UNRESOLVED, Outcome.AGENT_LIMIT, False),
        (StopReason.LIMIT_STEPS, RESOLVED, Outcome.AGENT_LIMIT, False),
        (StopReason.FINISHED, Grade("error", None, {}, error="no report"), Outcome.VERIFIER_ERROR, False),
        (StopReason.FINISHED, Grade("error", None, {}, error="launch", infra=True), Outcome.INFRA_ERROR, True),
        (StopReason.LIMIT_TIME, Grade("error", None, {}, error="no report"), Outcome.VERIFIER_ERROR, False),
        (StopReason.FINISHED, CHEAT, Outcome.DISQUALIFIED, False),
        (StopReason.FINISHED, ODD, Outcome.RESOLVED, False),
    ],
)  # fmt: skip
def test_grades(stop: StopReason, grade: Grade, outcome: Outcome, retried: bool) -> None:
    verdict = from_grade(AgentResult(stop), grade)
    assert (verdict.outcome, verdict.retryable) == (outcome, retried)


def test_a_model_that_never_answers_is_infrastructure() -> None:
    verdict = from_model_failure(AgentResult(StopReason.MODEL_ERROR, "429 six times"))
    assert (verdict.outcome, verdict.retryable, verdict.detail) == (Outcome.INFRA_ERROR, True, "429 six times")


def test_three_retries_at_most() -> None:
    verdict = from_error(InfraError("x"))
    assert [may_retry(verdict, tries) for tries in (1, 2, 3, 4)] == [True, True, True, False]
    assert MAX_RETRIES == 3


@given(st.integers(1, 50), st.floats(0, 1))
def test_the_wait_grows_and_is_bounded(tries: int, jitter: float) -> None:
    assert 1 <= backoff_s(tries, 0) <= backoff_s(tries, jitter) <= 45
    assert backoff_s(tries, 0) <= backoff_s(tries + 1, 0)
