"""What a trial was told and told of itself, in the record: numbers without a source, special tools, a full context."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from proctor.analysis.numbers import unsupported, values_in
from proctor.analysis.observed import Pointer, State
from proctor.runs.formats import NetworkLine, parse
from proctor.trajectories.atif import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from proctor.runs.formats import ExecLine
    from proctor.trajectories.atif import Trajectory

_DATA = re.compile(r"\.(?:txt|csv|tsv|json|jsonl|md|ya?ml)$")
"""Files whose content is a statement; numbers in code are constants."""
_PROGRAM = re.compile(r"`(/(?:[\w.-]+/)*(?:bin|sbin|tools?|exam)/[\w.-]+)[^`\n]*`")
"""A program of its own that an instruction names."""
_BUILT_IN = frozenset({"bash", "read_file", "write_file", "edit_file", "finish"})
_MOST_NUMBERS = 50


def unsupported_numbers(trajectory: Trajectory, final_message: str) -> tuple[tuple[str, Pointer], ...]:
    """Numbers in data files that it wrote and in its last message, which nothing before them shows."""
    known: set[float] = set()
    found: list[tuple[str, Pointer]] = []
    for index, step in enumerate(trajectory.steps):
        if step.source in ("user", "system"):
            known |= values_in(text_of(step.message))
            continue
        for number, call in enumerate(step.tool_calls or ()):
            path, content = call.arguments.get("path"), call.arguments.get("content")
            if isinstance(path, str) and isinstance(content, str) and _DATA.search(path):
                place = f"/steps/{index}/tool_calls/{number}/arguments/content"
                found += [(one, Pointer("trajectory.json", place, one)) for one in unsupported(content, known)]
            known |= values_in(" ".join(value for value in _texts(call.arguments)))
        for result in step.observation.results if step.observation else ():
            known |= values_in(text_of(result.content)) if result.content is not None else set()
    found += [(one, Pointer("result.json", "/final_message", one)) for one in unsupported(final_message, known)]
    return tuple(found[:_MOST_NUMBERS])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, (int, float)):
        yield str(value)


def offered_tools(trajectory: Trajectory) -> dict[str, Pointer]:
    """Programs of their own that the instruction names in backticks, and tools beside those that a harness has."""
    found: dict[str, Pointer] = {}
    for index, step in enumerate(trajectory.steps):
        if step.source == "user":
            for match in _PROGRAM.finditer(text_of(step.message)):
                found.setdefault(match.group(1), Pointer("trajectory.json", f"/steps/{index}/message", match.group(1)))
            break
    for number, tool in enumerate(trajectory.agent.tool_definitions or ()):
        name = (tool.get("function") or {}).get("name")
        if isinstance(name, str) and name not in _BUILT_IN:
            found.setdefault(name, Pointer("trajectory.json", f"/agent/tool_definitions/{number}", name))
    return found


def pressure(trajectory: Trajectory, stop: str, detail: str) -> tuple[tuple[str, Pointer], ...]:
    """Answers cut off by their length, a conversation that was shortened, and a window that was full at the end."""
    found = []
    for index, step in enumerate(trajectory.steps):
        extra = step.extra or {}
        if extra.get("finish_reason") == "length":
            found.append(("an answer was cut off by its length", f"/steps/{index}/extra/finish_reason", "length"))
        if isinstance(dropped := extra.get("context_dropped"), dict):
            why = str(dropped.get("why"))
            found.append(("the conversation was shortened", f"/steps/{index}/extra/context_dropped/why", why))
    places = [(what, Pointer("trajectory.json", place, span)) for what, place, span in found]
    if stop == "limit:tokens" and "context" in detail:
        places.append(("the window of the model was full", Pointer("result.json", "/detail", "context")))
    return tuple(places)


def network_faults(path: Path) -> dict[str, tuple[str, str]]:
    """Connections and requests that were slowed or broken on purpose: name and fault, by their line."""
    if not path.exists():
        return {}
    found = {}
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        if b'"fault"' in raw:
            line = parse(NetworkLine, raw, name=f"{path}:{number}")
            if line.fault:
                found[f"network.jsonl#{number}"] = (line.name, f"network: {line.fault}")
    return found


def file_states(lines: Iterable[ExecLine]) -> Iterator[State]:
    """Whole files as they were read and written through the host, in order; calls that went wrong show nothing."""
    for line in lines:
        if line.kind in ("read", "write") and line.digest is not None and line.error is None:
            yield State(line.subject, line.digest, f"exec.jsonl#{line.seq}")
