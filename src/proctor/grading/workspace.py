"""Bringing a patch and the tests into a clean room: apply, put protected files back, then add the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.grading.collect import repository_of
from proctor.grading.contract import GradeFinding
from proctor.grading.protect import Protection
from proctor.grading.room import discard, place_changes, place_states
from proctor.grading.trees import View
from proctor.tasks.patches import patch_paths

if TYPE_CHECKING:
    from proctor.grading.deliverable import Collected, FileState
    from proctor.grading.room import Rooms
    from proctor.sandbox.contract import ExecResult, Sandbox
    from proctor.tasks.model import TestSpec

_STAGING = "/opt/proctor-staging"
_GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=", "-c", "safe.directory=*")
_CHAIN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("git apply", (*_GIT, "apply", "--verbose")),
    ("git apply --3way", (*_GIT, "apply", "--verbose", "--3way")),
    ("git apply --reject", (*_GIT, "apply", "--verbose", "--reject")),
    ("patch --fuzz=5", ("patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i")),
)
"""The order of the public harness (research notes, §2e)."""
_APPLY_TIMEOUT_S = 120.0


class TestsDoNotApply(Exception):
    """The task's own tests cannot be brought in: the verifier's failure, not the candidate's."""


@dataclass(frozen=True, slots=True)
class Applied:
    """How a patch went in. `how` is empty when it did not."""

    how: str
    detail: str = ""
    restored: tuple[str, ...] = ()
    findings: tuple[GradeFinding, ...] = ()


async def bring_work(rooms: Rooms, box: Sandbox, collected: Collected, spec: TestSpec) -> Applied:
    """Put the candidate's patch into the room's repository and take protected paths back to their base state."""
    repo = repository_of(rooms.task, rooms.image.workdir)
    protection = Protection(rooms.task, spec)
    if collected.changes is not None:
        kept, restored = protection.split(change.path for change in collected.changes)
        wanted = set(kept)
        await place_changes(box, repo, [change for change in collected.changes if change.path in wanted])
        return Applied("exact states", restored=tuple(restored), findings=_findings(restored))
    text = collected.patch or ""
    if not text.strip():
        return Applied("", "the patch is empty")
    how, detail = await _apply_chain(box, repo, text)
    if not how:
        return Applied("", detail)
    _, restored = protection.split(patch_paths(text))
    await _put_back(rooms, box, repo, list(restored))
    return Applied(how, detail, tuple(restored), _findings(restored))


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
    await box.exec(["/bin/sh", "-c", script, "sh", directory], cwd="/", user="root", timeout_s=_APPLY_TIMEOUT_S)


async def _apply_chain(box: Sandbox, repo: str, text: str) -> tuple[str, str]:
    """The first way of the chain that takes the patch, and what the last one said if none did."""
    patch = f"{_STAGING}/work.patch"
    await box.write(patch, text.encode("utf-8", "surrogateescape"), mode=0o400)
    said = ""
    try:
        for name, argv in _CHAIN:
            result = await _run(box, (*argv, patch), repo)
            if result.ok:
                return name, ""
            said = _last_line(result) or said
            reverse = await _run(box, (*_GIT, "apply", "--check", "--reverse", patch), repo)
            if reverse.ok:
                return "already applied", ""
            await _run(box, (*_GIT, "checkout", "-q", "--", "."), repo)
            await _run(box, (*_GIT, "clean", "-qfd"), repo)
        return "", f"the patch does not apply: {said}"
    finally:
        await discard(box, _STAGING)


async def _put_back(rooms: Rooms, box: Sandbox, repo: str, paths: list[str]) -> None:
    if not paths:
        return
    with View(rooms.image.layers) as base:
        states: dict[str, FileState | None] = {path: base.state(f"{repo}/{path}") for path in paths}
    await place_states(box, repo, states)


async def _run(box: Sandbox, argv: tuple[str, ...], cwd: str) -> ExecResult:
    return await box.exec(
        ["/usr/bin/env", "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", *argv],
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
