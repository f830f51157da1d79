"""From run directories and Parquet files to a report on disk: the parts are computed, the records read once, the file
written in the form that was asked for."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from proctor.analysis.aggregate import Options, aggregate
from proctor.analysis.report.matrix import build_matrix
from proctor.analysis.report.model import Matrix, Report
from proctor.common import ConfigError, atomic_write
from proctor.runs.conclusions import conclude
from proctor.runs.formats import RunLock, load
from proctor.runs.frame import load_trials, save_trials
from proctor.runs.reading import TrialPages, read_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from proctor.analysis.aggregate import Aggregate

Pages = Literal["auto", "none", "embed", "beside"]
Form = Literal["html", "md", "json", "csv", "parquet", "junit"]
SUFFIXES: Mapping[str, Form] = {
    ".html": "html", ".htm": "html", ".md": "md", ".json": "json", ".csv": "csv", ".parquet": "parquet",
    ".xml": "junit",
}  # fmt: skip
EMBEDDED_TRIALS = 150
"""With `auto`, trials are told inside the report up to this many."""


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
    workers: int = 1
    """Processes that read records. More than one only from a program whose main module may be imported again."""


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
    pages = _plan_pages(request, matrix)
    found = read_records(trials, result, request.paths, pages, workers=request.workers)
    evidence, causes = found.evidence, found.causes(pages.numbers)
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


def _write(report: Report, request: Request, pages: TrialPages) -> None:
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


def _plan_pages(request: Request, matrix: Matrix) -> TrialPages:
    """Where the pages of trials go; their folder is made, empty."""
    numbers = {(mark.run_id, mark.trial_id): mark.number for row in matrix.rows for cell in row.cells for mark in cell}
    how = request.pages if request.form == "html" else "none"
    if how == "auto":
        how = "embed" if matrix.trials <= EMBEDDED_TRIALS else "beside"
    folder = request.output.with_name(f"{request.output.stem}_trials") if how == "beside" else None
    if folder is not None:
        _empty(folder)
    return TrialPages(numbers, how == "embed", folder, request.output.name)


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
