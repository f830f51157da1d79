"""Evidence that may be looked at after every trial: worked numbers, and no penalty for peeking."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import beta

from proctor.analysis.paired import mcnemar
from proctor.analysis.sequential import SPRT, SymmetricEvidence, e_value, evidence
from proctor.common import ConfigError

# integrity research, section 3.9.
E_VALUES = [(0, 5, 5.333), (0, 6, 9.143), (1, 8, 5.689), (2, 12, 12.003), (0, 10, 93.091)]
TEST = SPRT(0.6, 0.8, alpha=0.05, beta=0.10)


@pytest.mark.parametrize(("b", "c", "expected"), E_VALUES)
def test_e_value_worked_numbers(b: int, c: int, expected: float) -> None:
    assert e_value(b, c) == pytest.approx(expected, abs=5e-4)


@given(st.integers(0, 60), st.integers(0, 60))
def test_e_value_is_the_formula(b: int, c: int) -> None:
    assert e_value(b, c) == pytest.approx(2.0 ** (b + c) * float(beta(b + 1, c + 1)))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 10), st.randoms())
def test_evidence_of_signs_is_the_e_value_in_any_order(b: int, c: int, ties: int, random: object) -> None:
    units = [(1.0, 1.0)] * b + [(-1.0, 1.0)] * c + [(0.0, 1.0)] * ties
    random.shuffle(units)  # type: ignore[attr-defined]
    assert evidence(units) == pytest.approx(e_value(b, c), rel=1e-6)


@given(st.lists(st.floats(-1, 1), max_size=6))
def test_evidence_averages_to_one_over_all_signs(sizes: list[float]) -> None:
    """The defining property of an e-value: if every difference is as likely as its negative, its mean is 1."""
    values = []
    for pattern in range(2 ** len(sizes)):
        signs = [1 if pattern >> bit & 1 else -1 for bit in range(len(sizes))]
        values.append(evidence((sign * size, 1.0) for sign, size in zip(signs, sizes, strict=True)))
    assert np.mean(values) == pytest.approx(1.0, rel=1e-6)


def test_peeking_after_every_task_rarely_misleads_an_e_value_and_often_a_p_value() -> None:
    random = np.random.default_rng(11)
    rounds, tasks = 1500, 150
    by_e = by_p = 0
    for _ in range(rounds):
        signs = random.integers(0, 2, tasks)
        wins = np.cumsum(signs)
        by_e += any(e_value(int(w), n - int(w)) >= 20 for n, w in enumerate(wins, 1))
        if _ < 300:
            by_p += any(mcnemar(int(w), n - int(w)) <= 0.05 for n, w in enumerate(wins, 1))
    assert by_e / rounds <= 0.05
    assert by_p / 300 > 0.15


def test_peeking_after_every_cluster_rarely_misleads_and_after_every_task_of_one_it_does() -> None:
    """Nobody is better on the average, but each cluster suits one of the two: its tasks are one piece of evidence."""
    random = np.random.default_rng(12)
    rounds, clusters, size = 600, 40, 5
    by_cluster = by_task = 0
    for _ in range(rounds):
        lean = random.choice([-0.35, 0.35], clusters)
        signs = np.where(random.random((clusters, size)) < 0.5 + lean[:, None], 1.0, -1.0)
        whole, apart = SymmetricEvidence(), SymmetricEvidence()
        best = [0.0, 0.0]
        for members in signs:
            whole.add(float(members.sum()), size)
            best[0] = max(best[0], whole.value)
            for sign in members:
                apart.add(float(sign))
            best[1] = max(best[1], apart.value)
        by_cluster += best[0] >= 20
        by_task += best[1] >= 20
    assert by_cluster / rounds <= 0.05 + 1.96 * (0.05 * 0.95 / rounds) ** 0.5
    assert by_task / rounds > 0.10


def test_a_real_difference_is_found_early() -> None:
    random = np.random.default_rng(3)
    stops = []
    for _ in range(200):
        total = SymmetricEvidence()
        for count in range(1, 301):
            total.add(float(random.choice([1.0, 0.0, -1.0], p=[0.25, 0.7, 0.05])))
            if total.value >= 20:
                stops.append(count)
                break
    assert len(stops) > 190
    assert np.median(stops) < 120


def test_sprt_worked_numbers() -> None:
    assert (TEST.upper, TEST.lower) == (pytest.approx(2.890372, abs=1e-6), pytest.approx(-2.251292, abs=1e-6))
    assert TEST.steps == (pytest.approx(0.287682, abs=1e-6), pytest.approx(-0.693147, abs=1e-6))
    assert TEST.decide([True] * 30) == ("above", 11)
    assert TEST.decide([False] * 30) == ("below", 4)
    assert TEST.decide([True, False] * 3) == ("undecided", 6)
    assert round(TEST.expected_trials(0.8)) == 26
    assert round(TEST.expected_trials(0.6)) == 19


@pytest.mark.parametrize(("rate", "wrong", "most"), [(0.6, "above", 0.05), (0.8, "below", 0.10)])
def test_sprt_keeps_its_errors(rate: float, wrong: str, most: float) -> None:
    random = np.random.default_rng(8)
    decisions = [TEST.decide(list(random.random(400) < rate))[0] for _ in range(2000)]
    assert decisions.count(wrong) / len(decisions) <= most + 0.015  # type: ignore[arg-type]
    assert decisions.count("undecided") == 0


def test_what_makes_no_sense_is_refused() -> None:
    for arguments in ((0.8, 0.6), (0.0, 0.5), (0.5, 1.0), (0.5, 0.6, 0.7, 0.4)):
        with pytest.raises(ConfigError):
            SPRT(*arguments)
    with pytest.raises(ConfigError):
        e_value(-1, 2)
    with pytest.raises(ConfigError):
        SymmetricEvidence().add(float("nan"))
