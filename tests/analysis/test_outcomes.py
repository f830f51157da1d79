"""Every outcome has its place wherever outcomes are listed: none can leave a denominator for want of a name."""

from __future__ import annotations

from proctor.analysis.frame import GRADED, OUTCOMES
from proctor.analysis.report.page import MARKS as REPORT_MARKS
from proctor.runs.outcome import Outcome
from proctor.runs.summary import NOT_RUN, STOPPED, UNRUNNABLE
from proctor.runs.table import MARKS


def test_the_lists_of_outcomes_agree() -> None:
    assert set(OUTCOMES) == {*map(str, Outcome), STOPPED, UNRUNNABLE, "planned"}
    assert set(REPORT_MARKS) == set(OUTCOMES)
    assert {str(mark) for mark in MARKS} == {*map(str, Outcome), STOPPED, NOT_RUN}
    assert set(GRADED) == {str(outcome) for outcome in Outcome if outcome.is_graded}
