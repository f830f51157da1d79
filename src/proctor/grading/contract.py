"""What a grade is. Nothing in it comes from text that graded code printed."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - field types are read at run time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal


class TestStatus(StrEnum):
    """Status of one test id, as the trusted runner saw it."""

    __test__ = False

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """One expected test. `unstable` when re-runs in fresh rooms disagreed; `runs` has them all."""

    __test__: ClassVar[bool] = False
    test_id: str
    group: Literal["fail_to_pass", "pass_to_pass"]
    status: TestStatus
    ok: bool
    unstable: bool = False
    runs: tuple[TestStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class CompatVerdict:
    """The verdict by SWE-bench's own rules (log parsing included), beside ours."""

    resolved: bool
    status: Literal["RESOLVED_FULL", "RESOLVED_PARTIAL", "RESOLVED_NO"]
    patch_applied: bool
    graded: bool
    tests: Mapping[str, Mapping[str, tuple[str, ...]]]
    """`{"FAIL_TO_PASS": {"success": […], "failure": […]}, "PASS_TO_PASS": …}`."""


@dataclass(frozen=True, slots=True)
class GradeFinding:
    """An integrity signal met while grading, with the evidence."""

    kind: str
    detail: str
    severity: Literal["note", "review", "disqualify"] = "note"


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of one trial. `verdict` is `error` when the verifier itself failed: never a pass, never a zero.

    `resolved` is None exactly when verdict is `error`. `rewards` are finite numbers.
    """

    verdict: Literal["resolved", "unresolved", "error"]
    resolved: bool | None
    rewards: Mapping[str, float]
    tests: tuple[TestOutcome, ...] = ()
    compat: CompatVerdict | None = None
    in_place: bool = False
    carry: str = ""
    carried: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    infra: bool = False
    """True when the error is the machinery's (worth a retry), not the verifier's or the candidate's."""
    findings: tuple[GradeFinding, ...] = ()
    duration_s: float = 0.0
    rooms: int = 0
    receipts: tuple[Mapping[str, Any], ...] = ()
    logs: Mapping[str, str] = field(default_factory=dict)
    """Raw verifier output for people (`test-stdout.txt`, …); decides nothing."""
