"""A comparison, a gate and a plan as lines for people. What was not earned is not said here either."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from proctor.analysis.comparison import Claim, Comparison, Gate, Needed, PValue
    from proctor.analysis.proportions import Interval


def claim_lines(claim: Claim, *, claims: int) -> Iterator[str]:
    """One claim: the sentence first, then what it rests on."""
    yield claim.sentence
    where = f"{claim.tasks} tasks in {claim.clusters} clusters" if claim.clustered else f"{claim.tasks} tasks"
    left_out = f"; left out: {counted(claim.unpaired)}" if claim.unpaired else ""
    yield f"  paired at {where}: {claim.contender_mean:.3f} against {claim.baseline_mean:.3f}{left_out}"
    counts = claim.discordance
    if counts is not None:
        yield (
            f"  resolved by both {counts.both}, only {claim.contender} {counts.contender_only}, "
            f"only {claim.baseline} {counts.baseline_only}, neither {counts.neither}"
        )
    first, *others = claim.tests
    adjusted = f", {p_value(claim.p_adjusted)} after Holm over {claims} claims" if claims > 1 else ""
    yield f"  p {p_value(first.p)}{adjusted}, by {_test(first)}, which decides; at most {claim.alpha:.3g} is needed"
    if others:
        yield f"  deciding nothing: {', '.join(f'{_test(test)} p {p_value(test.p)}' for test in others)}"
    yield f"  {100 * _level(claim.difference):g} % interval: {_span(claim.difference)} ({claim.difference.formula})"
    if claim.bootstrap is not None:
        yield f"  and by bootstrap: {_span(claim.bootstrap)} ({claim.bootstrap.formula})"
    if (claim.worst, claim.best) != (claim.difference.point, claim.difference.point):
        yield f"  if what has no score had all failed or all passed: {points(claim.worst)} to {points(claim.best)}"
    if claim.mde is not None:
        yield (
            f"  a comparison of this size finds a difference of {100 * claim.mde:.1f} points "
            f"{100 * claim.power:g} % of the time"
        )
    if claim.needed is not None:
        yield f"  {needed_line(claim.needed)}"
    for note in claim.notes:
        yield f"  note: {note}"


def needed_line(needed: Needed) -> str:
    """What it would take, in tasks times attempts."""
    designs = " or ".join(f"{design.tasks:,} tasks x {design.attempts}" for design in needed.designs)
    return (
        f"to tell a difference of {100 * needed.effect:.1f} points {100 * needed.power:g} % of the time "
        f"it takes {designs} attempts"
    )


def gate_lines(gate: Gate) -> Iterator[str]:
    """The gate's verdict with its reasons."""
    yield (
        f"gate: {gate.verdict.upper()}: no worse by {100 * gate.margin:g} points? "
        f"p {p_value(gate.p_noninferior)} for yes, {p_value(gate.p_inferior)} for no; at most {gate.alpha:.3g} is "
        f"needed ({gate.formula})"
    )
    for reason in gate.reasons:
        yield f"  {reason}"


def heading(comparison: Comparison) -> str:
    """How it was computed, in one line."""
    return (
        f"{comparison.score} paired by task, baseline {comparison.claims[0].baseline}, "
        f"level {100 * comparison.level:g} %, power {100 * comparison.power:g} %, seed {comparison.seed}"
    )


def points(value: float) -> str:
    """A difference in points with its sign: 0.125 as +12.5."""
    return f"{100 * value:+.1f}"


def p_value(p: float) -> str:
    """A p-value with two digits that mean something."""
    return f"{p:.3f}" if p >= 0.1 else f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def counted(reasons: Mapping[str, int]) -> str:
    """`{"infra_error": 2}` as `2 infra_error`."""
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())


def _test(test: PValue) -> str:
    drawn = f", {test.resamples:,} draws, seed {test.seed}" if test.seed is not None else ""
    return f"{test.formula}{drawn}"


def _span(interval: Interval) -> str:
    return f"{points(interval.low)} to {points(interval.high)} points"


def _level(interval: Interval) -> float:
    return round(interval.level, 6)
