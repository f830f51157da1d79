"""A trial as a story that a person reads: what happened step by step, what the examiner said, and on what evidence.

Everything that came from inside a sandbox or from a model is shown with control characters made visible: a record
must not be able to move the reader's cursor.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, digest_tree
from proctor.runs.formats import DiffFile, FindingsFile, GradeFile, ReceiptFile, TrialResult, load
from proctor.runs.text import brief, duration, quantity, safe, shorten
from proctor.trajectories.atif import ContentPart, Step, Trajectory, read_trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich.console import Console

    from proctor.runs.summary import RunView

_SHOWN_PATHS = 20


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


def print_trial(console: Console, trial: TrialView) -> None:
    """Print the story."""
    from rich.text import Text

    for style, line in story(trial):
        console.print(Text(line, style=style), soft_wrap=True)


def story(trial: TrialView) -> Iterator[tuple[str, str]]:
    """The story as (style, line) pairs."""
    yield from _head(trial)
    yield "", ""
    for step in trial.trajectory.steps:
        yield from _step(step)
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
        tokens = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens" if known else "tokens unknown"
        cost = "unknown" if usage.cost_usd is None else f"${usage.cost_usd:.4f}"
        yield "", f"model: {usage.model_calls} calls, {tokens}, cost {cost}"
    if parent := parent_of(trial.trajectory):
        yield "magenta", parent
    stages = " · ".join(f"{time.stage} {duration(time.duration_s or 0.0)}" for time in result.stages)
    yield "dim", f"{result.started_at}  {stages}  (total {duration(result.duration_s)})"


def parent_of(trajectory: Trajectory) -> str:
    """One line on the trial that this one was made from; empty for a trial of an exam."""
    found = ((trajectory.extra or {}).get("proctor") or {}).get("parent")
    if not isinstance(found, dict):
        return ""
    at = f" at step {found['step']}, restored by {found['restored']}" if found.get("step") else ""
    what = {"branch": "a branch off", "model-calls": "made from the recorded answers of"}.get(
        str(found.get("kind")), ""
    )
    change = f": {found['change']}" if found.get("change") else ""
    return safe(f"parent: {what} {found.get('trial')} of {found.get('run_id')}{at}{change}")


def _step(step: Step) -> Iterator[tuple[str, str]]:
    yield "bold cyan", f"[{step.step_id}] {step.source}" + (f" {step.timestamp}" if step.timestamp else "")
    yield from _indented("dim italic", step.reasoning_content or "")
    yield from _indented("", _text(step.message))
    results = {result.source_call_id: result for result in (step.observation.results if step.observation else ())}
    for call in step.tool_calls or ():
        yield from _call(call.function_name, call.arguments)
        result = results.pop(call.tool_call_id, None)
        if result is not None:
            failed = bool(result.extra and result.extra.get("error"))
            yield from _indented("red" if failed else "dim", _text(result.content), prefix="    ")
    for result in results.values():
        yield from _indented("dim", _text(result.content), prefix="    ")


def _call(name: str, arguments: dict[str, Any]) -> Iterator[tuple[str, str]]:
    command = arguments.get("command", arguments.get("argv"))
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    if isinstance(command, str):
        first, *rest = shorten(command)
        yield "green", f"  $ {first}"
        yield from (("green", f"    {line}") for line in rest)
    else:
        shown = ", ".join(f"{key}={brief(value)}" for key, value in arguments.items())
        yield "green", f"  {safe(name)}({shown})"


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


def _text(content: str | list[ContentPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text if part.text is not None else f"[{part.type}]" for part in content)
    return content or ""


def _indented(style: str, text: str, prefix: str = "  ") -> Iterator[tuple[str, str]]:
    if text.strip():
        yield from ((style, prefix + line) for line in shorten(text))


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
