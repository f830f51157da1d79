"""From records to causes of failure and cards, and from a pointer back to what stands there on record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.analysis.cards import Card, checked, make_card
from proctor.analysis.causes import ENDED, MEANINGS, NOT_RUN, RESOLVED, Account, Judged, account, judge
from proctor.analysis.frame import GRADED, PLAIN, under
from proctor.analysis.observed import FindingSeen, Observed, TestSeen
from proctor.analysis.report.model import Cause, Causes, CauseSignal
from proctor.common import ConfigError
from proctor.runs.behaviour import (
    behaviour_of,
    excused,
    exec_actions,
    exec_lines,
    injected_calls,
    trajectory_actions,
)
from proctor.runs.evidence import read_record
from proctor.runs.told import file_states, network_faults, offered_tools, pressure, unsupported_numbers
from proctor.trajectories.atif import text_of

if TYPE_CHECKING:
    import polars as pl

    from proctor.analysis.observed import Pointer
    from proctor.runs.story import TrialView
    from proctor.trajectories.atif import Trajectory

_LINKED = 5
_MAX_PLACE = 2_000_000
"""A place that holds more text than this is not searched for a span."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Every planned trial of some runs, accounted for. `judged` are those with a record, in the order of the frame."""

    account: Account
    judged: tuple[Judged, ...]
    unread: int
    """Trials that ended and whose record is not there, or is damaged; they are judged by their row alone."""

    def cards(self) -> tuple[Card, ...]:
        """The cards of trials that were not resolved, with statements that hold only."""
        found = conditions_of(self.judged)
        return tuple(card_of(one, found) for one in self.judged if one.cause is not None)


def read_failures(trials: pl.DataFrame) -> Failures:
    """Judge every trial of a frame. Trials without a record are judged by their row: their outcome and stop."""
    judged: list[Judged] = []
    not_run: list[tuple[str, str]] = []
    unread = 0
    for row in trials.iter_rows(named=True):
        if row["outcome"] not in ENDED:
            not_run.append((row_agent(row), row["outcome"]))
            continue
        try:
            seen = read_observed(row)
        except (ConfigError, OSError):
            # A record that was damaged is said to be so by whoever checks the ledger; its row still counts here.
            seen = read_observed({**row, "record": None})
        unread += seen.behaviour.record is None
        judged.append(judge(seen))
    return Failures(account(judged, not_run), tuple(judged), unread)


def row_agent(row: Mapping[str, Any]) -> str:
    """The agent of a row as accounts name it: with the condition, if it is not plain."""
    agent: str = row["agent"]
    return under(agent, row["condition"])


Conditions = Mapping[tuple[str, str], tuple[tuple[str, int, int], ...]]


def conditions_of(judged: Iterable[Judged]) -> Conditions:
    """(agent, task) -> what became of it under each condition, where there is more than one."""
    counts: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for one in judged:
        run = one.seen.behaviour
        if one.seen.outcome in GRADED:
            by_name = counts.setdefault((run.agent, run.task), {})
            won, graded = by_name.get(run.condition, (0, 0))
            by_name[run.condition] = (won + (one.seen.outcome == RESOLVED), graded + 1)
    return {
        key: tuple((name, *found) for name, found in sorted(by_name.items(), key=lambda item: item[0] != PLAIN))
        for key, by_name in counts.items()
        if len(by_name) > 1
    }


def card_of(judged: Judged, conditions: Conditions | None = None) -> Card:
    """The card of a trial, its statements checked against its record."""
    run = judged.seen.behaviour
    card = checked(make_card(judged), Resolver(Path(run.record)) if run.record is not None else _nothing)
    return replace(card, conditions=(conditions or {}).get((run.agent, run.task), ()))


def _nothing(pointer: Pointer) -> str | None:
    return None


