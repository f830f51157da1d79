"""Datasets: `dataset.toml`, a folder of task directories, SWE instances, or one task; each becomes a Dataset.

Every selected task that cannot be loaded fails the whole, and all of them are listed: a benchmark that
loses tasks in silence has another denominator than the one it names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, ProctorError, RefusedError, digest_json, state_dir
from proctor.tasks.findings import Findings, Source, raise_problems
from proctor.tasks.io_errors import clear_errors
from proctor.tasks.load import TASK_FILE, load_task, task_digest
from proctor.tasks.model import Dataset, DatasetEntry, Problem, Unrunnable
from proctor.tasks.toml_lines import TomlSyntaxError, parse_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proctor.tasks.dataset_schema import DatasetToml, TaskEntry
    from proctor.tasks.model import Task

DATASET_FILE = "dataset.toml"


def load_any(
    path: Path,
    *,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    host_env: Mapping[str, str] | None = None,
    network: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Dataset:
    """Whatever a person may point `proctor run` at.

    A `dataset.toml` or a folder with one; a task directory; a folder of task directories; a folder of SWE
    instances or a file of SWE rows (imported into the state directory, once per content).

    `select` and `exclude` are shell patterns for names of tasks or of their directories (`!pattern` in `select`
    excludes, too); what is not selected is not loaded; every selected task that cannot be loaded is an error.
    `network`: whether tasks are given the network that they ask for, instead of being refused.
    """
    from proctor.tasks.rows import ROW_SUFFIXES
    from proctor.tasks.swe import is_swe_folder, plan_swe, write_plan

    path = Path(os.path.abspath(path))
    left_out = [one.removeprefix("!") for one in select if one.startswith("!")]
    wanted = Selection(tuple(one for one in select if not one.startswith("!")), (*exclude, *left_out))
    if path.name == DATASET_FILE and path.is_file():
        return load_dataset(path, selection=wanted, host_env=host_env, network=network)
    if (path / TASK_FILE).is_file():
        return _of_folders(path.name, [path], path, wanted, host_env, network)
    if (path / DATASET_FILE).is_file():
        return load_dataset(path / DATASET_FILE, selection=wanted, host_env=host_env, network=network)
    if is_swe_folder(path) or (path.is_file() and path.suffix.lower() in ROW_SUFFIXES):
        plan = plan_swe(path)
        out = state_dir() / "imported" / plan.digest.removeprefix("sha256:")[:24]
        write_plan(plan, out, progress=progress)
        return load_dataset(out / DATASET_FILE, selection=wanted, host_env=host_env, network=network)
    if not path.exists():
        raise ConfigError("does not exist", field=str(path))
    folders = sorted(child for child in path.iterdir() if (child / TASK_FILE).is_file()) if path.is_dir() else []
    if not folders:
        remedy = "give a task directory, a folder of them, a dataset.toml, or SWE rows"
        raise ConfigError("holds no tasks", field=str(path), remedy=remedy)
    return _of_folders(path.name, folders, path, wanted, host_env, network)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tasks of a dataset are meant, by shell patterns for their names. The default is all."""

    select: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def has_task(self, folder: Path, *names: str) -> bool:
        """Whether a task directory is meant: by its own name, by `names`, or by the name in its file."""
        if not self.select and not self.exclude:
            return True
        declared = declared_name(folder)
        return self.has(folder.name, *names, *([declared] if declared else []))

    def has(self, *names: str) -> bool:
        """Whether a task with one of these names is meant."""
        chosen = not self.select or any(fnmatchcase(name, one) for name in names for one in self.select)
        return chosen and not any(fnmatchcase(name, one) for name in names for one in self.exclude)

    def check(self, count: int, path: Path) -> None:
        """Refuse a selection that leaves nothing."""
        if count == 0 and (self.select or self.exclude):
            patterns = ", ".join(self.select + tuple(f"not {one}" for one in self.exclude))
            raise ConfigError(f"no task is selected by {patterns}", field=str(path))


def load_dataset(
    file: Path,
    *,
    selection: Selection | None = None,
    host_env: Mapping[str, str] | None = None,
    network: bool = False,
) -> Dataset:
    """Read a `dataset.toml` and every selected task it names; digests that are given are verified."""
    wanted = selection or Selection()
    document, findings = read_document(file)
    raise_problems(file, findings.problems)
    assert document is not None
    tasks: list[DatasetEntry] = []
    failures: list[ProctorError] = []
    for index, entry in enumerate(document.tasks):
        if not wanted.has_task(Path(os.path.normpath(file.parent / entry.path)), entry.name or entry.path):
            continue
        try:
            task = _load_entry(entry, index, file, findings, host_env, network)
        except ProctorError as error:
            failures.append(error)
        else:
            tasks.append(DatasetEntry(task, entry.split, entry.weight))
    _raise_all(failures, file)
    unrunnable = tuple(Unrunnable(one.name, one.reason) for one in document.unrunnable if wanted.has(one.name))
    wanted.check(len(tasks) + len(unrunnable), file)
    return _dataset(document.dataset.name, document.dataset.version or "0", tasks, file.parent, unrunnable)


