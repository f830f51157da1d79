"""How firm ranks are, against the worked numbers and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau, rankdata, spearmanr

from proctor.analysis.ranks import EXACT_CLUSTERS, enumerated, kendall, rank_rows, rank_stability, sampled
from proctor.common import ConfigError

# Integrity research, section 3.7.
WORKED = {"a": (1, 0.6, 0.2, 0.4), "b": (0.8, 0.8, 0.2, 0.2), "c": (0.6, 0.4, 0.4, 0.4)}
SCORES = st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])


def test_all_256_resamples_of_four_tasks() -> None:
    found = rank_stability(WORKED)
    assert (found.formula, found.resamples, found.seed) == ("rank/enumerated", 256, None)
    assert [one.label for one in found.systems] == ["a", "b", "c"]
    assert [one.p_first for one in found.systems] == [
        pytest.approx(value, abs=1e-6) for value in (0.576172, 0.238281, 0.185547)
    ]
    assert [one.mean for one in found.systems] == [pytest.approx(value) for value in (0.55, 0.50, 0.45)]


def test_drawn_resamples_agree_with_all_of_them() -> None:
    exact = next(enumerated(4))
    every = rank_rows(exact[0] @ np.array(list(WORKED.values())).T)
    drawn = np.concatenate([rank_rows(block @ np.array(list(WORKED.values())).T) for block, _ in sampled(4, 40_000, 1)])
    assert np.average(every, axis=0, weights=exact[1]) == pytest.approx(drawn.mean(axis=0), abs=0.02)


def test_kendall_of_the_worked_lists() -> None:
    # Integrity research, section 3.7: tau .6; Spearman .8.
    one, other = [1, 2, 3, 4, 5], [2, 1, 3, 5, 4]
    assert kendall(one, other) == pytest.approx(0.6)
    assert spearmanr(one, other).statistic == pytest.approx(0.8)


@given(st.lists(SCORES, min_size=2, max_size=8), st.data())
def test_kendall_and_ranks_are_those_of_scipy(one: list[float], data: st.DataObject) -> None:
    other = data.draw(st.lists(SCORES, min_size=len(one), max_size=len(one)))
    theirs = kendalltau(one, other).statistic
    mine = kendall(one, other)
    assert math.isnan(theirs) == math.isnan(mine)
    assert math.isnan(mine) or mine == pytest.approx(theirs)
    assert rank_rows(np.array([one]))[0] == pytest.approx(rankdata([-score for score in one]))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6).flatmap(
    lambda tasks: st.lists(st.lists(SCORES, min_size=tasks, max_size=tasks), min_size=2, max_size=5)))  # fmt: skip
def test_of_any_systems(rows: list[list[float]]) -> None:
    found = rank_stability({str(index): row for index, row in enumerate(rows)})
    assert sum(one.p_first for one in found.systems) == pytest.approx(1.0)
    assert sum(one.rank for one in found.systems) == pytest.approx(len(rows) * (len(rows) + 1) / 2)
    assert sum(one.expected for one in found.systems) == pytest.approx(len(rows) * (len(rows) + 1) / 2)
    for one in found.systems:
        assert 1 <= one.low <= one.expected + (len(rows) - 1)
        assert one.low <= one.high <= len(rows)


def test_equal_systems_share_everything() -> None:
    found = rank_stability({"a": [1.0, 0.0], "b": [1.0, 0.0]})
    assert [(one.rank, one.p_first) for one in found.systems] == [(1.5, 0.5), (1.5, 0.5)]
    assert found.tau is None


def test_whole_clusters_are_drawn() -> None:
    # One good cluster of nine tasks and one bad task: two units, so a quarter of the draws miss either.
    scores = {"a": [1.0] * 9 + [0.0], "b": [0.0] * 9 + [1.0]}
    found = rank_stability(scores, ["repo"] * 9 + ["other"])
    assert found.clusters == 2
    assert {one.label: one.p_first for one in found.systems} == {"a": pytest.approx(0.75), "b": pytest.approx(0.25)}


def test_many_clusters_are_drawn_from_a_seed() -> None:
    count = EXACT_CLUSTERS + 1
    scores = {"a": [1.0, 0.0] * count, "b": [0.0, 0.9] * count}
    one, same, other = (rank_stability(scores, resamples=500, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert one.formula == "rank/bootstrap"


def test_a_missing_score_is_not_ranked() -> None:
    with pytest.raises(ConfigError, match="missing"):
        rank_stability({"a": [1.0, math.nan], "b": [1.0, 0.0]})
    with pytest.raises(ConfigError, match="same tasks"):
        rank_stability({"a": [1.0], "b": [1.0, 0.0]})
