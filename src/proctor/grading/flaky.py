"""Unstable tests: what re-runs in fresh rooms say about a failing pass-to-pass test. Pure.

A pass-to-pass test that fails is run again. When the second run agrees, it has failed. When it does not, a third
run decides by majority, and the test is marked `unstable` whatever comes out. Fail-to-pass tests are never re-run
into a pass: a fix that works sometimes does not work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from proctor.grading.contract import TestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proctor.grading.contract import TestOutcome

_RETRIED = frozenset({TestStatus.FAILED, TestStatus.ERROR})


def unsettled(runs: Sequence[Sequence[TestOutcome]]) -> bool:
    """Whether another run could change the verdict: every fail-to-pass test holds, every other failure is of a
    kind that instability explains, and no majority has been reached."""
    first = runs[0]
    failing = [i for i, t in enumerate(first) if not t.ok]
    if not failing or any(first[i].group == "fail_to_pass" or first[i].status not in _RETRIED for i in failing):
        return False
    if len(runs) == 1:
        return True
    votes = [[run[i].ok for run in runs] for i in failing]
    lost = any(v.count(False) > len(v) / 2 and v.count(False) >= 2 for v in votes)
    return not lost and any(v.count(True) <= len(v) / 2 for v in votes)


def settle(runs: Sequence[Sequence[TestOutcome]]) -> tuple[TestOutcome, ...]:
    """The outcomes of the first run, with pass-to-pass failures decided by the majority of all runs."""
    settled: list[TestOutcome] = []
    for index, first in enumerate(runs[0]):
        statuses = tuple(run[index].status for run in runs)
        votes = [run[index].ok for run in runs]
        if len(runs) == 1 or first.ok or first.group == "fail_to_pass":
            settled.append(first)
            continue
        ok = votes.count(True) > votes.count(False)
        best = next((run[index].status for run in runs if run[index].ok == ok), first.status)
        settled.append(replace(first, status=best, ok=ok, unstable=len(set(votes)) > 1, runs=statuses))
    return tuple(settled)