def read_observed(row: Mapping[str, Any], trial: TrialView | None = None) -> Observed:
    """What the record of one trial shows, given its row of the frame; `trial` is the record, if it was read already."""
    if row["record"] is None:
        return Observed(behaviour_of(row, [], []), row["outcome"], row["stop"] or "", row["detail"] or "")
    trial = trial or read_record(Path(row["record"]), None)
    result, trajectory, grade = trial.result, trial.trajectory, trial.grade
    lines = exec_lines(trial.directory / "exec.jsonl")
    injected = injected_calls(lines)
    broken = network_faults(trial.directory / "network.jsonl")
    reported = list(trajectory_actions(trajectory, frozenset(subject for subject, _ in injected.values())))
    reported = excused(reported, frozenset(name for name, _ in broken.values()))
    logged = list(exec_actions(lines))
    return Observed(
        behaviour=behaviour_of(row, reported, logged),
        outcome=row["outcome"],
        stop=result.stop,
        detail=result.detail,
        verdict=result.verdict,
        logged=tuple(logged),
        call_errors=dict(_call_errors(trajectory)),
        tests=tuple(TestSeen(t.test_id, t.group, t.status, t.ok, t.unstable) for t in grade.tests) if grade else (),
        rewards=result.rewards,
        findings=tuple(FindingSeen(f.kind, f.detail, f.severity, f.source) for f in trial.findings.findings),
        changed=tuple(item.path for item in trial.diff.entries) if trial.diff is not None else None,
        final_message=result.final_message,
        instruction=next((text_of(step.message) for step in trajectory.steps if step.source == "user"), ""),
        grade_error=grade.error if grade else "",
        model_errors=result.model_errors,
        steps=result.steps,
        limits=json.loads(row["limits"]) if row["limits"] else {},
        injected={place: how for place, (_, how) in {**injected, **broken}.items()},
        states=tuple(file_states(lines)),
        unsupported=unsupported_numbers(trajectory, result.final_message),
        offered=offered_tools(trajectory),
        pressure=pressure(trajectory, result.stop, result.detail),
    )


def _call_errors(trajectory: Trajectory) -> dict[str, str]:
    """Errors of tool calls as the harness recorded them (`kind: message`), by the place of the call."""
    found: dict[str, str] = {}
    for index, step in enumerate(trajectory.steps):
        errors = {result.source_call_id: str((result.extra or {}).get("error") or "")
                  for result in (step.observation.results if step.observation else ())}  # fmt: skip
        for number, call in enumerate(step.tool_calls or ()):
            if errors.get(call.tool_call_id):
                found[f"trajectory.json#/steps/{index}/tool_calls/{number}"] = errors[call.tool_call_id]
    return found


class Resolver:
    """What stands at a pointer's place in the record of one trial. Files are read once; nothing outside is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}

    def __call__(self, pointer: Pointer) -> str | None:
        """The text at a place (a JSON value as JSON); None when there is no such file or place."""
        try:
            value = self._value(pointer)
        except (LookupError, ValueError, OSError):
            return None
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= _MAX_PLACE else None

    def _value(self, pointer: Pointer) -> Any:
        document = self._document(pointer.file)
        if pointer.file.endswith(".jsonl"):
            return document[int(pointer.place)]
        if pointer.place and not pointer.place.startswith("/"):
            raise LookupError(pointer.place)
        for part in pointer.place.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            document = document[int(key)] if isinstance(document, list) else document[key]
        return document

    def _document(self, name: str) -> Any:
        if name not in self._files:
            path = (self._folder / name).resolve()
            if path.parent != self._folder.resolve():
                raise LookupError(name)
            if name.endswith(".jsonl"):
                lines = [json.loads(line) for line in path.read_bytes().splitlines()]
                self._files[name] = {line.get("seq", number): line for number, line in enumerate(lines, 1)}
            else:
                self._files[name] = json.loads(path.read_bytes())
        return self._files[name]


def report_causes(found: Failures, numbers: Mapping[tuple[str, str], int]) -> Causes:
    """What was found as the report shows it."""
    trials_of: dict[str, list[int]] = {}
    for one in found.judged:
        place = numbers.get((one.seen.behaviour.run, one.seen.behaviour.trial))
        if one.cause is not None and place is not None:
            trials_of.setdefault(one.cause.name, []).append(place)
    told = found.account
    causes = tuple(
        Cause(name, meaning, {agent: counts[name] for agent, counts in told.by_agent.items() if counts.get(name)},
              tuple(trials_of.get(name, ())[:_LINKED]))
        for name, meaning in MEANINGS.items() if name in told.counts
    )  # fmt: skip
    seen = tuple(CauseSignal(name, told.certainties[name], counts) for name, counts in sorted(told.signals.items()))
    return Causes(causes, seen, len(found.judged) - found.unread, _statement(found))


def _statement(found: Failures) -> str:
    told = found.account
    parts = [f"{count:,} {name}" for name, count in told.counts.items() if name in MEANINGS]
    resolved, not_run = told.counts.get(RESOLVED, 0), told.counts.get(NOT_RUN, 0)
    tail = f", {not_run:,} never run" if not_run else ""
    tail += f" ({found.unread:,} by their outcome alone, for want of a record that can be read)" if found.unread else ""
    sums = "" if told.reconciles else " These do not add up to what was planned, which is a defect."
    return (
        f"Of {told.planned:,} planned trials {resolved:,} were resolved{tail}; the others by primary cause: "
        f"{', '.join(parts) or 'none'}. Causes come from rules over what the host recorded, not from a model; "
        f"what no rule fits stays unclassified.{sums}"
    )
