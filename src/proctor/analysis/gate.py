"""A gate for continuous integration: is the new version no worse than the old one by more than a margin?

Three answers. *Pass*: the interval of the difference lies above -margin. *Fail*: it lies below. *Inconclusive*: it
holds -margin, or too many trials have no score. No evidence is not a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from proctor.analysis.comparison import Gate, GateVerdict
from proctor.analysis.paired import Estimate, score_statistic
from proctor.common import ConfigError


@dataclass(frozen=True, slots=True)
class GateRule:
    """What `--gate` says. `max_excluded` is the share of either side's planned trials that may be without a score."""

    margin: float
    max_excluded: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ConfigError(f"{self.margin:g} is not a margin", field="--gate margin",
                              remedy="points of the score as a fraction: 0.02 is two points")  # fmt: skip
        if not 0 <= self.max_excluded <= 1:
            raise ConfigError(f"{self.max_excluded:g} is not a share", field="--gate max_excluded", remedy="0 to 1")


def parse_gate(text: str) -> GateRule:
    """`margin=0.02` or `margin=0.02,max_excluded=0.1`."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in GateRule.__dataclass_fields__ or not equals or name in values:
            raise ConfigError(f"{part!r} is not understood", field="--gate", remedy="margin=0.02,max_excluded=0.05")
        try:
            values[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"{value!r} is not a number", field=f"--gate {name}") from error
    if "margin" not in values:
        raise ConfigError("no margin is given", field="--gate", remedy="--gate margin=0.02")
    return GateRule(**values)


def tails(estimate: Estimate, margin: float) -> tuple[float, float]:
    """One-sided p-values of "worse by `margin` or more" and "worse by no more than `margin`", by the t distribution.

    (difference + margin) / error; with many units it is the normal test of non-inferiority.
    """
    if estimate.error is None:
        return 1.0, 1.0
    from scipy.stats import t

    distance = (estimate.point + margin) / estimate.error if estimate.error else 0.0
    return float(t.sf(distance, estimate.df)), float(t.cdf(distance, estimate.df))


def score_tails(b: int, c: int, n: int, margin: float) -> tuple[float, float]:
    """The same for one pass-or-fail score of each agent at each of `n` tasks, by Tango's score test."""
    from scipy.stats import norm

    z = score_statistic(b, c, n, -margin)
    return float(norm.sf(z)), float(norm.cdf(z))


def decide(
    rule: GateRule,
    p_values: tuple[float, float],
    *,
    alpha: float,
    excluded_share: float,
    formula: str,
    watched: bool = False,
) -> Gate:
    """The verdict. `alpha` is one-sided: half of what the two-sided interval leaves out, so the two agree.

    `watched`: a stopping rule could end one of the runs, so its size was not fixed and these p-values say nothing.
    """
    noninferior, inferior = p_values
    reasons = []
    verdict: GateVerdict
    if noninferior <= alpha:
        verdict = "pass"
    elif inferior <= alpha:
        verdict = "fail"
        reasons.append(f"worse by more than the margin of {100 * rule.margin:g} points")
    else:
        verdict = "inconclusive"
        reasons.append(f"a loss of {100 * rule.margin:g} points is neither shown nor ruled out at this size")
    if verdict != "fail" and excluded_share > rule.max_excluded:
        verdict = "inconclusive"
        reasons.append(f"{100 * excluded_share:.1f} % of the planned trials have no score "
                       f"(at most {100 * rule.max_excluded:g} % may)")  # fmt: skip
    if watched:
        verdict = "inconclusive"
        reasons = ["a stopping rule watched a run; a gate needs a size that was fixed beforehand"]
    return Gate(rule.margin, alpha, noninferior, inferior, verdict, formula, tuple(reasons))
