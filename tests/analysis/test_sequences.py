"""Distances between what runs did."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from proctor.analysis.sequences import (
    common_prefix,
    distances,
    divergence_bits,
    edit_distance,
    jensen_shannon,
    sequence_distance,
)
from proctor.common import ConfigError

WORDS = st.lists(st.sampled_from("abcd"), max_size=12)


def by_table(one: list[str], other: list[str]) -> int:
    """The textbook's table (Wagner and Fischer 1974)."""
    row = list(range(len(other) + 1))
    for i, first in enumerate(one, 1):
        above, row[0] = row[0], i
        for j, second in enumerate(other, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (first != second))
    return row[-1]


def test_worked_sequence_and_mix() -> None:
    # Integrity research, section 6, points 3 and 4.
    assert edit_distance("RRET", "RRRRET") == 2
    assert sequence_distance("RRET", "RRRRET") == pytest.approx(0.333333, abs=1e-6)
    bits = jensen_shannon({"a": 50, "b": 30, "c": 20}, {"a": 40, "b": 50, "c": 10})
    assert bits == pytest.approx(0.034498, abs=1e-6)
    assert math.sqrt(bits) == pytest.approx(0.185736, abs=1e-6)


@given(WORDS, WORDS)
def test_edit_distance_is_that_of_the_textbook(one: list[str], other: list[str]) -> None:
    assert edit_distance(one, other) == by_table(one, other) == edit_distance(other, one)


@given(WORDS, WORDS, WORDS)
def test_edit_distance_is_a_metric(one: list[str], two: list[str], three: list[str]) -> None:
    assert edit_distance(one, three) <= edit_distance(one, two) + edit_distance(two, three)
    assert (edit_distance(one, two) == 0) == (one == two)
    assert 0 <= sequence_distance(one, two) <= 1


def test_sequences_longer_than_a_machine_word() -> None:
    one, other = [str(i % 17) for i in range(300)], [str(i % 19) for i in range(280)]
    assert edit_distance(one, other) == by_table(one, other)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6))
def test_divergence_is_that_of_scipy(counts: list[tuple[int, int]]) -> None:
    one, other = (np.array([side], dtype=float) for side in zip(*counts, strict=True))
    found = float(divergence_bits(one, other)[0])
    if not one.any() or not other.any():
        assert math.isnan(found)
    else:
        assert found == pytest.approx(jensenshannon(one[0], other[0], base=2) ** 2, abs=1e-9)
        assert 0 <= found <= 1 + 1e-12


def test_an_empty_tally_has_no_shares() -> None:
    with pytest.raises(ConfigError):
        jensen_shannon({}, {"a": 1})


def test_a_matrix_of_distances() -> None:
    found = distances(["RRET", "RRRRET", "RRET", ""])
    assert found == pytest.approx(found.T)
    assert found[0].tolist() == [0.0, pytest.approx(1 / 3), 0.0, 1.0]


def test_where_two_runs_part() -> None:
    assert common_prefix("RRET", "RRRRET") == 2
    assert common_prefix("RR", "RRET") == 2
    assert common_prefix("", "R") == 0
