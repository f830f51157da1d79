"""Reading the records of many trials, once each: evidence, causes of failure, and the page of every trial.

From PARALLEL_FROM records on, several processes do it. Each writes the pages of its trials and hands back counts and
judgements, which are put together in the order of the trials; so the report is the same, however many there were.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.analysis.causes import ENDED, account, judge
from proctor.analysis.report.matrix import agent_names
from proctor.analysis.report.model import Mark, Matrix, MatrixRow, Story
from proctor.common import ConfigError, InfraError
from proctor.runs.evidence import Evidence, read_record, record_digests, unreadable
from proctor.runs.failures import Failures, card_of, read_observed, report_causes, row_agent
from proctor.runs.formats import RunLock, load
from proctor.runs.retelling import SHORT, Length, retell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from proctor.analysis.aggregate import Aggregate
    from proctor.analysis.causes import Judged
    from proctor.analysis.report.model import Causes
    from proctor.runs.story import TrialView

EMBEDDED_CHARACTERS = 6_000_000
"""Text of trials inside a report, at most; further trials have no page there, and the report says so."""
PARALLEL_FROM = 1000
"""Starting a process costs about as much as reading two hundred records."""
_CHUNKS = 4
"""Chunks for each process, so that none waits long for the slowest."""


@dataclass(slots=True)
class TrialPages:
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


@dataclass(slots=True)
class Reading:
    """What came of reading some trials, in their order."""

    evidence: Evidence = field(default_factory=Evidence)
    judged: list[Judged] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)
    unread: int = 0
    told: int = 0
    there: set[int] = field(default_factory=set)

    def judge(self, row: Mapping[str, Any], trial: TrialView | None = None) -> Judged | None:
        """Judge one trial; None when it never ended. What it did is not kept."""
        if row["outcome"] not in ENDED:
            self.not_run.append((row_agent(row), row["outcome"]))
            return None
        self.unread += row["record"] is None
        judged = judge(read_observed(row, trial))
        light = replace(judged.seen, behaviour=replace(judged.seen.behaviour, actions=()), logged=(), instruction="",
                        states=(), unsupported=())  # fmt: skip
        self.judged.append(replace(judged, seen=light))
        return judged

    def add(self, other: Reading) -> None:
        """The trials that come after these."""
        self.evidence.merge(other.evidence)
        self.judged += other.judged
        self.not_run += other.not_run
        self.unread += other.unread
        self.told += other.told
        self.there |= other.there

    def causes(self, numbers: Mapping[tuple[str, str], int]) -> Causes | None:
        """What was found, with the places in the matrix of some trials; None without a record."""
        if not self.evidence.records:
            return None
        found = Failures(account(self.judged, self.not_run), tuple(self.judged), self.unread)
        return report_causes(found, numbers)


def read_records(
    trials: pl.LazyFrame, result: Aggregate, paths: Sequence[Path], pages: TrialPages, *, workers: int = 1
) -> Reading:
    """One pass over all trials: evidence, cause and, where it is wanted, the page of each."""
    import polars as pl

    if not trials.select(pl.col("record").is_not_null().any()).collect().item():
        return Reading()  # Parquet alone, which may be millions of rows
    digests = _digests(paths)
    names = agent_names(trials, result)
    rows = []
    for row in trials.collect().iter_rows(named=True):
        agent = names.get((row["agent"], row["harness"], row["harness_version"], row["model"]), row["agent"])
        rows.append({**row, "agent": agent, "digest": digests.get((row["run_id"], row["trial_id"]))})
    if workers > 1 and not pages.embed and len(rows) >= PARALLEL_FROM:
        found = _in_processes(rows, pages, workers)
        pages.told, pages.there = found.told, found.there
        return found
    return read_rows(rows, pages)


def _digests(paths: Sequence[Path]) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for path in paths:
        if path.is_dir():
            run_id = load(RunLock, path / "run.json").run_id
            found |= {(run_id, trial): digest for trial, digest in record_digests(path).items()}
    return found


def read_rows(rows: Sequence[Mapping[str, Any]], pages: TrialPages) -> Reading:
    """Read some trials, in order; pages are told as they are wanted."""
    found = Reading()
    length = SHORT if pages.embed else Length()
    for row in rows:
        number = pages.numbers.get((row["run_id"], row["trial_id"]))
        try:
            trial = read_record(Path(row["record"]), row["digest"]) if row["record"] is not None else None
            judged = found.judge(row, trial)
        except ConfigError as error:
            unreadable(found.evidence, row["trial_id"], error)
            found.judge({**row, "record": None})
            continue
        if trial is None:
            continue
        found.evidence.add(trial, number)
        if pages.wanted and number is not None:
            card = card_of(judged) if judged is not None and judged.cause is not None else None
            pages.tell(replace(retell(trial, length), card=card), number)
    found.told, found.there = pages.told, pages.there
    return found


def _in_processes(rows: Sequence[Mapping[str, Any]], pages: TrialPages, workers: int) -> Reading:
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    size = -(-len(rows) // (workers * _CHUNKS))
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    empty = replace(pages, numbers={})
    shares = [
        replace(empty, numbers={
            key: pages.numbers[key] for row in chunk if (key := (row["run_id"], row["trial_id"])) in pages.numbers
        })
        for chunk in chunks
    ]  # fmt: skip
    found = Reading()
    # Not fork: polars has threads, and a copy of them would hold locks for ever.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for part in pool.map(read_rows, chunks, shares):
                found.add(part)
        except BrokenProcessPool as error:
            raise InfraError("a process that reads records died, for want of memory perhaps", field="RUN",
                             remedy="report on fewer runs at a time") from error  # fmt: skip
    return found
