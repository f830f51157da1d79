"""Taking an agent's own files out of its sandbox: bounded, never followed, never a reason to fail."""

from __future__ import annotations

import fnmatch
import posixpath
from typing import TYPE_CHECKING

from proctor.sandbox.contract import FileError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable

    from proctor.agents.contract import Recorder
    from proctor.sandbox.contract import FileStat, Sandbox

MAX_KEPT_BYTES = 32 << 20
"""How much of an agent's logs is kept for a trial, in all."""
MAX_KEPT_FILES = 200
_MAX_DEPTH = 8


async def read_up_to(box: Sandbox, path: str, limit: int) -> bytes:
    """The first `limit` bytes of a file; empty when it cannot be read."""
    try:
        return await box.read(path, max_bytes=limit)
    except (FileError, SandboxError):
        return b""


async def newest(box: Sandbox, pattern: str) -> str | None:
    """The youngest file whose path matches; `*` stands for part of one name. A plain path is itself."""
    head, *_ = pattern.partition("*")
    if head == pattern:
        return pattern
    root = head.rpartition("/")[0] or "/"
    depth = pattern.count("/")
    found = [
        (stat.mtime, path)
        for path, stat in await _files(box, root)
        if path.count("/") == depth and fnmatch.fnmatchcase(path, pattern)
    ]
    return max(found)[1] if found else None


async def keep_logs(
    box: Sandbox, path: str, name: str, recorder: Recorder, clean: Callable[[bytes], bytes] = lambda data: data
) -> None:
    """Copy a file, or the files of a directory, into the record as `name`, or below it; `clean` may change them."""
    left = MAX_KEPT_BYTES
    files = await _files(box, path)
    single = files == []
    for where in [path] if single else [item for item, _ in files[:MAX_KEPT_FILES]]:
        data = await read_up_to(box, where, left)
        if not data:
            continue
        left -= len(data)
        recorder.keep(name if single else f"{name}/{posixpath.relpath(where, path)}", clean(data))
        if left <= 0:
            recorder.log(f"logs: more than {MAX_KEPT_BYTES} bytes below {path}; the rest was not kept")
            return
    if len(files) > MAX_KEPT_FILES:
        recorder.log(f"logs: {len(files)} files below {path}; {MAX_KEPT_FILES} were kept")


async def _files(box: Sandbox, root: str, depth: int = _MAX_DEPTH) -> list[tuple[str, FileStat]]:
    """Regular files below a directory, as path and metadata; links are not followed, other kinds left out."""
    try:
        entries = await box.list(root)
    except (FileError, SandboxError):
        return []
    found: list[tuple[str, FileStat]] = []
    for entry in sorted(entries, key=lambda item: item.name):
        path = posixpath.join(root, entry.name)
        if entry.kind == "file":
            found.append((path, entry))
        elif entry.kind == "dir" and depth > 0 and len(found) <= MAX_KEPT_FILES:
            found += await _files(box, path, depth - 1)
    return found
