"""A crossed exam, from a trials frame to what it says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from tests.analysis.frames import frame, trial
from tests.analysis.test_components import WORKED
from tests.analysis.test_drift import formulas

from proctor.analysis.components import variance_components
from proctor.analysis.crossed import _Grid, _interaction, crossed
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable


def exam(score: Callable[[str, str, int, int], float], models: str, harnesses: str, tasks: int, attempts: int = 1,
         **more: Any) -> pl.DataFrame:  # fmt: skip
    return frame([
        trial(f"task-{t:02}", agent=f"{h}+{m}", attempt=k + 1, model=m, harness=h, score=score(m, h, t, k), **more)
        for m in models.split() for h in harnesses.split() for t in range(tasks) for k in range(attempts)
    ])  # fmt: skip


def worked() -> pl.DataFrame:
    return exam(lambda m, h, t, k: float(WORKED[m][int(h[1])][t]), "m1 m2 m3", "h0 h1", 4)


def test_the_worked_table() -> None:
    found = crossed(worked())
    assert (found.models, found.harnesses, found.tasks, found.trials) == (("m1", "m2", "m3"), ("h0", "h1"), 4, 24)
    assert found.components is not None
    assert found.components["task"].share == pytest.approx(0.5730, abs=5e-5)
    assert found.study is not None
    assert found.study.now.relative == pytest.approx(0.9239, abs=5e-5)
    assert found.interaction is not None
    assert found.interaction.statistic == pytest.approx(0.001667 / 0.015, abs=1e-4)
    assert found.interaction.df == (2, 6)
    assert found.agreement == {"h0 | h1": 1.0}
    assert not any(reversal.seen for reversal in found.reversals)
    assert [cell.mean for cell in found.cells][:2] == [pytest.approx(0.7), pytest.approx(0.6)]
    plain = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert formulas(plain) <= plain["formulas"].keys()


def test_a_harness_that_turns_the_order_around() -> None:
    strong = {("m1", "old"): 0.9, ("m1", "new"): 0.3, ("m2", "old"): 0.5, ("m2", "new"): 0.7}
    rng = np.random.default_rng(5)
    found = crossed(exam(lambda m, h, t, k: float(rng.random() < strong[m, h]), "m1 m2", "old new", 40, 5))
    assert found.interaction is not None
    assert found.interaction.p < 1e-6
    assert found.agreement == {"new | old": -1.0}
    (reversal,) = found.reversals
    assert reversal.seen
    assert reversal.chance > 0.99
    assert found.components is not None
    assert found.components["model x harness"].share > 0.2
    assert found.study is not None
    assert found.study.now.ceiling is None or found.study.now.ceiling < 0.6


def test_the_interaction_test_keeps_its_level() -> None:
    # Models and harnesses add up: at 5 % one test in twenty may say otherwise.
    rng = np.random.default_rng(17)
    repeats, false = 200, 0
    for _ in range(repeats):
        task = rng.normal(0, 0.2, 15)
        trials = exam(lambda m, h, t, k: float(np.clip(0.5 + task[t] + rng.normal(0, 0.15), 0, 1)), "a b c", "x y", 15)  # noqa: B023
        found = _interaction(variance_components(_Grid.read(trials, "score").table()))
        assert found is not None
        false += found.p < 0.05
    assert false <= 18, "the 97.5 % quantile of Binomial(200, 0.05) is 16"


def test_a_hole_in_the_crossing() -> None:
    whole = exam(lambda m, h, t, k: (t + k + len(h) * (m == "m1")) % 3 / 2, "m1 m2 m3", "h0 h1", 6, 2)
    found = crossed(whole.filter(pl.col("agent") != "h1+m3"))
    assert found.missing == (("m3", "h1"),)
    assert found.components is not None
    assert found.components.formula == "henderson-1"
    assert found.ranks_models is not None
    assert {one.label for one in found.ranks_models.systems} == {"m1", "m2"}, "ranked where every harness was"
    assert found.interaction is None
    assert any("1 of 6 combinations" in note for note in found.notes)


def test_what_is_left_out_is_counted() -> None:
    rows = worked().to_dicts()
    rows += [trial("task-00", "infra_error", agent="h0+m1", attempt=2, model="m1", harness="h0")]
    rows += [trial("task-00", agent="oracle", harness="oracle")]
    rows += [trial("task-00", agent="h0+m1", model="m1", harness="h0", condition="faults")]
    found = crossed(frame(rows))
    assert found.left_out == {"another condition than plain": 1, "infra_error": 1, "no model": 1}
    assert found.trials == 24


def test_one_harness_cannot_say_what_is_whose() -> None:
    found = crossed(exam(lambda m, h, t, k: float((t + int(m[1])) % 3 > 0), "m1 m2 m3", "h0", 8))
    assert any("cannot be told apart" in note for note in found.notes)
    assert found.reversals == ()


def test_a_harness_in_two_versions_is_two() -> None:
    rows = worked().with_columns(pl.col("harness").replace({"h0": "h", "h1": "h"}),
                                 pl.col("harness").alias("harness_version"))  # fmt: skip
    assert crossed(rows).harnesses == ("h h0", "h h1")


def test_two_configurations_of_the_same_are_refused() -> None:
    rows = [*worked().to_dicts(), trial("task-00", agent="tuned", attempt=2, model="m1", harness="h0")]
    with pytest.raises(RefusedError, match="both m1 in h0"):
        crossed(frame(rows))


def test_another_content_of_a_task_is_refused() -> None:
    rows = worked().to_dicts()
    rows[0]["task_digest"] = "sha256:other"
    with pytest.raises(RefusedError, match="task_digest"):
        crossed(frame(rows))


def test_nothing_to_cross() -> None:
    with pytest.raises(ConfigError, match="no graded trial"):
        crossed(frame([trial("a", agent="oracle")]))
