"""Do causes, or verdicts, agree with what people say? Measured where labels exist, never assumed.

Accuracy alone is not given: who always says "pass" is right in 95 of 100 cases when 95 pass, and knows nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.analysis.proportions import Interval, proportion
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class PassAgreement:
    """Judged pass or fail against a person's label. `false_pass` is the share of real failures that were passed,
    `false_fail` that of real passes that were failed (each with its exact interval; None without such cases)."""

    both_pass: int
    false_fails: int
    false_passes: int
    both_fail: int
    false_pass: Interval | None
    false_fail: Interval | None
    kappa: float | None
    mcc: float | None
    """Matthews' correlation; None, as kappa, when one side says the same of everything."""


@dataclass(frozen=True, slots=True)
class CauseAgreement:
    """Causes against labels: Cohen's kappa, and for each cause (right, said, labelled): its precision and recall."""

    cases: int
    kappa: float | None
    by_cause: Mapping[str, tuple[int, int, int]]
    unclassified: int
    """Cases where no cause was named; they count as disagreeing unless the label says the same."""


def kappa(one: Sequence[str], other: Sequence[str]) -> float | None:
    """Cohen's kappa (1960) of two raters; None when chance alone would agree on everything."""
    if len(one) != len(other) or not one:
        raise ConfigError("two raters need a label each for the same cases", field="labels")
    cases = len(one)
    seen = sum(first == second for first, second in zip(one, other, strict=True)) / cases
    tallies = Counter(one), Counter(other)
    chance = sum(tallies[0][label] * tallies[1][label] for label in tallies[0]) / cases**2
    return (seen - chance) / (1 - chance) if chance < 1 else None


def pass_agreement(judged: Sequence[bool], labels: Sequence[bool], *, level: float = 0.95) -> PassAgreement:
    """Compare verdicts with a person's."""
    if len(judged) != len(labels) or not judged:
        raise ConfigError("a label is needed for every case", field="labels")
    counts = Counter(zip(labels, judged, strict=True))
    both_pass, false_fails = counts[True, True], counts[True, False]
    false_passes, both_fail = counts[False, True], counts[False, False]
    product = math.prod(
        (both_pass + false_fails, both_pass + false_passes, both_fail + false_fails, both_fail + false_passes)
    )
    return PassAgreement(
        both_pass=both_pass,
        false_fails=false_fails,
        false_passes=false_passes,
        both_fail=both_fail,
        false_pass=_share(false_passes, false_passes + both_fail, level),
        false_fail=_share(false_fails, false_fails + both_pass, level),
        kappa=kappa([str(one) for one in judged], [str(one) for one in labels]),
        mcc=(both_pass * both_fail - false_passes * false_fails) / math.sqrt(product) if product else None,
    )


def _share(count: int, cases: int, level: float) -> Interval | None:
    return proportion(count, cases, method="clopper-pearson", level=level) if cases else None


def cause_agreement(causes: Sequence[str], labels: Sequence[str]) -> CauseAgreement:
    """Compare primary causes with the labels that a person gave the same trials."""
    found = kappa(causes, labels)
    names = sorted(set(causes) | set(labels))
    by_cause = {
        name: (
            sum(cause == label == name for cause, label in zip(causes, labels, strict=True)),
            sum(cause == name for cause in causes),
            sum(label == name for label in labels),
        )
        for name in names
    }
    return CauseAgreement(len(causes), found, by_cause, sum(cause == "unclassified" for cause in causes))
