"""The suite mean and its errors against worked numbers, statsmodels and scipy."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import f_oneway, ttest_1samp
from scipy.stats import t as student

from proctor.analysis.means import Tasks, suite_mean
from proctor.analysis.resample import Resampler, by_cluster, percentiles
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Integrity research, section 3.2.
A = [1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0]
B = [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
CLUSTERS = list("aaabbbcccddd")
C = [[1.0] * won + [0.0] * (5 - won) for won in (5, 3, 1, 0)]


def singles(scores: Sequence[float]) -> list[list[float]]:
    return [[float(score)] for score in scores]


def test_example_a_clustered_scores() -> None:
    mean = suite_mean(Tasks.of(singles(A), CLUSTERS))
    assert (mean.mean, mean.tasks, mean.clusters, mean.cluster_df) == (0.5, 12, 4, 3)
    assert mean.population_error == pytest.approx(0.150756, abs=1e-6)
    assert mean.cluster_error == pytest.approx(0.215166, abs=1e-6)
    assert mean.cluster_error * math.sqrt(3 / 4) == pytest.approx(0.186339, abs=1e-6)
    assert student.ppf(0.975, 3) == pytest.approx(3.182446, abs=1e-6)
    assert mean.clustered is not None
    assert mean.clustered.high - 0.5 == pytest.approx(3.182446 * 0.215166, abs=1e-5)
    assert any("few clusters (4)" in note for note in mean.notes)


def test_example_a_every_cluster_resample() -> None:
    sums = np.array(A, dtype=float).reshape(4, 3).mean(axis=1)
    means = np.array([sums[list(draw)].mean() for draw in itertools.product(range(4), repeat=4)])
    assert len(means) == 256
    assert means.std() == pytest.approx(0.186339, abs=1e-6)
    assert percentiles(means[:, None], 0.95) == (pytest.approx(0.166667, abs=1e-6), pytest.approx(0.833333, abs=1e-6))
    # The same by drawing at random, as it is done for real suites.
    values = np.array(A, dtype=float)[:, None]
    codes = np.repeat(np.arange(4), 3)
    drawn = Resampler(4, 20000, 7).ratios(by_cluster(values, codes, 4), by_cluster(np.ones_like(values), codes, 4))
    assert drawn.std() == pytest.approx(0.186339, abs=3e-3)
    assert percentiles(drawn, 0.95) == (pytest.approx(0.166667, abs=1e-6), pytest.approx(0.833333, abs=1e-6))


def test_example_b_clusters_that_all_agree() -> None:
    mean = suite_mean(Tasks.of(singles(B), CLUSTERS))
    assert mean.population_error == pytest.approx(0.150756, abs=1e-6)
    assert mean.cluster_error == pytest.approx(0.288675, abs=1e-6)
    assert mean.cluster_error * math.sqrt(3 / 4) == pytest.approx(0.25, abs=1e-9)
    assert mean.deff == pytest.approx(3.0, abs=1e-9)


def test_example_c_repeats() -> None:
    mean = suite_mean(Tasks.of(C))
    assert mean.mean == pytest.approx(0.45)
    assert (mean.tasks, mean.trials) == (4, 20)
    assert mean.population_error == pytest.approx(0.221736, abs=1e-6)
    assert mean.rerun_error == pytest.approx(0.079057, abs=1e-6)
    assert mean.icc == pytest.approx(0.578652, abs=1e-6)
    assert mean.icc_mean == pytest.approx(0.872881, abs=1e-6)
    rows = [value for one in C for value in one]
    assert np.std(rows, ddof=1) / math.sqrt(20) == pytest.approx(0.114133, abs=1e-6), "the wrong error, for contrast"


def test_the_analysis_of_variance_behind_example_c() -> None:
    values = np.array(C)
    within = values.var(axis=1, ddof=1).mean()
    between = 5 * values.mean(axis=1).var(ddof=1)
    assert (between, within) == (pytest.approx(0.983333, abs=1e-6), pytest.approx(0.125))
    assert (between - within) / 5 == pytest.approx(0.171667, abs=1e-6)


suites = st.lists(
    st.tuples(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 5)), min_size=3, max_size=25
)


@given(suites)
def test_the_cluster_error_is_that_of_statsmodels(suite: list[tuple[list[float], int]]) -> None:
    from statsmodels.api import OLS

    scores, clusters = [one for one, _ in suite], [cluster for _, cluster in suite]
    mean = suite_mean(Tasks.of(scores, clusters))
    if mean.clusters < 2:
        assert mean.cluster_error is mean.clustered is None
        return
    means = np.array([np.mean(one) for one in scores])
    fit = OLS(means, np.ones_like(means)).fit(cov_type="cluster", cov_kwds={"groups": clusters, "df_correction": True})
    assert mean.mean == pytest.approx(fit.params[0])
    assert mean.cluster_error == pytest.approx(fit.bse[0], abs=1e-9)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=12))
def test_unequal_attempts_agree_with_scipys_analysis_of_variance(scores: list[list[int]]) -> None:
    mean = suite_mean(Tasks.of(scores))
    trials = sum(map(len, scores))
    if trials == len(scores):
        assert mean.rerun_error is mean.icc is None
        return
    within = sum(((np.array(one) - np.mean(one)) ** 2).sum() for one in scores) / (trials - len(scores))
    expected = math.sqrt(within * sum(1 / len(one) for one in scores)) / len(scores)
    assert mean.rerun_error == pytest.approx(expected, abs=1e-12)
    if within > 0 and len({value for one in scores for value in one}) > 1:
        ratio = float(f_oneway(*scores).statistic)
        usual = (trials - sum(len(one) ** 2 for one in scores) / trials) / (len(scores) - 1)
        assert mean.icc == pytest.approx((ratio - 1) / (ratio + usual - 1), abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_without_clusters_the_two_population_errors_are_one(scores: list[float]) -> None:
    mean = suite_mean(Tasks.of(singles(scores)))
    assert mean.cluster_error == pytest.approx(mean.population_error, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=2, max_size=20), st.randoms())
def test_order_does_not_matter(rows: list[tuple[float, int]], random: object) -> None:
    mixed = list(rows)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    one, other = (suite_mean(Tasks.of(singles([s for s, _ in some]), [c for _, c in some])) for some in (rows, mixed))
    assert one.cluster_error == pytest.approx(other.cluster_error, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30, unique=True))
def test_the_population_interval_is_scipys(scores: list[float]) -> None:
    found = suite_mean(Tasks.of(singles(scores)), level=0.9).population
    theirs = ttest_1samp(scores, 0.5).confidence_interval(0.9)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))


def test_one_task_has_no_error_over_tasks() -> None:
    mean = suite_mean(Tasks.of([[1.0, 0.0]]))
    assert mean.population is mean.clustered is None
    assert mean.rerun_error == pytest.approx(math.sqrt(0.5 / 2))


def test_repeats_that_never_differ_are_not_called_free_of_noise() -> None:
    assert any("was not seen" in note for note in suite_mean(Tasks.of([[1.0, 1.0], [0.0, 0.0]])).notes)


def test_what_has_no_mean_is_refused() -> None:
    with pytest.raises(ConfigError):
        Tasks.of([])
    with pytest.raises(ConfigError):
        Tasks.of([[1.0], []])
    with pytest.raises(ConfigError):
        Tasks.of([[1.0]], ["a", "b"])


def test_the_population_interval_covers_as_often_as_it_says() -> None:
    """30 tasks of very different difficulty, 3 attempts each: 95 % of the intervals hold the true mean."""
    random = np.random.default_rng(11)
    held = 0
    for _ in range(2000):
        rates = random.beta(0.6, 0.9, 30)
        won = random.binomial(3, rates).astype(float)
        tasks = Tasks(np.full(30, 3.0), won, won, np.arange(30))
        interval = suite_mean(tasks).population
        assert interval is not None
        held += interval.low <= 0.4 <= interval.high
    assert 0.935 <= held / 2000 <= 0.965


def test_the_rerun_interval_covers_the_rates_of_these_very_tasks() -> None:
    random = np.random.default_rng(12)
    rates = random.uniform(0.2, 0.8, 20)
    held = 0
    for _ in range(2000):
        won = random.binomial(5, rates).astype(float)
        interval = suite_mean(Tasks(np.full(20, 5.0), won, won, np.arange(20))).rerun
        assert interval is not None
        held += interval.low <= rates.mean() <= interval.high
    assert 0.935 <= held / 2000 <= 0.965
