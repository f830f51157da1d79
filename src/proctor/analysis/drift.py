"""Has an agent's behaviour changed between two versions? The same result can hide twice the work.

Everything is compared within task, over all runs of it. Two runs of the same version already differ, so a distance
between versions counts only as far as it exceeds the distance within them. Chance is judged by giving the runs of each
task to the two versions at random: if the version makes no difference, any assignment is as likely as the one seen.
What was never done before (a tool, a host) is no matter of chance: one event is enough.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from proctor import __version__
from proctor.analysis.comparison import as_plain
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.analysis.proportions import Interval

Verdict = Literal["pass", "fail", "inconclusive"]
Scale = Literal["ratio", "difference", "divergence", "distance"]
FORMULAS: Mapping[str, str] = {
    "permutation": "every p: the share of assignments of each task's runs to the versions with a statistic at least as "
    "large, all of them or `draws` with (1 + hits) / (1 + draws) (Phipson and Smyth 2010)",
    "holm": "p_adjusted of measures that decide (Holm 1979)",
    "benjamini-hochberg": "p_adjusted of measures that are only shown (Benjamini and Hochberg 1995)",
    "log-ratio": "exp of the mean over tasks of log(mean of new runs / mean of baseline runs)",
    "difference": "mean over tasks of (mean of new runs - mean of baseline runs)",
    "jensen-shannon/bits": "divergence of the calls by tool, tasks' mean tallies summed (Lin 1991)",
    "energy/edit-distance": "mean over tasks of: mean Levenshtein distance / longer length between versions, less the "
    "mean of those within (Székely and Rizzo 2013, without self-pairs)",
    "paired-t": "t over tasks, T - 1 degrees of freedom",
    "cluster-t": "t over clusters of tasks, C - 1 degrees of freedom (Miller 2024)",
    "rerun-t": "the runs' own noise at the tasks there are, for a single task or cluster",
    "bootstrap/cluster": "percentiles over resamples of whole clusters",
    "mde": "(z(1 - alpha/2) + z(power)) x standard error, in the measure's scale",
}
"""What each formula id means, and where it is from."""
GATED = ("tokens", "calls", "tool_mix", "sequence", "repetition", "errors")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a measure may move. Outside of it is drift; None: that direction is free (fewer tokens, say)."""

    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a value lies within."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


TOLERANCES: Mapping[str, Tolerance] = {
    "tokens": Tolerance(high=1.25),
    "calls": Tolerance(high=1.25),
    "cost": Tolerance(high=1.25),
    "wall": Tolerance(high=1.5),
    "tool_mix": Tolerance(high=0.05),
    "sequence": Tolerance(high=0.1),
    "repetition": Tolerance(high=0.1),
    "errors": Tolerance(high=0.1),
    "read_only": Tolerance(-0.15, 0.15),
    "verification": Tolerance(low=-0.1),
    "unverified_edits": Tolerance(high=1.0),
}
"""What may move how far without being called drift: ratios for amounts, points of share for rates, bits for the tool
mix, excess of normalised edit distance for the sequence."""


@dataclass(frozen=True, slots=True)
class DriftOptions:
    """How to judge. `gated` measures decide the verdict and share `alpha` (Holm); the others are shown."""

    level: float = 0.95
    alpha: float = 0.05
    power: float = 0.8
    seed: int = 0
    draws: int = 10_000
    """Random assignments of runs, where there are too many to look at all."""
    gated: tuple[str, ...] = GATED
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: dict(TOLERANCES))

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.gated, *self.tolerances) if name not in TOLERANCES]
        if unknown:
            raise ConfigError(
                f"unknown measure {unknown[0]!r}", field="drift", remedy=f"one of {', '.join(TOLERANCES)}"
            )


@dataclass(frozen=True, slots=True)
class Shift:
    """One measure in both versions.

    `baseline` and `new` are means over tasks (of task means over runs); for `distance` they are the mean distance
    within the baseline and between the versions, for `divergence` there are none. `point` is the change in the
    measure's own scale: new over baseline for `ratio` (geometric mean over tasks), new minus baseline for `difference`,
    bits between the mixes of tools for `divergence`, mean distance between versions beyond that within them for
    `distance`.

    `p` is from permuting runs within tasks, and `smallest_p` the least that this many runs can give. `mde` is the
    smallest change that would be found with the stated power. The verdict is None for a measure that is only shown.
    """

    name: str
    scale: Scale
    baseline: float | None
    new: float | None
    point: float
    interval: Interval | None
    p: float
    p_adjusted: float
    smallest_p: float
    exact: bool
    tasks: int
    left_out: int
    """Tasks at which it could not be measured."""
    tolerance: Tolerance
    gated: bool
    changed: bool
    """A change was shown, be it within the tolerance or not."""
    verdict: Verdict | None
    mde: float | None
    formula: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Novelty:
    """Something that the new version did and the baseline never: a tool, a host, a program, or a model that answered
    under the same name. An `alert` fails the verdict by itself."""

    kind: Literal["tool", "host", "program", "model"]
    item: str
    alert: bool
    trials: int
    """Trials of the new version in which it occurs."""
    evidence: tuple[str, ...]
    """Trial and place in its record, at most three."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the most typical run of each version parts from the other's, at one task. For explanation only."""

    task: str
    shared: int
    baseline: str | None
    new: str | None
    baseline_evidence: str
    new_evidence: str


@dataclass(frozen=True, slots=True)
class ToolChange:
    """Calls of one tool, a run and on average over tasks. `repeats` is the share of the new version's calls of it that
    asked the same again and were answered the same; `read_only` that it never did but read."""

    tool: str
    baseline: float
    new: float
    repeats: float
    baseline_repeats: float
    read_only: bool


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One task: runs of each version, ratios of mean tokens and calls (None: not known), mean scores."""

    task: str
    runs: tuple[int, int]
    tokens: float | None
    calls: float | None
    baseline_score: float | None
    new_score: float | None


@dataclass(frozen=True, slots=True)
class Drift:
    """Everything `proctor compare --drift` says. `same_result` tells whether the mean score of every task is equal."""

    baseline: str
    new: str
    verdict: Verdict
    shifts: tuple[Shift, ...]
    novelties: tuple[Novelty, ...]
    divergences: tuple[Divergence, ...]
    tools: tuple[ToolChange, ...]
    by_task: tuple[TaskChange, ...]
    tasks: int
    clusters: int
    runs: tuple[int, int]
    unpaired: tuple[str, ...]
    """Tasks that only one version has runs of."""
    score: tuple[float | None, float | None]
    same_result: bool | None
    findings: tuple[str, ...]
    """What it comes to, in sentences, the weightiest first."""
    level: float
    alpha: float
    seed: int
    draws: int
    inputs: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Shift:
        return next(shift for shift in self.shifts if shift.name == name)

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        plain: dict[str, Any] = as_plain(asdict(self))
        return {"version": 1, "proctor_version": __version__, **plain, "formulas": dict(FORMULAS)}
