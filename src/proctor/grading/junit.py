"""A verdict from a JUnit file: ids are `classname::name`, `classname.name` or `name`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from proctor.grading.contract import GradeFinding, TestOutcome, TestStatus
from proctor.grading.verdict import Group, StrictVerdict

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_junit(data: bytes) -> dict[str, list[TestStatus]]:
    """Statuses by every form of an id. Raises ValueError for anything but plain, well-formed XML."""
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data or b"\0" in data:
        raise ValueError("document types and encodings of several bytes, which could hide one, are not accepted")
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise ValueError(f"not well formed: {error}") from error
    found: dict[str, list[TestStatus]] = {}
    for case in root.iter("testcase"):
        name, owner = case.get("name", ""), case.get("classname", "")
        kinds = {child.tag for child in case}
        status = TestStatus.PASSED
        for tag, value in (
            ("skipped", TestStatus.SKIPPED),
            ("failure", TestStatus.FAILED),
            ("error", TestStatus.ERROR),
        ):
            if tag in kinds:
                status = value
        for form in {f"{owner}::{name}", f"{owner}.{name}", name}:
            found.setdefault(form, []).append(status)
    return found


def judge_junit(
    data: bytes, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str], *, ended_by: str = ""
) -> StrictVerdict:
    """Every expected id exactly once and passed. No file or a broken one is unresolved, never a pass."""
    weak = GradeFinding("weak-channel", "JUnit file: written by a process that also ran graded code")
    if not fail_to_pass and not pass_to_pass:
        return StrictVerdict("error", error="the task names no expected test")
    problem = "" if data else "no JUnit file was left"
    found: dict[str, list[TestStatus]] = {}
    try:
        found = parse_junit(data) if data else {}
    except ValueError as error:
        problem = f"the JUnit file is not usable: {error}"
    outcomes: list[TestOutcome] = []
    twice: list[str] = []
    groups: tuple[tuple[Group, Sequence[str]], ...] = (("fail_to_pass", fail_to_pass), ("pass_to_pass", pass_to_pass))
    for group, ids in groups:
        for test_id in ids:
            got = found.get(test_id, [])
            if len(got) > 1:
                twice.append(test_id)
            status = got[0] if len(got) == 1 else TestStatus.MISSING
            outcomes.append(TestOutcome(test_id, group, status, status is TestStatus.PASSED))
    findings = [weak]
    if twice:
        findings.append(GradeFinding("reported-twice", f"{len(twice)} expected tests: {twice[0]}", "review"))
    if problem:
        findings.append(GradeFinding("no-report", problem, "review"))
    if ended_by:
        findings.append(GradeFinding("cut-short", f"the run was ended by {ended_by}", "review"))
    good = all(o.ok for o in outcomes) and not problem and not ended_by
    return StrictVerdict("resolved" if good else "unresolved", tuple(outcomes), tuple(findings))
