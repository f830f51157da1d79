"""The last sections: why trials failed, how behaviour drifted, and how every number was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.analysis.report.charts import count_bar, short
from proctor.analysis.report.sections import Badge, Column, Links, Note, Section, Table, Two, counted, probability, span

if TYPE_CHECKING:
    from proctor.analysis.crossed import CellMean
    from proctor.analysis.drift import Shift
    from proctor.analysis.provenance import Input
    from proctor.analysis.report.model import Report, Tone

_SHOWN = 8
_LINKED = 3


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
            Links(cause.trials[:_LINKED], sum(cause.counts.values()) - len(cause.trials[:_LINKED])),
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


VERDICTS: dict[str | None, tuple[str, Tone]] = {
    "pass": ("within tolerance", "good"),
    "fail": ("drifted", "bad"),
    "inconclusive": ("not to be told", "warn"),
    None: ("shown only", "quiet"),
}
_SCALES = {
    "ratio": "new over baseline", "difference": "new minus baseline", "divergence": "bits between the mixes",
    "distance": "distance beyond that within versions",
}  # fmt: skip


def drift(report: Report) -> Section | None:
    """Behaviour of two agents within task; None when there are not two."""
    found = report.drift
    title = "Change of behaviour"
    if found is None:
        why = report.absent.get("drift")
        return Section("drift", title, (Note(why),)) if why else None
    said, tone = VERDICTS[found.verdict]
    parts: list[Table | Note] = [
        Note(f"{found.new} against {found.baseline}, within {counted(found.tasks, 'task')}: {said}.", tone)
    ]
    parts += [Note(_sentence(line), tone if tone != "good" else "quiet") for line in found.findings]
    columns = (Column("measure"), Column(found.baseline, "number"), Column(found.new, "number"),
               Column(f"change, {found.level * 100:g} % interval", "number"), Column("p (permuted)", "number"),
               Column("verdict"))  # fmt: skip
    parts.append(Table("Measures of behaviour", columns, tuple(_shift(one) for one in found.shifts)))
    if found.novelties:
        rows = tuple(
            (one.item, one.kind, f"{one.trials:,}", Badge("alert", "bad") if one.alert else Badge("new", "quiet"))
            for one in found.novelties
        )
        novelty = (Column("what"), Column("kind"), Column("trials", "number"), Column("weight"))
        parts.append(Table(f"What {found.baseline} never did", novelty, rows))
    if found.divergences:
        split = tuple(
            (one.task, f"{one.shared:,}", one.baseline or "(ends)", one.new or "(ends)")
            for one in found.divergences[:_SHOWN]
        )
        parting = (Column("task"), Column("actions shared", "number"), Column(found.baseline), Column(found.new))
        parts.append(Table("Where typical runs part (an explanation, not a test)", parting, split))
    parts += [Note(_sentence(note)) for note in found.notes]
    return Section("drift", title, tuple(parts))


def _shift(one: Shift) -> tuple[object, ...]:
    word, tone = VERDICTS[one.verdict]
    value = f"{one.point:.2f} times" if one.scale == "ratio" else f"{one.point:+.3f}"
    if one.interval is not None:
        value += f" ({one.interval.low:.2f} to {one.interval.high:.2f})"
    before, after = ("unknown" if side is None else short(side) for side in (one.baseline, one.new))
    return (Two(one.name.replace("_", " "), _SCALES[one.scale]), before, after, value, probability(one.p_adjusted),
            Badge(word, tone))  # fmt: skip


def crossed(report: Report) -> Section | None:
    """Model x harness: what each contributes, and how firm the ranking is. None when nothing was crossed."""
    found = report.crossed
    if found is None and (why := report.absent.get("crossed")):
        return Section("crossed", "Models and harnesses", (Note(why),))
    if found is None:
        return None
    means = {(cell.model, cell.harness): cell for cell in found.cells}
    rows = tuple(
        (model, *(_mean(means.get((model, harness))) for harness in found.harnesses)) for model in found.models
    )
    columns = (Column("model"), *(Column(harness, "number") for harness in found.harnesses))
    parts: list[Table | Note] = [Table("Mean score of each model in each harness", columns, rows)]
    if found.interaction is not None:
        depends = "depends" if found.interaction.p < 1 - found.level else "is not shown to depend"
        parts.append(Note(f"How much better one model is than another {depends} on the harness "
                          f"(p {probability(found.interaction.p)})."))  # fmt: skip
    if found.ranks_agents is not None:
        ranks = tuple(
            (one.label, f"{one.rank:g}", f"{one.low:g} to {one.high:g}", f"{100 * one.p_first:.0f} %")
            for one in found.ranks_agents.systems
        )
        most = Column(f"{found.level * 100:g} % of ranks", "number")
        firmness = (Column("agent"), Column("rank", "number"), most, Column("first in", "number"))
        parts.append(Table("How firm the ranking is, over resamples of the tasks", firmness, ranks))
    parts += [
        Note(f"{one.first} and {one.second} change places between {one.harness} and {one.other}.")
        for one in found.reversals
        if one.seen
    ]
    parts += [Note(_sentence(note)) for note in found.notes]
    return Section("crossed", "Models and harnesses", tuple(parts))


def _mean(cell: CellMean | None) -> object:
    if cell is None:
        return "not run"
    return Two(f"{100 * cell.mean:.1f} %", span(cell.interval) if cell.interval else counted(cell.tasks, "task"))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def _state(source: Input) -> str:
    return source.damage or ("whole" if source.vouched else "whole; lock not vouched for")


def provenance(report: Report) -> Section:
    """What is needed to compute every number again."""
    source = report.aggregate.provenance
    inputs = tuple((Two(one.name, one.kind), one.digest, f"{one.trials:,}", _state(one)) for one in source.inputs)
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
