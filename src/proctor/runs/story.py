"""A trial as a story that a person reads: what happened step by step, what the examiner said, and on what evidence.

Everything that came from inside a sandbox or from a model is shown with control characters made visible: a record
must not be able to move the reader's cursor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, digest_tree
from proctor.runs.formats import DiffFile, FindingsFile, GradeFile, ReceiptFile, TrialResult, load
from proctor.runs.record import read_lines
from proctor.runs.text import duration, quantity, safe
from proctor.runs.transcript import steps_text
from proctor.trajectories.atif import Trajectory, read_trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from rich.console import Console

    from proctor.runs.summary import RunView

_SHOWN_PATHS = 20
_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class TrialView:
    """The record of one trial, read and checked. `intact` is False when the ledger names another digest than it
    has."""

    directory: Path
    result: TrialResult
    trajectory: Trajectory
    grade: GradeFile | None
    findings: FindingsFile
    receipts: ReceiptFile
    diff: DiffFile | None
    intact: bool | None


def read_trial(view: RunView, trial_id: str) -> TrialView:
    """The record of a trial by its id, or by an unambiguous part of it."""
    trial_id = find_trial(view, trial_id)
    directory = view.directory / "trials" / trial_id
    if not (directory / "result.json").exists():
        status = next(trial.status for trial in view.trials if trial.id == trial_id)
        raise ConfigError(f"trial {trial_id} has no record: {status}", field=str(view.directory),
                          remedy="proctor run --resume runs what is missing")  # fmt: skip
    rows = [row.data["record"] for row in view.ledger.of("ended") if row.data["trial"] == trial_id]
    return TrialView(
        directory=directory,
        result=load(TrialResult, directory / "result.json"),
        trajectory=read_trajectory(directory / "trajectory.json"),
        grade=_optional(GradeFile, directory / "grade.json"),
        findings=load(FindingsFile, directory / "findings.json"),
        receipts=load(ReceiptFile, directory / "receipt.json"),
        diff=_optional(DiffFile, directory / "diff.json"),
        intact=rows[-1] == digest_tree(directory) if rows else None,
    )


def _optional(kind: Any, path: Path) -> Any:
    return load(kind, path) if path.exists() else None


def find_trial(view: RunView, text: str) -> str:
    """The id of the one planned trial whose id is, or else contains, `text`."""
    ids = [trial.id for trial in view.trials]
    if text in ids:
        return text
    found = [one for one in ids if text in one]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            f"no trial is called {text!r}", field=str(view.directory), remedy="proctor show RUN lists them"
        )
    some = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
    raise ConfigError(f"{text!r} fits {len(found)} trials: {some}", field=str(view.directory), remedy="give more of it")


def print_trial(console: Console, trial: TrialView, first: int = 1, last: int | None = None) -> None:
    """Print the story."""
    print_lines(console, story(trial, first, last))


def print_lines(console: Console, lines: Iterable[tuple[str, str]]) -> None:
    """Print (style, line) pairs; a line that is too long goes on below, indented as deep as it began."""
    from rich.padding import Padding
    from rich.text import Text

    for style, line in lines:
        body = line.lstrip(" ")
        if console.is_terminal and body:
            console.print(Padding(Text(body, style=style), (0, 0, 0, len(line) - len(body)), expand=False))
        else:
            console.print(Text(line, style=style), soft_wrap=True)


def story(trial: TrialView, first: int = 1, last: int | None = None) -> Iterator[tuple[str, str]]:
    """The story as (style, line) pairs, with the steps `first` to `last`."""
    yield from _head(trial)
    yield "", ""
    yield from steps_text(trial.trajectory, first, last)
    yield from _dropped(trial)
    yield from _changes(trial)
    yield from _grade(trial)
    yield from _receipts(trial)
    names = ", ".join(sorted(path.name for path in trial.directory.iterdir()))
    yield "dim", f"record: {trial.directory} ({names})"
    if trial.intact is False:
        yield "bold red", "record: CHANGED since it was committed: its digest is not the one in the ledger"


def _head(trial: TrialView) -> Iterator[tuple[str, str]]:
    result = trial.result
    agent = trial.trajectory.agent
    model = f" with {agent.model_name}" if agent.model_name else ""
    yield "bold", f"{result.trial_id}: {result.outcome}" + (f" ({safe(result.detail)})" if result.detail else "")
    yield (
        "",
        f"task {result.task}, agent {agent.name} {agent.version}{model}, attempt {result.attempt}, seed {result.seed}",
    )
    tries = f", {result.tries} tries" if result.tries > 1 else ""
    yield "", f"stopped: {result.stop}; {result.steps} steps, {result.execs} calls on the sandbox{tries}"
    if result.usage.model_calls:
        usage = result.usage
        known = usage.prompt_tokens is not None and usage.completion_tokens is not None
        tokens = f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens" if known else "tokens unknown"
        if known and usage.cached_tokens:
            tokens += f" ({usage.cached_tokens:,} cached)"
        cost = "unknown" if usage.cost_usd is None else f"${usage.cost_usd:.4f}"
        yield "", f"model: {usage.model_calls} calls, {tokens}, cost {cost}"
    if parent := parent_of(trial.trajectory):
        yield "magenta", parent
    stages = " · ".join(f"{time.stage} {duration(time.duration_s or 0.0)}" for time in result.stages)
    yield "dim", f"{result.started_at}  {stages}  (total {duration(result.duration_s)})"


def parent_of(trajectory: Trajectory) -> str:
    """One line on the trial that this one was made from; empty for a trial of an exam."""
    found = ((trajectory.extra or {}).get("proctor") or {}).get("parent")
    return parent_line(found) if isinstance(found, dict) else ""


def parent_line(parent: Mapping[str, Any]) -> str:
    """The parent of a trial or of a run of such trials, as the lock has it."""
    at = f" at step {parent['step']}, restored by {parent['restored']}" if parent.get("step") else ""
    what = "a branch off" if parent.get("kind") == "branch" else "made from the recorded answers of"
    change = f": {parent['change']}" if parent.get("change") else ""
    return safe(f"parent: {what} {parent.get('trial')} of {parent.get('run_id')}{at}{change}")


def _dropped(trial: TrialView) -> Iterator[tuple[str, str]]:
    """What of the commands' output was not kept: it was longer than what the host keeps of a stream."""
    calls, lost = 0, 0
    for line in read_lines(trial.directory / "exec.jsonl"):
        count = sum((line.get(name) or {}).get("dropped", 0) for name in ("stdout", "stderr"))
        calls, lost = calls + (count > 0), lost + count
    if calls:
        yield "yellow", f"not kept: {lost:,} bytes of output of {calls} command{'s' if calls != 1 else ''}"


