"""What becomes of a trial: the closed list of outcomes, and the one table that decides them.

Two questions are answered here and nowhere else. What is the outcome of an attempt, given how the harness stopped,
how the sandbox ended and what the examiner said? And may the attempt be repeated? Only faults of the machinery are
repeated; a failure that the agent brought about is its score (else an agent could buy retries, or leave the
denominator, by failing).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from proctor.common import InfraError, ProctorError, RefusedError
from proctor.sandbox.contract import EndReason, SandboxLost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.agents.contract import AgentResult, StopReason
    from proctor.grading.contract import Grade

MAX_RETRIES = 3
"""How often an attempt that failed for reasons of the machinery is repeated before it becomes `infra_error`."""


class Outcome(StrEnum):
    """Every trial ends as exactly one of these."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    AGENT_LIMIT = "agent_limit"
    DISQUALIFIED = "disqualified"
    INFRA_ERROR = "infra_error"
    VERIFIER_ERROR = "verifier_error"
    CANCELLED = "cancelled"

    @property
    def is_graded(self) -> bool:
        """True when the trial counts in the denominator of a rate."""
        return self in _GRADED


_GRADED = frozenset({Outcome.RESOLVED, Outcome.UNRESOLVED, Outcome.AGENT_LIMIT, Outcome.DISQUALIFIED})

AGENT_ENDS: Mapping[EndReason, str] = {
    EndReason.OOM: "limit:memory",
    EndReason.PIDS: "limit:pids",
    EndReason.DISK: "limit:disk",
    EndReason.NET_DENIED: "limit:network",
}
"""Ends of a sandbox that only what runs inside can bring about: it used up what it was given. All other ends are
ours.

TTL and IDLE are not here: both clocks are set longer than the trial's own limit, so when they fire the host has
stalled.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one attempt, why the harness or the room stopped, and one line for people.

    `retryable` is True for faults of the machinery only.
    """

    outcome: Outcome
    stop: str
    detail: str = ""
    retryable: bool = False


def from_error(error: Exception, *, during_grading: bool = False) -> Verdict:
    """The verdict on an attempt that an exception ended.

    An InfraError is the machinery's, unless the sandbox was lost because the candidate exhausted it. During grading,
    another error that Proctor raises on purpose is about the verifier. What is left is a defect of Proctor: not tried
    again (it would happen again) and never counted as a score.
    """
    detail = describe(error)
    if isinstance(error, SandboxLost) and error.reason in AGENT_ENDS and not during_grading:
        return Verdict(Outcome.AGENT_LIMIT, AGENT_ENDS[error.reason], detail)
    if isinstance(error, InfraError):
        stop = f"sandbox:{error.reason}" if isinstance(error, SandboxLost) else "infra"
        return Verdict(Outcome.INFRA_ERROR, stop, detail, retryable=True)
    if during_grading and isinstance(error, ProctorError):
        return Verdict(Outcome.VERIFIER_ERROR, "verifier", detail)
    return Verdict(Outcome.INFRA_ERROR, "refused" if isinstance(error, RefusedError) else "internal", detail)


def from_model_failure(result: AgentResult) -> Verdict:
    """The verdict on an attempt in which the model endpoint gave no answer after all its retries: the machinery's
    fault."""
    return Verdict(Outcome.INFRA_ERROR, str(result.stop), result.detail or "the model gave no answer", retryable=True)


def from_grade(result: AgentResult, grade: Grade) -> Verdict:
    """The verdict on an attempt that was graded.

    Order: a fault of the grading machinery, the verifier's own failure, a disqualifying fact, a limit that fired
    (also when the work would have passed: the grade still says so), the grade itself.
    """
    stop = str(result.stop)
    if grade.verdict == "error":
        if grade.infra:
            return Verdict(Outcome.INFRA_ERROR, stop, grade.error or "grading failed", retryable=True)
        return Verdict(Outcome.VERIFIER_ERROR, stop, grade.error or "the verifier gave no verdict")
    for finding in grade.findings:
        if finding.severity == "disqualify":
            return Verdict(Outcome.DISQUALIFIED, stop, f"{finding.kind}: {finding.detail}")
    if is_limit(result.stop):
        return Verdict(Outcome.AGENT_LIMIT, stop, result.detail or f"{stop} fired")
    return Verdict(Outcome.RESOLVED if grade.resolved else Outcome.UNRESOLVED, stop, result.detail)


def is_limit(stop: StopReason) -> bool:
    """True when a limit of the trial fired."""
    return str(stop).startswith("limit:")


def may_retry(verdict: Verdict, tries: int) -> bool:
    """Whether an attempt that has been tried `tries` times may be tried once more."""
    return verdict.retryable and tries <= MAX_RETRIES


def backoff_s(tries: int, jitter: float) -> float:
    """Seconds to wait after try number `tries`: 1, 2, 4 …, at most 30, each stretched by up to half (`jitter` in
    0..1)."""
    return float(min(30.0, 2.0 ** (tries - 1)) * (1.0 + jitter / 2))


def describe(error: BaseException) -> str:
    """An exception as one line of at most 500 characters: our own errors by their message, others with their
    class."""
    text = " ".join(str(error).split())
    own = type(error).__module__.startswith("proctor.")
    line = text if own and text else f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 500 else f"{line[:499]}…"
