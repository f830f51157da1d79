"""One observation against another, and what a difference is likely due to. Pure functions of values.

Three answers are possible: *same* (equal to the byte), *clock* (equal but for times and durations, which no replay can
give back) and *different*. A cause is a judgement by fixed rules, and says on what evidence; docs/replay.md has them.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from proctor.runs.replay.masks import lines_in_order, without_chance, without_times

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proctor.runs.formats import ExecLine, StreamLine


class Level(StrEnum):
    """How alike two observations are."""

    SAME = "same"
    CLOCK = "clock"
    DIFFERENT = "different"


class Cause(StrEnum):
    """What a difference is likely due to. A closed list."""

    TIME = "time"
    RANDOMNESS = "randomness"
    NETWORK = "network"
    RACE = "race"
    ENVIRONMENT = "environment"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an observation is not what was recorded: which part of it, and both values as text."""

    part: str
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """The likely cause of a difference, and on what evidence."""

    cause: Cause
    evidence: str


_NETWORK_COMMAND = re.compile(
    r"\b(curl|wget|pip3?|uv|npm|npx|yarn|apt(-get)?|apk|dnf|yum|ssh|scp|rsync|nc|ping|dig|nslookup|cargo|gem)\b"
    r"|\bgit\s+(clone|fetch|pull|push|ls-remote)\b|https?://"
)
_NETWORK_WORDS = re.compile(
    r"could not resolve|name resolution|name or service not known|connection (refused|reset|timed out)|network is "
    r"unreachable|no route to host|max retries exceeded|failed to establish a new connection",
    re.I,
)
_LOOKED_AT = 4000
"""How much of a command is looked at for a cause: a candidate may have written a very long one."""
_PARALLEL = re.compile(
    r"&\s*(\n|$|[^&>\s])|\bxargs\b.*\s-P|\bparallel\b|\bmake\b.*\s-j|\s-n\s*(auto|\d+)\b|\bthread", re.M
)


def compare(recorded: ExecLine, replayed: ExecLine) -> tuple[Level, Difference | None]:
    """How alike two observations of one call are, and the first part that differs more than by the clock (or, if
    there is none, the first that differs by the clock)."""
    clock: Difference | None = None
    for part, before, now in _parts(recorded, replayed):
        if before == now:
            continue
        found = Difference(part, before, now)
        if without_times(before) != without_times(now):
            return Level.DIFFERENT, found
        clock = clock or found
    return (Level.CLOCK, clock) if clock else (Level.SAME, None)


def _parts(recorded: ExecLine, replayed: ExecLine) -> Iterator[tuple[str, str, str]]:
    for part in ("timed_out", "reason", "exit_code", "signal", "error"):
        yield part, str(getattr(recorded, part)), str(getattr(replayed, part))
    for part in ("stdout", "stderr"):
        yield part, stream_text(getattr(recorded, part)), stream_text(getattr(replayed, part))
    for part in ("size_bytes", "digest"):
        yield part, str(getattr(recorded, part)), str(getattr(replayed, part))


def stream_text(stream: StreamLine | None) -> str:
    """What was kept of a stream, as text; bytes that are no text as escapes, and what was dropped by its count."""
    if stream is None:
        return ""
    text = stream.text
    if text is None:
        text = base64.b64decode(stream.base64 or "").decode("utf-8", "backslashreplace")
    return f"{text}\n[{stream.total} bytes, {stream.dropped} dropped]" if stream.dropped else text


def observed_text(line: ExecLine) -> str:
    """All that was observed of a call, as one text."""
    return "\n".join(before for _, before, _ in _parts(line, line))


