"""What a comparison of agents comes to, as values: who was compared, on what, by which tests, which words it earned.

`proctor.analysis.claims.compare` makes a `Comparison`; `proctor compare` prints it and reports draw it. Differences are
always *contender minus baseline*, in points of the score (0.05 is five percentage points).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from proctor.analysis.proportions import Interval

Word = Literal["better", "worse", "not distinguishable"]
Dimension = Literal["capability", "difficulty", "domain", "split"]
GateVerdict = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One side: an agent in one or more runs. `mean` is over its graded tasks, repeats averaged first."""

    label: str
    """Unique within the comparison: the agent's label, with the run where two runs use the same one."""
    agent: str
    run_ids: tuple[str, ...]
    harness: str
    harness_version: str | None
    model: str | None
    returned_models: tuple[str, ...]
    tasks: int
    planned: int
    graded: int
    excluded: Mapping[str, int]
    """Trials that have no score, by outcome (`infra_error`, `stopped`, `planned`, …)."""
    mean: float | None
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PValue:
    """One p-value. `formula` names the test and how it was computed; the one with `primary` decides the word."""

    formula: str
    p: float
    primary: bool = False
    statistic: float | None = None
    df: float | None = None
    resamples: int | None = None
    """Sign assignments that were looked at: all of them when exact, drawn ones when Monte Carlo."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Design:
    """So many tasks, so many attempts of each agent at each. `trials` is for both sides together."""

    tasks: int
    attempts: int

    @property
    def trials(self) -> int:
        """Trials that a comparison of two agents costs."""
        return 2 * self.tasks * self.attempts


@dataclass(frozen=True, slots=True)
class Needed:
    """What it would take to tell a difference of `effect`: any one of `designs` has the stated power."""

    effect: float
    power: float
    alpha: float
    designs: tuple[Design, ...]
    formula: str


@dataclass(frozen=True, slots=True)
class Discordance:
    """Tasks by who resolved them, where every task has one pass-or-fail score on each side."""

    both: int
    contender_only: int
    baseline_only: int
    neither: int


@dataclass(frozen=True, slots=True)
class Claim:
    """One contender against the baseline, paired by task.

    `word` is `better` or `worse` only when `p_adjusted <= alpha` and the interval does not hold zero; it speaks of the
    contender. `mde` is the
    smallest difference that a comparison of this size would find with the stated power; absent when no result of this
    size could be significant. `worst` and `best` are the differences if every trial without a score had gone against
    the contender, or for it.
    """

    baseline: str
    contender: str
    tasks: int
    clusters: int
    clustered: bool
    unpaired: Mapping[str, int]
    """Tasks that could not be paired, by reason."""
    difference: Interval
    bootstrap: Interval | None
    baseline_mean: float
    contender_mean: float
    worst: float
    best: float
    discordance: Discordance | None
    tests: tuple[PValue, ...]
    p: float
    p_adjusted: float
    alpha: float
    mde: float | None
    power: float
    word: Word
    needed: Needed | None
    notes: tuple[str, ...] = ()
    e_value: float | None = None
    """Anytime-valid evidence for a difference (`e-value-uniform-mixture`); decides when a run stopped itself."""
    posterior_better: float | None = None
    """Probability that the contender is better, under a flat prior; for single pass-or-fail scores, unclustered."""

    @property
    def sentence(self) -> str:
        """The claim in words, without any that were not earned."""
        size = f"{100 * self.difference.point:+.1f} points"
        span = f"{100 * self.difference.low:+.1f} to {100 * self.difference.high:+.1f}"
        if self.word == "not distinguishable":
            return f"{self.contender} and {self.baseline} are not distinguishable at this size ({size}, {span})"
        return f"{self.contender} is {self.word} than {self.baseline} ({size}, {span})"


@dataclass(frozen=True, slots=True)
class Gate:
    """Is the contender no worse than the baseline by more than `margin`? Three-valued; `reasons` say why not `pass`."""

    margin: float
    alpha: float
    """One-sided."""
    p_noninferior: float
    p_inferior: float
    verdict: GateVerdict
    formula: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """One line of an exploratory table: the difference at the tasks of one group. `q` is p after Benjamini-Hochberg."""

    dimension: Dimension
    name: str
    baseline: str
    contender: str
    tasks: int
    difference: Interval
    p: float
    q: float
    formula: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything `proctor compare` says. Equal inputs, seed and version give an equal comparison."""

    contenders: tuple[Contender, ...]
    claims: tuple[Claim, ...]
    gate: Gate | None
    level: float
    power: float
    seed: int
    multiplicity: Literal["holm", "none"]
    score: str
    """What is averaged: `resolved` (pass or fail) or `score` (graded)."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digest of each input, by the name it was given."""
    proctor_version: str = ""
    notes: tuple[str, ...] = ()
    exploration: tuple[GroupDifference, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        plain: dict[str, Any] = as_plain(asdict(self))
        for claim, shown in zip(self.claims, plain["claims"], strict=True):
            shown["sentence"] = claim.sentence
        return {"version": 1, **plain}


def as_plain(value: Any) -> Any:
    """Mappings and tuples as plain JSON values; NaN as null, infinities as text."""
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None if value != value else str(value)
    return value
