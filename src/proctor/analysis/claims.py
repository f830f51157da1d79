"""`compare`: from the trials of several agents to claims about them, each with its test, interval, size and word.

Which test decides is a matter of the design, never of the results: whole clusters flip where tasks come in clusters;
otherwise exact McNemar for one pass-or-fail score at each task, sign-flip for repeats and graded scores. If a run
stopped itself by looking at its own results, only evidence that allows for looking (the e-value) may decide. All other
tests are shown and decide nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from proctor.analysis import gate as gates
from proctor.analysis.comparison import Claim, Comparison, Contender, Design, Gate, Needed, PValue, Word
from proctor.analysis.means import FEW_CLUSTERS
from proctor.analysis.multiplicity import holm
from proctor.analysis.paired import (
    Estimate,
    cluster_bootstrap,
    discordance_error,
    mcnemar,
    over_clusters,
    over_tasks,
    score_interval,
    with_pseudo_pairs,
)
from proctor.analysis.pairing import STOPPED, Pairs, by_task, contender, pair
from proctor.analysis.permutation import DRAWS, sign_flip, smallest_p, units_needed
from proctor.analysis.posterior import paired as paired_posterior
from proctor.analysis.power import Spread, tasks_needed, z_total
from proctor.analysis.sequential import evidence
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import polars as pl

    from proctor.analysis.proportions import Interval

SMALL_EFFECT = 0.02
"""A seen difference below this is not worth planning for; what it would take is then told for DEFAULT_EFFECT."""
DEFAULT_EFFECT = 0.05


@dataclass(frozen=True, slots=True)
class Terms:
    """How to compare. `level` is that of intervals and, as 1 - level, of tests; `effect` what to plan for."""

    level: float = 0.95
    power: float = 0.8
    seed: int = 0
    score: str = "score"
    all_pairs: bool = False
    effect: float | None = None
    ignore: frozenset[str] = frozenset()
    anytime: bool = False
    """A stopping rule watched one of the runs: only evidence that allows for looking may decide. A run that was in
    fact stopped is noticed without this."""
    draws: int = DRAWS
    resamples: int = 10_000

    def __post_init__(self) -> None:
        for name, value in (("level", self.level), ("power", self.power), ("effect", self.effect)):
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"{value:g} is not between 0 and 1", field=f"--{name}")
        if self.seed < 0:
            raise ConfigError(f"{self.seed} is negative", field="--seed", remedy="0 or more")
        if self.score not in ("score", "resolved"):
            raise ConfigError(f"{self.score!r} is neither score nor resolved", field="--score")

    @property
    def alpha(self) -> float:
        """Two-sided."""
        return round(1 - self.level, 12)


def compare(
    sides: Mapping[str, pl.DataFrame],
    terms: Terms | None = None,
    *,
    gate: gates.GateRule | None = None,
    inputs: Mapping[str, str] | None = None,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Comparison:
    """Compare agents by their trials (frames with the columns of `TRIALS`), by label; the first is the baseline.

    Every other side is compared with it, or with `terms.all_pairs` every side with every one before it, or as `pairs`
    of (baseline, contender) says. p-values are adjusted by Holm over all claims. Raises RefusedError for what is not
    comparable, ConfigError for too few sides.
    """
    from proctor import __version__

    terms = terms or Terms()
    if len(sides) < 2:
        raise ConfigError("there is nothing to compare with", field="A B", remedy="name two agents, or runs of two")
    if gate is not None and len(sides) != 2:
        raise ConfigError("a gate is between two", field="--gate", remedy="name the baseline and the new one")
    contenders = tuple(contender(label, trials) for label, trials in sides.items())
    to_compare = couples(list(sides), terms) if pairs is None else list(pairs)
    tables: dict[str, pl.DataFrame] = {}
    analyses = [Analysis.of(one, other, sides, terms, len(to_compare), tables) for one, other in to_compare]
    adjusted = holm([analysis.primary.p for analysis in analyses])
    claims = tuple(analysis.claim(p) for analysis, p in zip(analyses, adjusted, strict=True))
    return Comparison(
        contenders=contenders,
        claims=claims,
        gate=_gate(gate, analyses[0]) if gate is not None else None,
        level=terms.level,
        power=terms.power,
        seed=terms.seed,
        multiplicity="holm" if len(claims) > 1 else "none",
        score=terms.score,
        inputs=dict(inputs or {}),
        proctor_version=__version__,
        notes=tuple(_drifting_models(contenders)),
    )


def couples(labels: Sequence[str], terms: Terms) -> list[tuple[str, str]]:
    """Who is compared with whom: the first with every other, or all with all."""
    return list(combinations(labels, 2)) if terms.all_pairs else [(labels[0], label) for label in labels[1:]]


def _drifting_models(contenders: Sequence[Contender]) -> Iterator[str]:
    """One name, two snapshots: the endpoint may have changed the model between runs."""
    by_name: dict[str, set[tuple[str, ...]]] = {}
    for side in contenders:
        if side.model is not None and side.returned_models:
            by_name.setdefault(side.model, set()).add(side.returned_models)
    for name, returned in by_name.items():
        if len(returned) > 1:
            shown = " and ".join(", ".join(models) for models in sorted(returned))
            yield f"{name} was answered by different models: {shown}; a difference may be the model's"


@dataclass(frozen=True, slots=True)
class Analysis:
    """One couple while it is being analysed."""

    baseline: str
    contender: str
    pairs: Pairs
    terms: Terms
    claims: int
    stopped: bool
    estimate: Estimate
    tests: tuple[PValue, ...]
    e_value: float

    @classmethod
    def of(
        cls,
        one: str,
        other: str,
        sides: Mapping[str, pl.DataFrame],
        terms: Terms,
        claims: int,
        tables: dict[str, pl.DataFrame],
    ) -> Analysis:
        """Pair, estimate and test. `tables` keeps each side by task for its next couple."""
        for label in (one, other):
            if label not in tables:
                tables[label] = by_task(sides[label], terms.score)
        pairs = pair(sides[one], sides[other], ignore=terms.ignore, tables=(tables[one], tables[other]))
        stopped = any(bool((sides[label]["outcome"] == STOPPED).any()) for label in (one, other))
        e_value = evidence(_units(pairs))
        estimate = (
            over_clusters(pairs.differences, pairs.clusters) if pairs.clustered else over_tasks(pairs.differences)
        )
        tests = _tests(pairs, estimate, terms, e_value if stopped or terms.anytime else None)
        return cls(one, other, pairs, terms, claims, stopped, estimate, tests, e_value)

    @property
    def primary(self) -> PValue:
        """The test that decides."""
        return next(test for test in self.tests if test.primary)

    @property
    def alpha(self) -> float:
        """What a single claim has to reach when it is the hardest of all of them (Holm's first step)."""
        return self.terms.alpha / self.claims

    @property
    def usable(self) -> Estimate:
        """The estimate with an error that is never zero."""
        return with_pseudo_pairs(self.estimate) if self.estimate.error == 0 else self.estimate

    def interval(self) -> Interval:
        """Of the difference: score interval for single pass-or-fail scores, else t over tasks or clusters."""
        counts = self.pairs.discordance
        if counts is not None and not self.pairs.clustered:
            return score_interval(counts.contender_only, counts.baseline_only, len(self.pairs.tasks), self.terms.level)
        found = self.usable.interval(self.terms.level)
        return replace(found, low=max(-1.0, found.low), high=min(1.0, found.high))

    def detectable(self) -> float | None:
        """The minimum detectable effect, or None when a comparison of this size can show nothing."""
        if smallest_p(self.estimate.units) > self.alpha or self.planning_error is None:
            return None
        size = z_total(self.alpha, self.terms.power) * self.planning_error
        return size if size < 1 else None

    @property
    def planning_error(self) -> float | None:
        """The error to plan with. Single scores get two pseudo-pairs: few tasks seldom show all that can differ."""
        counts = self.pairs.discordance
        if counts is None or self.pairs.clustered:
            return self.usable.error
        return discordance_error(counts.contender_only, counts.baseline_only, len(self.pairs.tasks))

    def claim(self, p_adjusted: float) -> Claim:
        """Everything put together, with the word that was earned."""
        pairs, terms, interval = self.pairs, self.terms, self.interval()
        word: Word = "not distinguishable"
        if p_adjusted <= terms.alpha and (interval.low > 0 or interval.high < 0):
            word = "better" if interval.point > 0 else "worse"
        detectable = self.detectable()
        counts = pairs.discordance
        posterior = None
        if counts is not None and not pairs.clustered:
            posterior = paired_posterior(counts.contender_only, counts.baseline_only, len(pairs.tasks)).better
        return Claim(
            baseline=self.baseline,
            contender=self.contender,
            tasks=len(pairs.tasks),
            clusters=len(set(pairs.clusters)),
            clustered=pairs.clustered,
            unpaired=pairs.unpaired,
            difference=interval,
            bootstrap=self._bootstrap(),
            baseline_mean=float(pairs.baseline.mean()),
            contender_mean=float(pairs.contender.mean()),
            worst=pairs.worst,
            best=pairs.best,
            discordance=counts,
            tests=self.tests,
            p=self.primary.p,
            p_adjusted=p_adjusted,
            alpha=terms.alpha,
            mde=detectable,
            power=terms.power,
            word=word,
            needed=self._needed() if word == "not distinguishable" else None,
            notes=tuple(self._notes(word, detectable, significant=p_adjusted <= terms.alpha)),
            e_value=self.e_value,
            posterior_better=posterior,
        )

    def _bootstrap(self) -> Interval | None:
        if self.estimate.units < 2:
            return None
        terms, pairs = self.terms, self.pairs
        return cluster_bootstrap(
            pairs.differences, pairs.clusters, resamples=terms.resamples, seed=terms.seed, level=terms.level
        )

    def _needed(self) -> Needed | None:
        """Tasks for each of several numbers of attempts, to tell the effect that was seen or one worth telling."""
        error = self.planning_error
        if error is None:
            return None
        seen = abs(self.estimate.point)
        effect = self.terms.effect or (seen if seen >= SMALL_EFFECT else DEFAULT_EFFECT)
        tasks, spread = len(self.pairs.tasks), self.pairs.spread()
        least = units_needed(self.alpha)
        total = error**2 * tasks  # variance of one task's difference, clustering included
        if spread is None:
            options = [(round(self.pairs.attempts[0]) or 1, Spread(total))]
            naive = total
        else:
            options = [(attempts, spread) for attempts in sorted({1, 2, 4, 8, round(self.pairs.attempts[0])})]
            naive = spread.variance(*self.pairs.attempts)
        design_effect = max(1.0, total / naive) if self.pairs.clustered and naive > 0 else 1.0
        designs = []
        for attempts, variances in options:
            count = 1.0 if spread is None else float(attempts)
            wanted = tasks_needed(
                effect, variances, attempts=(count, count), alpha=self.alpha, power=self.terms.power,
                design_effect=design_effect,
            )  # fmt: skip
            designs.append(Design(max(least, math.ceil(wanted)), attempts))
        return Needed(effect, self.terms.power, self.alpha, tuple(designs), "paired-normal-power")

    def _notes(self, word: Word, detectable: float | None, *, significant: bool) -> list[str]:
        """What a reader has to know to not be misled."""
        notes, units = [], self.estimate.units
        kind = "clusters" if self.pairs.clustered else "tasks"
        if smallest_p(units) > self.alpha:
            notes.append(f"{units} {kind} cannot show a difference of any size at {self.alpha:.3g}; "
                         f"at least {units_needed(self.alpha)} are needed")  # fmt: skip
        elif self.pairs.clustered and units < FEW_CLUSTERS:
            notes.append(f"only {units} clusters: their variance is hardly known, and the interval is wide for it")
        if significant and word == "not distinguishable":
            notes.append("the test would say so, but the interval holds zero: many small differences one way may hide "
                         "a few large ones the other way")  # fmt: skip
        if self.estimate.error == 0:
            notes.append("every task differs by the same amount; the interval allows for what so few tasks do not show")
        if word != "not distinguishable" and detectable is not None and abs(self.estimate.point) < detectable:
            notes.append("significant, but smaller than what this size reliably finds: the true difference is probably "
                         "smaller than the one seen")  # fmt: skip
        if self.stopped:
            notes.append("a stopping rule ended a run early: only the e-value decides; p-values, interval and estimate "
                         "do not allow for that, and the difference seen is probably too large")  # fmt: skip
        elif self.terms.anytime:
            notes.append("a stopping rule watched a run: only the e-value decides")
        turned = {"better": self.pairs.worst < 0, "worse": self.pairs.best > 0}
        if turned.get(word, False):
            notes.append("trials without a score could turn the sign of the difference")
        return notes


def _units(pairs: Pairs) -> list[tuple[float, float]]:
    """(sum of differences, size) for each cluster, or each task, that no stopping rule cut into."""
    sums: dict[str, list[float]] = {}
    cut = {cluster for cluster, whole in zip(pairs.clusters, pairs.complete, strict=True) if not whole}
    for cluster, difference in zip(pairs.clusters, pairs.differences, strict=True):
        if cluster not in cut:
            sums.setdefault(cluster, []).append(float(difference))
    return [(sum(members), float(len(members))) for members in sums.values()]


def _tests(pairs: Pairs, estimate: Estimate, terms: Terms, e_value: float | None) -> tuple[PValue, ...]:
    """The deciding test first, then the others."""
    d, tests = pairs.differences, []
    if pairs.clustered:
        tests.append(sign_flip(d, pairs.clusters, draws=terms.draws, seed=terms.seed))
    counts = pairs.discordance
    if counts is not None:
        for mid_p, name in ((False, "mcnemar-exact"), (True, "mcnemar-mid-p")):
            p = mcnemar(counts.contender_only, counts.baseline_only, mid_p=mid_p)
            tests.append(PValue(name, p))
    else:
        tests.append(sign_flip(d, draws=terms.draws, seed=terms.seed))
    estimates = (estimate, over_tasks(d)) if pairs.clustered else (estimate,)
    tests += [PValue(e.formula, e.p, statistic=e.statistic, df=e.df) for e in estimates if e.p is not None]
    if e_value is not None:
        tests.insert(0, PValue("e-value-uniform-mixture", min(1.0, 1 / e_value), statistic=e_value))
    return (replace(tests[0], primary=True), *tests[1:])


def _gate(rule: gates.GateRule, analysis: Analysis) -> Gate:
    pairs, counts = analysis.pairs, analysis.pairs.discordance
    if counts is not None and not pairs.clustered:
        p_values = gates.score_tails(counts.contender_only, counts.baseline_only, len(pairs.tasks), rule.margin)
        formula = "noninferiority-tango-score"
    else:
        p_values, formula = gates.tails(analysis.usable, rule.margin), f"noninferiority-{analysis.usable.formula}"
    return gates.decide(
        rule,
        p_values,
        alpha=analysis.terms.alpha / 2,
        excluded_share=pairs.excluded_share,
        formula=formula,
        watched=analysis.stopped or analysis.terms.anytime,
    )