def dataset_problems(file: Path, *, host_env: Mapping[str, str] | None = None) -> list[Problem]:
    """Everything wrong with a dataset and its tasks. Task files are named relative to the dataset's folder."""
    from dataclasses import replace

    from proctor.tasks.load import problems

    document, findings = read_document(file)
    if document is None:
        return findings.problems
    for index, entry in enumerate(document.tasks):
        folder = file.parent / entry.path
        source = Source(str(file), findings.source.lines, ("tasks", index, "proctor"))
        overlay = entry.proctor or None
        for problem in problems(folder, overlay=overlay, overlay_source=source, host_env=host_env):
            whole = problem.file in (str(folder), str(file))
            name = problem.file if whole else f"{entry.path}/{problem.file}"
            findings.problems.append(replace(problem, file=name))
        if entry.digest is None:
            findings.warn(("tasks", index), "has no digest, so a change goes unseen", rule="no-digest")
        elif (folder / TASK_FILE).is_file() and task_digest(folder) != entry.digest:
            findings.error(("tasks", index, "digest"), _changed(entry, folder))
    return findings.problems


def read_document(file: Path) -> tuple[DatasetToml | None, Findings]:
    """The checked document (None when it is wrong) and what was found; tasks are not read."""
    from pydantic import ValidationError

    from proctor.tasks.dataset_schema import DatasetToml

    findings = Findings(Source(str(file)))
    try:
        with clear_errors("read the dataset", file):
            data, lines = parse_toml(file.read_bytes())
    except TomlSyntaxError as error:
        findings.file_error(str(file), f"not valid TOML: {error}", line=error.line)
        return None, findings
    findings.source.lines = lines
    entries = data.get("tasks")
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict) and "path" not in entry and "name" in entry:
            findings.refuse(("tasks", index), "a task of a registry", "fetch its directory and give the path")
    if findings.failed:
        return None, findings
    try:
        document = DatasetToml.model_validate(data)
    except ValidationError as error:
        findings.validation(error, DatasetToml)
        return None, findings
    for index, _ in enumerate(document.files):
        findings.refuse(("files", index), "a file of the dataset's own")
    paths: dict[str, int] = {}
    for index, entry in enumerate(document.tasks):
        if entry.path in paths:
            findings.error(("tasks", index, "path"), f"{entry.path} is listed twice")
        paths[entry.path] = index
    if not document.tasks and not document.unrunnable and not findings.problems:
        findings.error((), "names no tasks", "add a [[tasks]] table with a path for each")
    return document, findings


def _load_entry(
    entry: TaskEntry, index: int, file: Path, findings: Findings, host_env: Mapping[str, str] | None, network: bool
) -> Task:
    folder = file.parent / entry.path
    source = Source(str(file), findings.source.lines, ("tasks", index, "proctor"))
    if entry.digest is not None and folder.is_dir() and task_digest(folder) != entry.digest:
        place, line = findings.where(("tasks", index, "digest"))
        remedy = "restore the task, or accept the change with a new version of the dataset"
        raise ConfigError(_changed(entry, folder), field=f"{place}:{line}", remedy=remedy)
    return load_task(folder, overlay=entry.proctor or None, overlay_source=source, host_env=host_env, network=network)


def _changed(entry: TaskEntry, folder: Path) -> str:
    return f"{entry.path} has digest {task_digest(folder)}, but the dataset names {entry.digest}"


def declared_name(folder: Path) -> str | None:
    """`[task] name` of a directory, without judging the rest of it."""
    try:
        data, _ = parse_toml((folder / TASK_FILE).read_bytes())
    except (OSError, TomlSyntaxError):
        return None
    table = data.get("task")
    name = table.get("name") if isinstance(table, dict) else None
    return name if isinstance(name, str) else None


def _of_folders(
    name: str,
    folders: Sequence[Path],
    path: Path,
    wanted: Selection,
    host_env: Mapping[str, str] | None,
    network: bool,
) -> Dataset:
    folders = [folder for folder in folders if wanted.has_task(folder)]
    wanted.check(len(folders), path)
    entries: list[DatasetEntry] = []
    failures: list[ProctorError] = []
    for folder in folders:
        try:
            entries.append(DatasetEntry(load_task(folder, host_env=host_env, network=network)))
        except ProctorError as error:
            failures.append(error)
    _raise_all(failures, path)
    return _dataset(name, "0", entries, path, ())


def _raise_all(failures: list[ProctorError], path: Path) -> None:
    if len(failures) == 1:
        raise failures[0]
    if failures:
        refused = all(isinstance(failure, RefusedError) for failure in failures)
        kind = RefusedError if refused else ConfigError
        lines = "; ".join(failure.line() for failure in failures)
        raise kind(f"{len(failures)} tasks cannot be loaded: {lines}", field=str(path))


def _dataset(
    name: str, version: str, entries: Sequence[DatasetEntry], path: Path, unrunnable: tuple[Unrunnable, ...]
) -> Dataset:
    seen: set[str] = set()
    for entry in entries:
        if entry.task.name in seen:
            raise ConfigError(f"two tasks are named {entry.task.name}", field=str(path))
        seen.add(entry.task.name)
    content: dict[str, Any] = {
        "name": name,
        "version": version,
        "tasks": [[one.task.name, one.task.digest, one.split, one.weight] for one in entries],
        "unrunnable": [[one.name, one.reason] for one in unrunnable],
    }
    return Dataset(name, version, digest_json(content), tuple(entries), path, unrunnable)
