"""Aggregates of random frames against the same numbers worked out row by row."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.analysis.frames import frame, trial

from proctor.analysis.aggregate import Options, aggregate
from proctor.analysis.frame import GRADED, OUTCOMES
from proctor.analysis.means import Tasks, suite_mean

OPTIONS = Options(resamples=20)
HARD = {0: "easy", 1: "hard", 2: None}


@st.composite
def suites(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Trials of two agents at up to eight tasks in three clusters, under two conditions, with anything as outcome."""
    rows = []
    count = draw(st.integers(1, 40))
    for number in range(count):
        task = draw(st.integers(0, 7))
        outcome = draw(st.sampled_from(OUTCOMES))
        tokens = draw(st.one_of(st.none(), st.integers(0, 10**6)))
        rows.append(
            trial(
                f"t{task}",
                outcome,
                agent=draw(st.sampled_from("ab")),
                attempt=number,
                condition=draw(st.sampled_from(["plain", "plain", "noisy"])),
                cluster=f"c{task % 3}",
                difficulty=HARD[task % 3],
                capabilities=["x", "y"][: task % 3],
                prompt_tokens=tokens,
                completion_tokens=0,
            )
        )
    return rows


def by_task(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[row["task"]].append(row)
    return found


def share(rows: list[dict[str, Any]], *, counted_as: bool | None = None) -> list[float]:
    """The mean result of each task; what is excluded is left out, or counted as failed or passed."""
    means = []
    for of_task in by_task(rows).values():
        results = [
            row["outcome"] == "resolved" if row["outcome"] in GRADED else counted_as
            for row in of_task
            if row["outcome"] in GRADED or counted_as is not None
        ]
        if results:
            means.append(float(np.mean(results)))
    return means


@settings(max_examples=150, deadline=None)
@given(suites())
def test_every_number_of_a_summary(rows: list[dict[str, Any]]) -> None:
    result = aggregate(frame(rows), options=OPTIONS)
    assert result.planned == len(rows)
    assert {one.agent for one in result.summaries} == {row["agent"] for row in rows}
    for found in result.summaries:
        plain = [row for row in rows if row["agent"] == found.agent and row["condition"] == "plain"]
        graded = [row for row in plain if row["outcome"] in GRADED]
        assert (found.planned, found.graded) == (len(plain), len(graded))
        assert found.resolved == sum(row["outcome"] == "resolved" for row in graded)
        assert found.outcomes == Counter(row["outcome"] for row in plain)
        assert sum(found.excluded.values()) == found.planned - found.graded
        if not plain:
            continue
        assert found.worst == pytest.approx(np.mean(share(plain, counted_as=False)))
        assert found.best == pytest.approx(np.mean(share(plain, counted_as=True)))
        if not graded:
            assert found.rate is None
            continue
        assert found.rate is not None
        assert found.worst is not None
        assert found.best is not None
        assert found.rate.point == pytest.approx(np.mean(share(plain)))
        assert (found.tasks, found.tasks_planned) == (len(by_task(graded)), len(by_task(plain)))
        scores = [[row["score"] for row in of_task] for of_task in by_task(graded).values()]
        clusters = [of_task[0]["cluster"] for of_task in by_task(graded).values()]
        expected = suite_mean(Tasks.of(scores, clusters))
        assert found.success is not None
        assert found.success.cluster_error == pytest.approx(expected.cluster_error)
        assert found.success.rerun_error == pytest.approx(expected.rerun_error)
        for group in found.groups:
            inside = [
                row
                for row in plain
                if (
                    group.name in (row["capabilities"] or [None])
                    if group.dimension == "capability"
                    else row[group.dimension] == group.name
                )
            ]
            assert group.planned == len(inside)
            assert group.resolved == sum(row["outcome"] == "resolved" for row in inside)
            assert (group.rate.point if group.rate else None) == (
                pytest.approx(np.mean(share(inside))) if share(inside) else None
            )
        tokens = found.economy[0]
        known = [row for row in graded if row["prompt_tokens"] is not None]
        assert (tokens.measure, tokens.known, tokens.graded) == ("tokens", len(known), len(graded))
        assert tokens.total == (sum(row["prompt_tokens"] for row in known) if len(known) == len(graded) else None)
        if tokens.per_trial is not None:
            means = [np.mean([row["prompt_tokens"] for row in of_task]) for of_task in by_task(known).values()]
            assert tokens.per_trial.point == pytest.approx(np.mean(means))


@settings(max_examples=100, deadline=None)
@given(suites())
def test_a_condition_is_paired_with_plain_by_task(rows: list[dict[str, Any]]) -> None:
    for found in aggregate(frame(rows), options=OPTIONS).summaries:
        mine = [row for row in rows if row["agent"] == found.agent and row["outcome"] in GRADED]
        sides = {name: by_task([row for row in mine if row["condition"] == name]) for name in ("plain", "noisy")}
        both = sides["plain"].keys() & sides["noisy"].keys()
        if not both:
            assert found.robustness == ()
            continue
        (change,) = found.robustness
        deltas = [share(sides["noisy"][task])[0] - share(sides["plain"][task])[0] for task in both]
        assert change.change.point == pytest.approx(np.mean(deltas))
        assert (change.tasks, change.unpaired) == (len(both), len(sides["plain"].keys() ^ sides["noisy"].keys()))
