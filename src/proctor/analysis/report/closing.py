"""The last sections: why trials failed, how behaviour drifted, and how every number was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.analysis.report.charts import axis, count_bar, interval_bar, symmetric
from proctor.analysis.report.sections import Badge, Column, Links, Note, Section, Table, Two, probability

if TYPE_CHECKING:
    from proctor.analysis.report.model import Report


def causes(report: Report) -> Section:
    """Primary causes of failure and signals of behaviour, by agent."""
    found = report.causes
    if found is None:
        return Section("causes", "Why trials failed", (Note(report.absent.get("causes", "Not analysed."), "quiet"),))
    agents = [
        one.agent for one in report.aggregate.summaries if any(cause.counts.get(one.agent) for cause in found.causes)
    ]
    most = max((sum(cause.counts.values()) for cause in found.causes), default=0)
    rows = tuple(
        (
            Two(cause.name, cause.meaning),
            count_bar(sum(cause.counts.values()), most),
            *(f"{cause.counts.get(agent, 0):,}" for agent in agents),
            Links(cause.trials, sum(cause.counts.values()) - len(cause.trials)),
        )
        for cause in found.causes
    )
    columns = (Column("primary cause"), Column("trials", "picture"), *(Column(agent, "number") for agent in agents),
               Column("where"))  # fmt: skip
    parts: list[Table | Note] = [Note(found.statement)]
    if rows:
        parts.append(Table("Failed trials by primary cause", columns, rows))
    if found.signals:
        named = [one.agent for one in report.aggregate.summaries]
        signal_rows = tuple(
            (Two(one.name, one.certainty), *(f"{one.counts.get(agent, 0):,}" for agent in named))
            for one in found.signals
        )
        signal_columns = (Column("signal"), *(Column(agent, "number") for agent in named))
        parts.append(Table("Trials in which a signal of behaviour was seen", signal_columns, signal_rows))
    return Section("causes", "Why trials failed", tuple(parts))


def drift(report: Report) -> Section | None:
    """Behaviour of two agents within task; None when there are not two."""
    found = report.drift
    if found is None:
        why = report.absent.get("drift")
        return Section("drift", "Change of behaviour", (Note(why),)) if why else None
    drawn = [one for one in found.measures if one.low is not None and one.high is not None]
    scale = symmetric(value for one in drawn for value in (one.low, one.high))
    ends = axis([(scale.low, f"{scale.low:g}"), (0.0, "0"), (scale.high, f"{scale.high:g}")], scale)
    rows = []
    for one in found.measures:
        bar: object = ""
        if one.point is not None and one.low is not None and one.high is not None:
            bar = interval_bar(one.point, one.low, one.high, scale=scale, zero=True)
        said = Badge("drifted", "warn") if one.drifted else Badge("no drift seen", "quiet")
        p = probability(one.p) if one.p is not None else ""
        rows.append((one.name, one.before, one.after, bar, one.text, p, said))
    columns = (Column("measure"), Column(found.baseline, "number"), Column(found.contender, "number"),
               Column("change", "picture", ends), Column("change", "number"), Column("p", "number"),
               Column("verdict"))  # fmt: skip
    parts: list[Table | Note] = [
        Note(found.statement, "warn" if any(one.drifted for one in found.measures) else "quiet")
    ]
    parts.append(Table(f"{found.contender} against {found.baseline}, within task", columns, tuple(rows)))
    parts += [Note(line, "warn") for line in found.novelties]
    return Section("drift", "Change of behaviour", tuple(parts))


def provenance(report: Report) -> Section:
    """What is needed to compute every number again."""
    source = report.aggregate.provenance
    inputs = tuple(
        (Two(one.name, one.kind), one.digest, f"{one.trials:,}", one.damage or "whole") for one in source.inputs
    )
    columns = (Column("input"), Column("digest (head of the ledger, or of the file)"), Column("trials", "number"),
               Column("state"))  # fmt: skip
    formulas = tuple((name, meaning) for name, meaning in source.formulas.items())
    resampled = f"Seed {source.seed}, {source.resamples:,} resamples, level {source.level:g}, Proctor {source.version}."
    return Section(
        "provenance",
        "How this was computed",
        (
            Table("Inputs", columns, inputs),
            Note(resampled),
            Table(
                "Formulas by the ids that stand beside numbers in the JSON form",
                (Column("id"), Column("formula")),
                formulas,
            ),
        ),
        folded=True,
    )
