"""The exam session behind `proctor run`: from a request to a finished record, with progress and signals.

Order matters here. Everything that a person may have got wrong is found before anything is built; images are built
before any trial's clock starts; the lock is written before the first trial; and the first Ctrl-C lets running trials
be closed cleanly, while the second one leaves at once (what lives below us dies with us).
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.common import ConfigError, ExitCode, RefusedError
from proctor.runs.engine import Execution, execute, single_error
from proctor.runs.formats import RunLock, load
from proctor.runs.ledger import read_ledger
from proctor.runs.lock import differences, make_lock, relock, write_lock
from proctor.runs.outcome import Outcome
from proctor.runs.progress import LineProgress, LiveProgress
from proctor.runs.record import record_errors
from proctor.runs.request import Request, plan_again, plan_request
from proctor.runs.stopping import make_rule
from proctor.runs.summary import STOPPED, RunView, read_run
from proctor.runs.vouching import lock_damage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from proctor.runs.plan import RunPlan
    from proctor.runs.preparation import Preparation
    from proctor.runs.progress import Progress


@dataclass(frozen=True, slots=True)
class Session:
    """A plan and the directory of its record; `lock` is there when the run was begun before."""

    plan: RunPlan
    directory: Path
    lock: RunLock | None = None

    @classmethod
    def new(cls, request: Request, directory: Path | None) -> Session:
        """A new run. Its directory must be empty or absent."""
        plan = plan_request(request)
        target = directory or Path("runs") / plan.run_id
        if (target / "run.json").exists():
            remedy = f"go on with it by --resume {target}, or choose another directory"
            raise ConfigError("there is a run here already", field=str(target), remedy=remedy)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError("not an empty directory", field=str(target), remedy="choose another one with -o")
        return cls(plan, target)

    @classmethod
    def resume(cls, directory: Path) -> Session:
        """A run that was begun before, from its lock."""
        lock = load(RunLock, directory / "run.json")
        if (directory / "ledger.jsonl").exists() and (damage := lock_damage(directory, read_ledger(directory))):
            raise RefusedError(damage, field=str(directory), remedy="restore it, or start a new run")
        if lock.parent is not None:
            raise RefusedError("these trials were made from another trial", field=str(directory),
                               remedy="make them again with proctor replay")  # fmt: skip
        return cls(plan_again(lock), directory, lock)

    def run(self, *, concurrency: int | None, as_json: bool) -> ExitCode:
        """Carry it out and print the result. Returns the exit code of `proctor run`."""
        with _progress(as_json) as progress:
            execution = anyio.run(self._run, concurrency or default_concurrency(), progress)
        if not (self.directory / "run.json").exists():
            print("interrupted before the first trial: there is no record", file=sys.stderr)
            return ExitCode.INTERRUPTED
        view = read_run(self.directory)
        self._report(view, execution, as_json=as_json)
        return exit_code(view, execution)

    async def _run(self, concurrency: int, progress: Progress) -> Execution:
        from proctor.runs.examiner import opened
        from proctor.runs.preparation import prepare_all

        stop, execution = anyio.Event(), Execution(interrupted=True)
        with single_error():
            async with anyio.create_task_group() as group:
                group.start_soon(_listen, stop, progress)
                preparation = await _unless(stop, prepare_all, self.plan, progress)
                if preparation is not None:
                    self._settle(preparation)
                    asked = self.plan.options.get("stop_when")
                    rule = make_rule(asked, self.plan) if asked else None
                    async with opened(self.plan, preparation) as examiner:
                        execution = await execute(
                            self.plan,
                            self.directory,
                            examiner,
                            concurrency=concurrency,
                            on_event=progress,
                            stop=stop,
                            rule=rule,
                        )
                group.cancel_scope.cancel()
        return execution

    def _settle(self, preparation: Preparation) -> None:
        """Write the lock of a new run; compare that of an old one. From here on the run can be resumed."""
        lock = make_lock(self.plan, preparation.images, preparation.kit_digests)
        if self.lock is None:
            with record_errors(str(self.directory)):
                self.directory.mkdir(parents=True, exist_ok=True)
                write_lock(self.directory, lock)
            return
        if changed := differences(self.lock, lock):
            shown = "; ".join(changed[:5]) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")
            raise ConfigError(f"changed since the run began: {shown}", field=str(self.directory / "run.json"),
                              remedy="undo the change, or start a new run")  # fmt: skip
        if any(old.image_digest != new.image_digest for old, new in zip(self.lock.tasks, lock.tasks, strict=True)):
            # An image that could not be had the first time is there now: no trial of its task has been scored yet.
            with record_errors(str(self.directory)):
                relock(self.directory, self.lock.model_copy(update={"tasks": lock.tasks}))

    def _report(self, view: RunView, execution: Execution, *, as_json: bool) -> None:
        from proctor.runs import summary
        from proctor.runs.formats import dump_json

        if as_json:
            sys.stdout.write(dump_json(summary.as_json(view), indent=1).decode())
            return
        from rich.text import Text

        from proctor.runs.table import console, print_run

        out = console()
        print_run(out, view)
        first = next((trial.id for trial in view.trials if trial.result is not None), "TRIAL")
        out.print(Text(f"record: {self.directory}"))
        out.print(Text(f"next:   proctor show {self.directory} {first}"))
        if execution.interrupted or any(trial.status not in _SETTLED for trial in view.trials):
            out.print(Text(f"        proctor run --resume {self.directory}"))


_SETTLED = frozenset(
    {*(str(outcome) for outcome in Outcome if outcome.is_graded), str(Outcome.VERIFIER_ERROR), STOPPED}
)
"""Outcomes that a resumed run leaves alone. A verifier's error is cured by grading again, not by another attempt."""


def exit_code(view: RunView, execution: Execution) -> ExitCode:
    """0 complete; 6 when a trial ended as infra_error or verifier_error; 130 interrupted. Scores do not count."""
    if execution.interrupted:
        return ExitCode.INTERRUPTED
    broken = {str(Outcome.INFRA_ERROR), str(Outcome.VERIFIER_ERROR)}
    return ExitCode.INFRA if any(trial.status in broken for trial in view.trials) else ExitCode.OK


def default_concurrency() -> int:
    """Two trials for each core: they mostly wait for models; what really fits is the Edge's decision."""
    return 2 * len(os.sched_getaffinity(0))


@contextmanager
def _progress(as_json: bool) -> Iterator[Progress]:
    """The display on stderr when stdout carries JSON or stderr is a terminal; plain lines where there is none."""
    from proctor.runs.table import console

    screen = console(stderr=True)
    display: Progress
    if screen.is_terminal and not as_json:
        display = LiveProgress(screen)
    else:
        display = LineProgress(lambda line: print(line, file=sys.stderr, flush=True))
    with display:
        yield display


async def _listen(stop: anyio.Event, progress: Progress) -> None:
    """First signal: stop in good order. Second: leave at once; the kernel ends everything that hangs on us."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if stop.is_set():
                progress.__exit__(None, None, None)
                os._exit(ExitCode.INTERRUPTED)
            progress.note("stopping: running trials are being closed; once more to leave at once")
            stop.set()


async def _unless(
    stop: anyio.Event, prepare: Callable[[RunPlan, Progress], Awaitable[Preparation]], plan: RunPlan, progress: Progress
) -> Preparation | None:
    """The preparation, or None when `stop` is set before it is done."""
    found: Preparation | None = None
    with single_error():
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await stop.wait()
                group.cancel_scope.cancel()

            group.start_soon(watch)
            found = await prepare(plan, progress)
            group.cancel_scope.cancel()
    return found
