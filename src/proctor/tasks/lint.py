"""Lint."""

from proctor.tasks.model import Problem, Task


def lint_task(task: Task) -> list[Problem]:
    return []
