"""Bringing a patch and the tests into a clean room: apply, put protected files back, then add the tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proctor.common import ConfigError
from proctor.grading.collect import leaves, repository_of, touched_paths
from proctor.grading.contract import GradeFinding
from proctor.grading.protect import Protection, uploaded_files
from proctor.grading.room import discard, place_changes, place_states
from proctor.grading.trees import View
from proctor.sandbox.contract import FileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proctor.grading.deliverable import Collected, FileState
    from proctor.grading.room import Rooms
    from proctor.sandbox.contract import DiffEntry, ExecResult, Sandbox
    from proctor.tasks.model import TestSpec

_STAGING = "/opt/proctor-staging"
_PATCH = f"{_STAGING}/work.patch"
_GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=", "-c", "safe.directory=*")
_CHAIN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("git apply", (*_GIT, "apply", "--verbose")),
    ("git apply --3way", (*_GIT, "apply", "--verbose", "--3way")),
    ("git apply --reject", (*_GIT, "apply", "--verbose", "--reject")),
    ("patch --fuzz=5", ("patch", "--batch", "--forward", "--unified", "--fuzz=5", "-p1", "-i")),
)
"""The order of the public harness (research notes, §2e). `--unified`: else `patch` would hand a script to ed."""
_APPLY_TIMEOUT_S = 120.0
_NO_SUCH_PROGRAM = 127


class ReachesOutside(Exception):
    """A patch changed something outside the repository. No program that applies patches should let it."""


class TestsDoNotApply(Exception):
    """The task's own tests cannot be brought in: the verifier's failure, not the candidate's."""


@dataclass(frozen=True, slots=True)
class Applied:
    """How a patch went in. `how` is empty when it did not. `changed`: the paths that a prediction changed, as the
    room's disk shows them, relative to the repository."""

    how: str
    detail: str = ""
    changed: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    findings: tuple[GradeFinding, ...] = ()


async def bring_work(rooms: Rooms, box: Sandbox, collected: Collected, spec: TestSpec) -> Applied:
    """Put the candidate's patch into the room's repository and take protected paths back to their base state."""
    repo = repository_of(rooms.task, rooms.image.workdir)
    protection = Protection(rooms.task, spec, rooms.image.workdir)
    if collected.changes is not None:
        kept, restored = protection.split(change.path for change in collected.changes)
        wanted = set(kept)
        await place_changes(box, repo, [change for change in collected.changes if change.path in wanted])
        return Applied("exact states", restored=tuple(restored), findings=_findings(restored))
    applied = await bring_patch(rooms, box, collected.patch or "")
    if not applied.how:
        return applied
    _, restored = protection.split(applied.changed)
    restored |= {path: "link" for path in applied.changed if path not in restored and await _leaves(box, repo, path)}
    await _put_back(rooms, box, repo, list(restored))
    return replace(applied, restored=tuple(restored), findings=_findings(restored))


async def bring_patch(rooms: Rooms, box: Sandbox, text: str) -> Applied:
    """Apply a patch made elsewhere to the room's repository, by the first way of the chain that takes it.

    What it did is read from the room's disk, not from the patch: programs that apply patches are more lenient than
    any reader of them. One that reaches outside the repository is refused; `.git` is put back at once.
    """
    repo = repository_of(rooms.task, rooms.image.workdir)
    await box.write(_PATCH, text.encode("utf-8", "surrogateescape"), mode=0o400)
    try:
        return await _apply_chain(rooms, box, repo)
    except ReachesOutside as error:
        return Applied("", f"the patch is refused: {error}")
    finally:
        await discard(box, _STAGING)


async def bring_tests(rooms: Rooms, box: Sandbox, spec: TestSpec) -> None:
    """Apply the test patch to the repository and copy the test files over the workspace, in that order."""
    repo = repository_of(rooms.task, rooms.image.workdir)
    if spec.patch is not None:
        data = spec.patch.read_bytes()
        await box.write(f"{_STAGING}/tests.patch", data, mode=0o400)
        result = await _run(box, (*_GIT, "apply", "--whitespace=nowarn", f"{_STAGING}/tests.patch"), repo)
        await discard(box, _STAGING)
        if not result.ok:
            raise TestsDoNotApply(f"the test patch does not apply: {_last_line(result)}")
    if spec.files is not None:
        await _clear_way(box, spec.cwd, uploaded_files(spec))
        await box.upload(spec.files, spec.cwd)


