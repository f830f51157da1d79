"""Intervals of rates over clustered, repeated and weighted tasks: coverage by simulation, and limits that must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from statsmodels.stats.proportion import confint_proportions_2indep

from proctor.analysis.means import Tasks, suite_mean
from proctor.analysis.proportions import proportion, score_interval
from proctor.analysis.rates import difference, rate_interval


def draw(
    random: np.random.Generator, clusters: int, size: int, rate: float, icc: float, attempts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Per-task rates of a suite whose clusters have beta-distributed success rates."""
    spread = (1 - icc) / icc
    codes = np.repeat(np.arange(clusters), size)
    return random.binomial(attempts, random.beta(rate * spread, (1 - rate) * spread, clusters)[codes]) / attempts, codes


CASES = [
    (clusters, rate, icc, attempts)
    for clusters in (5, 10, 20, 60)
    for rate in (0.1, 0.5, 0.97)
    for icc in (0.05, 0.4)
    for attempts in (1, 4)
]


@pytest.mark.slow
def test_coverage_with_clusters_and_that_a_t_interval_does_not_have_it() -> None:
    random = np.random.default_rng(1)
    ours, theirs = [], []
    for clusters, rate, icc, attempts in CASES:
        held = np.zeros(2)
        for _ in range(400):
            means, codes = draw(random, clusters, 5, rate, icc, attempts)
            plain = suite_mean(Tasks(np.ones(len(means)), means, means**2, codes)).clustered
            assert plain is not None
            for number, interval in enumerate((rate_interval(means, codes), plain)):
                held[number] += interval.low <= rate <= interval.high
        ours.append(held[0] / 400)
        theirs.append(held[1] / 400)
    assert min(ours) >= 0.88
    assert np.mean(ours) >= 0.95
    assert min(theirs) < 0.5, "this is why rates do not get a t interval"


@given(st.integers(1, 80).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_independent_tasks_once_each_get_wilsons_interval(kn: tuple[int, int]) -> None:
    k, n = kn
    means = np.array([1.0] * k + [0.0] * (n - k))
    assert rate_interval(means, np.arange(n)) == proportion(k, n)
    assert rate_interval(means, np.arange(n), np.full(n, 2.5)).low == pytest.approx(proportion(k, n).low, abs=1e-12)
    assert rate_interval(means, np.arange(n), exact=True).high == pytest.approx(
        proportion(k, n, method="clopper-pearson").high
    )


cases = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), st.floats(0.1, 5)), min_size=1, max_size=40)


@given(cases)
@example([(0.0, 0, 1.0), (0.0, 1, 1.0), (1.3377220916470017e-197, 2, 1.0)])
@example([(1.0, 0, 1.0), (1.0, 1, 1.0), (1 - 2**-53, 2, 1.0)])
def test_an_interval_holds_its_point_and_stays_inside(rows: list[tuple[float, int, float]]) -> None:
    means, codes, weights = (np.array(one) for one in zip(*rows, strict=True))
    for interval in (rate_interval(means, codes), rate_interval(means, codes, weights)):
        assert 0 <= interval.low <= interval.point <= interval.high <= 1
        assert interval.high - interval.low > 0


@given(cases)
def test_clusters_never_narrow_it(rows: list[tuple[float, int, float]]) -> None:
    means, codes, _ = (np.array(one) for one in zip(*rows, strict=True))
    alone, together = rate_interval(means, np.arange(len(means))), rate_interval(means, codes)
    assert together.high - together.low >= alone.high - alone.low - 1e-12


@given(cases)
def test_failure_mirrors_success(rows: list[tuple[float, int, float]]) -> None:
    means, codes, weights = (np.array(one) for one in zip(*rows, strict=True))
    one, other = rate_interval(means, codes, weights), rate_interval(1 - means, codes, weights)
    assert one.low == pytest.approx(1 - other.high, abs=1e-6)


def test_what_clustered_tasks_are_worth() -> None:
    """Twelve tasks in four clusters (example A of the integrity research): p(1-p)/V tasks, and t instead of z."""
    means = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0], dtype=float)
    worth = 0.25 / 0.215166**2 * (1.959964 / 3.182446) ** 2
    found = rate_interval(means, np.repeat(np.arange(4), 3))
    expected = score_interval(0.5, worth)
    assert (found.low, found.high) == (pytest.approx(expected.low, abs=1e-5), pytest.approx(expected.high, abs=1e-5))


def test_everything_passed_is_no_certainty() -> None:
    """Twelve tasks of three clusters that all pass are worth three, not twelve."""
    clustered = rate_interval(np.ones(12), np.repeat(np.arange(3), 4))
    assert clustered.low == proportion(3, 3).low
    assert clustered.formula == "wilson/effective"


def test_a_task_of_weight_zero_is_not_there() -> None:
    means, codes = np.array([1.0, 0.0, 1.0]), np.arange(3)
    with_it = rate_interval(means, codes, np.array([1.0, 1.0, 0.0]))
    assert with_it.point == 0.5
    assert with_it.high - with_it.low >= proportion(1, 2).high - proportion(1, 2).low - 1e-9


@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
)
def test_a_difference_is_newcombes(one: tuple[int, int], other: tuple[int, int]) -> None:
    found = difference(proportion(*one), proportion(*other))
    low, high = confint_proportions_2indep(*one, *other, method="newcomb", compare="diff")
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))
