"""pass@k and pass^k against worked numbers and against enumeration; k > n is refused."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.analysis.passk import Curve, pass_at_k, pass_curve, pass_hat_k
from proctor.common import ConfigError

# Integrity research, section 3.3: (n, c, k, pass@k, pass^k).
WORKED = [
    (5, 3, 1, 0.6, 0.6),
    (5, 3, 2, 0.9, 0.3),
    (5, 3, 3, 1.0, 0.1),
    (10, 7, 4, 1.0, 0.166667),
    (8, 6, 8, 1.0, 0.0),
]
SUITE = [(1, 0.45, 0.45), (2, 0.575, 0.325), (3, 0.65, 0.275), (5, 0.75, 0.25)]


@pytest.mark.parametrize(("n", "c", "k", "at", "hat"), WORKED)
def test_worked_numbers(n: int, c: int, k: int, at: float, hat: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(at, abs=1e-6)
    assert pass_hat_k(n, c, k) == pytest.approx(hat, abs=1e-6)


def test_the_plug_in_estimate_is_another_number() -> None:
    assert pytest.approx(0.2401) == 0.7**4
    assert pass_hat_k(10, 7, 4) == pytest.approx(0.166667, abs=1e-6)


def test_same_mean_opposite_reliability() -> None:
    assert pytest.approx(0.000977, abs=1e-6) == 0.5**10
    sure = [pass_hat_k(10, won, 10) for won in (10, 0)]
    assert sum(sure) / 2 == 0.5


def curve(attempts: list[int], won: list[int], **options: int) -> Curve:
    return pass_curve(np.array(attempts, float), np.array(won, float), np.arange(len(attempts)), **options)


def test_worked_suite() -> None:
    points = {point.k: point for point in curve([5, 5, 5, 5], [5, 3, 1, 0]).points}
    assert list(points) == [1, 2, 3, 4, 5]
    for k, at, hat in SUITE:
        assert (points[k].pass_at.point, points[k].pass_hat.point) == (pytest.approx(at), pytest.approx(hat))


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_both_are_what_enumeration_of_all_choices_gives(case: tuple[int, int, int]) -> None:
    n, c, k = case
    results = [True] * c + [False] * (n - c)
    choices = list(combinations(results, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(5, 3, 6), (1, 1, 2), (0, 0, 1), (5, 3, 0), (5, 6, 1), (5, -1, 1)])
def test_beyond_the_attempts_there_is_no_answer(n: int, c: int, k: int) -> None:
    for measure in (pass_at_k, pass_hat_k):
        with pytest.raises(ConfigError):
            measure(n, c, k)


@given(
    st.lists(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=40)
)
def test_the_curve_averages_the_tasks_and_is_monotone(tasks: list[tuple[int, int]]) -> None:
    found = curve([n for n, _ in tasks], [c for _, c in tasks], resamples=50)
    whole = None
    for point in found.points:
        enough = [(n, c) for n, c in tasks if n >= point.k]
        assert (point.tasks, point.left_out) == (len(enough), len(tasks) - len(enough))
        assert point.pass_at.point == pytest.approx(np.mean([pass_at_k(n, c, point.k) for n, c in enough]))
        assert point.pass_hat.point == pytest.approx(np.mean([pass_hat_k(n, c, point.k) for n, c in enough]))
        assert 0 <= point.pass_at.low <= point.pass_at.high <= 1
        assert point.left_out <= 0.05 * len(tasks)
        if whole is not None and not point.left_out:
            assert point.pass_at.point >= whole.pass_at.point - 1e-12
            assert point.pass_hat.point <= whole.pass_hat.point + 1e-12
        whole = point if not point.left_out else whole


def test_the_curve_ends_where_attempts_do_and_says_so() -> None:
    few = curve([5, 5, 2], [1, 1, 1])
    assert [point.k for point in few.points] == [1, 2]
    assert few.ends == "1 of 3 tasks have no more than 2 graded attempts"
    assert curve([3, 3], [1, 1]).ends == "no task has more than 3 graded attempts"
    assert curve([1, 1], [1, 0]).ends == "one attempt for each task"
    assert curve([], []).points == ()


def test_a_few_tasks_that_lost_attempts_do_not_end_the_curve() -> None:
    found = curve([5] * 99 + [2], [2] * 100, resamples=50)
    assert (found.points[-1].k, found.points[-1].tasks, found.points[-1].left_out) == (5, 99, 1)


def test_many_attempts_give_few_points() -> None:
    ks = [point.k for point in curve([1000] * 40, [300] * 40, resamples=20).points]
    assert ks[:16] == list(range(1, 17))
    assert ks[-1] == 1000
    assert len(ks) < 40


def test_the_interval_is_a_bootstrap_over_clusters_as_scipys() -> None:
    from scipy.stats import bootstrap

    random = np.random.default_rng(5)
    attempts, won = np.full(60, 4.0), random.binomial(4, random.beta(1, 1, 60)).astype(float)
    point = pass_curve(attempts, won, np.arange(60), resamples=20000).points[1]
    values = [pass_at_k(4, int(c), 2) for c in won]
    theirs = bootstrap((values,), np.mean, method="percentile", n_resamples=20000, rng=random).confidence_interval
    assert point.pass_at.formula == "bootstrap/cluster"
    assert (point.pass_at.low, point.pass_at.high) == (
        pytest.approx(theirs.low, abs=4e-3),
        pytest.approx(theirs.high, abs=4e-3),
    )


def test_many_clusters_give_the_bootstraps_interval_without_it() -> None:
    random = np.random.default_rng(6)
    attempts, won = np.full(5200, 3.0), random.binomial(3, random.beta(1, 1, 5200)).astype(float)
    many = pass_curve(attempts, won, np.arange(5200)).points[1].pass_at
    few = pass_curve(attempts, won, np.arange(5200) % 5000, resamples=4000).points[1].pass_at
    assert (many.formula, few.formula) == ("t/cluster", "bootstrap/cluster")
    assert (many.low, many.high) == (pytest.approx(few.low, abs=1e-3), pytest.approx(few.high, abs=1e-3))


def test_the_same_seed_gives_the_same_interval() -> None:
    won = [number % 5 for number in range(40)]
    one, same, other = (curve([4] * 40, won, seed=seed, resamples=200).points[0] for seed in (1, 1, 2))
    assert one == same
    assert one.pass_at.low != other.pass_at.low


@pytest.mark.parametrize("tasks", [12, 60])
def test_the_interval_covers_as_often_as_it_says(tasks: int) -> None:
    random = np.random.default_rng(tasks)
    # pass@2 of a task with rate p is 1 - (1-p)^2; for p uniform its mean is 2/3, that of pass^2 is 1/3.
    held = np.zeros(2)
    for seed in range(600):
        won = random.binomial(4, random.uniform(size=tasks)).astype(float)
        point = pass_curve(np.full(tasks, 4.0), won, np.arange(tasks), resamples=400, seed=seed).points[1]
        held += [point.pass_at.low <= 2 / 3 <= point.pass_at.high, point.pass_hat.low <= 1 / 3 <= point.pass_hat.high]
    assert (held / 600 >= 0.92).all()