def judge(
    recorded: ExecLine,
    replayed: Sequence[ExecLine],
    *,
    seeded: Sequence[ExecLine] = (),
    reached: Sequence[str] = (),
    first: bool = True,
) -> Judgement:
    """The likely cause of the difference between a recorded call and the same call in one or more replays.

    `replayed` has one line for each replay; `seeded` those of replays with a fixed hash seed. `reached`: names that the
    sandbox was seen to ask for while the recorded call ran. `first`: nothing differed before it; a later difference may
    be the consequence of an earlier one.
    """
    texts = [observed_text(line) for line in replayed]
    then, now = observed_text(recorded), texts[0]
    for line in replayed:
        _, found = compare(recorded, line)
        if found is not None:
            now = observed_text(line)
            break
    return (
        _by_network(recorded, then, now, reached)
        or _by_clock(recorded, replayed, then, now)
        or _by_seed(texts, seeded)
        or _by_order(recorded, then, now, texts)
        or _by_chance(then, now, texts)
        or _by_repeats(texts, first=first)
    )


def _by_network(recorded: ExecLine, then: str, now: str, reached: Sequence[str]) -> Judgement | None:
    for name, text in (("then", then), ("now", now)):
        if (found := _NETWORK_WORDS.search(text)) and not (_NETWORK_WORDS.search(then) and _NETWORK_WORDS.search(now)):
            return Judgement(Cause.NETWORK, f"the output {name} says {found.group()!r}, the other does not")
    if reached and without_times(then) != without_times(now):
        return Judgement(
            Cause.NETWORK, f"while it ran, the host saw it ask for {', '.join(reached[:3])} (network.jsonl)"
        )
    if (found := _NETWORK_COMMAND.search(recorded.subject[:_LOOKED_AT])) and without_times(then) != without_times(now):
        return Judgement(Cause.NETWORK, f"the command uses the network ({found.group().strip()})")
    return None


def _by_clock(recorded: ExecLine, replayed: Sequence[ExecLine], then: str, now: str) -> Judgement | None:
    if without_times(then) == without_times(now):
        return Judgement(Cause.TIME, "equal once dates, times and durations are masked")
    if any(line.timed_out != recorded.timed_out for line in replayed):
        return Judgement(Cause.TIME, f"it met its limit of {recorded.limit_s} s in one of the two only")
    return None


def _by_seed(texts: Sequence[str], seeded: Sequence[ExecLine]) -> Judgement | None:
    fixed = {without_times(observed_text(line)) for line in seeded}
    free = {without_times(text) for text in texts}
    if len(seeded) > 1 and len(fixed) == 1 and len(free) > 1:
        return Judgement(Cause.RANDOMNESS, f"{len(free)} outputs in {len(texts)} replays, but one only with a fixed "
                                           "hash seed (PYTHONHASHSEED=0)")  # fmt: skip
    return None


def _by_order(recorded: ExecLine, then: str, now: str, texts: Sequence[str]) -> Judgement | None:
    if lines_in_order(then) == lines_in_order(now):
        return Judgement(Cause.RACE, "the same lines in another order")
    if _PARALLEL.search(recorded.subject[:_LOOKED_AT]) and len({without_chance(text) for text in texts}) > 1:
        return Judgement(Cause.RACE, "it starts several things at once, and its replays differ among themselves")
    return None


def _by_chance(then: str, now: str, texts: Sequence[str]) -> Judgement | None:
    if without_chance(then) == without_chance(now):
        return Judgement(Cause.RANDOMNESS, "equal once ids, addresses, hashes and temporary names are masked")
    if len({without_times(text) for text in texts}) > 1:
        return Judgement(Cause.RANDOMNESS, f"{len(texts)} replays differ among themselves as well")
    return None


def _by_repeats(texts: Sequence[str], *, first: bool) -> Judgement:
    if not first:
        return Judgement(Cause.UNKNOWN, "it may follow from an earlier difference")
    if len(texts) > 1:
        agree = f"all {len(texts)} replays agree with each other, and not with the record"
        return Judgement(Cause.ENVIRONMENT, f"{agree}: something around the sandbox is not as it was")
    return Judgement(Cause.UNKNOWN, "one replay only; repeat it to learn more (--repeat)")
