"""From a report to the strict verdict. Pure; docs/design/verdict-channel.md gives the reasons.

Exit codes and printed text play no part. Whatever goes wrong before graded code could run is the machinery's (`error`);
whatever goes wrong after it is on the candidate's account (`unresolved`, with a finding), because a verdict
that could be turned into `error` from inside would let a failing candidate leave the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proctor.grading.compat import is_cut
from proctor.grading.contract import GradeFinding, TestOutcome, TestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from proctor.grading.report import Report, Seen
    from proctor.grading.sentinels import SentinelPlan

Group = Literal["fail_to_pass", "pass_to_pass"]
_GOOD = frozenset({TestStatus.PASSED, TestStatus.XFAILED})
_SEVERITY = (
    TestStatus.ERROR,
    TestStatus.FAILED,
    TestStatus.MISSING,
    TestStatus.SKIPPED,
    TestStatus.XPASSED,
    TestStatus.XFAILED,
    TestStatus.PASSED,
)


@dataclass(frozen=True, slots=True)
class StrictVerdict:
    """What one run of the tests proves."""

    verdict: Literal["resolved", "unresolved", "error"]
    tests: tuple[TestOutcome, ...] = ()
    findings: tuple[GradeFinding, ...] = ()
    error: str = ""


def judge(
    report: Report,
    sentinels: SentinelPlan,
    *,
    runner: str,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    truncated_ids: bool = False,
    ended_by: str = "",
) -> StrictVerdict:
    """Both groups must hold: every expected test ran exactly once and passed, and the sentinels came out as planned.

    `ended_by` says what cut the run short (EXEC_TIMEOUT, OOM, …), if anything did. Statuses that count as passed
    are PASSED and XFAILED by a mark; a skip, an xfail raised by running code and an unexpected pass do not.
    """
    if not fail_to_pass and not pass_to_pass:
        return StrictVerdict("error", error="the task names no expected test")
    if not report.started:
        why = report.broken or ended_by or "no first frame"
        return StrictVerdict("error", error=f"the test process did not start: {why}")
    outcomes, trouble = _outcomes(report, fail_to_pass, pass_to_pass, truncated_ids)
    if report.broken and not report.forged:
        return StrictVerdict("error", outcomes, error=f"the report is not valid: {report.broken}")
    expected = {o.test_id for o in outcomes}
    twice = sorted(expected & report.duplicates)
    if twice:
        trouble.append(GradeFinding("reported-twice", f"{len(twice)} expected tests: {twice[0]}", "review"))
    findings = [*trouble, *_run_findings(report, ended_by), *_sentinel_findings(report, sentinels, runner, outcomes)]
    sound = all(f.severity == "note" for f in findings) and report.ended and not ended_by
    good = all(o.ok for o in outcomes)
    return StrictVerdict("resolved" if good and sound else "unresolved", outcomes, tuple(findings))


def match(test_id: str, tests: Iterable[Seen], *, truncated_ids: bool) -> list[Seen]:
    """The reported tests that an expected id stands for.

    In this order: the id itself; a printed form (`method (class)`, a docstring's first line); for cut ids a
    prefix; at last a bare method name. All that match count, and all must agree.
    """
    listed = list(tests)
    exact = [t for t in listed if t.test_id == test_id]
    if exact and not (truncated_ids and is_cut(test_id)):
        return exact
    if truncated_ids and is_cut(test_id):
        return [t for t in listed if t.test_id.startswith(test_id)]
    named = [t for t in listed if test_id in t.names]
    return named or [t for t in listed if t.method == test_id]


def is_ok(seen: Seen) -> bool:
    """Whether a status counts as passed in the strict verdict."""
    return seen.status in _GOOD and not seen.conflict and not seen.raised_xfail


def _outcomes(
    report: Report, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str], truncated_ids: bool
) -> tuple[tuple[TestOutcome, ...], list[GradeFinding]]:
    outcomes: list[TestOutcome] = []
    findings: list[GradeFinding] = []
    groups: tuple[tuple[Group, Sequence[str]], ...] = (("fail_to_pass", fail_to_pass), ("pass_to_pass", pass_to_pass))
    tests = list(report.tests.values())
    for group, ids in groups:
        for test_id in ids:
            found = match(test_id, tests, truncated_ids=truncated_ids)
            status = min((t.status for t in found), key=_SEVERITY.index, default=TestStatus.MISSING)
            ok = bool(found) and all(is_ok(t) for t in found)
            outcomes.append(TestOutcome(test_id, group, status, ok))
            if any(t.conflict for t in found):
                findings.append(GradeFinding("outcome-conflict", f"{test_id}: reported passed, but raised", "review"))
            if any(t.raised_xfail for t in found):
                findings.append(GradeFinding("raised-xfail", f"{test_id}: xfail raised by running code", "review"))
            if status is TestStatus.SKIPPED and group == "fail_to_pass":
                findings.append(GradeFinding("skipped-expected", f"{test_id}: skipped, which is not passed"))
    return tuple(outcomes), findings


def _run_findings(report: Report, ended_by: str) -> Iterable[GradeFinding]:
    if report.forged:
        yield GradeFinding("forged-report", report.broken, "disqualify")
    elif not report.ended:
        yield GradeFinding("no-end", f"the test process ended early ({ended_by or 'it left on its own'})", "review")
    elif ended_by:
        yield GradeFinding("cut-short", f"the run was ended by {ended_by}", "review")


def _sentinel_findings(
    report: Report, plan: SentinelPlan, runner: str, outcomes: Sequence[TestOutcome]
) -> Iterable[GradeFinding]:
    """Sentinels that came out otherwise than planned. Nothing is said when no test ran at all: then none can be ok."""
    if not report.tests:
        return
    by_name: dict[str, list[Seen]] = {}
    for seen in report.tests.values():
        by_name.setdefault(_last_name(seen, runner), []).append(seen)
    for name, wanted in ((plan.must_pass, TestStatus.PASSED), (plan.must_fail, TestStatus.FAILED)):
        got = [t.status for t in by_name.get(name, [])]
        if got != [wanted]:
            told = ", ".join(got) or "missing"
            severity: Literal["review", "disqualify"] = "disqualify" if TestStatus.PASSED in got else "review"
            yield GradeFinding("sentinel", f"a test that must end as {wanted} was reported as {told}", severity)
    decoys: dict[str, list[Seen]] = {}
    for name in plan.decoys:
        for seen in by_name.get(name, []):
            decoys.setdefault(container(seen.test_id, runner), []).append(seen)
            if seen.status in (TestStatus.PASSED, TestStatus.XPASSED):
                yield GradeFinding("sentinel", f"a decoy in {container(seen.test_id, runner)} passed", "disqualify")
    if runner == "sympy":
        return
    yield from _unguarded(report, decoys, runner, outcomes)


def _unguarded(
    report: Report, decoys: dict[str, list[Seen]], runner: str, outcomes: Sequence[TestOutcome]
) -> Iterable[GradeFinding]:
    """Containers in which an expected test passed although no decoy failed beside it."""
    expected = [o.test_id for o in outcomes if o.ok]
    tests = list(report.tests.values())
    needed = {
        container(seen.test_id, runner)
        for test_id in expected
        for seen in match(test_id, tests, truncated_ids=is_cut(test_id))
        if seen.status is TestStatus.PASSED
    }
    for place in sorted(needed):
        failed = any(t.status in (TestStatus.FAILED, TestStatus.ERROR) for t in decoys.get(place, []))
        if not failed:
            yield GradeFinding("sentinel", f"no decoy failed in {place} although tests passed there", "review")


def _last_name(seen: Seen, runner: str) -> str:
    if runner == "pytest":
        return seen.test_id.rpartition("::")[2]
    return seen.method or seen.test_id.rpartition(".")[2]


def container(test_id: str, runner: str) -> str:
    """The module (pytest) or class (unittest, Django) that holds a test."""
    return test_id.partition("::")[0] if runner == "pytest" else test_id.rpartition(".")[0]
