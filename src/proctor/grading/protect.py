"""Which paths of a deliverable must not decide how it is tested. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.grading.collect import repository_of
from proctor.tasks.patches import patch_paths

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proctor.tasks.model import Task, TestSpec

_NAMES = frozenset(
    {
        "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
        "pyproject.toml", "sitecustomize.py", "usercustomize.py",
    }
)  # fmt: skip
_RUNNERS: dict[str, tuple[str, ...]] = {
    "django": ("tests/runtests.py",),
    "sympy": ("bin/test", "bin/get_sympy.py", "sympy/utilities/runtests.py", "sympy/testing/runtests.py"),
}


class Protection:
    """Decides, path by path (relative to the repository), what is put back to the base state before tests run.

    Always: what the task protects and what the test patch touches. Unless the reference solution changes them too:
    files that configure or are the test runner (conftest.py, pytest.ini, setup.cfg, Django's runtests.py, …).
    """

    def __init__(self, task: Task, spec: TestSpec, image_workdir: str) -> None:
        self.repo = repository_of(task, image_workdir)
        test_patch = _text(spec.patch)
        solution = _text(task.solution.patch) if task.solution is not None else ""
        self._tests = {path.strip("/") for path in (*spec.protected, *patch_paths(test_patch))}
        self._tests |= set(_below_repo(self.repo, spec.cwd, uploaded_files(spec)))
        self._reference = set(patch_paths(solution))
        self._runner = set(_RUNNERS.get(spec.runner, ()))

    def of_absolute(self, path: str) -> bool:
        """`why` for an absolute path; nothing outside the repository is protected here."""
        return path.startswith(self.repo + "/") and self.why(path[len(self.repo) + 1 :]) is not None

    def why(self, path: str) -> str | None:
        """`tests`, `runner`, `above` (a path that holds a protected one) or None when it may be carried."""
        parts = path.split("/")
        prefixes = {"/".join(parts[: count + 1]) for count in range(len(parts))}
        if prefixes & self._tests:
            return "tests"
        if any((kept + "/").startswith(path + "/") for kept in self._tests):
            return "above"
        if path in self._reference:
            return None
        if path in self._runner or _configures_runner(parts):
            return "runner"
        return None

    def split(self, paths: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """Paths that stay as carried, and those that go back to the base state with the reason."""
        kept: list[str] = []
        restored: dict[str, str] = {}
        for path in paths:
            reason = self.why(path)
            if reason is None:
                kept.append(path)
            else:
                restored[path] = reason
        return kept, restored


def uploaded_files(spec: TestSpec) -> list[str]:
    """Files that the tests bring, relative to the directory they are copied to."""
    root = spec.files
    return [] if root is None else [str(p.relative_to(root)) for p in sorted(root.rglob("*")) if not p.is_dir()]


def _below_repo(repo: str, cwd: str, names: Iterable[str]) -> Iterable[str]:
    for name in names:
        path = f"{cwd.rstrip('/')}/{name}"
        if path.startswith(repo + "/"):
            yield path[len(repo) + 1 :]


def _configures_runner(parts: list[str]) -> bool:
    name = parts[-1]
    if name in _NAMES or name.endswith((".pth", ".pyc", ".pyo")) or "__pycache__" in parts or ".git" in parts:
        return True
    return any(part.endswith((".dist-info", ".egg-info")) for part in parts)


def _text(path: object) -> str:
    from pathlib import Path

    return path.read_text(encoding="utf-8", errors="surrogateescape") if isinstance(path, Path) else ""
