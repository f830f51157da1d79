"""Running a plan: dispatch, retries, the ledger, atomic commits, resume and cancellation.

What an attempt consists of is the examiner's business (`proctor.runs.examiner`); this module knows only that it ends
with a verdict or an exception. The invariant: a trial is scored when, and only when, its record has been renamed into
`trials/`; the ledger row that says so comes after. Whatever dies in between, the next start sees a whole record and
finishes the book-keeping.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio
from anyio import to_thread

from proctor.common import ConfigError, InfraError, ProctorError, digest_file, digest_tree
from proctor.runs.archive import Attempt, archive, start_data
from proctor.runs.clock import now_iso
from proctor.runs.formats import Stage, TrialResult, UsageTotals, load
from proctor.runs.ledger import Ledger, LedgerWriter, Row, RowKind
from proctor.runs.outcome import Outcome, Verdict, backoff_s, from_error, may_retry
from proctor.runs.record import TEMPORARY, RecordError, TrialRecord, commit, record_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proctor.runs.plan import RunPlan, TrialPlan
    from proctor.runs.stopping import Stop, StopRule

PLANNING: frozenset[RowKind] = frozenset({"run", "planned", "unrunnable"})
"""The rows that are written before any trial starts."""
EventKind = Literal["queued", "stage", "retry", "done", "cancelled", "stopped"]


class Examiner(Protocol):
    """Carries out one attempt. It enters the stages on the record as it goes, and leaves no sandbox behind, however
    it ends."""

    async def examine(self, trial: TrialPlan, record: TrialRecord) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Event:
    """Something a progress display may want to show."""

    kind: EventKind
    trial_id: str
    stage: Stage | None = None
    result: TrialResult | None = None
    detail: str = ""


@dataclass(slots=True)
class Execution:
    """What came of `execute`: the results committed by this call, and whether it was stopped early."""

    results: dict[str, TrialResult] = field(default_factory=dict)
    interrupted: bool = False
    stopped: Stop | None = None


OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a ledger and its directory say about trials that were run before."""

    scored: frozenset[str]
    adopted: tuple[str, ...] = ()


async def execute(
    plan: RunPlan,
    directory: Path,
    examiner: Examiner,
    *,
    concurrency: int,
    on_event: OnEvent = lambda event: None,
    stop: anyio.Event | None = None,
    rule: StopRule | None = None,
    backoff: Callable[[int, float], float] = backoff_s,
) -> Execution:
    """Run every trial of the plan that the ledger in `directory` does not call scored.

    `run.json` must be there already. Setting `stop` ends the run: nothing more is dispatched, running trials are
    cancelled and not committed, and the ledger says so. When `rule` decides, nothing more is dispatched either, but
    what runs ends and counts; what was left out is in the ledger as `stopped`, for good. Raises RecordError when the
    record cannot be written; finished trials stay intact.
    """
    with record_errors("the ledger"), LedgerWriter(directory) as ledger:
        book = _Book(plan, directory, ledger)
        todo = book.open()
        if rule is not None:
            todo = rule.order(todo)
            for result in book.scored_results():
                rule.take(result)
        run = _Run(book, examiner, on_event, backoff, Random(plan.seed), rule)
        for trial in todo:
            on_event(Event("queued", trial.id))
        await run.all(todo, concurrency, stop or anyio.Event())
        book.close(interrupted=run.execution.interrupted)
        return run.execution


