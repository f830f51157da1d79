"""From run directories and Parquet files to a report on disk: the parts are computed, the records read once, the file
written in the form that was asked for."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from proctor.analysis.aggregate import Options, aggregate
from proctor.analysis.causes import ENDED, account, judge
from proctor.analysis.report.matrix import agent_names, build_matrix
from proctor.analysis.report.model import Mark, Matrix, MatrixRow, Report, Story
from proctor.common import ConfigError, atomic_write
from proctor.runs.conclusions import conclude
from proctor.runs.evidence import Evidence, read_record, record_digests, unreadable
from proctor.runs.failures import Failures, card_of, read_observed, report_causes, row_agent
from proctor.runs.formats import RunLock, load
from proctor.runs.frame import load_trials, save_trials
from proctor.runs.retelling import SHORT, Length, retell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from proctor.analysis.aggregate import Aggregate
    from proctor.analysis.causes import Judged
    from proctor.analysis.report.model import Causes

Pages = Literal["auto", "none", "embed", "beside"]
Form = Literal["html", "md", "json", "csv", "parquet", "junit"]
SUFFIXES: Mapping[str, Form] = {
    ".html": "html", ".htm": "html", ".md": "md", ".json": "json", ".csv": "csv", ".parquet": "parquet",
    ".xml": "junit",
}  # fmt: skip
EMBEDDED_TRIALS = 150
"""With `auto`, trials are told inside the report up to this many."""
EMBEDDED_CHARACTERS = 6_000_000
"""Text of trials inside a report, at most; further trials have no page there, and the report says so."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to report on and how. `baseline` is the agent that others are compared with (the first, by default)."""

    paths: tuple[Path, ...]
    output: Path
    form: Form
    pages: Pages = "auto"
    title: str | None = None
    baseline: str | None = None
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True)
class Written:
    """What was written. `folder` holds the pages of trials when they are beside the report."""

    path: Path
    report: Report | None
    folder: Path | None = None
    told: int = 0


def write_report(request: Request) -> Written:
    """Write the report. Raises ConfigError for inputs that are not runs and for an agent that is not there."""
    loaded = load_trials(request.paths)
    if request.form == "parquet":
        save_trials(loaded.trials, request.output)
        return Written(request.output, None)
    if request.form == "csv":
        from proctor.analysis.report.tables import write_csv

        write_csv(loaded.trials, request.output)
        return Written(request.output, None)
    if request.form == "junit":
        from proctor.analysis.report.junit import render_junit

        atomic_write(request.output, render_junit(loaded.trials).encode())
        return Written(request.output, None)
    trials = (
        loaded.trials if any(source.kind == "parquet" for source in loaded.inputs) else loaded.trials.collect().lazy()
    )
    result = aggregate(trials, inputs=loaded.inputs, options=request.options)
    matrix = build_matrix(trials, result)
    pages = _Pages.plan(request, matrix)
    evidence, causes = _read_records(trials, result, request.paths, pages)
    said = conclude(trials, result, request.baseline, request.options)
    absent = dict(said.absent)
    if causes is None:
        absent["causes"] = "There are no records to judge trials by: a Parquet file holds outcomes, not what was done."
    if pages.untold:
        absent["trials"] = f"{pages.untold:,} trials are not told here, because the page would get too large."
    report = Report(
        title=request.title or _title(request.paths),
        lead=_lead(result, request.paths),
        aggregate=result,
        trust=evidence.trust(result),
        matrix=pages.marked(matrix),
        comparison=said.comparison,
        causes=causes,
        drift=said.drift,
        crossed=said.crossed,
        absent=absent,
    )
    _write(report, request, pages)
    return Written(request.output, report, pages.folder, pages.told)


def _write(report: Report, request: Request, pages: _Pages) -> None:
    if request.form == "html":
        from proctor.analysis.report.page import Trials, render_page

        text = render_page(report, Trials(pages.stories, pages.folder.name if pages.folder else None))
    elif request.form == "md":
        from proctor.analysis.report.markdown import render_markdown

        text = render_markdown(report)
    else:
        from proctor.analysis.report.tables import render_json

        text = render_json(report)
    atomic_write(request.output, text.encode())


