"""Holm and Benjamini-Hochberg against worked numbers, statsmodels and scipy."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control
from statsmodels.stats.multitest import multipletests

from proctor.analysis.multiplicity import benjamini_hochberg, bonferroni, holm
from proctor.common import ConfigError

# integrity research, section 3.6.
P = [0.001, 0.008, 0.039, 0.041, 0.042, 0.06, 0.074, 0.205, 0.212, 0.216]
HOLM = [0.01, 0.072, *[0.312] * 5, *[0.615] * 3]
BH = [0.01, 0.04, 0.084, 0.084, 0.084, 0.1, 0.105714, 0.216, 0.216, 0.216]

p_values = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def test_worked_numbers() -> None:
    assert holm(P) == pytest.approx(HOLM, abs=1e-6)
    assert benjamini_hochberg(P) == pytest.approx(BH, abs=1e-6)
    assert bonferroni(P)[:3] == pytest.approx([0.01, 0.08, 0.39])


@given(p_values)
def test_same_as_statsmodels_and_scipy(p: list[float]) -> None:
    with mock.patch("gc.collect"):  # statsmodels' Holm ends each call with it, a tenth of a second
        theirs = multipletests(p, method="holm")[1]
    assert holm(p) == pytest.approx(list(theirs))
    assert bonferroni(p) == pytest.approx(list(multipletests(p, method="bonferroni")[1]))
    assert benjamini_hochberg(p) == pytest.approx(list(false_discovery_control(p)))


@given(p_values)
def test_never_smaller_than_the_raw_and_never_larger_than_bonferroni(p: list[float]) -> None:
    for raw, q, adjusted, most in zip(p, benjamini_hochberg(p), holm(p), bonferroni(p), strict=True):
        assert raw - 1e-12 <= q <= adjusted + 1e-12
        assert adjusted <= most + 1e-12


def test_nothing_and_nonsense() -> None:
    assert holm([]) == benjamini_hochberg([]) == []
    with pytest.raises(ConfigError):
        holm([0.5, 1.5])