class _Book:
    """The book-keeping of one run: its ledger and its trial directories, kept in step."""

    def __init__(self, plan: RunPlan, directory: Path, ledger: LedgerWriter) -> None:
        self.plan = plan
        self.directory = directory
        self.trials = directory / "trials"
        self._ledger = ledger
        self._scored: frozenset[str] = frozenset()

    def open(self) -> list[TrialPlan]:
        """Write the plan into a new ledger, or continue an old one. Returns the trials that are still to be run."""
        trials = self.plan.trials()
        self.trials.mkdir(exist_ok=True)
        lock = self.directory / "run.json"
        rows = planned_rows(self.plan, trials, digest_file(lock) if lock.exists() else None)
        written = self._ledger.ledger.rows
        if len(written) < len(rows) and all(row.kind in PLANNING for row in written):
            # A new ledger, or one whose writing was cut short by a crash before anything started.
            if [(row.kind, row.data) for row in written] != rows[: len(written)]:
                raise _changed("the plan")
            self._ledger.extend(rows[len(written) :], durable=True)
            return trials
        state = resume_state(self._ledger.ledger, self.directory, trials)
        clean_temporary(self.trials)
        for trial_id in state.adopted:
            self._append(
                "ended", self._ended(trial_id, digest_tree(self.trials / trial_id), adopted=True), durable=True
            )
        self._scored = state.scored | set(state.adopted)
        settled = self._scored | {
            trial_id for row in self._ledger.ledger.of("stopped") for trial_id in row.data["trials"]
        }
        todo = [trial for trial in trials if trial.id not in settled]
        self._append("resumed", {"remaining": len(todo), "scored": len(self._scored)}, durable=True)
        return todo

    def scored_results(self) -> list[TrialResult]:
        """The results of trials that an earlier call has scored, in the order of the plan."""
        return [
            load(TrialResult, self.trials / trial.id / "result.json")
            for trial in self.plan.trials()
            if trial.id in self._scored
        ]

    def stopped(self, decision: Stop, left_out: list[TrialPlan]) -> None:
        data = {
            "rule": decision.rule,
            "reason": decision.reason,
            "facts": dict(decision.facts),
            "trials": [trial.id for trial in left_out],
        }
        self._append("stopped", data, durable=True)

    def started(self, trial: TrialPlan, tries: int) -> None:
        self._append("started", {"trial": trial.id, "try": tries})

    def retry(self, trial: TrialPlan, tries: int, verdict: Verdict, wait_s: float, spent: UsageTotals) -> None:
        data = {
            "trial": trial.id,
            "try": tries,
            "stop": verdict.stop,
            "reason": verdict.detail,
            "wait_s": round(wait_s, 3),
            "usage": spent.model_dump(exclude_none=True),
        }
        self._append("retry", data)

    def cancelled(self, trial: TrialPlan, tries: int) -> None:
        self._append("cancelled", {"trial": trial.id, "try": tries})

    def committed(self, trial_id: str, digest: str) -> None:
        self._append("ended", self._ended(trial_id, digest), durable=True)

    def close(self, *, interrupted: bool) -> None:
        self._append("finished", {"interrupted": interrupted}, durable=True)

    def _append(self, kind: RowKind, data: Mapping[str, Any], *, durable: bool = False) -> Row:
        with record_errors("the ledger"):
            return self._ledger.append(kind, data, durable=durable)

    def _ended(self, trial_id: str, digest: str, *, adopted: bool = False) -> dict[str, Any]:
        result = load(TrialResult, self.trials / trial_id / "result.json")
        row = {
            "trial": trial_id,
            "try": result.tries,
            "outcome": str(result.outcome),
            "stop": result.stop,
            "record": digest,
        }
        if result.outcome in (Outcome.INFRA_ERROR, Outcome.VERIFIER_ERROR):
            row["reason"] = result.detail
        return {**row, "adopted": True} if adopted else row


class _Run:
    """One call of `execute` while it lasts."""

    def __init__(
        self,
        book: _Book,
        examiner: Examiner,
        on_event: OnEvent,
        backoff: Callable[[int, float], float],
        random: Random,
        rule: StopRule | None = None,
    ):
        self.execution = Execution()
        self._book = book
        self._examiner = examiner
        self._on_event = on_event
        self._backoff = backoff
        self._random = random
        self._rule = rule
        self._waiting: Iterator[TrialPlan] = iter(())

    async def all(self, todo: list[TrialPlan], concurrency: int, stop: anyio.Event) -> None:
        """Run `todo`, `concurrency` at a time, until all have ended or `stop` is set."""
        self._waiting = iter(todo)
        self._consult()

        async def worker() -> None:
            for trial in self._waiting:
                await self._trial(trial)
                self._consult()

        async def watch() -> None:
            await stop.wait()
            self.execution.interrupted = True
            group.cancel_scope.cancel()

        with single_error():
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                async with anyio.create_task_group() as workers:
                    for _ in range(min(concurrency, len(todo))):
                        workers.start_soon(worker)
                group.cancel_scope.cancel()

    def _consult(self) -> None:
        """Ask the stopping rule, once; what it leaves out is never handed to a worker."""
        if self._rule is None or self.execution.stopped is not None:
            return
        decision = self._rule.decision()
        if decision is not None and (left_out := list(self._waiting)):
            self.execution.stopped = decision
            self._book.stopped(decision, left_out)
            for trial in left_out:
                self._on_event(Event("stopped", trial.id, detail=decision.reason))

    async def _trial(self, trial: TrialPlan) -> None:
        """One trial: attempts until it has a verdict that stands, then the commit."""
        tries = 0
        while True:
            tries += 1
            wait_s = await self._attempt(trial, tries)
            if wait_s is None:
                return
            await anyio.sleep(wait_s)

    async def _attempt(self, trial: TrialPlan, tries: int) -> float | None:
        """One try. Returns the seconds to wait before the next one, or None when the trial has ended."""
        self._book.started(trial, tries)
        record = TrialRecord(self._book.trials / f"{TEMPORARY}{trial.id}.{tries}", on_stage=self._stage_of(trial))
        begun, started_at = monotonic(), now_iso()
        try:
            record.events.write("start", start_data(self._book.plan, trial, tries, started_at))
            verdict = await self._verdict(trial, record)
            if may_retry(verdict, tries):
                wait_s = self._backoff(tries, self._random.random())
                self._book.retry(trial, tries, verdict, wait_s, record.usage())
                self._on_event(Event("retry", trial.id, detail=verdict.detail))
                return wait_s
            with anyio.CancelScope(shield=True):
                result = await to_thread.run_sync(self._commit, trial, record, verdict, tries, started_at, begun)
            self.execution.results[trial.id] = result
            if self._rule is not None:
                self._rule.take(result)
            self._on_event(Event("done", trial.id, result=result))
            return None
        except anyio.get_cancelled_exc_class():
            # When the run stops because the disk is full, that error is the one to report; resume needs no row.
            with suppress(RecordError):
                self._book.cancelled(trial, tries)
            self._on_event(Event("cancelled", trial.id))
            raise
        finally:
            record.discard()

    async def _verdict(self, trial: TrialPlan, record: TrialRecord) -> Verdict:
        """What the examiner says, or what the exception means that ended the attempt.

        Raises what concerns the run as a whole: a record that cannot be written, input that a person got wrong.
        """
        record.stages.enter(Stage.DISPATCH)
        try:
            return await self._examiner.examine(trial, record)
        except Exception as caught:  # the boundary: an attempt may end by any error, and each has a place in the table
            error = cause(caught)
            grading = record.stages.current is Stage.GRADING_ARCHIVE
            if isinstance(error, RecordError) or (isinstance(error, ConfigError) and not grading):
                raise error from caught
            record.failure(caught)
            return from_error(error, during_grading=grading)

    def _commit(
        self, trial: TrialPlan, record: TrialRecord, verdict: Verdict, tries: int, started_at: str, begun: float
    ) -> TrialResult:
        record.stages.leave()
        attempt = Attempt(trial, tries, started_at, monotonic() - begun)
        result = archive(self._book.plan.run_id, attempt, record, verdict)
        done = commit(record, self._book.trials / trial.id, superseded=self._book.directory / "superseded")
        self._book.committed(trial.id, done.digest)
        return result

    def _stage_of(self, trial: TrialPlan) -> Callable[[Stage], None]:
        return lambda stage: self._on_event(Event("stage", trial.id, stage=stage))


