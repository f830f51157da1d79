"""The examiner: clean-room grading.

`collect` ends the candidate and takes the deliverable; `grade` judges it in rooms of its own.
"""

from __future__ import annotations

from proctor.grading.collect import collect
from proctor.grading.contract import CompatVerdict, Grade, GradeFinding, TestOutcome, TestStatus
from proctor.grading.deliverable import Collected
from proctor.grading.grade import GradeOptions, grade

__all__ = [
    "Collected",
    "CompatVerdict",
    "Grade",
    "GradeFinding",
    "GradeOptions",
    "TestOutcome",
    "TestStatus",
    "collect",
    "grade",
]
