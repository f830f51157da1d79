"""Intervals of a proportion against worked numbers and against exact coverage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from proctor.analysis.proportions import Method, proportion
from proctor.common import ConfigError

# integrity research, section 3.1 (computed there with scipy and statsmodels).
WORKED = [
    (0, 10, "wilson", 0.000000, 0.277533),
    (0, 10, "clopper-pearson", 0.000000, 0.308497),
    (0, 10, "beta", 0.002299, 0.284914),
    (3, 10, "wilson", 0.107791, 0.603222),
    (3, 10, "clopper-pearson", 0.066740, 0.652453),
    (3, 10, "beta", 0.109263, 0.609743),
    (3, 10, "wald", 0.015974, 0.584026),
    (10, 10, "wilson", 0.722467, 1.0),
    (10, 10, "clopper-pearson", 0.691503, 1.0),
    (10, 10, "beta", 0.715086, 0.997701),
    (17, 20, "wilson", 0.639581, 0.947631),
    (17, 20, "clopper-pearson", 0.621073, 0.967929),
    (17, 20, "beta", 0.636576, 0.945536),
    (17, 20, "wald", 0.693509, 1.006491),
    (42, 100, "wilson", 0.327984, 0.517935),
    (42, 100, "clopper-pearson", 0.321986, 0.522881),
    (42, 100, "beta", 0.327870, 0.518182),
    (42, 100, "wald", 0.323264, 0.516736),
]

COVERAGE = [
    (10, 0.9, 0.6497, 0.9298, 0.9872),
    (20, 0.9, 0.8760, 0.9568, 0.9887),
    (50, 0.98, 0.6354, 0.9216, 0.9822),
    (100, 0.95, 0.8775, 0.9659, 0.9826),
    (300, 0.95, 0.9257, 0.9548, 0.9672),
]


@pytest.mark.parametrize(("k", "n", "method", "low", "high"), WORKED)
def test_worked_numbers(k: int, n: int, method: Method, low: float, high: float) -> None:
    interval = proportion(k, n, method=method)
    assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6))


def exact_coverage(n: int, p: float, method: Method) -> float:
    """The probability that the interval holds p, summed over every possible k."""
    intervals = ((k, proportion(k, n, method=method)) for k in range(n + 1))
    return float(sum(binom.pmf(k, n, p) for k, i in intervals if i.low <= p <= i.high))


@pytest.mark.parametrize(("n", "p", "wald", "wilson", "exact"), COVERAGE)
def test_exact_coverage(n: int, p: float, wald: float, wilson: float, exact: float) -> None:
    assert exact_coverage(n, p, "wald") == pytest.approx(wald, abs=1e-4)
    assert exact_coverage(n, p, "wilson") == pytest.approx(wilson, abs=1e-4)
    assert exact_coverage(n, p, "clopper-pearson") == pytest.approx(exact, abs=1e-4)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_clopper_pearson_never_covers_less_than_it_says(n: int, p: float) -> None:
    assert exact_coverage(n, p, "clopper-pearson") >= 0.95 - 1e-9


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_hold_the_point_and_mirror(kn: tuple[int, int]) -> None:
    k, n = kn
    for method in ("wilson", "clopper-pearson"):
        one, other = proportion(k, n, method=method), proportion(n - k, n, method=method)
        assert 0 <= one.low <= one.point + 1e-12
        assert one.point - 1e-12 <= one.high <= 1
        assert one.low == pytest.approx(1 - other.high, abs=1e-9)


@pytest.mark.parametrize(("k", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_what_is_not_a_proportion_is_refused(k: int, n: int) -> None:
    with pytest.raises(ConfigError):
        proportion(k, n)
