"""Where the variance of scores comes from: model, harness, task, their interactions, and the rest.

Everything is taken as random, y = mu + M + H + T + MH + MT + HT (+ MHT with repeated attempts) + error. Balanced tables
give the classical analysis of variance; for others Henderson's method 1 (1953, Biometrics 9) equates the same quadratic
forms with their expectations, which are then no longer the textbook ones. Both are unbiased, cheap at any size, and may
give a negative estimate: that is shown as it came out, and counts as zero. REML is there through statsmodels.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from proctor.analysis.means import Codes, Floats

Method = Literal["anova", "reml"]
FACTORS = ("model", "harness", "task")
RESIDUAL = "residual"
_PLURAL = {"model": "models", "harness": "harnesses", "task": "tasks"}
_FEW = 5
_REML_ROWS = 1500
"""REML inverts a matrix of so many rows at each step."""


@dataclass(frozen=True, slots=True)
class Table:
    """Scores with the level of each factor. `codes` are numbers into `levels`, one for each score; a factor may be
    missing when the data do not have it."""

    scores: Floats
    codes: Mapping[str, Codes]
    levels: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, object]], scores: Sequence[float]) -> Table:
        """From one mapping factor -> level for each score. Levels are put in order by name."""
        import numpy as np

        if not rows or len(rows) != len(scores):
            raise ConfigError("there are no scores", field="scores")
        names = [name for name in FACTORS if name in rows[0]]
        levels = {name: tuple(sorted({str(row[name]) for row in rows})) for name in names}
        places = {name: {level: number for number, level in enumerate(found)} for name, found in levels.items()}
        codes = {name: np.array([places[name][str(row[name])] for row in rows], dtype=np.int64) for name in names}
        return cls(np.asarray(scores, dtype=np.float64), codes, levels)

    def only(self, kept: NDArray[np.bool_]) -> Table:
        """The table of some of the scores; levels without a score are gone."""
        import numpy as np

        codes, levels = {}, {}
        for name, old in self.codes.items():
            there, new = np.unique(old[kept], return_inverse=True)
            codes[name] = new.astype(np.int64)
            levels[name] = tuple(self.levels[name][index] for index in there)
        return Table(self.scores[kept], codes, levels)

    @property
    def varying(self) -> tuple[str, ...]:
        """The factors with more than one level: the others explain nothing."""
        return tuple(name for name in FACTORS if len(self.levels.get(name, ())) > 1)

    def cells(self, factors: Sequence[str]) -> Codes:
        """A number for each score that tells the combination of levels of these factors."""
        import numpy as np

        joint = np.zeros(len(self.scores), dtype=np.int64)
        for name in factors:
            joint = joint * len(self.levels[name]) + self.codes[name]
        return np.unique(joint, return_inverse=True)[1].astype(np.int64)

    @property
    def balanced(self) -> bool:
        """Every combination of levels is there, equally often."""
        import numpy as np

        counts = np.bincount(self.cells(self.varying))
        cells = int(np.prod([len(self.levels[name]) for name in self.varying]))
        return len(counts) == cells and int(counts.min()) == int(counts.max())

    @property
    def repeated(self) -> bool:
        """Some combination of levels has more than one score."""
        return int(self.cells(self.varying).max()) + 1 < len(self.scores)


@dataclass(frozen=True, slots=True)
class Component:
    """The variance of one effect. `raw` is the estimate, `value` counts a negative one as 0, `share` is of the sum.

    Degrees of freedom and mean square are those of the balanced analysis; None for other tables.
    """

    effect: tuple[str, ...]
    """The factors whose interaction it is; empty for the residual."""
    levels: int
    df: int | None
    mean_square: float | None
    raw: float
    value: float
    share: float

    @property
    def name(self) -> str:
        """`model`, `model x task`, `residual`."""
        return " x ".join(self.effect) if self.effect else RESIDUAL


@dataclass(frozen=True, slots=True)
class Components:
    """All components of a table. `repeated` says that attempts were repeated, so that the interaction of everything
    is apart from the residual; otherwise the residual holds both."""

    components: tuple[Component, ...]
    grand_mean: float
    total_ss: float
    rows: int
    balanced: bool
    repeated: bool
    formula: str
    notes: tuple[str, ...] = ()

    def value(self, *effect: str) -> float:
        """The component of an effect, in any order of its factors; without names the residual; 0 when absent."""
        return next((one.value for one in self.components if set(one.effect) == set(effect)), 0.0)

    def __getitem__(self, name: str) -> Component:
        return next(one for one in self.components if one.name == name)


def variance_components(table: Table, *, method: Method = "anova") -> Components:
    """The components of a table. Raises RefusedError when they cannot be told apart in it (too few combinations)."""
    import numpy as np

    scores, factors = table.scores, table.varying
    if not factors:
        raise RefusedError("nothing varies: one model, one harness, one task", field="trials",
                           remedy="run several models, harnesses or tasks")  # fmt: skip
    effects = [group for size in range(1, len(factors) + 1) for group in combinations(factors, size)]
    if not table.repeated:
        effects.pop()
    cells = {effect: table.cells(effect) for effect in effects}
    terms = _terms(scores, cells)
    raw = _reml(table, effects) if method == "reml" else _henderson(scores, cells, terms)
    balanced = table.balanced
    squares = _mean_squares(table, effects, terms) if balanced else {}
    total = sum(max(0.0, value) for value in raw.values())
    found = []
    for effect in [*effects, ()]:
        df, mean_square = squares.get(effect, (None, None))
        value = max(0.0, raw[effect])
        levels = int(cells[effect].max()) + 1 if effect else len(scores)
        share = value / total if total > 0 else 0.0
        found.append(Component(effect, levels, df, mean_square, raw[effect], value, share))
    formula = "reml" if method == "reml" else "anova/balanced" if balanced else "henderson-1"
    return Components(
        components=tuple(found),
        grand_mean=float(scores.mean()),
        total_ss=float(scores @ scores - terms[()]),
        rows=len(scores),
        balanced=balanced,
        repeated=table.repeated,
        formula=formula,
        notes=tuple(_notes(table, found, bool(np.isin(scores, (0.0, 1.0)).all()))),
    )


def _notes(table: Table, found: Sequence[Component], binary: bool) -> list[str]:
    notes = [
        f"how much {_PLURAL[name]} vary is hardly known from {len(table.levels[name])} of them"
        for name in table.varying
        if len(table.levels[name]) < _FEW
    ]
    negative = [one.name for one in found if one.raw < -1e-12]
    if negative:
        notes.append(f"estimated below zero and counted as zero: {', '.join(negative)}")
    if binary:
        notes.append("scores are pass or fail: components are variances of a probability, not of its logit")
    if not table.repeated:
        notes.append("one attempt each: the residual holds the interaction of everything and the noise of a run")
    return notes


def _terms(scores: Floats, cells: Mapping[tuple[str, ...], Codes]) -> dict[tuple[str, ...], float]:
    """The uncorrected sums of squares: over the cells of an effect, (sum of scores)² / number. () is the mean's."""
    import numpy as np

    terms: dict[tuple[str, ...], float] = {(): float(scores.sum()) ** 2 / len(scores)}
    for effect, codes in cells.items():
        sums, counts = np.bincount(codes, weights=scores), np.bincount(codes)
        terms[effect] = float((sums * sums / counts).sum())
    return terms


