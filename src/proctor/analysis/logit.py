"""Pass or fail in a crossed exam: a logistic mixed model, logit p = mu + M + H + T + their interactions, all random.

Components of a probability (`proctor.analysis.components`) shrink where rates are near 0 or 1; those of the logit do
not. Effects are at their joint mode (penalised quasi-likelihood; Breslow and Clayton 1993), standard deviations at
MacKay's fixed point (1992), and likelihoods are Laplace's. Known weakness, also in our simulations: with few attempts
in a cell, the components of interactions come out too small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from proctor.common import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from proctor.analysis.components import Table
    from proctor.analysis.means import Floats

RESIDUAL_VARIANCE = math.pi**2 / 3
"""Variance of the standard logistic distribution: what is left on the scale of the logit."""
MOST_EFFECTS = 500
"""Levels of all effects together: each step solves a linear system of that size."""
LARGEST_SD = 8.0
_SMALLEST_SD = 1e-3
_NOTHING = 0.02
"""A standard deviation that makes no difference of a percentage point anywhere counts as 0."""
_STEPS = 40
_FIXED_POINTS = 40


@dataclass(frozen=True, slots=True)
class LogitComponent:
    """The standard deviation of one effect on the logit, and its share of the variance there (residual included)."""

    effect: tuple[str, ...]
    levels: int
    sd: float
    share: float

    @property
    def name(self) -> str:
        """`model`, `model x task`."""
        return " x ".join(self.effect)


@dataclass(frozen=True, slots=True)
class LogitModel:
    """The fitted model. `interaction_p` tests model x harness: twice the gain in Laplace likelihood against a half-half
    mixture of 0 and chi-squared with one degree of freedom (Self and Liang 1987); None without that effect."""

    mean_logit: float
    components: tuple[LogitComponent, ...]
    residual_share: float
    log_likelihood: float
    interaction_p: float | None
    formula: str = "glmm/pql"
    notes: tuple[str, ...] = ()

    def sd(self, *effect: str) -> float:
        """The standard deviation of an effect; 0 when it is not in the model."""
        return next((one.sd for one in self.components if set(one.effect) == set(effect)), 0.0)


def fit_logit(table: Table) -> LogitModel:
    """Fit the model to a table of zeros and ones.

    Raises RefusedError when scores are graded, all alike, or the table has more levels than MOST_EFFECTS even without
    the interactions of tasks.
    """
    import numpy as np

    if not bool(np.isin(table.scores, (0.0, 1.0)).all()):
        raise RefusedError("scores are graded, not pass or fail", field="--score", remedy="use --score resolved")
    if float(table.scores.min()) == float(table.scores.max()):
        raise RefusedError("all trials ended alike", field="trials", remedy="there is nothing to explain")
    effects, notes = _effects(table)
    problem = _Problem.of(table, effects)
    sds, fitted = problem.maximise()
    names = [set(effect) for effect in effects]
    test = None
    if {"model", "harness"} in names:
        place = names.index({"model", "harness"})
        rest = [number for number in range(len(effects)) if number != place]
        _, without = problem.without(place).maximise(start=[sds[number] for number in rest])
        test = _half_chi_squared(2 * (fitted.log_likelihood - without.log_likelihood))
    total = sum(sd * sd for sd in sds) + RESIDUAL_VARIANCE
    found = tuple(
        LogitComponent(effect, problem.sizes[number], sds[number], sds[number] ** 2 / total)
        for number, effect in enumerate(effects)
    )
    if any(sd > 0.99 * LARGEST_SD for sd in sds):
        notes.append("an effect is as large as can be told: some levels pass or fail always")
    return LogitModel(fitted.mean, found, RESIDUAL_VARIANCE / total, fitted.log_likelihood, test, notes=tuple(notes))


def _effects(table: Table) -> tuple[list[tuple[str, ...]], list[str]]:
    """The effects that the table can tell apart and that fit; interactions of tasks go first when they do not."""
    factors = table.varying
    wanted = [group for size in (1, 2) for group in combinations(factors, size)]
    if not table.repeated and len(factors) < 3:
        wanted = [group for group in wanted if len(group) < len(factors)]
    notes = []

    def levels(groups: Sequence[tuple[str, ...]]) -> int:
        return sum(int(table.cells(group).max()) + 1 for group in groups)

    if levels(wanted) > MOST_EFFECTS:
        wanted = [group for group in wanted if len(group) == 1 or "task" not in group]
        notes.append("too many tasks to fit their interactions with models and harnesses; these are in the residual")
    if not wanted or levels(wanted) > MOST_EFFECTS:
        raise RefusedError(f"{levels(wanted)} levels are too many for the logistic model", field="trials",
                           remedy=f"at most {MOST_EFFECTS}")  # fmt: skip
    return wanted, notes


@dataclass(frozen=True, slots=True)
class _Fit:
    """The mode for given standard deviations. `effects` are on the logit, `precision` is the Cholesky factor of the
    curvature in units of the standard deviations, the mean last."""

    mean: float
    log_likelihood: float
    effects: Floats
    precision: Floats


@dataclass(slots=True)
class _Problem:
    """Counts by cell, and for each effect which of its levels each cell has. `start` is the last mode found."""

    passed: Floats
    trials: Floats
    codes: list[NDArray[np.int64]]
    sizes: list[int]
    design: Any
    start: Floats

    @classmethod
    def of(cls, table: Table, effects: Sequence[tuple[str, ...]]) -> _Problem:
        import numpy as np

        cells = table.cells(table.varying)
        first = np.unique(cells, return_index=True)[1]
        passed = np.bincount(cells, weights=table.scores).astype(np.float64)
        return cls.made(
            passed, np.bincount(cells).astype(np.float64), [table.cells(effect)[first] for effect in effects]
        )

    @classmethod
    def made(cls, passed: Floats, trials: Floats, codes: list[NDArray[np.int64]]) -> _Problem:
        import numpy as np
        from scipy import sparse

        sizes = [int(one.max()) + 1 for one in codes]
        offsets = np.cumsum([0, *sizes[:-1]])
        columns = np.concatenate([one + offset for one, offset in zip(codes, offsets, strict=True)])
        rows = np.tile(np.arange(len(passed)), len(codes))
        shape = (len(passed), sum(sizes))
        design = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=shape)
        return cls(passed, trials, codes, sizes, design, np.zeros(shape[1] + 1))

    def without(self, place: int) -> _Problem:
        """The problem without one of its effects."""
        return self.made(self.passed, self.trials, [one for n, one in enumerate(self.codes) if n != place])

    def maximise(self, start: Sequence[float] | None = None) -> tuple[list[float], _Fit]:
        """The standard deviations at the fixed point, and the mode and likelihood there."""
        import numpy as np

        sds = self._near(np.array(start if start is not None else [0.7] * len(self.sizes)))
        return [0.0 if sd <= _NOTHING else float(sd) for sd in sds], self.fit(sds)

    def _near(self, sds: Floats) -> Floats:
        """MacKay's fixed point: the variance of an effect is its sum of squares by its degrees of freedom."""
        import numpy as np
        from scipy.linalg import solve_triangular

        ends = np.cumsum(self.sizes)
        sds = np.clip(sds, _NOTHING, LARGEST_SD)
        for _ in range(_FIXED_POINTS):
            found = self.fit(sds)
            inverse = solve_triangular(np.tril(found.precision), np.eye(len(found.precision)), lower=True)
            spread = (inverse * inverse).sum(axis=0)
            after = []
            for size, end in zip(self.sizes, ends, strict=True):
                part = slice(end - size, end)
                free = max(1e-3, size - float(spread[part].sum()))
                after.append(math.sqrt(max(_SMALLEST_SD**2, float((found.effects[part] ** 2).sum()) / free)))
            change = float(np.abs(np.log(np.array(after) / sds)).max())
            sds = np.clip(np.array(after), _NOTHING, LARGEST_SD)
            if change < 0.02:
                break
        return sds

    def fit(self, sds: Floats) -> _Fit:
        """Newton's method for the scaled effects u = b / sd and the mean (last), then Laplace's approximation."""
        import numpy as np
        from scipy.linalg import cho_factor, cho_solve

        scale = np.repeat(sds, self.sizes)
        count = len(scale)
        penalty = np.append(np.ones(count), 0.0)
        mode = self.start

        def eta(at: Floats) -> Floats:
            return np.asarray(self.design @ (scale * at[:count]) + at[count])

        def gain(at: Floats) -> float:
            logit = eta(at)
            fitted = float(self.passed @ logit - self.trials @ np.logaddexp(0, logit))
            return fitted - 0.5 * float(penalty @ (at * at))

        value, factor = gain(mode), np.eye(count + 1)
        for _ in range(_STEPS):
            p = 1 / (1 + np.exp(-eta(mode)))
            rest, weight = self.passed - self.trials * p, self.trials * p * (1 - p)
            curvature = np.empty((count + 1, count + 1))
            curvature[:count, :count] = (self.design.T @ self.design.multiply(weight[:, None])).toarray()
            curvature[:count, :count] *= scale[:, None] * scale
            curvature[count, :count] = curvature[:count, count] = scale * (self.design.T @ weight)
            curvature[count, count] = weight.sum() + 1e-9
            curvature[np.arange(count), np.arange(count)] += 1.0
            slope = np.append(scale * (self.design.T @ rest), rest.sum()) - penalty * mode
            factor = cho_factor(curvature, lower=True)[0]
            mode, better = _uphill(gain, mode, cho_solve((factor, True), slope), value)
            done = better - value < 1e-8 * (1 + abs(value))
            value = better
            if done:
                break
        self.start = mode
        # The mean is last, so the leading block of the factor is that of the effects alone.
        half_log_determinant = float(np.log(np.diag(factor)[:count]).sum())
        return _Fit(float(mode[count]), value - half_log_determinant, scale * mode[:count], factor)


def _uphill(gain: Callable[[Floats], float], at: Floats, step: Floats, value: float) -> tuple[Floats, float]:
    """A Newton step, halved until it does not lead down."""
    for _ in range(20):
        there = gain(at + step)
        if there >= value - 1e-12:
            return at + step, there
        step = step / 2
    return at, value


def _half_chi_squared(statistic: float) -> float:
    from scipy.stats import chi2

    return 1.0 if statistic <= 0 else 0.5 * float(chi2.sf(statistic, 1))
