"""Reading what the test process reported: bytes from the channel become facts about tests. Pure.

Frames are lines `<mac> <json>`. A mac covers the mac before it and the frame, keyed by the run's nonce, so frames
cannot be added, dropped, changed or reordered by anybody who does not hold the nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from proctor.grading.contract import TestStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_FRAME = 1 << 16
_LINE = re.compile(rb"([0-9a-f]{64}) (\{.*\})")


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    seq: int = Field(ge=0)


class Start(_Frame):
    """First frame, sent before any graded code can run."""

    t: Literal["start"]
    runner: str
    python: str


class Collected(_Frame):
    """How many tests the session holds before sentinels are added."""

    t: Literal["collected"]
    count: int = Field(ge=0)


class Phase(_Frame):
    """One phase of one pytest item; `sub` frames are subtests of it."""

    t: Literal["phase", "sub"]
    id: str
    when: Literal["setup", "call", "teardown"]
    outcome: Literal["passed", "failed", "skipped"]
    seen: Literal["nothing", "error", "skip", "xfail"]
    xfail: Literal["", "mark", "raised"]


class Names(BaseModel):
    """The forms under which a unittest-like test is known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    method: str
    label: str
    text: str
    description: str


class Result(_Frame):
    """One test of a unittest-like runner."""

    t: Literal["result"]
    id: str
    names: Names
    status: Literal["passed", "skipped", "xfailed", "xpassed", "failed", "error"]


class Session(_Frame):
    """What a witness saw of a verifier's own pytest session."""

    t: Literal["session"]
    tests: int
    conflicts: int
    decoy: Literal["failed", "passed", "unknown"]


class End(_Frame):
    """Last frame, sent after the runner returned."""

    t: Literal["end"]
    code: int


Frame = Start | Collected | Phase | Result | Session | End
_ADAPTER: TypeAdapter[Frame] = TypeAdapter(Annotated[Frame, Field(discriminator="t")])


@dataclass(frozen=True, slots=True)
class Seen:
    """One test as reported: its status, its other names, and what was odd about it."""

    test_id: str
    status: TestStatus
    names: frozenset[str]
    method: str = ""
    conflict: bool = False
    """The runner's report said passed although an exception was seen."""
    raised_xfail: bool = False
    """xfail was raised by code that ran, not set by a mark."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the channel said. `broken` names the first thing that no honest test process sends."""

    started: bool = False
    ended: bool = False
    collected: int | None = None
    tests: Mapping[str, Seen] = field(default_factory=dict)
    duplicates: frozenset[str] = frozenset()
    broken: str = ""
    session: Session | None = None
    forged: bool = False
    """`broken` because bytes came that were not made with the nonce."""


def parse_report(raw: bytes, nonce: bytes, *, runner: str, dropped: int = 0) -> Report:
    """Check every frame of a report and put the phases of each test together. Never raises."""
    lines = raw.split(b"\n")
    tail = lines.pop()
    frames: list[Frame] = []
    mac, problem, forged = b"", "", False
    for number, line in enumerate(lines):
        match = _LINE.fullmatch(line)
        if match is None:
            problem, forged = f"frame {number} is not a frame", True
            break
        given, body = match.groups()
        mac = hmac.new(nonce, mac + body, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(mac, given):
            problem, forged = f"frame {number} was not made with this run's nonce", True
            break
        try:
            frame = _ADAPTER.validate_python(_strict_json(body))
        except (ValidationError, ValueError):
            problem = f"frame {number} does not follow the schema"
            break
        problem = _out_of_place(frame, number, frames, runner)
        if problem:
            break
        frames.append(frame)
    if not problem and (dropped or len(tail) > _MAX_FRAME):
        # No frame of ours is that long, so somebody else wrote to the pipe.
        problem, forged = f"{dropped} bytes of the report were dropped", len(tail) > _MAX_FRAME
    if not problem and tail and frames and isinstance(frames[-1], End):
        problem, forged = "bytes after the last frame", True
    return _assemble(frames, problem, forged)


def _strict_json(body: bytes) -> Any:
    """JSON without duplicate keys and without numbers that are not finite."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("duplicate key")
        return found

    def refuse(text: str) -> Any:
        raise ValueError(f"not a finite number: {text}")

    return json.loads(body, object_pairs_hook=pairs, parse_constant=refuse)


def _out_of_place(frame: Frame, number: int, before: list[Frame], runner: str) -> str:
    if frame.seq != number:
        return f"frame {number} says it is number {frame.seq}"
    if isinstance(frame, Start) != (number == 0):
        return f"frame {number} is out of place"
    if isinstance(frame, Start) and frame.runner != runner:
        return f"the report is of runner {frame.runner!r}, not {runner!r}"
    if before and isinstance(before[-1], End):
        return "frames after the end"
    return ""


def _assemble(frames: list[Frame], problem: str, forged: bool) -> Report:
    phases: dict[str, list[Phase]] = {}
    results: dict[str, Seen] = {}
    counts: Counter[str] = Counter()
    collected: int | None = None
    for frame in frames:
        if isinstance(frame, Phase):
            phases.setdefault(frame.id, []).append(frame)
        elif isinstance(frame, Result):
            counts[frame.id] += 1
            names = frame.names
            results[frame.id] = Seen(
                frame.id,
                TestStatus(frame.status),
                frozenset(n for n in (names.label, names.text, names.description) if n),
                method=names.method,
            )
        elif isinstance(frame, Collected) and collected is None:
            collected = frame.count
    for test_id, parts in phases.items():
        when = Counter(p.when for p in parts if p.t == "phase")
        counts[test_id] += max(when.values(), default=0)
        results[test_id] = _of_phases(test_id, parts)
    return Report(
        started=bool(frames),
        ended=bool(frames) and isinstance(frames[-1], End),
        collected=collected,
        tests=results,
        duplicates=frozenset(name for name, count in counts.items() if count > 1),
        broken=problem,
        session=next((frame for frame in frames if isinstance(frame, Session)), None),
        forged=forged,
    )


def _of_phases(test_id: str, parts: list[Phase]) -> Seen:
    """One status from setup, call and teardown. Passed needs all three, and no exception seen in any."""
    by = {p.when: p for p in parts if p.t == "phase"}
    conflict = any(p.outcome == "passed" and p.seen == "error" for p in parts)
    setup, call, teardown = by.get("setup"), by.get("call"), by.get("teardown")
    decisive = setup if setup is not None and setup.outcome != "passed" else call
    status = TestStatus.ERROR
    if decisive is not None and (decisive is call or decisive is setup):
        if decisive.outcome == "failed":
            status = TestStatus.ERROR if decisive is setup else TestStatus.FAILED
        elif decisive.outcome == "skipped":
            status = TestStatus.XFAILED if decisive.xfail else TestStatus.SKIPPED
        elif call is decisive:
            status = TestStatus.XPASSED if decisive.xfail else TestStatus.PASSED
    if any(p.t == "sub" and p.outcome == "failed" for p in parts) or conflict:
        status = TestStatus.FAILED
    if teardown is None or teardown.outcome == "failed" or setup is None:
        status = TestStatus.ERROR
    return Seen(
        test_id,
        status,
        frozenset(),
        conflict=conflict,
        raised_xfail=any(p.xfail == "raised" for p in parts),
    )