def _henderson(
    scores: Floats, cells: Mapping[tuple[str, ...], Codes], terms: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    """Solve for the components that make every quadratic form equal to its expectation.

    E[T_f] = N mu² + sum over effects g of k(f, g) s_g + (cells of f) s_residual, where k(f, g) is the sum over cells a
    of f of (sum over cells b of g of n_ab²) / n_a. The last equation is that of the sum of squares of all scores.
    """
    import numpy as np

    rows = len(scores)
    effects = list(cells)
    matrix = [[rows, *(_overlap(np.zeros(rows, dtype=np.int64), cells[g]) for g in effects), 1.0]]
    right = [terms[()]]
    for f in effects:
        number = float(cells[f].max() + 1)
        matrix.append([rows, *(rows if set(g) <= set(f) else _overlap(cells[f], cells[g]) for g in effects), number])
        right.append(terms[f])
    matrix.append([rows] * (len(effects) + 2))
    right.append(float(scores @ scores))
    system = np.array(matrix, dtype=np.float64) / rows
    if np.linalg.matrix_rank(system, tol=1e-9) < len(system):
        raise RefusedError("too few combinations to tell the effects apart", field="models x harnesses x tasks",
                           remedy="run more of the missing combinations")  # fmt: skip
    solved = np.linalg.solve(system, np.array(right) / rows)
    return {effect: _rounded(value) for effect, value in zip([*effects, ()], solved[1:], strict=True)}


def _rounded(value: float) -> float:
    """What is zero on paper differs from it in the last bits; a negative estimate should mean something."""
    return 0.0 if abs(value) < 1e-13 else float(value)


def _overlap(f: Codes, g: Codes) -> float:
    import numpy as np

    width = int(g.max()) + 1
    pairs, counts = np.unique(f * width + g, return_counts=True)
    sizes = np.bincount(f)
    return float((counts.astype(np.float64) ** 2 / sizes[pairs // width]).sum())


def _mean_squares(
    table: Table, effects: Sequence[tuple[str, ...]], terms: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], tuple[int, float]]:
    """Degrees of freedom and mean squares of a balanced table, the residual's under ()."""
    squares: dict[tuple[str, ...], tuple[int, float]] = {}
    left_ss = float(table.scores @ table.scores) - terms[()]
    left_df = len(table.scores) - 1
    for effect in effects:
        parts = [group for size in range(len(effect) + 1) for group in combinations(effect, size)]
        total = sum((-1) ** (len(effect) - len(part)) * terms[part] for part in parts)
        df = 1
        for name in effect:
            df *= len(table.levels[name]) - 1
        squares[effect] = df, max(0.0, total) / df
        left_ss, left_df = left_ss - total, left_df - df
    if left_df > 0:
        squares[()] = left_df, max(0.0, left_ss) / left_df
    return squares


def _reml(table: Table, effects: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
    """Restricted maximum likelihood by statsmodels: one group, each effect a variance component. Never negative."""
    import numpy as np

    if len(table.scores) > _REML_ROWS:
        raise ConfigError(f"{len(table.scores)} scores are too many for REML", field="method",
                          remedy=f"at most {_REML_ROWS}; use anova")  # fmt: skip
    from statsmodels.regression.mixed_linear_model import MixedLM, VCSpec

    names = [" x ".join(effect) for effect in effects]
    matrices = []
    for effect in effects:
        codes = table.cells(effect)
        matrices.append([np.eye(int(codes.max()) + 1)[codes]])
    columns = [[[f"{name}[{i}]" for i in range(one[0].shape[1])]] for name, one in zip(names, matrices, strict=True)]
    ones: NDArray[np.float64] = np.ones((len(table.scores), 1))
    model = MixedLM(table.scores, ones, groups=ones[:, 0], exog_vc=VCSpec(names, columns, matrices))
    with warnings.catch_warnings():
        # A component that ends at zero, the edge of what is allowed, is an answer here and not an accident.
        warnings.simplefilter("ignore")
        result = model.fit(reml=True, method=["lbfgs", "powell"])
    if not result.converged:
        raise RefusedError("REML did not converge", field="method", remedy="use anova")
    found = {effect: float(value) for effect, value in zip(effects, result.vcomp, strict=True)}
    return {**found, (): float(result.scale)}
