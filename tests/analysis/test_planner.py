"""The planner: worked numbers of audits, flakes and flags, and that its ways of asking agree with each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.analysis.sides import make_trials, single

from proctor.analysis.pairing import pair
from proctor.analysis.planner import (
    TYPICAL,
    Assumptions,
    audits_needed,
    catch_probability,
    flag_value,
    flake_bound,
    learned,
    options,
)
from proctor.analysis.power import Spread
from proctor.common import ConfigError

# integrity research, section 3.10.
CAUGHT = [
    (1000, 50, 10, 0.4027),
    (1000, 50, 20, 0.6451),
    (1000, 10, 20, 0.1837),
    (200, 10, 4, 0.1868),
    (200, 10, 20, 0.6602),
]
AUDITS = [(0.05, 59), (0.02, 149), (0.01, 299)]
FLAKES = [(3, 0.6316), (5, 0.4507), (10, 0.2589), (20, 0.1391), (60, 0.0487), (299, 0.0100)]
FLAGS = [
    (0.85, 0.05, 0.01, 0.1466),
    (0.85, 0.05, 0.036, 0.3883),
    (0.85, 0.05, 0.16, 0.7640),
    (0.90, 0.01, 0.01, 0.4762),
]


@pytest.mark.parametrize(("population", "bad", "audited", "expected"), CAUGHT)
def test_catching_at_least_one(population: int, bad: int, audited: int, expected: float) -> None:
    assert catch_probability(population, bad, audited) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("prevalence", "expected"), AUDITS)
def test_audits_needed(prevalence: float, expected: int) -> None:
    assert audits_needed(prevalence).audits == expected


@pytest.mark.parametrize(("reruns", "expected"), FLAKES)
def test_no_failure_in_some_reruns(reruns: int, expected: float) -> None:
    assert flake_bound(reruns) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("sensitivity", "false_positive", "prevalence", "expected"), FLAGS)
def test_how_often_a_flag_is_right(
    sensitivity: float, false_positive: float, prevalence: float, expected: float
) -> None:
    assert flag_value(sensitivity, false_positive, prevalence) == pytest.approx(expected, abs=1e-4)


@given(st.floats(0.005, 0.6), st.integers(1, 800), st.floats(0.5, 0.99))
def test_an_audit_is_large_enough_and_not_larger(prevalence: float, population: int, confidence: float) -> None:
    audit = audits_needed(prevalence, population=population, confidence=confidence)
    bad = max(1, round(prevalence * population))
    assert catch_probability(population, bad, audit.audits) >= confidence
    assert audit.audits == 1 or catch_probability(population, bad, audit.audits - 1) < confidence
    assert audit.audits <= population


def test_tasks_for_an_effect() -> None:
    # integrity research, section 3.5.
    found = options(Assumptions(), (1, 2, 4, 10), effect=0.03)
    assert [option.tasks for option in found] == [3876, 2423, 1696, 1260]
    assert [option.trials for option in found] == [7752, 9692, 13568, 25200]
    assert {option.cost_usd for option in found} == {None}, "an unknown cost is not zero"
    assert {option.fits for option in found} == {True}


@given(st.integers(8, 3000), st.integers(1, 10), st.floats(1, 5))
def test_what_a_size_finds_takes_that_size(tasks: int, attempts: int, design_effect: float) -> None:
    assumptions = Assumptions(TYPICAL, design_effect)
    (forward,) = options(assumptions, [attempts], tasks=tasks)
    if forward.effect is None:
        return
    (back,) = options(assumptions, [attempts], effect=forward.effect)
    assert back.tasks == max(6, tasks)


def test_a_budget_buys_tasks_and_never_more_than_there_are() -> None:
    assumptions = Assumptions(cost_per_trial=0.25)
    found = options(assumptions, (1, 4, 10), tasks=60, budget_usd=100)
    assert [(option.tasks, option.cost_usd) for option in found] == [(60, 30.0), (50, 100.0), (20, 100.0)]
    assert all((option.cost_usd or 0) <= 100 for option in found)
    expensive = options(assumptions, (1,), effect=0.03, budget_usd=100, tasks=10_000)[0]
    assert (expensive.tasks, expensive.cost_usd, expensive.fits) == (3876, 1938.0, False)
    assert options(Assumptions(), (1,), effect=0.03, budget_usd=100)[0].fits is None


def test_too_few_tasks_find_nothing() -> None:
    (found,) = options(Assumptions(), (1,), tasks=5)
    assert found.effect is None


def test_assumptions_from_repeated_runs_recover_what_was_put_in() -> None:
    random = np.random.default_rng(1)
    size, attempts = 1500, 8
    rates = random.uniform(0.2, 0.8, size)
    shifts = random.choice([-0.15, 0.15], size)
    sides = [
        make_trials(name, {f"t{i}": list((random.random(attempts) < p[i]).astype(float)) for i in range(size)})
        for name, p in (("a", rates), ("b", rates + shifts))
    ]
    found = learned(pair(*sides), 0.1, "test", alpha=0.05, power=0.8)
    assert found.spread.between == pytest.approx(0.15**2, abs=0.009)
    assert found.spread.second == pytest.approx(float(np.mean(rates * (1 - rates))), abs=0.01)
    assert found.repeats


def test_one_attempt_tells_nothing_of_more() -> None:
    found = learned(pair(single("a", "+-" * 10), single("b", "++" * 10)), None, "test", alpha=0.05, power=0.8)
    assert not found.repeats
    assert [option.attempts for option in options(found, (1, 2, 4), effect=0.1)] == [1]


def test_clusters_are_worth_less() -> None:
    random = np.random.default_rng(1)
    clusters = {f"t{g}-{i}": f"c{g}" for g in range(20) for i in range(5)}
    passed = {name: random.random() for name in set(clusters.values())}
    a = make_trials("a", {name: [0.0] for name in clusters}, clusters=clusters)
    b = make_trials("b", {name: [float(passed[g] > 0.5)] for name, g in clusters.items()}, clusters=clusters)
    found = learned(pair(a, b), None, "test", alpha=0.05, power=0.8)
    assert found.design_effect == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"effect": 0.0},
        {"effect": 1.5},
        {"tasks": 0},
        {"budget_usd": 100.0},
        {"budget_usd": -1.0, "tasks": 5},
        {"effect": math.nan},
        {"effect": 1e-300},
        {"budget_usd": math.nan, "tasks": 5},
        {"budget_usd": math.inf, "tasks": 5},
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        options(Assumptions(), (1,), **arguments)  # type: ignore[arg-type]


def test_nonsense_is_refused() -> None:
    for wrong in (
        {"spread": Spread(-1.0)}, {"spread": Spread(math.nan)}, {"spread": Spread(0.1, math.inf)},
        {"design_effect": 0.0}, {"design_effect": math.nan}, {"cost_per_trial": math.inf},
        {"alpha": math.nan}, {"power": 0.0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            Assumptions(**wrong)  # type: ignore[arg-type]
    for call in (
        lambda: audits_needed(0),
        lambda: audits_needed(1e-300),
        lambda: audits_needed(0.1, population=0),
        lambda: catch_probability(5, 6, 1),
        lambda: flake_bound(0),
        lambda: flag_value(0, 0, 0.5),
    ):
        with pytest.raises(ConfigError):
            call()
