"""Two agents at the same tasks: worked numbers, statsmodels and scipy, and what must hold for any data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar

from proctor.analysis import paired, posterior
from proctor.analysis.permutation import sign_flip, smallest_p, units_needed
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# integrity research, section 3.4 (computed there with scipy and statsmodels).
A = (1, 0.8, 0.6, 0.2, 1, 0.4, 0, 0.6, 0.8, 1)
B = (0.8, 0.6, 0.6, 0, 1, 0.2, 0, 0.4, 0.8, 0.8)
BY_CLUSTER = ((0.2, 0.2, 0), (0.1, -0.1, 0), (0.3, 0.2, 0.1), (0, 0, -0.1))
MCNEMAR = [(1, 8, 0.039062), (0, 5, 0.0625), (0, 6, 0.03125), (10, 25, 0.016674), (3, 3, 1.0)]

counts = st.integers(0, 40)
scores = st.lists(st.floats(-1, 1), min_size=3, max_size=12).filter(lambda d: np.std(d) > 1e-3)


def differences() -> list[float]:
    return [a - b for a, b in zip(A, B, strict=True)]


def clustered() -> tuple[list[float], list[str]]:
    pairs = [(d, f"cluster-{g}") for g, members in enumerate(BY_CLUSTER) for d in members]
    return [d for d, _ in pairs], [g for _, g in pairs]


@pytest.mark.parametrize(("b", "c", "p"), MCNEMAR)
def test_exact_mcnemar_worked_numbers(b: int, c: int, p: float) -> None:
    assert paired.mcnemar(b, c) == pytest.approx(p, abs=1e-6)


def test_mid_p_worked_number() -> None:
    assert paired.mcnemar(1, 8, mid_p=True) == pytest.approx(0.021484, abs=1e-6)


@given(counts, counts)
def test_exact_mcnemar_is_statsmodels(b: int, c: int) -> None:
    expected = reference_mcnemar([[0, b], [c, 0]], exact=True).pvalue if b + c else 1.0
    assert paired.mcnemar(b, c) == pytest.approx(float(expected))
    assert paired.mcnemar(b, c, mid_p=True) <= paired.mcnemar(b, c)


def test_at_least_six_discordant_tasks_are_needed() -> None:
    assert paired.mcnemar(0, 5) > 0.05 > paired.mcnemar(0, 6)
    assert units_needed(0.05) == 6


@given(counts, counts)
def test_sign_flip_of_pass_or_fail_scores_is_mcnemar(b: int, c: int) -> None:
    b, c = b // 4, c // 4
    assert sign_flip([1.0] * b + [-1.0] * c + [0.0] * 5).p == pytest.approx(paired.mcnemar(b, c))


def test_paired_t_worked_numbers() -> None:
    estimate = paired.over_tasks(differences())
    interval = estimate.interval()
    assert estimate.point == pytest.approx(0.12)
    assert estimate.error == pytest.approx(0.032660, abs=1e-6)
    assert estimate.statistic == pytest.approx(3.674235, abs=1e-6)
    assert estimate.p == pytest.approx(0.005121, abs=1e-6)
    assert (interval.low, interval.high) == (pytest.approx(0.046118, abs=1e-6), pytest.approx(0.193882, abs=1e-6))


def test_pairing_is_what_makes_it_sharp() -> None:
    unpaired = math.sqrt(np.var(A, ddof=1) / len(A) + np.var(B, ddof=1) / len(B))
    assert unpaired == pytest.approx(0.157762, abs=1e-6)
    assert np.corrcoef(A, B)[0, 1] == pytest.approx(0.957241, abs=1e-6)


@given(scores)
def test_paired_t_is_scipy(d: list[float]) -> None:
    expected = stats.ttest_1samp(d, 0)
    estimate = paired.over_tasks(d)
    assert estimate.statistic == pytest.approx(float(expected.statistic))
    assert estimate.p == pytest.approx(float(expected.pvalue))
    low, high = expected.confidence_interval(0.9)
    assert (estimate.interval(0.9).low, estimate.interval(0.9).high) == (pytest.approx(low), pytest.approx(high))


def test_sign_flip_worked_number() -> None:
    found = sign_flip(differences())
    assert (found.p, found.formula) == (pytest.approx(0.03125), "sign-flip-exact")
    # 32 of 1024 over all ten tasks; four of them differ by nothing, and their signs change no sum.
    assert found.resamples == 2**6


def test_clustered_worked_numbers() -> None:
    d, clusters = clustered()
    estimate = paired.over_clusters(d, clusters)
    assert estimate.point == pytest.approx(0.075)
    assert paired.over_tasks(d).error == pytest.approx(0.037183, abs=1e-6)
    assert estimate.error == pytest.approx(0.055067, abs=1e-6)
    assert (estimate.df, estimate.units) == (3, 4)
    assert sign_flip(d, clusters).p == pytest.approx(0.5)
    assert smallest_p(4) == 0.125, "four clusters can never be significant at 0.05"


@given(scores, st.integers(0, 5))
def test_exact_sign_flip_is_scipy(d: list[float], shift: int) -> None:
    d = [round(x, 3) for x in d]
    expected = stats.permutation_test((d,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip(d).p == pytest.approx(min(1.0, float(expected.pvalue)))


def test_monte_carlo_sign_flip_is_near_the_exact_one_and_repeats_by_its_seed() -> None:
    random = np.random.default_rng(1)
    d = random.normal(0.15, 0.4, size=24)
    drawn = sign_flip(d, seed=3)
    assert (drawn.formula, drawn.resamples, drawn.seed) == ("sign-flip-monte-carlo", 100_000, 3)
    assert sign_flip(d, seed=3) == drawn
    assert sign_flip(d, seed=4).p != drawn.p
    expected = stats.permutation_test((d,), np.sum, permutation_type="samples", n_resamples=99_999, rng=5).pvalue
    assert drawn.p == pytest.approx(float(expected), abs=5 * math.sqrt(2 * 0.25 * 0.1 / 100_000))


@pytest.mark.parametrize("attempts", [1, 3, 5])
def test_drawing_for_all_units_of_one_size_at_once_is_the_exact_distribution(attempts: int) -> None:
    """The reference adds up the distribution of all sums, one unit after the other."""
    steps = np.random.default_rng(attempts).integers(-attempts, attempts + 1, size=80)
    weights = np.array([1.0])
    for step in np.abs(steps):
        weights = np.convolve(weights, [0.5, *[0] * (2 * step - 1), 0.5] if step else [1.0])
    sums = np.arange(len(weights)) - len(weights) // 2
    exact = float(weights[np.abs(sums) >= abs(steps.sum())].sum())
    assert sign_flip(steps / attempts, seed=1).p == pytest.approx(exact, abs=5 * math.sqrt(0.25 / 100_000))


@given(scores, st.randoms())
def test_sign_flip_does_not_depend_on_order_or_direction(d: list[float], random: object) -> None:
    shuffled = list(d)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sign_flip(shuffled).p == pytest.approx(sign_flip(d).p)
    assert sign_flip([-x for x in d]).p == pytest.approx(sign_flip(d).p)


@given(scores, st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_cluster_error_is_statsmodels(d: list[float], groups: list[int]) -> None:
    groups = groups[: len(d)]
    if len(set(groups)) < 2:
        return
    fit = OLS(np.array(d), np.ones(len(d))).fit(
        cov_type="cluster", cov_kwds={"groups": np.array(groups), "use_correction": False}
    )
    count = len(set(groups))
    expected = float(fit.bse[0]) * math.sqrt(count / (count - 1))
    assert paired.over_clusters(d, [str(g) for g in groups]).error == pytest.approx(expected, abs=1e-9)


@given(scores)
def test_clusters_of_one_are_tasks(d: list[float]) -> None:
    names = [str(number) for number in range(len(d))]
    assert paired.over_clusters(d, names).error == pytest.approx(paired.over_tasks(d).error)
    assert sign_flip(d, names).p == sign_flip(d).p


def test_cluster_bootstrap_of_all_resamples() -> None:
    # integrity research, section 3.2, example A: 256 resamples enumerated, percentile .166667 - .833333.
    scores = [1.0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0]
    clusters = [name for name in "abcd" for _ in range(3)]
    found = paired.cluster_bootstrap(scores, clusters, resamples=40_000, seed=1)
    assert (found.low, found.high) == (pytest.approx(1 / 6), pytest.approx(5 / 6))
    assert found == paired.cluster_bootstrap(scores, clusters, resamples=40_000, seed=1)


def test_cluster_bootstrap_is_scipy() -> None:
    d = np.random.default_rng(2).normal(0.1, 0.3, size=30)
    mine = paired.cluster_bootstrap(d, [str(i) for i in range(30)], resamples=20_000, seed=1)
    theirs = stats.bootstrap((d,), np.mean, n_resamples=20_000, method="percentile", rng=1).confidence_interval
    assert (mine.low, mine.high) == (pytest.approx(theirs.low, abs=0.01), pytest.approx(theirs.high, abs=0.01))


# --- Tango's score interval -------------------------------------------------------------------------------------------


def restricted_statistic(b: int, c: int, n: int, delta: float) -> float:
    """Tango's statistic with the nuisance parameter found by maximising the likelihood numerically."""

    def loss(q: float) -> float:
        cells = ((b, q + delta), (c, q), (n - b - c, 1 - 2 * q - delta))
        return -sum(k * math.log(max(p, 1e-300)) for k, p in cells if k)

    low, high = max(0.0, -delta), (1 - delta) / 2
    q = optimize.minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    return (b - c - n * delta) / math.sqrt(n * (2 * q + delta * (1 - delta)))


