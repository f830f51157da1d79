"""The first sections: the headline with its denominators, what may be claimed, and how far it can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.analysis.frame import GRADED, OUTCOMES
from proctor.analysis.report.charts import axis, interval_bar, stacked_bar, symmetric
from proctor.analysis.report.sections import (
    Badge,
    Column,
    Links,
    Named,
    Note,
    Section,
    Table,
    Two,
    counted,
    grouped,
    percent,
    point_span,
    points,
    probability,
    reasons,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proctor.analysis.comparison import Claim, Comparison
    from proctor.analysis.report.model import Report, Tone, Trust
    from proctor.analysis.summaries import Summary

RATE_AXIS = axis([(0.0, "0"), (0.5, "50"), (1.0, "100 %")])
MOST_CLAIMS = 5
"""Claims that stand under the headline; the section on comparisons has all."""
WORDS: dict[str, Tone] = {"better": "good", "worse": "bad", "not distinguishable": "quiet"}


def headline(report: Report) -> Section:
    """Every agent with its rate, interval and denominators."""
    result = report.aggregate
    bounds = any(summary.excluded for summary in result.summaries)
    columns = (
        Column("agent"),
        Column("success rate", "picture", RATE_AXIS),
        Column(f"success rate, {result.provenance.level * 100:g} % interval", "number"),
        Column("resolved, of graded trials", "number"),
        Column("excluded, of planned trials", "number"),
        *((Column("rate if all excluded had failed, or had been resolved", "number"),) if bounds else ()),
    )
    rows = tuple(
        (*_headline_row(summary, colour), *((_bounds(summary),) if bounds else ()))
        for colour, summary in enumerate(result.summaries)
    )
    table = Table("Success rate of each agent with its interval and denominators", columns, rows)
    return Section("headline", "Result", (table, *(Note(line, tone) for line, tone in _said(report))))


def _headline_row(summary: Summary, colour: int) -> tuple[object, ...]:
    who = " · ".join(part for part in (f"{summary.harness} {summary.harness_version}".strip(), summary.model) if part)
    name = Named(summary.agent, colour, who)
    out = Two(f"{summary.planned - summary.graded:,} of {summary.planned:,}", reasons(dict(summary.excluded)))
    if summary.headline is None:
        return (name, "", "no rate", "", out)
    bar = interval_bar(summary.headline.point, summary.headline.low, summary.headline.high, colour=colour)
    rate = Two(percent(summary.headline.point), span(summary.headline))
    return (name, bar, rate, Two(f"{summary.resolved:,} of {summary.graded:,}", _tasks(summary)), out)


def _bounds(summary: Summary) -> str:
    if not summary.excluded or summary.worst is None or summary.best is None:
        return ""
    return f"{100 * summary.worst:.1f} or {percent(summary.best)}"


def _tasks(summary: Summary) -> str:
    clusters = f" in {summary.clusters} clusters" if summary.clusters != summary.tasks else ""
    return f"{counted(summary.tasks, 'task')}{clusters}"


def _said(report: Report) -> Iterator[tuple[str, Tone]]:
    """What may be said in words: claims that were earned, denominators that are in doubt, alarms."""
    claims = report.comparison.claims if report.comparison is not None else ()
    for claim in claims[:MOST_CLAIMS]:
        yield f"{claim.sentence}.", WORDS[claim.word]
    if len(claims) > MOST_CLAIMS:
        yield f"{len(claims) - MOST_CLAIMS} more comparisons are in the section on them.", "quiet"
    summaries = report.aggregate.summaries
    for line in grouped([(one.agent, note) for one in summaries for note in one.notes], len(summaries)):
        yield f"{line}.", "quiet"
    for note in report.aggregate.notes:
        yield f"{note[:1].upper()}{note[1:]}.", "warn"


def endings(report: Report) -> Section:
    """How trials ended, by agent: the whole denominator."""
    seen = [name for name in OUTCOMES if any(one.outcomes.get(name) for one in report.aggregate.summaries)]
    columns = (Column("agent"), Column("share", "picture"), *(Column(_outcome(name), "number") for name in seen))
    rows = tuple(
        (
            Named(one.agent, colour),
            stacked_bar([(name, one.outcomes.get(name, 0)) for name in seen]),
            *(f"{one.outcomes.get(name, 0):,}" for name in seen),
        )
        for colour, one in enumerate(report.aggregate.summaries)
    )
    outside = [_outcome(name) for name in seen if name not in GRADED]
    note = f"Not in any rate: {', '.join(outside)}." if outside else "Every planned trial is in the rate."
    return Section("endings", "How trials ended", (Table("Trials of each agent by outcome", columns, rows, note),))


def _outcome(name: str) -> str:
    return name.replace("_", " ")


def trust(report: Report) -> Section:
    """The trust statement with its reasons, and the counts behind it."""
    state = report.trust
    tone: Tone = {"sound": "good", "reservations": "warn", "broken": "bad"}[state.standing]  # type: ignore[assignment]
    parts: list[Table | Note] = [Note(state.statement, tone)]
    parts += [Note(line, "bad") for line in state.broken]
    parts += [Note(line, "warn") for line in state.reservations]
    parts.append(Table("What the records say", (Column("question"), Column("answer")), tuple(_facts(state))))
    if state.findings:
        rows = tuple(
            (one.kind, Badge(one.severity, _severity(one.severity)), f"{one.count:,}",
             Links(one.trials, one.count - len(one.trials)))
            for one in state.findings
        )  # fmt: skip
        columns = (Column("finding"), Column("severity"), Column("trials", "number"), Column("where"))
        parts.append(Table("Integrity findings", columns, rows))
    return Section("trust", "Can it be trusted?", tuple(parts))


def _facts(state: Trust) -> Iterator[tuple[str, str]]:
    yield (
        "records read",
        f"{state.records:,}" + (f"; {state.unchecked:,} trials have none here" if state.unchecked else ""),
    )
    yield "records that are as the ledger says", f"{state.intact:,} of {state.records:,}"
    yield "isolation of the candidate", _counts(state.tiers)
    yield "network of the candidate", _counts(state.networks)
    yield (
        "graded in a clean room",
        f"{state.clean_room:,}" + (f"; in place: {state.in_place:,}" if state.in_place else ""),
    )
    if state.unstable_tests:
        yield "unstable tests, quarantined", f"{state.unstable_tests:,}"


def _counts(counts: object) -> str:
    assert isinstance(counts, dict)
    return "; ".join(f"{name}: {count:,}" for name, count in counts.items()) or "not known"


def _severity(name: str) -> Tone:
    return {"disqualify": "bad", "review": "warn"}.get(name, "quiet")  # type: ignore[return-value]


def comparison(report: Report) -> Section:
    """The forest plot of differences, and what each comparison rests on."""
    found = report.comparison
    if found is None:
        return Section("comparison", "Comparison", (Note(report.absent.get("comparison", "There is none.")),))
    scale = symmetric(value for claim in found.claims for value in (claim.difference.low, claim.difference.high))
    ends = axis([(scale.low, points(scale.low)), (0.0, "0"), (scale.high, points(scale.high))], scale)
    columns = (
        Column("contender against baseline"),
        Column("difference", "picture", ends),
        Column(f"difference in points, {found.level * 100:g} % interval", "number"),
        Column("verdict"),
        Column("tasks", "number"),
        Column("p" if found.multiplicity == "none" else "p (Holm)", "number"),
        Column("detectable", "number"),
    )
    rows = []
    for claim in found.claims:
        gap = claim.difference
        rows.append((
            Two(claim.contender, f"against {claim.baseline}"),
            interval_bar(gap.point, gap.low, gap.high, scale=scale, zero=True),
            Two(points(gap.point), point_span(gap.low, gap.high)),
            Badge(claim.word, WORDS[claim.word]),
            f"{claim.tasks:,}",
            probability(claim.p_adjusted),
            "nothing at this size" if claim.mde is None else f"{100 * claim.mde:.1f}",
        ))  # fmt: skip
    note = (
        f'Paired by task; positive is in favour of the contender. "Detectable" is the smallest difference, in points, '
        f"that a comparison of this size finds with {found.power * 100:g} % power."
    )
    table = Table("Differences in score, contender minus baseline", columns, tuple(rows), note)
    return Section("comparison", "Comparison", (table, *_details(found)))


def _details(found: Comparison) -> Iterator[Note | Table]:
    rows = []
    for claim in found.claims:
        for test in claim.tests:
            mark = " (decides)" if test.primary else ""
            rows.append((f"{claim.contender} - {claim.baseline}", f"{test.formula}{mark}", probability(test.p)))
    columns = (Column("comparison"), Column("test"), Column("p", "number"))
    yield Table("Every test, and which one decides", columns, tuple(rows))
    for claim in found.claims:
        if claim.word == "not distinguishable" and claim.needed is not None:
            yield Note(_needed(claim), "info")
        for note in claim.notes:
            yield Note(f"{claim.contender} - {claim.baseline}: {note}.")
    for note in found.notes:
        yield Note(f"{note}.")


def _needed(claim: Claim) -> str:
    assert claim.needed is not None
    designs = " or ".join(f"{counted(one.tasks, 'task')} x {counted(one.attempts, 'attempt')}"
                          for one in claim.needed.designs)  # fmt: skip
    return (
        f"To tell {claim.contender} from {claim.baseline} when they differ by {100 * claim.needed.effect:.1f} points, "
        f"with {claim.needed.power * 100:g} % power: {designs}."
    )
