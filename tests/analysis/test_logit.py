"""The logistic mixed model: its likelihood by quadrature, its estimates by simulation, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from proctor.analysis.components import Table
from proctor.analysis.logit import MOST_EFFECTS, _Problem, fit_logit
from proctor.common import RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping


def drawn(
    rng: np.random.Generator, models: int, harnesses: int, tasks: int, attempts: int, sds: Mapping[str, float]
) -> Table:
    """A crossed exam whose logits are sums of effects with these standard deviations (`m`, `h`, `t`, `mh`, `mt`)."""
    sizes = {"m": models, "h": harnesses, "t": tasks}
    m, h, t = (rng.normal(0, sds.get(name, 0), size) for name, size in sizes.items())
    mh, mt = rng.normal(0, sds.get("mh", 0), (models, harnesses)), rng.normal(0, sds.get("mt", 0), (models, tasks))
    logit = m[:, None, None] + h[:, None] + t + mh[:, :, None] + mt[:, None, :]
    passed = rng.random((attempts, *logit.shape)) < 1 / (1 + np.exp(-logit))
    places = [place for place, _ in np.ndenumerate(passed)]
    rows = [{"model": f"m{i}", "harness": f"h{j}", "task": f"t{k:03}"} for _, i, j, k in places]
    return Table.of(rows, passed.astype(float).ravel().tolist())


def test_the_likelihood_is_that_of_quadrature() -> None:
    rng = np.random.default_rng(3)
    table = drawn(rng, 1, 1, 15, 25, {"t": 1.2})
    problem = _Problem.of(table, [("task",)])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    for sd in (0.5, 1.2, 2.0):
        found = problem.fit(np.array([sd]))
        p = 1 / (1 + np.exp(-(found.mean + sd * nodes)))
        exact = 0.0
        for passed, trials in zip(problem.passed, problem.trials, strict=True):
            exact += np.log((weights * p**passed * (1 - p) ** (trials - passed)).sum() / np.sqrt(2 * np.pi))
        assert found.log_likelihood == pytest.approx(exact, abs=0.15)


def test_the_mode_is_the_penalised_maximum() -> None:
    table = drawn(np.random.default_rng(4), 3, 2, 12, 3, {"m": 1, "t": 1})
    problem = _Problem.of(table, [("model",), ("task",)])
    sds = np.array([0.8, 1.1])
    found = problem.fit(sds)
    p = 1 / (1 + np.exp(-(problem.design @ found.effects + found.mean)))
    rest = problem.passed - problem.trials * p
    variances = np.repeat(sds**2, problem.sizes)
    assert problem.design.T @ rest == pytest.approx(found.effects / variances, abs=1e-4)
    assert float(rest.sum()) == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
def test_standard_deviations_are_found_again() -> None:
    rng = np.random.default_rng(5)
    found = [fit_logit(drawn(rng, 3, 2, 14, 6, {"m": 1.0, "t": 1.5, "mt": 0.7})) for _ in range(5)]
    assert np.mean([one.sd("task") for one in found]) == pytest.approx(1.5, rel=0.25)
    assert np.mean([one.sd("model", "task") for one in found]) == pytest.approx(0.7, rel=0.35)
    assert np.mean([one.sd("harness", "task") for one in found]) < 0.4
    assert np.mean([one.sd("harness") for one in found]) < 0.3
    for one in found:
        assert sum(part.share for part in one.components) + one.residual_share == pytest.approx(1)


@pytest.mark.slow
def test_an_interaction_is_told_from_none() -> None:
    rng = np.random.default_rng(6)
    with_it = [fit_logit(drawn(rng, 4, 3, 7, 8, {"m": 0.5, "t": 1.0, "mh": 1.0})).interaction_p for _ in range(3)]
    without = [fit_logit(drawn(rng, 4, 3, 7, 8, {"m": 0.5, "t": 1.0})).interaction_p for _ in range(8)]
    assert all(p is not None and p < 0.01 for p in with_it)
    assert sum(p is not None and p < 0.05 for p in without) <= 2


def test_what_cannot_be_fitted_is_refused_with_the_reason() -> None:
    rows = [{"model": f"m{i % 2}", "harness": "h", "task": f"t{i % 5}"} for i in range(20)]
    with pytest.raises(RefusedError, match="graded"):
        fit_logit(Table.of(rows, [0.5] * 20))
    with pytest.raises(RefusedError, match="alike"):
        fit_logit(Table.of(rows, [1.0] * 20))
    many = [{"model": "m", "harness": "h", "task": f"t{i}"} for i in range(MOST_EFFECTS + 1)]
    with pytest.raises(RefusedError, match="too many"):
        fit_logit(Table.of(many, [float(i % 2) for i in range(len(many))]))


def test_interactions_of_very_many_tasks_are_left_to_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.analysis.logit.MOST_EFFECTS", 40)
    found = fit_logit(drawn(np.random.default_rng(7), 3, 2, 15, 2, {"t": 1.0}))
    assert {one.name for one in found.components} == {"model", "harness", "task", "model x harness"}
    assert any("too many tasks" in note for note in found.notes)


def test_levels_that_never_fail_do_not_break_it() -> None:
    table = drawn(np.random.default_rng(8), 2, 2, 6, 1, {})
    rows = [{name: table.levels[name][table.codes[name][i]] for name in table.levels} for i in range(24)]
    found = fit_logit(Table.of(rows, [float(row["model"] == "m0") for row in rows]))
    assert found.sd("model") > 1
    assert np.isfinite(found.log_likelihood)
