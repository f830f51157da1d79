"""The live view of a run: redrawn in place on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Protocol, Self

from proctor.analysis.frame import under
from proctor.runs.outcome import Outcome
from proctor.runs.text import duration, safe

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.console import Console, RenderableType

    from proctor.runs.engine import Event
    from proctor.runs.formats import Stage

_QUIET_S = 10.0
"""Without a terminal, a summary line at most this often, beside one line for each trial that ends."""
_SHOWN = 8


class Board:
    """What a run is doing, from its events: counts, rate, time to go. Pure, apart from the clock it is given."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._started: float | None = None
        self.queued: set[str] = set()
        self.running: dict[str, tuple[Stage | None, float]] = {}
        self.outcomes: Counter[str] = Counter()
        self.per_agent: dict[str, Counter[str]] = {}
        self.retries = 0
        self.stopped = 0

    def take(self, event: Event) -> None:
        """Account for one event. The clock of the rate starts with the first trial that does."""
        if self._started is None and event.kind != "queued":
            self._started = self._clock()
        if event.kind == "queued":
            self.queued.add(event.trial_id)
        elif event.kind == "stage":
            self.queued.discard(event.trial_id)
            _, since = self.running.get(event.trial_id, (None, self._clock()))
            self.running[event.trial_id] = (event.stage, since)
        elif event.kind == "retry":
            self.retries += 1
        elif event.kind == "stopped":
            self.queued.discard(event.trial_id)
            self.stopped += 1
        else:
            self.running.pop(event.trial_id, None)
            outcome = event.result.outcome if event.result else Outcome.CANCELLED
            self.outcomes[outcome] += 1
            if event.result:
                condition = event.result.condition
                label = under(event.result.agent, condition)
                self.per_agent.setdefault(label, Counter())[outcome] += 1

    @property
    def done(self) -> int:
        """Trials that have ended."""
        return self.outcomes.total()

    @property
    def total(self) -> int:
        """Trials of this call."""
        return self.done + len(self.running) + len(self.queued)

    @property
    def rate_per_minute(self) -> float | None:
        """Trials ended per minute so far."""
        return 60 * self.done / self.elapsed_s if self.done and self.elapsed_s > 0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the present rate."""
        rate = self.rate_per_minute
        return None if not rate else 60 * (self.total - self.done) / rate

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first trial started."""
        return 0.0 if self._started is None else self._clock() - self._started

    def line(self) -> str:
        """Everything in one line."""
        graded = sum(count for outcome, count in self.outcomes.items() if Outcome(outcome).is_graded)
        excluded = self.done - graded
        parts = [
            f"{self.done}/{self.total} done",
            f"{len(self.running)} running",
            f"{len(self.queued)} queued",
            f"resolved {self.outcomes[Outcome.RESOLVED]}/{graded} graded",
        ]
        if excluded:
            parts.append(f"{excluded} excluded")
        if self.stopped:
            parts.append(f"{self.stopped} left out by the stopping rule")
        if self.retries:
            parts.append(f"{self.retries} retries")
        if (rate := self.rate_per_minute) is not None:
            parts.append(f"{rate:.1f}/min")
        if self.total > self.done and (eta := self.eta_s) is not None:
            parts.append(f"ETA {duration(eta)}")
        return " · ".join(parts)

    def running_longest(self) -> list[tuple[str, Stage | None, float]]:
        """Running trials with their stage and age in seconds, the oldest first."""
        now = self._clock()
        items = [(trial_id, stage, now - since) for trial_id, (stage, since) in self.running.items()]
        return sorted(items, key=lambda item: -item[2])


class Progress(Protocol):
    """A display: a context manager that takes events."""

    def __call__(self, event: Event) -> None: ...

    def note(self, line: str) -> None:
        """Something to be read even after the run."""
        ...

    def preparing(self, line: str) -> None:
        """What is being done before the first trial."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LineProgress:
    """One line for each trial that ends, and a summary now and then: for logs and pipes."""

    def __init__(self, write: Callable[[str], None], board: Board | None = None) -> None:
        self._write = write
        self.board = board or Board()
        self._last = monotonic()

    def __call__(self, event: Event) -> None:
        self.board.take(event)
        if event.kind == "done" and event.result is not None:
            why = "" if event.result.outcome.is_graded else f": {event.result.detail}"
            self.note(f"{event.trial_id}: {event.result.outcome} ({duration(event.result.duration_s)}){why}")
        elif event.kind == "retry":
            self.note(f"{event.trial_id}: trying again: {event.detail}")
        elif event.kind == "cancelled":
            self._write(f"{event.trial_id}: cancelled")
        if monotonic() - self._last >= _QUIET_S:
            self._last = monotonic()
            self._write(self.board.line())

    def note(self, line: str) -> None:
        """A line of its own."""
        self._write(safe(line))

    def preparing(self, line: str) -> None:
        """A line of its own."""
        self._write(safe(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.board.total:
            self._write(self.board.line())


class LiveProgress:
    """A few lines redrawn in place. Leaving the context restores the terminal, whatever ended it."""

    def __init__(self, console: Console, board: Board | None = None) -> None:
        from rich.live import Live

        self._console = console
        self.board = board or Board()
        self._preparing = "preparing"
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=4, transient=True, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip

    def __call__(self, event: Event) -> None:
        self.board.take(event)
        if event.kind == "retry":
            self.note(f"{event.trial_id}: trying again: {event.detail}")

    def note(self, line: str) -> None:
        """A line above the live part."""
        from rich.text import Text

        self._console.print(Text(safe(line), style="yellow"))

    def preparing(self, line: str) -> None:
        """Shown until the next one, or until the first trial."""
        self._preparing = line

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        board = self.board
        if not board.total:
            return Text(safe(self._preparing), style="dim", no_wrap=True, overflow="ellipsis")
        bar = Table.grid()  # a bar by itself does not end its line
        bar.add_row(ProgressBar(total=board.total, completed=board.done, width=60))
        lines: list[RenderableType] = [bar, Text(f"{board.line()} · {duration(board.elapsed_s)}")]
        running = board.running_longest()
        for trial_id, stage, age in running[:_SHOWN]:
            lines.append(Text(f"  {trial_id}  {stage or ''}  {duration(age)}", style="dim"))
        if len(running) > _SHOWN:
            lines.append(Text(f"  … and {len(running) - _SHOWN} more", style="dim"))
        return Group(*lines)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, value, trace)
        self._console.show_cursor(True)