@pytest.mark.parametrize("delta", [-0.6, -0.1, -0.02, 0.05, 0.3])
@pytest.mark.parametrize(("b", "c", "n"), [(8, 1, 20), (3, 12, 50), (2, 2, 10), (0, 4, 30), (7, 0, 30)])
def test_score_statistic_is_the_restricted_maximum(b: int, c: int, n: int, delta: float) -> None:
    assert paired.score_statistic(b, c, n, delta) == pytest.approx(restricted_statistic(b, c, n, delta), rel=1e-4)


@given(counts, counts, st.integers(1, 100))
def test_score_test_of_no_difference_is_mcnemars(b: int, c: int, rest: int) -> None:
    expected = (b - c) / math.sqrt(b + c) if b + c else 0.0
    assert paired.score_statistic(b, c, b + c + rest, 0.0) == pytest.approx(expected)


@given(counts, counts, st.integers(0, 100))
def test_score_interval_holds_the_point_and_mirrors(b: int, c: int, rest: int) -> None:
    n = b + c + rest
    if n == 0:
        return
    one, other = paired.score_interval(b, c, n), paired.score_interval(c, b, n)
    assert -1 <= one.low <= one.point <= one.high <= 1
    assert one.high - one.low > 0, "no finite number of tasks is certain"
    assert (one.low, one.high) == (pytest.approx(-other.high, abs=1e-6), pytest.approx(-other.low, abs=1e-6))


