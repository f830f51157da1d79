"""The same work in the right form: what a deliverable would be if it lay at the declared path, as plain text.

A trial fails on form alone when its work passes after a mechanical change that adds nothing: the file moved from
another folder or extension, byte-order marks, carriage returns or a fence of code removed. The grade is not changed by
that; a second grading is the evidence for the cause.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from proctor.grading.deliverable import Change, FileState
from proctor.sandbox.contract import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proctor.grading.deliverable import Collected
    from proctor.sandbox.contract import Sandbox
    from proctor.tasks.model import Task

MAX_BYTES = 1 << 20
_FENCE = re.compile(rb"\A\s*```[\w-]*\n(.*?)\n?```\s*\Z", re.DOTALL)


async def misplaced(task: Task, box: Sandbox, collected: Collected) -> tuple[tuple[str, Change], ...]:
    """For each declared path at which nothing is: the one changed file elsewhere that is called like it, as (where it
    is, what it would be). Two candidates are none: choosing one would be a guess."""
    if task.carry.kind != "paths" or collected.problem:
        return ()
    there = {change.path for change in collected.changes or () if change.after is not None}
    missing = [path for path in task.carry.paths if not any(one == path or one.startswith(f"{path}/") for one in there)]
    found: list[tuple[str, Change]] = []
    files = [f"/{entry.path.lstrip('/')}" for entry in await box.diff() if missing and entry.kind == "file"]
    for path in missing:
        alike = _alike(path, (one for one in files if one not in there))
        if alike is None:
            continue
        try:
            data = await box.read(alike, max_bytes=MAX_BYTES + 1)
        except SandboxError:
            continue
        if len(data) <= MAX_BYTES:
            found.append((alike, Change(path, None, FileState(0o644, data))))
    return tuple(found)


def _alike(path: str, files: Iterable[str]) -> str | None:
    """The only file with the path's name (letters' case apart), else the only one with its name but for the ending."""
    wanted = posixpath.basename(path).lower()
    by_name = {one: posixpath.basename(one).lower() for one in files}
    same = [one for one, name in by_name.items() if name == wanted]
    alike = same or [
        one for one, name in by_name.items() if posixpath.splitext(name)[0] == posixpath.splitext(wanted)[0]
    ]
    return alike[0] if len(alike) == 1 else None


def in_right_form(collected: Collected) -> tuple[Collected, str] | None:
    """The deliverable after every mechanical change that applies, and what was changed; None when none does."""
    changes, reasons = [], [f"{where} moved to {change.path}" for where, change in collected.misplaced]
    for change in (*(collected.changes or ()), *(change for _, change in collected.misplaced)):
        after = change.after
        if after is not None and after.mode in (0o644, 0o755) and len(after.data) <= MAX_BYTES:
            data, why = plain_text(after.data)
            if why:
                reasons.append(f"{change.path} without {', '.join(why)}")
                change = replace(change, after=replace(after, data=data))
        changes.append(change)
    return (replace(collected, changes=tuple(changes)), "; ".join(reasons)) if reasons else None


def plain_text(data: bytes) -> tuple[bytes, list[str]]:
    """A text without what programs put around it, and what that was. Binary data stays as it is."""
    why = []
    if data.startswith(b"\xef\xbb\xbf"):
        data, why = data[3:], ["its byte-order mark"]
    elif data.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            data, why = data.decode("utf-16").encode(), ["UTF-16"]
        except UnicodeError:
            return data, []
    if b"\0" in data:
        return data, []
    if b"\r\n" in data:
        data = data.replace(b"\r\n", b"\n")
        why.append("carriage returns")
    if fenced := _FENCE.match(data):
        data = fenced.group(1) + b"\n"
        why.append("the fence around it")
    return data, why
