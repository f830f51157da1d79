"""Agreement with human labels against the worked numbers and scikit-free arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.analysis.agreement import cause_agreement, kappa, pass_agreement
from proctor.common import ConfigError


def table(both: int, false_fail: int, false_pass: int, neither: int) -> tuple[list[bool], list[bool]]:
    labels = [True] * (both + false_fail) + [False] * (false_pass + neither)
    judged = [True] * both + [False] * false_fail + [True] * false_pass + [False] * neither
    return judged, labels


def test_worked_table() -> None:
    # Integrity research, section 4, point 3: 45 / 5 / 10 / 40.
    found = pass_agreement(*table(45, 5, 10, 40))
    assert found.kappa == pytest.approx(0.70)
    assert found.mcc == pytest.approx(0.703526, abs=1e-6)
    assert found.false_pass is not None
    assert found.false_fail is not None
    assert (found.false_pass.point, found.false_fail.point) == (pytest.approx(0.20), pytest.approx(0.10))


def test_worked_ten_items_and_the_judge_that_always_passes() -> None:
    # The same section: eight agreements of ten (5, 1, 1, 3); and 95 / 5 data, where accuracy is .95 and kappa 0.
    assert pass_agreement(*table(5, 1, 1, 3)).kappa == pytest.approx(0.583333, abs=1e-6)
    always = pass_agreement([True] * 100, [True] * 95 + [False] * 5)
    assert always.kappa == 0
    assert always.mcc is None
    assert always.false_pass is not None
    assert always.false_pass.point == 1.0


def test_causes_against_labels() -> None:
    found = cause_agreement(["budget", "partial", "unclassified", "partial"], ["budget", "partial", "partial", "claim"])
    assert found.by_cause["partial"] == (1, 2, 2)
    assert found.unclassified == 1
    assert found.kappa == pytest.approx((0.5 - 5 / 16) / (1 - 5 / 16))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1))
def test_kappa_is_symmetric_and_at_most_one(pairs: list[tuple[str, str]]) -> None:
    one, other = [first for first, _ in pairs], [second for _, second in pairs]
    found = kappa(one, other)
    assert found == kappa(other, one)
    assert found is None or found <= 1 + 1e-12
    assert kappa(one, one) in (None, pytest.approx(1.0))


def test_a_label_for_every_case() -> None:
    with pytest.raises(ConfigError):
        kappa(["a"], [])
    with pytest.raises(ConfigError):
        pass_agreement([True], [])