@pytest.mark.parametrize(("n", "first", "second"), [(15, 0.1, 0.1), (20, 0.25, 0.05), (30, 0.02, 0.02), (40, 0.3, 0.3)])
def test_score_interval_covers(n: int, first: float, second: float) -> None:
    """Exact coverage over every possible pair of counts; Wald's paired interval is here to be compared with."""
    covered = wald = 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            weight = stats.multinomial.pmf([b, c, n - b - c], n, [first, second, 1 - first - second])
            if weight < 1e-9:
                continue
            interval, truth = paired.score_interval(b, c, n), first - second
            covered += weight * (interval.low - 1e-9 <= truth <= interval.high + 1e-9)
            half = 1.96 * math.sqrt(max(0.0, b + c - (b - c) ** 2 / n)) / n
            wald += weight * (abs((b - c) / n - truth) <= half + 1e-9)
    assert covered > 0.93
    assert covered > wald - 0.02


# --- What has no spread -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [[0.0] * 8, [1.0] * 8, [-0.25] * 5])
def test_equal_differences_are_not_certainty(d: Sequence[float]) -> None:
    estimate = paired.over_tasks(d)
    assert estimate.error == 0
    interval = paired.with_pseudo_pairs(estimate).interval()
    assert interval.high - interval.low > 0.3


def test_one_task_says_nothing() -> None:
    interval = paired.over_tasks([0.5]).interval()
    assert (interval.low, interval.high) == (-math.inf, math.inf)


@pytest.mark.parametrize("d", [[], [math.nan, 0.1], [math.inf]])
def test_what_is_not_a_difference_is_refused(d: list[float]) -> None:
    with pytest.raises(ConfigError):
        paired.over_tasks(d)
    with pytest.raises(ConfigError):
        sign_flip(d)


# --- Coverage and level by simulation ---------------------------------------------------------------------------------


def test_cluster_t_interval_covers_where_the_naive_one_does_not() -> None:
    random = np.random.default_rng(7)
    clusters = [str(g) for g in range(12) for _ in range(6)]
    covered = naive = 0
    rounds = 2000
    for _ in range(rounds):
        d = np.repeat(random.normal(0, 0.3, 12), 6) + random.normal(0, 0.3, 72)
        for estimate in (paired.over_clusters(d, clusters), paired.over_tasks(d)):
            interval = estimate.interval()
            hit = interval.low <= 0 <= interval.high
            covered += hit * (estimate.formula == "cluster-t")
            naive += hit * (estimate.formula == "paired-t")
    assert covered / rounds == pytest.approx(0.95, abs=0.02)
    assert naive / rounds < 0.75


# --- Posterior --------------------------------------------------------------------------------------------------------


def test_posterior_worked_numbers() -> None:
    one = posterior.independent((17, 20), (12, 20))  # Beta(18, 4) and Beta(13, 9)
    assert one.better == pytest.approx(0.957253, abs=1e-6)
    both = posterior.paired(8, 1, 100)  # counts (40, 8, 1, 51)
    assert both.better == pytest.approx(0.989258, abs=1e-6)
    assert both.difference == pytest.approx(0.067308, abs=1e-6)