async def shut(box: Sandbox, directory: str) -> None:
    """Make the workspace readable, but nothing in it replaceable, for the unprivileged test process.

    Files stay root's; directories are sticky and open, so that tests can add files beside them. Bytecode goes.
    """
    script = (
        'find "$1" -name __pycache__ -type d -prune -exec rm -rf {} + ; '
        'find "$1" -path "*/.git/*" -prune -o -type d -exec chmod 1777 {} + ; '
        'find "$1" -path "*/.git/*" -prune -o -type f ! -perm -004 -exec chmod o+r {} +'
    )
    argv = ["/bin/sh", "-c", script, "sh", directory]
    result = await box.exec(argv, cwd="/", user="root", timeout_s=_APPLY_TIMEOUT_S)
    if result.exit_code == _NO_SUCH_PROGRAM or result.exit_code is None:
        raise ConfigError("the workspace cannot be shut: the image has no find, chmod or rm", field="image")


async def _clear_way(box: Sandbox, root: str, names: list[str]) -> None:
    """Make sure that copying `names` below `root` replaces what is there and follows no link on the way."""
    done: set[str] = set()
    for name in names:
        path = root.rstrip("/")
        parts = name.split("/")
        for position, part in enumerate(parts):
            path = f"{path}/{part}"
            if path in done:
                continue
            done.add(path)
            try:
                kind = (await box.stat(path)).kind
            except FileError:
                break
            if kind != "dir" or position == len(parts) - 1:
                await discard(box, path)


async def _apply_chain(rooms: Rooms, box: Sandbox, repo: str) -> Applied:
    """The first way of the chain that takes the staged patch, or what the last one said if none did."""
    before = frozenset(await box.diff())
    said, tools = "", 0
    for name, argv in _CHAIN:
        result = await _run(box, (*argv, _PATCH), repo)
        if result.exit_code == _NO_SUCH_PROGRAM:
            continue
        tools += 1
        changed = await _changed(rooms, box, repo, before)
        # Before git runs again: its own directory decides what git would start.
        await _put_back(rooms, box, repo, [path for path in changed if ".git" in path.split("/")])
        if result.ok:
            return Applied(name, changed=changed)
        said = _last_line(result) or said
        reverse = await _run(box, (*_GIT, "apply", "--check", "--reverse", _PATCH), repo)
        if reverse.ok:
            return Applied("already applied", changed=changed)
        await _put_back(rooms, box, repo, changed)
    if not tools:
        raise ConfigError("the image has neither git nor patch, so no prediction can be applied", field=rooms.image.ref)
    return Applied("", f"the patch does not apply: {said}")


async def _changed(rooms: Rooms, box: Sandbox, repo: str, before: frozenset[DiffEntry]) -> tuple[str, ...]:
    """Paths of the repository (relative to it) that differ from the image since `before`, each once.

    Raises ReachesOutside when anything else does.
    """
    found: dict[str, None] = {}
    with View(rooms.image.layers) as base:
        for entry in await box.diff():
            if entry in before or (entry.kind == "dir" and entry.change == "modified" and base.is_dir(entry.path)):
                continue
            if not entry.path.startswith(repo + "/"):
                raise ReachesOutside(f"it changes {entry.path}, outside {repo}")
            for path in touched_paths(entry, repo, base, git=True):
                found[path[len(repo) + 1 :]] = None
    return tuple(found)


async def _leaves(box: Sandbox, repo: str, path: str) -> bool:
    """Whether `path` is now a link that leaves the repository; collected ones are not carried either."""
    try:
        info = await box.stat(f"{repo}/{path}")
    except FileError:
        return False
    return info.kind == "link" and leaves(path.split("/"), info.target or "")


async def _put_back(rooms: Rooms, box: Sandbox, repo: str, paths: Sequence[str]) -> None:
    if not paths:
        return
    with View(rooms.image.layers) as base:
        states: dict[str, FileState | None] = {path: base.state(f"{repo}/{path}") for path in paths}
    await place_states(box, repo, states)


async def _run(box: Sandbox, argv: tuple[str, ...], cwd: str) -> ExecResult:
    # A repository that the work made above this one would bring settings, and with them programs, along.
    ceiling = f"GIT_CEILING_DIRECTORIES={cwd.rpartition('/')[0] or '/'}"
    return await box.exec(
        ["/usr/bin/env", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", ceiling, *argv],
        cwd=cwd or "/",
        user="root",
        timeout_s=_APPLY_TIMEOUT_S,
    )


def _last_line(result: ExecResult) -> str:
    lines = [line for line in (result.error_text + "\n" + result.text).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [f"exit code {result.exit_code}"])[-1][:300]


def _findings(restored: dict[str, str]) -> tuple[GradeFinding, ...]:
    """Touched tests and runner files are put back; that is worth knowing, and it is not cheating by itself."""
    return tuple(
        GradeFinding("restored", f"{path}: put back to its base state ({reason})")
        for path, reason in list(restored.items())[:50]
    )
