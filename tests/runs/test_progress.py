"""The progress display: right counts, plain lines where there is no terminal, and a terminal left as it was found."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from proctor.runs.clock import now_iso
from proctor.runs.engine import Event
from proctor.runs.formats import Stage, TrialResult
from proctor.runs.outcome import Outcome
from proctor.runs.progress import Board, LineProgress, LiveProgress

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def done(trial_id: str, outcome: Outcome) -> Event:
    result = TrialResult(
        run_id="r", trial_id=trial_id, task=trial_id, task_digest="d", agent="a", attempt=1, seed=1, tries=1,
        outcome=outcome, stop="finished", started_at=now_iso(), ended_at=now_iso(), duration_s=2.0,
    )  # fmt: skip
    return Event("done", trial_id, result=result)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.sampled_from(list(Outcome)), max_size=30), st.integers(0, 5), st.integers(0, 5))
def test_every_trial_is_in_exactly_one_place(ends: list[Outcome], running: int, queued: int) -> None:
    board = Board(Clock())
    names = [f"t{number}" for number in range(len(ends) + running + queued)]
    for name in names:
        board.take(Event("queued", name))
    for name in names[: len(ends) + running]:
        board.take(Event("stage", name, stage=Stage.DISPATCH))
        board.take(Event("stage", name, stage=Stage.EXECUTION))
    for name, outcome in zip(names, ends, strict=False):
        board.take(Event("cancelled", name) if outcome is Outcome.CANCELLED else done(name, outcome))
    assert (board.done, len(board.running), len(board.queued)) == (len(ends), running, queued)
    assert board.total == len(names)
    graded = sum(outcome.is_graded for outcome in ends)
    assert f"resolved {ends.count(Outcome.RESOLVED)}/{graded} graded" in board.line()


def test_rate_and_time_to_go() -> None:
    clock = Clock()
    board = Board(clock)
    for number in range(4):
        board.take(Event("queued", f"t{number}"))
    assert board.eta_s is None
    clock.now = 100.0
    board.take(Event("stage", "t0", stage=Stage.DISPATCH))
    clock.now = 130.0
    board.take(done("t0", Outcome.RESOLVED))
    assert board.rate_per_minute == 2.0
    assert board.eta_s == 90.0
    assert board.line() == "1/4 done · 0 running · 3 queued · resolved 1/1 graded · 2.0/min · ETA 1m30s"


def test_a_retried_trial_is_still_running_and_its_age_goes_on() -> None:
    clock = Clock()
    board = Board(clock)
    board.take(Event("queued", "t"))
    board.take(Event("stage", "t", stage=Stage.DISPATCH))
    clock.now = 5.0
    board.take(Event("retry", "t", detail="the node blinked"))
    board.take(Event("stage", "t", stage=Stage.ADMISSION))
    assert board.running_longest() == [("t", Stage.ADMISSION, 5.0)]
    assert board.retries == 1


def test_without_a_terminal_there_are_only_plain_lines() -> None:
    lines: list[str] = []
    with LineProgress(lines.append) as progress:
        progress(Event("queued", "t"))
        progress(Event("stage", "t", stage=Stage.DISPATCH))
        progress(Event("retry", "t", detail="the node blinked"))
        progress(done("t", Outcome.RESOLVED))
    assert lines[:2] == ["t: trying again: the node blinked", "t: resolved (2.0s)"]
    assert lines[2].startswith("1/1 done")
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_left_as_it_was_found(
    error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    try:
        with LiveProgress(console) as progress:
            progress(Event("queued", "t"))
            progress(Event("stage", "t", stage=Stage.EXECUTION))
            progress.note("a note with \x1b[31m colour")
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    text = screen.getvalue()
    assert text.rfind(SHOW) > text.rfind(HIDE)
    assert "a note with \\x1b[31m colour" in text
