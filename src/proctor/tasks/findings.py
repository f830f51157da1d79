"""Collecting everything that is wrong with a task, each with its file and line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, RefusedError
from proctor.tasks.model import Problem
from proctor.tasks.toml_lines import KeyPath, line_of

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel, ValidationError

_PLAIN = {
    "missing": "is missing",
    "string_type": "should be a string",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "bool_type": "should be true or false",
    "list_type": "should be an array",
    "dict_type": "should be a table",
    "model_type": "should be a table",
}


@dataclass(slots=True)
class Source:
    """A TOML file (or a table in one) that keys can be traced to. `prefix` is where its keys start there."""

    file: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    root: KeyPath = ()

    def line(self, path: KeyPath) -> int | None:
        """The line of `path` as this file knows it."""
        return line_of(dict(self.lines), (*self.root, *path))


@dataclass(slots=True)
class Findings:
    """Problems of one task or dataset in the order they were met. `overlay` stands above `source` for its keys."""

    source: Source
    overlay: Source | None = None
    overlay_value: Mapping[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether any finding is an error."""
        return any(problem.severity == "error" for problem in self.problems)

    def where(self, path: KeyPath) -> tuple[str, int | None]:
        """File and line of a key: the overlay's if the overlay sets it, else the task file's."""
        if self.overlay is not None and path[:1] == ("proctor",) and _has(self.overlay_value, path[1:]):
            return self.overlay.file, self.overlay.line(path[1:])
        return self.source.file, self.source.line(path)

    def error(self, path: KeyPath, message: str, remedy: str | None = None, *, rule: str | None = None) -> None:
        """Something that makes the task unusable."""
        file, line = self.where(path)
        self.problems.append(Problem(file, line, dotted(path) or None, message, remedy, "error", rule))

    def refuse(self, path: KeyPath, what: str, remedy: str | None = None) -> None:
        """Something that is well formed but that Proctor does not honour, so the task is refused by name."""
        self.error(path, f"{what} cannot be honoured yet", remedy, rule="refused")

    def warn(self, path: KeyPath, message: str, remedy: str | None = None, *, rule: str) -> None:
        """Something worth knowing that does not stop the task."""
        file, line = self.where(path)
        self.problems.append(Problem(file, line, dotted(path) or None, message, remedy, "warning", rule))

    def file_error(self, file: str, message: str, remedy: str | None = None, *, line: int | None = None) -> None:
        """Something wrong with another file of the task."""
        self.problems.append(Problem(file, line, None, message, remedy, "error"))

    def file_warning(self, file: str, line: int | None, message: str, remedy: str | None = None, *, rule: str) -> None:
        """Something worth knowing about another file of the task."""
        self.problems.append(Problem(file, line, None, message, remedy, "warning", rule))

    def validation(self, error: ValidationError, model: type[BaseModel]) -> None:
        """Take over what pydantic found, one problem per key. A required key that is misspelt is one problem."""
        details = error.errors(include_url=False)
        unknown = [tuple(one["loc"]) for one in details if one["type"] == "extra_forbidden"]
        closest = {path: _closest(str(path[-1]), model, path[:-1]) for path in unknown}
        meant = {(*path[:-1], name) for path, name in closest.items() if name is not None}
        for detail in details:
            path: KeyPath = tuple(detail["loc"])
            kind = detail["type"]
            if kind == "extra_forbidden":
                name = closest[path]
                self.error(path, "unknown key", f"did you mean `{name}`?" if name else "docs/tasks.md lists the keys")
            elif kind != "missing" or path not in meant:
                message = _PLAIN.get(kind) or detail["msg"].removeprefix("Value error, ")
                self.error(path, message[:1].lower() + message[1:])


def dotted(path: Iterable[str | int]) -> str:
    """`("steps", 0, "name")` as `steps[0].name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def describe(problem: Problem) -> str:
    """One line: file:line: field: message (remedy)."""
    place = problem.file if problem.line is None else f"{problem.file}:{problem.line}"
    head = f"{problem.field}: {problem.message}" if problem.field else problem.message
    return f"{place}: {head}" + (f" ({problem.remedy})" if problem.remedy else "")


def raise_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Raise one error for all of them: RefusedError when only refusals stand in the way, else ConfigError."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if not errors:
        return
    refused = all(problem.rule == "refused" for problem in errors)
    kind = RefusedError if refused else ConfigError
    first, rest = errors[0], len(errors) - 1
    place = os.path.join(path, first.file)  # an absolute name stays as it is
    field_name = f"{place}:{first.line}" if first.line is not None else place
    message = f"{first.field}: {first.message}" if first.field else first.message
    if rest:
        message += f"; and {rest} more"
    remedy = first.remedy if not rest else f"see all with `proctor task check {path}`"
    raise kind(message, field=field_name, remedy=remedy)


def _has(value: Any, path: KeyPath) -> bool:
    for part in path:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return isinstance(value, list) and isinstance(part, int) and part < len(value)
    return True


def _closest(name: str, model: type[BaseModel], path: KeyPath) -> str | None:
    from pydantic import BaseModel as Base

    table: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        info = table.model_fields.get(part)
        candidates = [t for t in _types(info.annotation) if issubclass(t, Base)] if info else []
        if not candidates:
            return None
        table = candidates[0]
    matches = difflib.get_close_matches(name, list(table.model_fields), n=1)
    return matches[0] if matches else None


def _types(annotation: Any) -> list[type]:
    arguments = getattr(annotation, "__args__", None)
    if arguments is None:
        return [annotation] if isinstance(annotation, type) else []
    return [found for argument in arguments for found in _types(argument)]
