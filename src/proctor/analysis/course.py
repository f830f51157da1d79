"""Signals in the course of a trial: what came back, what was lost again, what was never used, what was cut off.

Rules as in `proctor.analysis.signals`. Not observable in these records, and therefore never said: what a screen showed,
since no event of a screen is on record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.analysis.observed import Pointer, Signal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proctor.analysis.observed import Observed, State

MUCH_LEFT = 0.7
"""Ending with more than this share of every known limit unused is ending early."""
_POINTERS = 3


def cycle(seen: Observed) -> Iterator[Signal]:
    """A file is back at a content that it had before, after two changes or more."""
    by_path: dict[str, list[State]] = {}
    for state in seen.states:
        course = by_path.setdefault(state.path, [])
        if not course or course[-1].digest != state.digest:
            course.append(state)
    for path, course in by_path.items():
        first: dict[str, State] = {}
        for state in course:
            before = first.setdefault(state.digest, state)
            if before is not state:
                changes = course.index(state) - course.index(before)
                yield Signal(
                    "cycle",
                    "fact",
                    path,
                    f"after {changes} changes {path} is as it was before",
                    (Pointer.parse(before.evidence), Pointer.parse(state.evidence)),
                )
                break


def destroyed_progress(seen: Observed) -> Iterator[Signal]:
    """The same check passed, and after further writes it fails to the end."""
    passed = written = None
    for action in seen.behaviour.actions:
        if action.kind == "write":
            written = action if passed is not None else None
        elif action.kind == "verify" and not action.injected:
            if not action.failed:
                passed, written = action, None
            elif passed is not None and written is not None and action.call == passed.call:
                last = next(one for one in reversed(seen.behaviour.actions) if one.call == action.call)
                if last.failed and seen.outcome != "resolved":
                    yield Signal(
                        "destroyed progress",
                        "heuristic",
                        action.text,
                        "a check that had passed fails at the end, after further writes",
                        tuple(Pointer.parse(one.evidence) for one in (passed, written, last)),
                    )
                    return


def fabricated_number(seen: Observed) -> Iterator[Signal]:
    """It reports numbers that stand nowhere on record and do not follow from any two that do."""
    if seen.unsupported:
        shown = ", ".join(number for number, _ in seen.unsupported[:_POINTERS])
        yield Signal(
            "fabricated number",
            "heuristic",
            len(seen.unsupported),
            f"{len(seen.unsupported)} numbers in what it delivers stand nowhere else on record: {shown}",
            tuple(place for _, place in seen.unsupported[:_POINTERS]),
        )


def tool_unused(seen: Observed) -> Iterator[Signal]:
    """A special tool was offered, and never called."""
    for name, place in seen.offered.items():
        if not any(action.tool == name or name in action.text or name in action.programs
                   for action in (*seen.behaviour.actions, *seen.logged)):  # fmt: skip
            yield Signal("tool unused", "heuristic", name, f"it was offered {name} and never used it", (place,))


def context_pressure(seen: Observed) -> Iterator[Signal]:
    """The model's window was full, an answer was cut off by its length, or the conversation was shortened."""
    if seen.pressure:
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in seen.pressure))
        yield Signal(
            "context pressure",
            "fact",
            len(seen.pressure),
            f"its context was under pressure: {kinds}",
            tuple(place for _, place in seen.pressure[:_POINTERS]),
        )


def format_only(seen: Observed) -> Iterator[Signal]:
    """A second grading of the same work in the right form passed."""
    for number, finding in enumerate(seen.findings):
        if finding.kind == "format-only":
            yield Signal(
                "format near-miss",
                "fact",
                finding.detail,
                finding.detail,
                (Pointer("findings.json", f"/findings/{number}/detail", finding.detail[:80]),),
            )


def last_check(seen: Observed) -> Iterator[Signal]:
    """It finished of its own accord while its last check failed; early, when most of every limit was left."""
    checks = [action for action in seen.behaviour.actions if action.kind == "verify" and not action.injected]
    if seen.stop not in ("finished", "gave_up") or not checks or not checks[-1].failed:
        return
    evidence = (Pointer.parse(checks[-1].evidence), Pointer("result.json", "/stop", seen.stop))
    yield Signal("last check failed", "heuristic", seen.stop, "it ended while its own last check failed", evidence)
    left = budget_left(seen)
    if left is not None and left > MUCH_LEFT:
        text = f"it ended with {left:.0%} of its budget left, while its own last check failed"
        yield Signal("early stop", "heuristic", left, text, evidence)


def budget_left(seen: Observed) -> float | None:
    """The share that is left of the limit that was used most; None when no limit is known."""
    run = seen.behaviour
    used: Sequence[tuple[float | None, str]] = (
        (seen.steps, "steps"), (run.tokens, "tokens"), (run.cost_usd, "cost_usd"), (run.wall_s, "total_s"),
    )  # fmt: skip
    shares = [amount / limit for amount, name in used if amount is not None and (limit := seen.limits.get(name))]
    return max(0.0, 1 - max(shares)) if shares else None


RULES = (
    format_only,
    cycle,
    destroyed_progress,
    fabricated_number,
    tool_unused,
    context_pressure,
    last_check,
)
"""The rules of this module, in the order in which their signals are listed."""
