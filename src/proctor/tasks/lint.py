"""Warnings about tasks that load: habits that make a score less than it seems. Names are Harbor's where it has one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proctor.common import digest_file
from proctor.tasks.model import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proctor.tasks.model import Task

RULES = {
    "agent-image-test-leak": "tests or the solution are in the image the agent works in",
    "artifact-log-overlap": "an artifact is in a log directory that is collected anyway",
    "artifacts-in-diff": "artifacts are not collected one by one; the record holds every file that the agent changed",
    "image-not-used": "built from environment/Dockerfile, not from",
    "network-unset": "no network mode is named; Harbor would give the public network, Proctor gives none",
    "no-digest": "a dataset's entry has no digest",
    "no-fail-to-pass": "no test has to change from failing to passing, so doing nothing may resolve the task",
    "no-solution": "there is no reference solution",
    "overlapping-artifacts": "one artifact contains another",
    "root-agent": "the agent works as root",
    "shared-verifier": "the task is graded in the sandbox that the agent worked in",
    "unpinned-image": "a tag can come to mean another image",
    "unpinned-python-dependency": "a Python package is installed without a version",
    "unrunnable": "a row of a dataset has no environment; it stays in the count, by name",
    "verifier-network-download": "the verifier downloads, and grading has no network",
    "verifier-runtime-install": "the verifier installs packages when it runs, without a network",
}
"""Every warning that `proctor task check` knows."""

_FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*$", re.IGNORECASE)
_COPY = re.compile(r"(?:COPY|ADD)\s+(.*)$", re.IGNORECASE)
_LEAK = re.compile(r"(?:^|[\s\"'/])(?:\.\./)?(tests|solution)(?:/|\s|\"|$)")
_PIP = re.compile(r"\b(?:pip3?|uv\s+pip)\s+install\s+([^&|;]*)")
_INSTALLS = re.compile(
    r"\b(?:apt(?:-get)?\s+(?:-\S+\s+)*install|apk\s+add|(?:dnf|yum)\s+install|pip3?\s+install|uv\s+(?:pip\s+install|add)"
    r"|uvx|npm\s+(?:install|i|ci)|cargo\s+install|gem\s+install)\b"
)
_DOWNLOADS = re.compile(r"\b(?:curl|wget)\b[^#]*(?:https?|ftp)://|\bgit\s+clone\s+\S*(?:://|@)")


@dataclass(frozen=True, slots=True)
class Line:
    """A logical line (continuations joined) and where it begins."""

    number: int
    text: str


def lint_task(task: Task) -> list[Problem]:
    """All warnings about one task."""
    return [*_image(task), *_verifier(task), *_artifacts(task), *_choices(task)]


def logical_lines(text: str) -> list[Line]:
    """Lines of a shell script or Dockerfile, continuations joined, comments and blank lines left out."""
    lines: list[Line] = []
    pending: list[str] = []
    start = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("#") or (not line and not pending):
            continue
        start = start if pending else number
        if line.endswith("\\"):
            pending.append(line[:-1].rstrip())
            continue
        lines.append(Line(start, " ".join([*pending, line])))
        pending = []
    if pending:
        lines.append(Line(start, " ".join(pending)))
    return lines


def _warning(rule: str, file: str, line: int | None, detail: str, remedy: str | None = None) -> Problem:
    return Problem(file, line, None, f"{RULES[rule]}: {detail}" if detail else RULES[rule], remedy, "warning", rule)


def _read(path: Path) -> list[Line]:
    return logical_lines(path.read_text(encoding="utf-8", errors="replace"))


def _image(task: Task) -> Iterator[Problem]:
    environment = task.environment
    if environment.image is not None and "@sha256:" not in environment.image and "/" in environment.image:
        yield _warning("unpinned-image", "task.toml", None, environment.image, "name it by its digest")
    if environment.dockerfile is not None:
        yield from _dockerfile(environment.dockerfile)
    yield from _copies_of_answers(task)


def _dockerfile(path: Path) -> Iterator[Problem]:
    file = "environment/Dockerfile"
    stages: set[str] = set()
    for line in _read(path):
        if found := _FROM.match(line.text):
            image, stage = found.groups()
            if image.lower() != "scratch" and image not in stages and "@sha256:" not in image:
                yield _warning("unpinned-image", file, line.number, image, "name it by its digest")
            if stage:
                stages.add(stage)
        elif (copied := _COPY.match(line.text)) and "--from=" not in line.text and _LEAK.search(copied.group(1)):
            yield _warning("agent-image-test-leak", file, line.number, line.text)
        for command in _PIP.finditer(line.text):
            if loose := [word for word in command.group(1).split() if _is_loose(word)]:
                yield _warning("unpinned-python-dependency", file, line.number, ", ".join(loose), "write name==version")


def _is_loose(word: str) -> bool:
    """Whether an argument of `pip install` is a bare package name."""
    word = word.strip("\"'")
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[^\]]*\])?(?:[<>~!].*)?", word)) and not word.endswith(
        (".txt", ".toml", ".whl", ".gz")
    )


def _copies_of_answers(task: Task) -> Iterator[Problem]:
    """Files of the image's context that are, byte for byte, files of tests/ or solution/."""
    answers: dict[str, str] = {}
    for folder in ("tests", "solution"):
        for path in sorted((task.path / folder).rglob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size > 0:
                answers.setdefault(digest_file(path), str(path.relative_to(task.path)))
    sizes = {(task.path / name).stat().st_size for name in answers.values()}
    for path in sorted((task.path / "environment").rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size in sizes:
            same = answers.get(digest_file(path))
            if same is not None:
                yield _warning("agent-image-test-leak", str(path.relative_to(task.path)), None, f"the same as {same}")


def _verifier(task: Task) -> Iterator[Problem]:
    script = task.verifier.script
    if script is None or not script.is_file():
        return
    for line in _read(script):
        if found := _INSTALLS.search(line.text):
            yield _warning(
                "verifier-runtime-install", "tests/test.sh", line.number, found.group(0), "install it in the image"
            )
        if _DOWNLOADS.search(line.text):
            yield _warning("verifier-network-download", "tests/test.sh", line.number, "", "put the file into tests/")


def _artifacts(task: Task) -> Iterator[Problem]:
    sources = [str(artifact["source"]).rstrip("/") for artifact in task.artifacts]
    for index, source in enumerate(sources):
        if source.startswith(("/logs/agent", "/logs/verifier")):
            yield _warning("artifact-log-overlap", "task.toml", None, source)
        for other in sources[:index]:
            if source == other or source.startswith(other + "/") or other.startswith(source + "/"):
                yield _warning("overlapping-artifacts", "task.toml", None, f"{other} and {source}")


def _choices(task: Task) -> Iterator[Problem]:
    if task.agent_user in (None, "root", "0"):
        yield _warning("root-agent", "task.toml", None, "", "set `[agent] user`, unless it needs root")
    if task.carry.kind == "live":
        yield _warning("shared-verifier", "task.toml", None, 'carry = "live"', "grade in a clean room if it can be")
    tests = task.verifier.tests
    if tests is not None and not tests.fail_to_pass:
        yield _warning("no-fail-to-pass", "task.toml", None, "")
