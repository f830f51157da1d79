"""The record of a trial as the story that a report shows: steps, verdict, findings, rooms, each cut to a length.

Texts are passed on as they are in the record, which is hostile: whoever shows them escapes them.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.analysis.frame import under
from proctor.analysis.report.model import Block, Story, StoryStep, StoryTest
from proctor.runs.text import duration, quantity
from proctor.trajectories.atif import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proctor.runs.formats import GradeFile
    from proctor.runs.story import TrialView
    from proctor.trajectories.atif import Step


@dataclass(frozen=True, slots=True)
class Length:
    """How much of a trial is told: the first and last lines of a text, the first and last steps, paths and tests."""

    head: int = 60
    tail: int = 20
    width: int = 1000
    first_steps: int = 150
    last_steps: int = 50
    listed: int = 100


SHORT = Length(head=25, tail=10, width=500, first_steps=40, last_steps=20, listed=40)
"""For trials inside the report itself."""
_MARKS = {"added": "+", "modified": "~", "deleted": "-"}


def retell(trial: TrialView, length: Length) -> Story:
    """The story of a trial."""
    result, steps = trial.result, trial.trajectory.steps
    left_out = max(0, len(steps) - length.first_steps - length.last_steps)
    shown = steps if not left_out else [*steps[: length.first_steps], *steps[-length.last_steps :]]
    return Story(
        trial_id=result.trial_id,
        run_id=result.run_id,
        task=result.task,
        agent=under(result.agent, result.condition),
        attempt=result.attempt,
        outcome=str(result.outcome),
        detail=_cut(result.detail, length),
        facts=tuple(_facts(trial)),
        steps=tuple(_step(step, length) for step in shown),
        left_out=left_out,
        changes=tuple(_changes(trial, length)),
        verdict=trial.grade.verdict if trial.grade else "not graded",
        verdict_facts=tuple(_verdict(trial.grade, length)) if trial.grade else (),
        tests=tuple(_tests(trial.grade, length)) if trial.grade else (),
        findings=tuple(
            (one.severity, _cut(one.kind, length), _cut(one.detail, length))
            for one in trial.findings.findings[: length.listed]
        ),
        rooms=tuple(_rooms(trial)),
        intact=trial.intact,
    )


def _facts(trial: TrialView) -> Iterator[tuple[str, str]]:
    result, agent = trial.result, trial.trajectory.agent
    yield "outcome", f"{result.outcome}" + (f" ({result.detail[:300]})" if result.detail else "")
    yield "stopped", result.stop
    yield "harness", f"{agent.name} {agent.version}" + (f" with {agent.model_name}" if agent.model_name else "")
    tries = f", {result.tries} tries" if result.tries > 1 else ""
    yield "length", f"{result.steps} steps, {result.execs} calls on the sandbox, {duration(result.duration_s)}{tries}"
    usage = result.usage
    if usage.model_calls:
        known = usage.prompt_tokens is not None and usage.completion_tokens is not None
        tokens = f"{usage.prompt_tokens:,} + {usage.completion_tokens:,} tokens" if known else "tokens unknown"
        cost = "cost unknown" if usage.cost_usd is None else f"${usage.cost_usd:.4f}"
        yield "model", f"{usage.model_calls} calls, {tokens}, {cost}"
    if result.injected:
        yield "made to go wrong on purpose", f"{result.injected} calls on the sandbox"
    yield "started", result.started_at
    yield "seed", str(result.seed)


def _step(step: Step, length: Length) -> StoryStep:
    return StoryStep(step.step_id, step.source, step.timestamp or "", tuple(_blocks(step, length)))


def _blocks(step: Step, length: Length) -> Iterator[Block]:
    if step.reasoning_content:
        yield Block("thought", shorten(step.reasoning_content, length), "reasoning")
    if message := text_of(step.message):
        yield Block("message", shorten(message, length))
    results = {result.source_call_id: result for result in (step.observation.results if step.observation else ())}
    for call in step.tool_calls or ():
        yield Block("command", shorten(_call(call.arguments), length), call.function_name[:200])
        result = results.pop(call.tool_call_id, None)
        if result is not None:
            failed = bool(result.extra and result.extra.get("error"))
            yield Block("error" if failed else "output", shorten(text_of(result.content), length))
    for result in results.values():
        yield Block("output", shorten(text_of(result.content), length))


def _call(arguments: dict[str, Any]) -> str:
    command = arguments.get("command", arguments.get("argv"))
    if isinstance(command, list):
        return shlex.join(map(str, command))
    if isinstance(command, str):
        return command
    return "\n".join(f"{key}: {value}" for key, value in arguments.items())


def _changes(trial: TrialView, length: Length) -> Iterator[str]:
    entries = trial.diff.entries if trial.diff else []
    for entry in entries[: length.listed]:
        size = f" ({entry.size:,} bytes)" if entry.kind == "file" and entry.change != "deleted" else ""
        yield f"{_MARKS[entry.change]} {_cut(entry.path, length)}{size}"
    if len(entries) > length.listed:
        yield f"… and {len(entries) - length.listed:,} more"


def _verdict(grade: GradeFile, length: Length) -> Iterator[str]:
    yield "graded in place" if grade.in_place else f"graded in {grade.rooms} clean room{'s' * (grade.rooms != 1)}"
    if grade.carry:
        yield f"carried over: {grade.carry}"
    for group in ("fail_to_pass", "pass_to_pass"):
        tests = [test.ok for test in grade.tests if test.group == group]
        if tests:
            yield f"{group} {sum(tests)} of {len(tests)}"
    if grade.rewards:
        yield "rewards " + ", ".join(f"{name[:80]} {value:g}" for name, value in sorted(grade.rewards.items())[:20])
    if grade.compat is not None:
        yield f"by SWE-bench's rules: {grade.compat.status}"
    if grade.error:
        yield _cut(grade.error, length)


def _tests(grade: GradeFile, length: Length) -> Iterator[StoryTest]:
    """Tests that say something first: not as expected, or unstable; then the targets; then the others."""
    ordered = sorted(grade.tests, key=lambda test: (test.ok and not test.unstable, test.group != "fail_to_pass"))
    for test in ordered[: length.listed]:
        note = f"unstable: {' '.join(test.runs)[:200]}" if test.unstable else ""
        yield StoryTest(_cut(test.test_id, length), test.group, test.status, test.ok, note)
    if len(ordered) > length.listed:
        rest = ordered[length.listed :]
        yield StoryTest(
            f"… and {len(rest):,} more", "", f"{sum(test.ok for test in rest):,} ok", all(t.ok for t in rest)
        )


def _rooms(trial: TrialView) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    rooms = [("The candidate's room", trial.receipts.agent)] if trial.receipts.agent else []
    rooms += [("A grading room", room) for room in trial.receipts.grading]
    for name, room in rooms:
        peaks = room.get("peaks")
        used = (
            ", ".join(quantity(str(key), value) for key, value in peaks.items() if value)
            if isinstance(peaks, dict)
            else ""
        )
        yield (
            name,
            (
                ("isolation", str(room.get("tier"))[:200]),
                ("kernel", str(room.get("kernel"))[:200]),
                ("image", f"{room.get('image_ref')} {room.get('image_digest')}"[:300]),
                ("network", str(room.get("network"))[:200]),
                ("ended", str(room.get("end_reason"))[:200]),
                ("peaks", used[:400] or "none"),
            ),
        )


def shorten(text: str, length: Length) -> str:
    """The first and last lines of a text, each cut to a width, with a count of what is left out."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) > length.head + length.tail + 1:
        left_out = len(lines) - length.head - length.tail
        lines = [*lines[: length.head], f"… {left_out:,} lines left out …", *lines[-length.tail :]]
    return "\n".join(_cut(line, length) for line in lines)


def _cut(text: str, length: Length) -> str:
    left_out = len(text) - length.width
    return text if left_out <= 0 else f"{text[: length.width]} … {left_out:,} characters left out"
