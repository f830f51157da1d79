"""Economy and robustness: ratios by Fieller's theorem, the Pareto front, paired changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student
from scipy.stats import ttest_rel

from proctor.analysis.faces import Spent, agresti_min, change, cost, front, ratio


def spent(known: list[int], total: list[float], resolved: list[int]) -> Spent:
    arrays = [np.array(one, dtype=float) for one in (known, total, resolved)]
    return Spent(*arrays, np.arange(len(known)))


def test_what_one_success_costs() -> None:
    found = cost("tokens", 8, spent([2, 2, 2, 2], [200, 400, 600, 800], [2, 2, 0, 2]))
    assert found.total == 2000
    assert found.per_trial is not None
    assert found.per_resolved is not None
    assert found.per_trial.point == 250
    assert found.per_resolved.point == pytest.approx(2000 / 6)
    assert (found.graded, found.known) == (8, 8)


def test_the_cost_of_a_trial_has_the_t_interval_of_scipy() -> None:
    values = [200.0, 400.0, 600.0, 800.0, 500.0]
    found = cost("tokens", 5, spent([1] * 5, values, [1] * 5)).per_trial
    assert found is not None
    half = student.ppf(0.975, 4) * np.std(values, ddof=1) / math.sqrt(5)
    assert (found.low, found.high) == (pytest.approx(500 - half), pytest.approx(500 + half))


def test_an_unknown_part_makes_the_total_unknown_and_is_counted() -> None:
    found = cost("cost_usd", 8, spent([2, 0, 2, 2], [2.0, 0.0, 4.0, 6.0], [1, 0, 1, 1]))
    assert (found.known, found.graded, found.total) == (6, 8, None)
    assert found.per_trial is not None
    assert found.per_trial.point == 2.0


def test_what_is_not_known_at_all_has_no_number() -> None:
    found = cost("cost_usd", 4, spent([0, 0], [0.0, 0.0], [0, 0]))
    assert (found.total, found.per_trial, found.per_resolved) == (None, None, None)


def test_nothing_resolved_has_no_price() -> None:
    assert cost("steps", 2, spent([1, 1], [5.0, 6.0], [0, 0])).per_resolved is None


def test_a_rare_success_has_no_upper_end() -> None:
    found = cost("steps", 20, spent([1] * 20, [10.0] * 20, [1] + [0] * 19)).per_resolved
    assert found is not None
    assert found.point == pytest.approx(200)
    assert found.high == math.inf
    assert 0 < found.low < 200


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), min_size=3, max_size=30))
def test_fiellers_set_is_what_a_search_finds(rows: list[tuple[float, float]]) -> None:
    tops, bottoms = (np.array(one) for one in zip(*rows, strict=True))
    if bottoms.mean() < 1e-3:
        return
    found = ratio(tops, bottoms, np.arange(len(rows)))
    assert found is not None
    assert found.low <= found.point <= found.high

    def inside(value: float) -> bool:
        values = tops - value * bottoms
        error = values.std(ddof=1) / math.sqrt(len(values))
        return bool(abs(values.mean()) <= student.ppf(0.975, len(values) - 1) * error + 1e-9 * (1 + abs(value)))

    scale = max(1.0, found.point)
    if found.low > 1e-6 * scale:
        assert inside(found.low + 1e-4 * scale) or found.high - found.low < 1e-3 * scale
        assert not inside(found.low - 1e-3 * scale) or found.low < 1e-3 * scale
    if math.isfinite(found.high):
        assert inside(found.high - 1e-4 * scale) or found.high - found.low < 1e-3 * scale
        assert not inside(found.high + 1e-3 * max(scale, found.high))
    else:
        assert inside(1e9 * scale)


def test_the_price_of_success_covers_as_often_as_it_says() -> None:
    """40 tasks in 20 clusters; hard clusters cost more and succeed less: true price 100 x (2 - p) on average / p."""
    random = np.random.default_rng(4)
    codes = np.repeat(np.arange(20), 2)
    truth = (100 * (2 - 0.5)) / 0.5
    held = 0
    for _ in range(1500):
        rates = random.uniform(0.2, 0.8, 20)[codes]
        costs = random.gamma(4.0, 100 * (2 - rates) / 4)
        found = ratio(costs, random.binomial(2, rates) / 2, codes)
        assert found is not None
        held += found.low <= truth <= found.high
    assert 0.93 <= held / 1500 <= 0.97


def test_the_front_and_who_dominates_whom() -> None:
    agents = {"good": (0.9, 10.0), "cheap": (0.5, 1.0), "bad": (0.4, 5.0), "twin": (0.5, 1.0), "dear": (0.9, 11.0)}
    found = front("cost_usd", agents, missing=("unknown",))
    points = {point.agent: point for point in found.points}
    assert {name for name, point in points.items() if point.on_front} == {"good", "cheap", "twin"}
    assert points["bad"].dominated_by == "cheap"
    assert points["dear"].dominated_by == "good"
    assert found.missing == ("unknown",)
    assert points["good"].probability is None


def test_how_sure_the_front_is() -> None:
    draws = np.array([[[0.9, 10.0], [0.5, 1.0]], [[0.4, 10.0], [0.5, 1.0]]])
    points = front("tokens", {"a": (0.65, 10.0), "b": (0.5, 1.0)}, draws).points
    assert [point.probability for point in points] == [0.5, 1.0]


points = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=12)


@given(points)
def test_no_one_on_the_front_is_dominated_and_all_others_are(agents: list[tuple[float, float]]) -> None:
    found = front("tokens", {str(number): agent for number, agent in enumerate(agents)}).points
    edge = [point for point in found if point.on_front]
    assert edge
    for point in found:
        beaten = any(
            other.rate >= point.rate
            and other.cost <= point.cost
            and (other.rate > point.rate or other.cost < point.cost)
            for other in edge
        )
        assert beaten != point.on_front


def test_a_change_is_paired_within_task() -> None:
    plain = np.array([1, 0.8, 0.6, 0.2, 1, 0.4, 0, 0.6, 0.8, 1])
    noisy = np.array([0.8, 0.6, 0.6, 0, 1, 0.2, 0, 0.4, 0.8, 0.8])
    found = change("noisy", plain, noisy, np.arange(10), unpaired=2)
    # The worked numbers of section 3.4 of the integrity research, with the sign turned.
    assert found.change.point == pytest.approx(-0.12)
    assert (found.change.low, found.change.high) == (
        pytest.approx(-0.193882, abs=1e-6),
        pytest.approx(-0.046118, abs=1e-6),
    )
    theirs = ttest_rel(noisy, plain).confidence_interval()
    assert (found.change.low, found.change.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    assert (found.tasks, found.unpaired) == (10, 2)
    assert found.kept == pytest.approx(noisy.mean() / plain.mean())


def test_clusters_widen_a_change() -> None:
    deltas = np.array([0.2, 0.2, 0, 0.1, -0.1, 0, 0.3, 0.2, 0.1, 0, 0, -0.1])
    plain = np.full(12, 0.5)
    found = change("noisy", plain, plain + deltas, np.repeat(np.arange(4), 3)).change
    assert found.point == pytest.approx(0.075)
    assert (found.high - found.point) / student.ppf(0.975, 3) == pytest.approx(0.055067, abs=1e-6)


def test_no_change_seen_is_not_no_change() -> None:
    found = change("noisy", np.ones(10), np.ones(10), np.arange(10)).change
    assert found.formula == "agresti-min"
    assert found.low < -0.1 < 0 < 0.1 < found.high


def test_agresti_and_mins_interval_covers() -> None:
    """Rare discordant pairs, few tasks: where a t interval often has no width at all."""
    random = np.random.default_rng(9)
    held = 0
    for _ in range(4000):
        deltas = random.choice([-1, 0, 1], 15, p=[0.08, 0.90, 0.02])
        found = agresti_min(float(deltas.mean()), float(np.square(deltas).mean()), 15)
        held += found.low <= -0.06 <= found.high
    assert held / 4000 >= 0.94


def test_one_cluster_has_no_interval() -> None:
    found = cost("steps", 2, Spent(np.ones(2), np.array([1.0, 2.0]), np.ones(2), np.zeros(2, dtype=np.int64)))
    assert found.per_trial is not None
    assert (found.per_trial.formula, found.per_trial.high) == ("none/one-cluster", math.inf)
