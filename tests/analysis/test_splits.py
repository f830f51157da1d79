"""The gap between public and held-out tasks: when the alarm fires, when it must not, and what difficulty explains."""

from __future__ import annotations

import numpy as np
import pytest

from proctor.analysis.splits import Gap, split_gap


def gap_of(public: tuple[int, int], held_out: tuple[int, int], *, agents: int = 1, margin: float = 0.0) -> Gap | None:
    """From (successes, tasks) of each side."""
    means = np.array([1.0] * public[0] + [0.0] * (public[1] - public[0]))
    hidden_means = np.array([1.0] * held_out[0] + [0.0] * (held_out[1] - held_out[0]))
    hidden = np.repeat([False, True], [public[1], held_out[1]])
    both = np.concatenate([means, hidden_means])
    return split_gap(both, np.arange(len(both)), hidden, agents=agents, margin=margin)


def test_a_wide_gap_fires_and_the_rule_is_written_down() -> None:
    gap = gap_of((90, 100), (55, 100))
    assert gap
    assert gap.alarm
    assert gap.gap.point == pytest.approx(0.35)
    assert gap.gap.low > 0
    assert gap.rule.startswith(
        "alarm when the low end of the gap's exact 95 % interval is above 0 points; here it is 2"
    )
    assert gap.notes == ("difficulties are not known: the gap may be one of difficulty",)


def test_few_tasks_cannot_fire_it() -> None:
    gap = gap_of((7, 7), (0, 1))
    assert gap
    assert gap.gap.point == 1.0
    assert not gap.alarm


def test_the_other_direction_is_no_alarm() -> None:
    gap = gap_of((20, 100), (90, 100))
    assert gap
    assert not gap.alarm


def test_agents_share_the_error_rate_and_a_margin_can_be_asked_for() -> None:
    one, many = gap_of((78, 100), (60, 100)), gap_of((78, 100), (60, 100), agents=20)
    assert one
    assert many
    assert (one.alarm, many.alarm) == (True, False)
    assert "shared by 20 agents" in many.rule
    wide = gap_of((90, 100), (55, 100), margin=0.3)
    assert wide
    assert not wide.alarm


def test_one_side_alone_has_no_gap() -> None:
    assert gap_of((5, 10), (0, 0)) is None
    assert gap_of((0, 0), (5, 10)) is None


def test_what_difficulty_explains_goes_away_when_adjusted() -> None:
    """Easy tasks are mostly public, hard ones mostly held out; within each difficulty there is no gap."""
    parts = [(0, 80, 0.9, False), (1, 20, 0.3, False), (0, 20, 0.9, True), (1, 80, 0.3, True)]
    means = np.concatenate([np.repeat([1.0, 0.0], [round(n * p), n - round(n * p)]) for _, n, p, _ in parts])
    difficulty = np.concatenate([np.full(n, code) for code, n, _, _ in parts])
    hidden = np.concatenate([np.full(n, side) for _, n, _, side in parts])
    gap = split_gap(means, np.arange(200), hidden, difficulty)
    assert gap
    assert gap.gap.point == pytest.approx(0.36)
    assert gap.alarm
    assert gap.adjusted
    assert gap.adjusted.point == pytest.approx(0.0, abs=1e-9)
    assert gap.adjusted.low < 0 < gap.adjusted.high


def test_tasks_of_unknown_or_one_sided_difficulty_are_left_out_and_counted() -> None:
    means, hidden = np.array([1.0, 1.0, 0.0, 0.0, 1.0]), np.array([False, False, True, True, False])
    gap = split_gap(means, np.arange(5), hidden, np.array([0, 1, 0, 2, -1]))
    assert gap
    assert gap.adjusted
    assert gap.adjusted.point == 1.0
    assert gap.notes == ("tasks left out of the adjusted gap (difficulty unknown, or on one side only): 3",)
    apart = split_gap(means, np.arange(5), hidden, np.array([0, 0, 1, 1, 0]))
    assert apart
    assert apart.adjusted is None


@pytest.mark.parametrize("clustered", [False, True])
def test_without_a_gap_the_alarm_is_rare(clustered: bool) -> None:
    """Four agents at once; tasks of a cluster move together. At most 2.5 % of suites may have a false alarm."""
    random = np.random.default_rng(3)
    false = 0
    for _ in range(600):
        hidden = np.repeat([False, True], [60, 40])
        codes = np.repeat(np.arange(20), 5) if clustered else np.arange(100)
        rates = random.beta(1, 1, 20)[codes] if clustered else np.full(100, 0.6)
        gaps = [split_gap((random.random(100) < rates).astype(float), codes, hidden, agents=4) for _ in range(4)]
        false += any(gap.alarm for gap in gaps if gap)
    assert false / 600 <= 0.035
