"""What came of a replay, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from proctor.runs.replay.compare import Cause, Level, judge
from proctor.runs.text import safe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proctor.runs.replay.actions import ActionReplay, First, Repeat
    from proctor.runs.replay.branch import Branches
    from proctor.runs.replay.calls import CallReplay
    from proctor.runs.replay.compare import Difference
    from proctor.runs.replay.disk import DiskDifference
    from proctor.runs.replay.requests import Divergence

_SHOWN = 10
_EXCERPT = 3
_WIDTH = 160


def actions_text(done: ActionReplay, *, strict: bool) -> Iterator[tuple[str, str]]:
    """The replay of a trial's actions as (style, line) pairs."""
    calls = sum(one.level is not None for one in done.repeats[0].observed)
    for number, repeat in enumerate(done.repeats, 1):
        yield "", f"replay {number}: {_line_of(repeat, calls)}"
    for note in done.skipped:
        yield "dim", f"  {safe(note)}"
    if done.first is not None:
        yield from _first(done.first, "first difference")
        for one in done.later[: _SHOWN - 1]:
            yield (
                "",
                f"  then {safe(one.where)} ({_subject(one.subject)}): {one.difference.part}, {one.judgement.cause}",
            )
        if len(done.later) >= _SHOWN:
            yield "", f"  … and {len(done.later) - _SHOWN + 1} more (--json has all)"
    whole = sum(not repeat.differences for repeat in done.repeats)
    yield (
        "",
        f"determinism: {done.score:.3f} over {len(done.repeats)} repeat{'s' * (len(done.repeats) != 1)}, {whole} of "
        f"them without a difference" + (f"; {done.probes} probes more to tell the cause" if done.probes else ""),
    )
    yield from _verdict(done.differences, done.clock, strict=strict)


def _line_of(repeat: Repeat, calls: int) -> str:
    levels = [one.level for one in repeat.observed]
    disk = _disk_line(repeat.disk) if repeat.disk_compared else "final disk not compared: the record has none"
    if repeat.disk_compared and not repeat.content_compared:
        disk += ", by its paths alone: the record does not have what was in the files"
    return f"{_levels(levels, calls, 'observations')}, {disk}"


def _disk_line(disk: Sequence[DiskDifference]) -> str:
    changed = [one for one in disk if one.level is Level.DIFFERENT]
    timed = [one for one in disk if one.level is Level.CLOCK]
    line = "final disk equal" if not changed else f"final disk differs in {len(changed)} paths"
    return line + (f" ({len(timed)} but for times)" if timed else "")


def _levels(levels: Sequence[Level | None], count: int, what: str) -> str:
    parts = [f"{levels.count(Level.SAME)} of {count} {what} equal"]
    if clock := levels.count(Level.CLOCK):
        parts.append(f"{clock} equal but for times")
    if different := levels.count(Level.DIFFERENT):
        parts.append(f"{different} different")
    return ", ".join(parts)


def calls_text(done: CallReplay, *, strict: bool) -> Iterator[tuple[str, str]]:
    """The replay of a trial's model calls as (style, line) pairs."""
    same = done.asked - done.extra - len(done.divergences)
    levels = [Level.SAME] * same + [one.level for one in done.divergences]
    yield "", _levels(levels, done.asked, "requests")
    if done.extra:
        yield "red", f"{done.extra} requests more than the record has answers for"
    if done.unasked:
        yield "red", f"{done.unasked} recorded answers were never asked for"
    yield from _divergences(done.divergences)
    observed = [level for _, _, level, _ in done.observed]
    yield "", f"{_levels(observed, len(observed), 'observations')}, {_disk_line(done.disk)}"
    for before, after, level, difference in done.observed:
        if level is Level.DIFFERENT and difference is not None:
            line = before or after
            yield (
                "bold",
                f"first difference: call {line.seq if line else '?'}: {_subject(line.subject if line else '')}",
            )
            yield from difference_text(difference)
            if before is not None and after is not None and difference.part != "call":
                found = judge(before, [after])
                if found.cause is not Cause.UNKNOWN:
                    yield "yellow", f"  likely cause: {found.cause}: {safe(found.evidence)}"
            break
    for path in [one for one in done.disk if one.level is Level.DIFFERENT][:_SHOWN]:
        yield "red", f"  final disk: {safe(path.path)}: {safe(path.what)}"
    same_end = done.before.outcome == done.after.outcome
    if chance := sum(one.by_chance for one in done.divergences):
        yield "dim", f"{chance} of the requests that differ do so by ids drawn at random alone"
    yield "" if same_end else "bold red", f"outcome: {done.before.outcome} then, {done.after.outcome} now"
    yield from _verdict(done.differences, done.clock, strict=strict)


def _divergences(divergences: Sequence[Divergence]) -> Iterator[tuple[str, str]]:
    """Each divergence once: a conversation carries what was said before along."""
    seen: set[tuple[str, str, str]] = set()
    shown = repeated = 0
    for one in divergences:
        new = [change for change in one.changes if (change.path, change.then, change.now) not in seen]
        seen.update((change.path, change.then, change.now) for change in new)
        repeated += not new
        if not new or shown == _SHOWN:
            continue
        shown += 1
        more = f", and in {one.more} places more" if one.more else ""
        yield "bold", f"request {one.call} differs in {len(new)} place{'s' * (len(new) != 1)}{more}:"
        for change in new[:_EXCERPT]:
            tag = " (but for times)" if change.level is Level.CLOCK else ""
            yield "", f"  {safe(change.path)}" + (" (but for ids drawn at random)" if change.by_chance else tag)
            yield "red", f"  - {_one_line(change.then)}"
            yield "green", f"  + {_one_line(change.now)}"
    if repeated:
        yield "dim", f"{repeated} later requests carry on what is named above, and differ in nothing else"
    if len(divergences) - repeated > shown:
        yield "", f"… and {len(divergences) - repeated - shown} more (--json has all)"


