"""Power and minimum detectable effect against worked numbers and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from proctor.analysis.paired import mcnemar, over_tasks
from proctor.analysis.power import Spread, detectable, mcnemar_power, mcnemar_tasks, tasks_needed
from proctor.common import ConfigError

# integrity research, section 3.5.
DETECTABLE = [
    (0.5, 50, 0.198102),
    (0.5, 100, 0.140079),
    (0.5, 200, 0.099051),
    (0.5, 500, 0.062645),
    (0.5, 1000, 0.044297),
    (0.3, 100, 0.084048),
]
MILLER = Spread(between=1 / 9, first=1 / 6, second=1 / 6)
NEEDED = [(1, 3876), (2, 2423), (4, 1696), (10, 1260)]
MCNEMAR = [(100, 0.1341), (200, 0.2952), (500, 0.7026), (1000, 0.9508)]


@pytest.mark.parametrize(("sd", "tasks", "expected"), DETECTABLE)
def test_detectable_worked_numbers(sd: float, tasks: int, expected: float) -> None:
    assert detectable(sd, tasks) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("attempts", "expected"), NEEDED)
def test_tasks_needed_worked_numbers(attempts: int, expected: int) -> None:
    assert math.ceil(tasks_needed(0.03, MILLER, attempts=(attempts, attempts))) == expected


def test_tasks_needed_unrounded() -> None:
    assert tasks_needed(0.03, MILLER) == pytest.approx(3875.99, abs=0.01)


@pytest.mark.parametrize(("tasks", "expected"), MCNEMAR)
def test_exact_mcnemar_power_worked_numbers(tasks: int, expected: float) -> None:
    assert mcnemar_power(tasks, 0.08, 0.04) == pytest.approx(expected, abs=1e-4)


def test_mcnemar_tasks_worked_number() -> None:
    assert math.ceil(mcnemar_tasks(0.08, 0.04)) == 581


@given(st.integers(1, 40), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_mcnemar_power_is_the_sum_over_all_outcomes(tasks: int, first: float, second: float) -> None:
    total = 0.0
    for b in range(tasks + 1):
        for c in range(tasks + 1 - b):
            if mcnemar(b, c) <= 0.05:
                cells = [first, second, 1 - first - second]
                total += float(stats.multinomial.pmf([b, c, tasks - b - c], tasks, np.clip(cells, 0, 1)))
    assert mcnemar_power(tasks, first, second) == pytest.approx(total, abs=1e-9)


@given(st.floats(0.01, 0.3), st.floats(0.05, 0.5), st.floats(0.5, 0.95), st.floats(1, 4))
def test_detectable_and_needed_are_inverse(effect: float, sd: float, power: float, deff: float) -> None:
    tasks = tasks_needed(effect, Spread(sd**2), power=power, design_effect=deff)
    assert detectable(sd, tasks, power=power, design_effect=deff) == pytest.approx(effect)


def test_a_difference_of_the_detectable_size_is_found_as_often_as_promised() -> None:
    random = np.random.default_rng(5)
    sd, tasks, rounds = 0.4, 80, 3000
    effect = detectable(sd, tasks)
    found = sum((over_tasks(random.normal(effect, sd, tasks)).p or 1) <= 0.05 for _ in range(rounds))
    assert found / rounds == pytest.approx(0.8, abs=0.03)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError):
        tasks_needed(0, MILLER)
    with pytest.raises(ConfigError):
        detectable(0.5, 0)
    with pytest.raises(ConfigError):
        detectable(0.5, 10, power=1)
    with pytest.raises(ConfigError):
        mcnemar_power(10, 0.7, 0.7)