def _changes(trial: TrialView) -> Iterator[tuple[str, str]]:
    if trial.diff is None:
        return
    entries = trial.diff.entries
    yield "bold", f"changed on disk: {len(entries)} path{'s' if len(entries) != 1 else ''} ({trial.diff.archive})"
    marks = {"added": "+", "modified": "~", "deleted": "-"}
    for entry in entries[:_SHOWN_PATHS]:
        yield (
            "",
            f"  {marks[entry.change]} {safe(entry.path)}" + (f" ({entry.size} bytes)" if entry.kind == "file" else ""),
        )
    if len(entries) > _SHOWN_PATHS:
        yield "", f"  … and {len(entries) - _SHOWN_PATHS} more in diff.json"


def _grade(trial: TrialView) -> Iterator[tuple[str, str]]:
    grade = trial.grade
    if grade is None:
        yield "bold", "grade: none, the trial was not graded"
        return
    style = {"resolved": "bold green", "unresolved": "bold red"}.get(grade.verdict, "bold magenta")
    where = "in place" if grade.in_place else f"in {grade.rooms} clean room{'s' if grade.rooms != 1 else ''}"
    carry = f", carried: {grade.carry}" if grade.carry else ""
    yield style, f"grade: {grade.verdict}, {where}{carry}, {duration(grade.duration_s)}"
    if grade.error:
        yield "magenta", f"  {safe(grade.error)}"
    if grade.rewards:
        yield "", "  rewards: " + ", ".join(f"{safe(name)} {value:g}" for name, value in sorted(grade.rewards.items()))
    for group in ("fail_to_pass", "pass_to_pass"):
        tests = [test for test in grade.tests if test.group == group]
        if tests:
            yield "", f"  {group}: {sum(test.ok for test in tests)} of {len(tests)}"
        for test in tests:
            unstable = f", unstable: {' '.join(test.runs)}" if test.unstable else ""
            if group == "fail_to_pass" or not test.ok or test.unstable:
                yield (
                    "green" if test.ok else "red",
                    f"    {'✓' if test.ok else '✗'} {safe(test.test_id)} {test.status}{unstable}",
                )
    if grade.compat is not None:
        agrees = grade.compat.resolved == grade.resolved
        yield (
            "" if agrees else "yellow",
            f"  by SWE-bench's rules: {grade.compat.status}" + ("" if agrees else " (differs)"),
        )
    for finding in trial.findings.findings:
        yield "yellow", f"  finding ({finding.severity}): {safe(finding.kind)}: {safe(finding.detail)}"


def _receipts(trial: TrialView) -> Iterator[tuple[str, str]]:
    rooms = [("agent's room", trial.receipts.agent)] if trial.receipts.agent else []
    rooms += [("grading room", room) for room in trial.receipts.grading]
    for name, room in rooms:
        peaks = ", ".join(quantity(key, value) for key, value in (room.get("peaks") or {}).items() if value)
        yield (
            "dim",
            (
                f"{name}: {room.get('tier')}, image {room.get('image_ref')} {str(room.get('image_digest'))[:19]}, "
                f"network {room.get('network')}, ended {room.get('end_reason')}; peaks: {peaks or '-'}"
            ),
        )
        for line in network_lines(room.get("network_decisions") or {}):
            yield "dim", f"  {safe(line)}"


def network_lines(decisions: Mapping[str, Any]) -> Iterator[str]:
    """What a sandbox reached and was refused, from the totals of its receipt."""
    names = decisions.get("connections_by_name") or {}
    if names:
        reached = sorted(names.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{name} x{count}" for name, count in reached[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        sent, received = decisions.get("bytes_sent", 0), decisions.get("bytes_received", 0)
        yield f"connections: {shown}{more}; {sent:,} bytes out, {received:,} in"
    if reasons := decisions.get("reasons"):
        yield "not let through: " + ", ".join(f"{reason} x{count}" for reason, count in sorted(reasons.items()))


def as_json(trial: TrialView) -> dict[str, Any]:
    """The trial as `proctor show --json` prints it."""
    parts: Iterable[tuple[str, Any]] = (
        ("result", trial.result),
        ("grade", trial.grade),
        ("findings", trial.findings),
        ("receipt", trial.receipts),
        ("diff", trial.diff),
    )
    shown = {name: part.model_dump() if part is not None else None for name, part in parts}
    trajectory = trial.trajectory.model_dump(exclude_none=True)
    return {**shown, "trajectory": trajectory, "directory": str(trial.directory), "intact": trial.intact}