def _one_line(text: str) -> str:
    return safe(text).replace("\n", "⏎")


def _verdict(differences: int, clock: int, *, strict: bool) -> Iterator[tuple[str, str]]:
    bad = differences + (clock if strict else 0)
    explained = f", {clock} that the clock explains" if clock else ""
    yield "bold green" if not bad else "bold red", f"{differences} differences{explained}"


def _first(first: First, title: str) -> Iterator[tuple[str, str]]:
    yield "bold", f"{title}: {safe(first.where)}: {_subject(first.subject)}"
    yield from difference_text(first.difference)
    yield "yellow", f"  likely cause: {first.judgement.cause}: {safe(first.judgement.evidence)}"


def difference_text(difference: Difference) -> Iterator[tuple[str, str]]:
    """Where two texts part, each side by a few lines from there."""
    yield "", f"  in {safe(difference.part)}"
    then, now = difference.recorded.split("\n"), difference.replayed.split("\n")
    if (then, now) == ([""], [""]):
        return
    at = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    for mark, style, lines in (("-", "red", then), ("+", "green", now)):
        shown = lines[at : at + _EXCERPT] or ["(nothing more)"]
        yield from ((style, f"  {mark} {safe(line)[:_WIDTH]}") for line in shown)


def _short(one: First) -> str:
    return f"{safe(one.difference.part)}, {one.judgement.cause}"


def _subject(subject: str) -> str:
    line, *more = subject.split("\n")
    return safe(line)[:_WIDTH] + (" …" if more else "")


def actions_json(done: ActionReplay) -> dict[str, Any]:
    """The replay of a trial's actions as JSON."""
    return {
        "trial": done.trial_id,
        "image": done.image,
        "differences": done.differences,
        "clock": done.clock,
        "determinism": done.score,
        "probes": done.probes,
        "skipped": list(done.skipped),
        "repeats": [
            {
                "differences": repeat.differences,
                "clock": repeat.clock,
                "levels": [str(one.level) if one.level else None for one in repeat.observed],
                "disk": [asdict(one) for one in repeat.disk] if repeat.disk_compared else None,
                "content_compared": repeat.content_compared,
            }
            for repeat in done.repeats
        ],
        "found": [asdict(one) for one in ([done.first] if done.first else []) + list(done.later)],
    }


def calls_json(done: CallReplay) -> dict[str, Any]:
    """The replay of a trial's model calls as JSON."""
    return {
        "trial": done.before.trial_id,
        "outcome": {"then": str(done.before.outcome), "now": str(done.after.outcome)},
        "differences": done.differences,
        "clock": done.clock,
        "asked": done.asked,
        "extra": done.extra,
        "unasked": done.unasked,
        "divergences": [
            {**asdict(one), "level": str(one.level), "by_chance": one.by_chance} for one in done.divergences
        ],
        "levels": [str(level) for _, _, level, _ in done.observed],
        "disk": [asdict(one) for one in done.disk],
    }


def branches_text(done: Branches) -> Iterator[tuple[str, str]]:
    """What came of branches as (style, line) pairs."""
    yield "bold", f"branches off step {done.step}, restored by {done.restored}: {safe(done.change)}"
    for arm, results in done.arms.items():
        for result in results:
            detail = f" ({safe(result.detail)})" if result.detail else ""
            yield "", f"  {arm} {result.attempt}: {result.outcome}, {result.steps} steps{detail}"
    if done.worth is not None:
        estimate = done.worth.estimate
        interval = done.worth.interval()
        pairs = len(done.worth.pairs)
        means = [sum(side) / pairs for side in zip(*done.worth.pairs, strict=True)]
        yield "", f"mean score: {means[0]:.3f} with the change, {means[1]:.3f} without, over {pairs} pairs"
        yield (
            "bold",
            f"the change was worth {estimate.point:+.3f} ({interval.low:+.3f} to {interval.high:+.3f}, 95 %, "
            f"{estimate.formula})",
        )
        if interval.low <= 0 <= interval.high:
            yield "yellow", "the interval holds 0: so many branches do not tell it from nothing"
    for note in done.notes:
        yield "yellow", f"note: {safe(note)}"
    yield "", f"record: {done.directory}"
    yield "", f"next:   proctor show {done.directory}"


def branches_json(done: Branches) -> dict[str, Any]:
    """What came of branches as JSON."""
    worth = None
    if done.worth is not None:
        estimate, interval = done.worth.estimate, done.worth.interval()
        worth = {
            "pairs": [list(pair) for pair in done.worth.pairs],
            "difference": estimate.point,
            "low": interval.low,
            "high": interval.high,
            "level": interval.level,
            "formula": estimate.formula,
        }
    return {
        "step": done.step,
        "change": done.change,
        "restored": done.restored,
        "directory": str(done.directory),
        "trials": [
            {"trial": one.trial_id, "arm": arm, "attempt": one.attempt, "outcome": str(one.outcome), "steps": one.steps,
             "rewards": one.rewards, "detail": one.detail}
            for arm, results in done.arms.items() for one in results
        ],
        "worth": worth,
        "notes": list(done.notes),
    }  # fmt: skip