@dataclass(slots=True)
class _Pages:
    """The pages of trials: which are wanted, where they go, which are there."""

    numbers: Mapping[tuple[str, str], int]
    embed: bool
    folder: Path | None
    back: str
    stories: dict[int, Story] = field(default_factory=dict)
    told: int = 0
    untold: int = 0
    characters: int = 0
    there: set[int] = field(default_factory=set)

    @classmethod
    def plan(cls, request: Request, matrix: Matrix) -> _Pages:
        numbers = {(mark.run_id, mark.trial_id): mark.number
                   for row in matrix.rows for cell in row.cells for mark in cell}  # fmt: skip
        how = request.pages if request.form == "html" else "none"
        if how == "auto":
            how = "embed" if matrix.trials <= EMBEDDED_TRIALS else "beside"
        folder = request.output.with_name(f"{request.output.stem}_trials") if how == "beside" else None
        if folder is not None:
            _empty(folder)
        return cls(numbers, how == "embed", folder, request.output.name)

    def tell(self, story: Story, number: int) -> None:
        """Keep or write the page of one trial."""
        if self.folder is not None:
            from proctor.analysis.report.page import file_name, render_trial

            (self.folder / file_name(number)).write_text(render_trial(story, self.back), encoding="utf-8")
        elif self.characters < EMBEDDED_CHARACTERS:
            self.characters += sum(len(block.text) for step in story.steps for block in step.blocks)
            self.stories[number] = story
        else:
            self.untold += 1
            return
        self.told += 1
        self.there.add(number)

    @property
    def wanted(self) -> bool:
        return self.embed or self.folder is not None

    def marked(self, matrix: Matrix) -> Matrix:
        """The matrix with the marks that lead to a page; embedded stories in its order."""
        self.stories = dict(sorted(self.stories.items()))
        if not self.there:
            return matrix

        def mark(one: Mark) -> Mark:
            return replace(one, story=True) if one.number in self.there else one

        rows = [
            MatrixRow(
                row.task, tuple(tuple(mark(one) for one in cell) for cell in row.cells), row.differs, row.unsolved
            )
            for row in matrix.rows
        ]
        return replace(matrix, rows=tuple(rows))


def _empty(folder: Path) -> None:
    """Make the folder of pages, without the pages of an earlier report; refuse one that holds anything else."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError("is in the way of the pages of trials", field=str(folder), remedy="give another -o")
    if folder.is_dir():
        foreign = [path.name for path in folder.iterdir() if not (path.suffix == ".html" and path.stem.isdigit())]
        if foreign:
            raise ConfigError(f"holds {foreign[0]!r}, which is no page of a trial", field=str(folder),
                              remedy="give another -o, or --trials embed")  # fmt: skip
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _read_records(
    trials: pl.LazyFrame, result: Aggregate, paths: Sequence[Path], pages: _Pages
) -> tuple[Evidence, Causes | None]:
    """One pass over all trials: evidence, cause and, where it is wanted, the page of each."""
    import polars as pl

    evidence, judging = Evidence(), _Judging()
    digests = {(load(RunLock, path / "run.json").run_id, trial): digest
               for path in paths if path.is_dir() for trial, digest in record_digests(path).items()}  # fmt: skip
    if not trials.select(pl.col("record").is_not_null().any()).collect().item():
        return evidence, None  # Parquet alone, which may be millions of rows
    names = agent_names(trials, result)
    length = SHORT if pages.embed else Length()
    for row in trials.collect().iter_rows(named=True):
        key = (row["run_id"], row["trial_id"])
        number = pages.numbers.get(key)
        row["agent"] = names.get((row["agent"], row["harness"], row["harness_version"], row["model"]), row["agent"])
        try:
            trial = read_record(Path(row["record"]), digests.get(key)) if row["record"] is not None else None
            judged = judging.add(row)
        except ConfigError as error:
            unreadable(evidence, row["trial_id"], error)
            judging.add({**row, "record": None})
            continue
        if trial is None:
            continue
        evidence.add(trial, number)
        if pages.wanted and number is not None:
            card = card_of(judged) if judged is not None and judged.cause is not None else None
            pages.tell(replace(retell(trial, length), card=card), number)
    return evidence, judging.causes(pages.numbers) if evidence.records else None


class _Judging:
    """Causes of failure while trials are read; what each trial did is not kept."""

    def __init__(self) -> None:
        self._judged: list[Judged] = []
        self._not_run: list[tuple[str, str]] = []
        self._unread = 0

    def add(self, row: Mapping[str, Any]) -> Judged | None:
        """Judge one trial; None when it never ended."""
        if row["outcome"] not in ENDED:
            self._not_run.append((row_agent(row), row["outcome"]))
            return None
        self._unread += row["record"] is None
        judged = judge(read_observed(row))
        light = replace(judged.seen, behaviour=replace(judged.seen.behaviour, actions=()), logged=(), instruction="")
        self._judged.append(replace(judged, seen=light))
        return judged

    def causes(self, numbers: Mapping[tuple[str, str], int]) -> Causes:
        """What was found, with the places in the matrix of some trials."""
        found = Failures(account(self._judged, self._not_run), tuple(self._judged), self._unread)
        return report_causes(found, numbers)


def _title(paths: Sequence[Path]) -> str:
    names = []
    for path in paths:
        if path.is_dir():
            dataset = load(RunLock, path / "run.json").dataset
            names.append(f"{dataset.name} {dataset.version}".strip())
        else:
            names.append(path.stem)
    return ", ".join(dict.fromkeys(names))


def _lead(result: Aggregate, paths: Sequence[Path]) -> str:
    conditions = f", under {', '.join(result.conditions)}" if result.conditions != ("plain",) else ""
    when = [load(RunLock, path / "run.json").created_at[:10] for path in paths if path.is_dir()]
    dates = f", {min(when)}" + (f" to {max(when)}" if min(when) != max(when) else "") if when else ""
    runs = ", ".join(source.name for source in result.provenance.inputs)
    plural = "s" if len(result.summaries) != 1 else ""
    return (
        f"{len(result.summaries)} agent{plural}, {result.tasks:,} tasks, {result.planned:,} planned trials, "
        f"{result.graded:,} graded{conditions}. {runs}{dates}."
    )