@contextmanager
def single_error() -> Iterator[None]:
    """A task group wraps what its tasks raise; the caller wants the error itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise cause(group) from group


def cause(error: BaseException) -> Exception:
    """The error that counts in a group of them: one that stops the run before one of the machinery before any
    other."""
    leaves = list(_leaves(error))
    for kind in (RecordError, InfraError, ProctorError, Exception):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    raise error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def planned_rows(
    plan: RunPlan, trials: list[TrialPlan], lock: str | None = None
) -> list[tuple[RowKind, dict[str, Any]]]:
    """The first rows of a ledger: the run with the digest of its lock, every trial before any of them starts, and what
    cannot be run here."""
    run = {"run_id": plan.run_id, "planned": len(trials)}
    run |= {"lock": lock} if lock is not None else {}
    run |= {"parent": dict(plan.parent)} if plan.parent else {}
    rows: list[tuple[RowKind, dict[str, Any]]] = [("run", run)]
    rows += [
        (
            "planned",
            {
                "trial": trial.id,
                "task": trial.task.name,
                "task_digest": trial.task.digest,
                "agent": trial.agent.label,
                "attempt": trial.attempt,
                "seed": trial.seed,
            }
            | ({"condition": trial.condition.name} if trial.condition.name != plan.condition else {}),
        )
        for trial in trials
    ]
    rows += [("unrunnable", {"task": task.name, "reason": task.reason}) for task in plan.unrunnable]
    return rows


def resume_state(ledger: Ledger, directory: Path, trials: list[TrialPlan]) -> Resumed:
    """Which planned trials are scored, by the ledger and by the records on disk.

    Scored is every trial whose last `ended` row is not `infra_error`; a whole record without a row (a crash between
    rename and row) is adopted. Raises ConfigError when plan and ledger, or ledger and records, contradict each other.
    """
    planned = {row.data["trial"]: row.data for row in ledger.of("planned")}
    for trial in trials:
        row = planned.get(trial.id)
        if row is None or row["task_digest"] != trial.task.digest or row["seed"] != trial.seed:
            raise _changed(f"trial {trial.id}")
    if missing := planned.keys() - {trial.id for trial in trials}:
        raise _changed(f"trial {min(missing)}")
    last = last_ended(ledger)
    adopted, scored = [], set()
    for trial_id in planned:
        record = directory / "trials" / trial_id
        row = last.get(trial_id)
        if row is not None and row["outcome"] != Outcome.INFRA_ERROR:
            if not record.is_dir():
                raise ConfigError(f"the ledger says that trial {trial_id} ended, but its record is gone",
                field=str(record), remedy="restore it, or start a new run")  # fmt: skip
            scored.add(trial_id)
        elif record.is_dir() and (row is None or row["record"] != digest_tree(record)):
            result = load(TrialResult, record / "result.json")
            if result.outcome is not Outcome.INFRA_ERROR:
                adopted.append(trial_id)
    return Resumed(frozenset(scored), tuple(adopted))


def _changed(what: str) -> ConfigError:
    return ConfigError(f"{what} is not what the ledger planned", field="--resume",
                       remedy="tasks, agents or seeds have changed since; start a new run")  # fmt: skip


def last_ended(ledger: Ledger) -> dict[str, Mapping[str, Any]]:
    """For every trial that ended, the data of its last `ended` row."""
    return {row.data["trial"]: row.data for row in ledger.of("ended")}


def clean_temporary(trials: Path) -> None:
    """Remove what a crash left half-written."""
    for path in trials.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)
