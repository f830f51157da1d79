"""Several weightings side by side, and the sentence on whether the ranking depends on them."""

from __future__ import annotations

from proctor.analysis.proportions import Interval
from proctor.analysis.weights import WeightedRate, Weighting, side_by_side


def weighting(name: str, **rates: float) -> Weighting:
    return Weighting(
        name, "", tuple(WeightedRate(agent, Interval(p, p, p, 0.95, "x"), 9, 9.0) for agent, p in rates.items())
    )


def test_a_ranking_that_depends_on_the_weights_is_said_to() -> None:
    found = side_by_side([weighting("task", a=0.6, b=0.5), weighting("domain", a=0.4, b=0.5)])
    assert found.depends
    assert [one.ranking for one in found.weightings] == [("a", "b"), ("b", "a")]
    assert found.statement == (
        "the ranking depends on the weights: weighted by task a is ahead of b, weighted by domain it is not"
    )


def test_a_tie_that_a_weighting_breaks_is_a_difference() -> None:
    assert side_by_side([weighting("task", a=0.5, b=0.5), weighting("domain", a=0.6, b=0.5)]).depends


def test_rounding_is_none() -> None:
    assert not side_by_side([weighting("task", a=0.1 + 0.2, b=0.3), weighting("domain", a=0.3, b=0.3)]).depends


def test_the_same_ranking_is_said_to_be() -> None:
    found = side_by_side([weighting("task", a=0.6, b=0.5), weighting("declared", a=0.9, b=0.1)])
    assert not found.depends
    assert found.statement == "the ranking is the same under all weights (task, declared)"


def test_one_weighting_says_why_it_is_alone() -> None:
    assert side_by_side([weighting("task", a=0.6)], ["there are not two domains"]).statement == (
        "there are not two domains"
    )
