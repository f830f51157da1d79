"""Variance components against the worked table, statsmodels, simulation, and what must hold of any table."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.analysis.components import Component, Components, Table, variance_components
from proctor.analysis.reliability import Exam, d_study, jackknife, reliability
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Integrity research, section 3.8: 3 models x 2 harnesses x 4 tasks.
WORKED = {
    "m1": [(1, 0.8, 0.6, 0.4), (0.8, 0.8, 0.4, 0.4)],
    "m2": [(0.8, 0.6, 0.4, 0.2), (0.8, 0.6, 0.4, 0)],
    "m3": [(0.6, 0.6, 0.2, 0.2), (0.6, 0.2, 0.2, 0.2)],
}


def worked() -> Table:
    cells = [
        ({"model": model, "harness": f"h{h}", "task": f"t{t}"}, score)
        for model, harnesses in WORKED.items()
        for h, tasks in enumerate(harnesses)
        for t, score in enumerate(tasks)
    ]
    return Table.of([row for row, _ in cells], [float(score) for _, score in cells])


def table(score: Callable[[int, int, int, int], float], sizes: Sequence[int]) -> Table:
    rows, scores = [], []
    for m, h, t, k in itertools.product(*map(range, sizes)):
        rows.append({"model": m, "harness": h, "task": t})
        scores.append(score(m, h, t, k))
    return Table.of(rows, scores)


def test_mean_squares_of_the_worked_table() -> None:
    found = variance_components(worked())
    assert (found.formula, found.balanced, found.repeated) == ("anova/balanced", True, False)
    squares = {one.name: one.mean_square for one in found.components}
    assert squares == {
        "model": pytest.approx(0.181667, abs=1e-6),
        "harness": pytest.approx(0.041667, abs=1e-6),
        "task": pytest.approx(0.339444, abs=1e-6),
        "model x harness": pytest.approx(0.001667, abs=1e-6),
        "model x task": pytest.approx(0.012778, abs=1e-6),
        "harness x task": pytest.approx(0.001667, abs=1e-6),
        "residual": pytest.approx(0.015),
    }
    assert found.total_ss == pytest.approx(1.598333, abs=1e-6)


def test_components_of_the_worked_table_raw_and_counted() -> None:
    found = variance_components(worked())
    raw = {one.name: one.raw for one in found.components}
    assert raw == {
        "model": pytest.approx(0.022778, abs=1e-6),
        "harness": pytest.approx(0.004444, abs=1e-6),
        "task": pytest.approx(0.056667, abs=1e-6),
        "model x harness": pytest.approx(-0.003333, abs=1e-6),
        "model x task": pytest.approx(-0.001111, abs=1e-6),
        "harness x task": pytest.approx(-0.004444, abs=1e-6),
        "residual": pytest.approx(0.015),
    }
    shares = {one.name: round(100 * one.share, 2) for one in found.components if one.value}
    assert shares == {"task": 57.30, "model": 23.03, "residual": 15.17, "harness": 4.49}
    assert found.value("task", "model") == 0.0
    assert any("model x harness, model x task, harness x task" in note for note in found.notes)


def test_reliability_of_the_worked_table() -> None:
    found = variance_components(worked())
    assert reliability(found, Exam(1, 4)).relative == pytest.approx(0.8586, abs=5e-5)
    assert reliability(found, Exam(2, 4)).relative == pytest.approx(0.9239, abs=5e-5)


def test_why_breadth_wins() -> None:
    # Integrity research, section 3.8: s_m .01, s_mh .01, s_mt .03, residual .1; the shape of the published HAL study.
    components = planted(m=0.01, mh=0.01, mt=0.03, residual=0.1)
    designs = [(1, 50), (1, 500), (1, 10**6), (3, 50), (7, 50)]
    found = [reliability(components, Exam(h, t)).relative for h, t in designs]
    assert found == [pytest.approx(value, abs=5e-5) for value in (0.4425, 0.4936, 0.5000, 0.6849, 0.8121)]
    one = reliability(components, Exam(1, 50))
    assert one.ceiling == pytest.approx(0.5), "no number of tasks makes up for a single harness"
    study = d_study(components, Exam(3, 50), target=0.8, harnesses=(1, 7))
    assert study.needed == ((1, 1, None), (7, 1, 42)), ".04429 / T <= .01 / .8 - .01 - .01 / 7"


def planted(**values: float) -> Components:
    names = {"m": ("model",), "h": ("harness",), "t": ("task",), "mh": ("model", "harness"), "mt": ("model", "task"),
             "ht": ("harness", "task"), "residual": ()}  # fmt: skip
    parts = tuple(
        Component(names[key], 1, None, None, values.get(key, 0.0), values.get(key, 0.0), 0.0) for key in names
    )
    return Components(parts, 0.5, 1.0, 100, balanced=True, repeated=False, formula="planted")


def test_attempts_help_only_against_the_noise_of_running() -> None:
    rng = np.random.default_rng(3)
    model, cell = rng.normal(0, 0.3, 4), rng.normal(0, 0.2, (4, 30))
    found = variance_components(table(lambda m, h, t, k: model[m] + cell[m, t] + rng.normal(0, 0.3), (4, 1, 30, 3)))
    assert {"model", "task", "model x task", "residual"} == {one.name for one in found.components}
    one, many, endless = (reliability(found, Exam(1, 30, k)).relative for k in (1, 10, 10**9))
    assert one < many < endless < 1
    study = d_study(found, Exam(1, 30, 3))
    assert {exam.exam.harnesses for exam in study.grid} == {1}, "what more harnesses would do is not in the data"
    assert {exam.exam.attempts for exam in study.grid} == {1, 3, 5}


def test_reliability_of_agents_takes_model_and_harness_together() -> None:
    components = planted(m=0.01, h=0.02, mh=0.01, mt=0.03, residual=0.1)
    found = reliability(components, Exam(1, 50), object="agent")
    assert found.relative == pytest.approx(0.04 / (0.04 + 0.13 / 50))


def test_against_reml_of_statsmodels_where_no_component_is_negative() -> None:
    # A balanced design whose estimates are all positive: REML is then the analysis of variance (Searle 1992, 4.8).
    rng = np.random.default_rng(11)
    model, task, cell = rng.normal(0, 1, 4), rng.normal(0, 1, 5), rng.normal(0, 0.8, (4, 5))
    data = table(lambda m, h, t, k: model[m] + task[t] + cell[m, t] + rng.normal(0, 0.5), (4, 1, 5, 3))
    anova, reml = variance_components(data), variance_components(data, method="reml")
    assert min(one.raw for one in anova.components) > 0
    for mine, theirs in zip(anova.components, reml.components, strict=True):
        assert mine.raw == pytest.approx(theirs.raw, rel=0.02), mine.name
    assert reml.formula == "reml"


def test_unbalanced_estimates_are_unbiased() -> None:
    # Henderson's method 1: the mean over simulated tables meets the planted components.
    rng = np.random.default_rng(7)
    sds = {"model": 0.4, "task": 0.6, "both": 0.3, "noise": 0.5}
    missing = {(0, 3), (1, 7), (2, 0), (3, 3), (3, 9)}
    sums: dict[str, float] = {}
    repeats = 600
    for _ in range(repeats):
        model, task = rng.normal(0, sds["model"], 6), rng.normal(0, sds["task"], 12)
        cell = rng.normal(0, sds["both"], (6, 12))
        rows, scores = [], []
        for m, t in itertools.product(range(6), range(12)):
            for _k in range(0 if (m, t) in missing else 1 + (m + t) % 3):
                rows.append({"model": m, "task": f"{t:02}"})
                scores.append(model[m] + task[t] + cell[m, t] + rng.normal(0, sds["noise"]))
        found = variance_components(Table.of(rows, scores))
        assert found.formula == "henderson-1"
        for one in found.components:
            sums[one.name] = sums.get(one.name, 0.0) + one.raw / repeats
    assert sums["model"] == pytest.approx(0.16, abs=0.02)
    assert sums["task"] == pytest.approx(0.36, abs=0.03)
    assert sums["model x task"] == pytest.approx(0.09, abs=0.01)
    assert sums["residual"] == pytest.approx(0.25, abs=0.01)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 5), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_of_any_balanced_table(models: int, harnesses: int, tasks: int, attempts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = table(lambda *_: float(rng.integers(0, 11)) / 10, (models, harnesses, tasks, attempts))
    found = variance_components(data)
    assert found.balanced
    assert sum(one.df or 0 for one in found.components) == len(data.scores) - 1
    squares = sum((one.df or 0) * (one.mean_square or 0) for one in found.components)
    assert squares == pytest.approx(found.total_ss, abs=1e-9)
    assert sum(one.share for one in found.components) == pytest.approx(1.0) or found.total_ss == pytest.approx(0)
    # Henderson's equations are those of the mean squares: E[MS] of the residual is its component.
    assert found["residual"].raw == pytest.approx(found["residual"].mean_square, abs=1e-9)
    # Another zero and another unit change nothing but the unit.
    moved = variance_components(Table(3.0 - 2.0 * data.scores, data.codes, data.levels))
    for one, other in zip(found.components, moved.components, strict=True):
        assert other.raw == pytest.approx(4 * one.raw, abs=1e-9)


def test_a_table_that_cannot_tell_effects_apart_is_refused() -> None:
    # Each model only in a harness of its own: whose doing a score is cannot be known.
    rows = [{"model": m, "harness": m, "task": t} for m in range(3) for t in range(4)]
    with pytest.raises(RefusedError, match="apart"):
        variance_components(Table.of(rows, [0.1 * i for i in range(12)]))


def test_nothing_varies() -> None:
    with pytest.raises(RefusedError, match="nothing varies"):
        variance_components(Table.of([{"model": "a", "task": "t"}] * 3, [0.0, 1.0, 1.0]))


def test_a_design_without_tasks_is_no_design() -> None:
    with pytest.raises(ConfigError):
        reliability(variance_components(worked()), Exam(1, 0))


def test_the_interval_of_reliability_covers() -> None:
    # Models as they are, other tasks drawn: how often the interval of the jackknife holds what many tasks would give.
    rng = np.random.default_rng(31)
    model = np.array([-0.3, -0.1, 0.1, 0.3])
    true = float(model.var(ddof=1)) / (float(model.var(ddof=1)) + 0.5**2 / 40)
    covered, repeats = 0, 100
    for _ in range(repeats):
        task = rng.normal(0, 0.4, 40)
        data = table(lambda m, h, t, k: model[m] + task[t] + rng.normal(0, 0.5), (4, 1, 40, 1))  # noqa: B023
        found = jackknife(data, [f"t{t}" for t in data.codes["task"]], Exam(1, 40))
        covered += found is not None and found.low <= true <= found.high
    assert covered >= 88, "95 in 100 on paper; the 1 % quantile of Binomial(100, 0.95) is 89"


def test_no_interval_from_too_few_clusters() -> None:
    data = worked()
    assert jackknife(data, [f"t{t}" for t in data.codes["task"]], Exam(2, 4)) is None


def test_what_attempts_would_do_is_not_assumed() -> None:
    found = variance_components(worked())
    assert reliability(found, Exam(1, 4, 5)).relative == reliability(found, Exam(1, 4, 1)).relative
