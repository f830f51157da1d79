"""`proctor task check`: everything that is wrong with whatever holds tasks, each with file and line."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.common import ConfigError, ProctorError, digest_file
from proctor.tasks.dataset import DATASET_FILE, dataset_problems, read_document
from proctor.tasks.load import TASK_FILE, problems
from proctor.tasks.model import Problem
from proctor.tasks.rows import ROW_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was looked at and what was found. Files are named relative to `path`."""

    path: Path
    tasks: int
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> int:
        """How many findings make a task unusable."""
        return sum(problem.severity == "error" for problem in self.problems)

    @property
    def warnings(self) -> int:
        """How many findings do not."""
        return len(self.problems) - self.errors


def check_any(path: Path, *, host_env: Mapping[str, str] | None = None) -> CheckReport:
    """Check a task directory, a folder of them, a dataset, or SWE rows.

    Raises ConfigError only when there is nothing to check.
    """
    from proctor.tasks.swe import is_swe_folder

    path = Path(os.path.abspath(path))
    if (path / TASK_FILE).is_file():
        return CheckReport(path, 1, tuple(problems(path, host_env=host_env)))
    file = path if path.name == DATASET_FILE else path / DATASET_FILE
    if file.is_file():
        return _check_dataset(file, host_env)
    if is_swe_folder(path) or (path.is_file() and path.suffix.lower() in ROW_SUFFIXES):
        return _check_swe(path)
    folders = sorted(one for one in path.iterdir() if (one / TASK_FILE).is_file()) if path.is_dir() else []
    if not folders:
        what = "holds no tasks" if path.exists() else "does not exist"
        raise ConfigError(what, field=str(path), remedy="give a task directory, a folder of them, or a dataset.toml")
    found = [
        replace(problem, file=f"{folder.name}/{problem.file}")
        for folder in folders
        for problem in problems(folder, host_env=host_env)
    ]
    return CheckReport(path, len(folders), tuple(found))


def _check_dataset(file: Path, host_env: Mapping[str, str] | None) -> CheckReport:
    found = [
        replace(problem, file=DATASET_FILE) if problem.file == str(file) else problem
        for problem in dataset_problems(file, host_env=host_env)
    ]
    document, _ = read_document(file)
    count = len(document.tasks) if document is not None else 0
    return CheckReport(file.parent, count, tuple(found))


def _check_swe(path: Path) -> CheckReport:
    """Rows without an environment are warnings here: they are reported by name and stay in the count."""
    from proctor.tasks.swe import plan_swe

    try:
        plan = plan_swe(path)
    except ProctorError as error:
        return CheckReport(path, 0, (Problem(error.field or str(path), None, None, error.message, error.remedy),))
    found = [
        Problem(one.name, None, None, f"cannot be run: {one.reason}", None, "warning", "unrunnable")
        for one in plan.unrunnable
    ]
    for task in plan.tasks:
        if task.archive is not None and digest_file(task.archive).removeprefix("sha256:") != task.sha256:
            message = "is not the archive that env.json names by its sha256"
            found.append(Problem(str(task.archive), None, None, message, "fetch the archive again"))
    return CheckReport(path, len(plan.tasks) + len(plan.unrunnable), tuple(found))
