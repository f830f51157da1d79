"""The event log of a trial: everything that the host saw, in the order in which it saw it, in one file.

`events.jsonl` is the source of truth for a trial; the trajectory is exported from it. One event a line, numbered from
1. What is bulky lies beside it (`exec.jsonl`, `model-calls.jsonl`, `blobs/`): the event then names the line and its
digest, so the log vouches for those files as well. `events.idx` holds where every STRIDE-th event begins (8 bytes
each, little endian), so that any range of a log of any length is read by one seek. The index follows from the log: it
is never trusted beyond what the log itself says, and made anew in memory where it is missing or wrong.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from proctor.agents.contract import Step, ToolCall
from proctor.common import ConfigError
from proctor.models.contract import Usage
from proctor.runs.clock import now_iso

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import IO

EVENTS = "events.jsonl"
INDEX = "events.idx"
STRIDE = 64
"""Every so many events have a place in the index; a read skips fewer than this many lines."""
EventKind = Literal["start", "stage", "tools", "step", "exec", "model_call", "snapshot", "log", "end"]
_KINDS = frozenset(get_args(EventKind))
_OFFSET = struct.Struct("<Q")
_TAIL = 1 << 16


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `data` depends on `kind`; docs/design/record.md lists the fields."""

    seq: int
    at: str
    kind: EventKind
    data: Mapping[str, Any]


class EventWriter:
    """Numbers events and hands their lines to `append`, which must have written them when it returns."""

    def __init__(self, append: Callable[[str, bytes], None], *, clock: Callable[[], str] = now_iso) -> None:
        self._append = append
        self._clock = clock
        self._offset = 0
        self.count = 0

    def write(self, kind: EventKind, data: Mapping[str, Any]) -> Event:
        """Append one event; its place goes into the index first, so that an index never lacks what the log has."""
        event = Event(self.count + 1, self._clock(), kind, data)
        line = _line({"v": 1, "seq": event.seq, "at": event.at, "kind": kind, "data": data})
        if self.count % STRIDE == 0:
            self._append(INDEX, _OFFSET.pack(self._offset))
        self._append(EVENTS, line)
        self._offset += len(line)
        self.count += 1
        return event


def _line(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode() + b"\n"


class EventLog:
    """A log that is read by range; memory does not grow with its length. Raises ConfigError for what is no log."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / EVENTS
        try:
            self._size = self._path.stat().st_size
        except OSError as error:
            remedy = "records made before there were event logs have none; read their trajectory.json"
            raise ConfigError(
                f"there is no event log: {error.strerror}", field=str(self._path), remedy=remedy
            ) from error
        self._offsets = self._read_index(directory / INDEX)
        self._count: int | None = None

    def __len__(self) -> int:
        """How many events there are, by the number of the last one."""
        if self._count is None:
            last = self._last_line()
            self._count = _parse(last, str(self._path)).seq if last else 0
        return self._count

    def read(self, first: int = 1, last: int | None = None) -> Iterator[Event]:
        """The events `first` to `last` (from 1, both included), one at a time; fewer when the log ends before."""
        if first < 1:
            raise ConfigError(f"events are numbered from 1, not {first}", field=str(self._path))
        with self._path.open("rb") as file:
            expected = self._seek(file, first)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # a crash leaves a torn last line
                if last is not None and expected > last:
                    return
                if expected >= first:
                    event = _parse(line, f"{self._path}:{expected}")
                    if event.seq != expected:
                        raise ConfigError(f"event {event.seq} is where {expected} belongs", field=str(self._path))
                    yield event
                expected += 1

    def of(self, *kinds: EventKind) -> Iterator[Event]:
        """The events of these kinds, in order."""
        return (event for event in self.read() if event.kind in kinds)

    def _seek(self, file: IO[bytes], first: int) -> int:
        """Go to the last indexed event that is not after `first`; returns its number."""
        slot = min((first - 1) // STRIDE, len(self._offsets) - 1)
        if slot < 0:
            return 1
        file.seek(self._offsets[slot])
        line = file.readline()
        number = slot * STRIDE + 1
        if not line or _parse(line, str(self._path)).seq != number:
            self._offsets = self._make_index()
            return self._seek(file, first)
        file.seek(self._offsets[slot])
        return number

    def _read_index(self, path: Path) -> list[int]:
        try:
            content = path.read_bytes()
        except OSError:
            return self._make_index()
        whole = len(content) - len(content) % _OFFSET.size
        offsets = [offset for (offset,) in _OFFSET.iter_unpack(content[:whole])]
        while offsets and offsets[-1] >= self._size:
            offsets.pop()
        rising = all(before < after for before, after in pairwise(offsets))
        return offsets if rising and (offsets or not self._size) and offsets[:1] in ([], [0]) else self._make_index()

    def _make_index(self) -> list[int]:
        offsets, offset = [], 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file):
                if number % STRIDE == 0:
                    offsets.append(offset)
                offset += len(line)
        return offsets

    def _last_line(self) -> bytes:
        """The last whole line, found from the end."""
        with self._path.open("rb") as file:
            reach = _TAIL
            while True:
                start = max(0, self._size - reach)
                file.seek(start)
                lines = file.read(self._size - start).split(b"\n")
                whole = lines[1:-1] if start else lines[:-1]
                if whole or not start:
                    return whole[-1] if whole else b""
                reach *= 8


def _parse(line: bytes, name: str) -> Event:
    try:
        value = json.loads(line)
        if value.keys() != {"v", "seq", "at", "kind", "data"} or value["v"] != 1 or value["kind"] not in _KINDS:
            raise ConfigError(f"not an event of version 1 (kinds: {', '.join(sorted(_KINDS))})", field=name)
        if not isinstance(value["seq"], int) or not isinstance(value["data"], dict):
            raise ConfigError("not an event", field=name)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"not an event: {error}", field=name) from error
    return Event(value["seq"], value["at"], value["kind"], value["data"])


def step_data(step: Step) -> dict[str, Any]:
    """A step as its event holds it: what has its default value is left out."""
    data = {name: value for name, value in asdict(step).items() if value not in (None, [], {}, 0)}
    if step.usage is not None:
        data["usage"] = {name: value for name, value in asdict(step.usage).items() if value is not None}
    if step.tool_calls:
        data["tool_calls"] = [
            {name: value for name, value in asdict(call).items() if value not in (None, {})} for call in step.tool_calls
        ]
    return data


def step_of(data: Mapping[str, Any]) -> Step:
    """The step that an event holds. Raises ConfigError for one that no Proctor wrote."""
    try:
        calls = [ToolCall(**{"arguments": {}, **call}) for call in data.get("tool_calls", ())]
        usage = Usage(**data["usage"]) if "usage" in data else None
        rest = {name: data[name] for name in _STEP_FIELDS if name in data}
        return Step(**{**rest, "tool_calls": calls, "usage": usage})
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"not a step: {error}", field=EVENTS) from error


_STEP_FIELDS = tuple(one.name for one in fields(Step) if one.name not in ("tool_calls", "usage"))
