"""Importing Harbor task directories: copied unchanged, listed with their digests in a `dataset.toml`."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, atomic_write
from proctor.tasks.findings import describe, raise_problems
from proctor.tasks.io_errors import clear_errors
from proctor.tasks.load import TASK_FILE, read_task, task_digest
from proctor.tasks.model import Unrunnable
from proctor.tasks.toml_write import dump_toml

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class HarborReport:
    """What an import did: `kept` tasks were already there, unchanged; `unrunnable` ones were refused by name."""

    out: Path
    imported: tuple[str, ...]
    kept: tuple[str, ...]
    unrunnable: tuple[Unrunnable, ...]


def import_harbor(source: Path, out: Path, *, progress: Callable[[str, int, int], None] | None = None) -> HarborReport:
    """Copy every task directory of `source` (or `source` itself) into `out` and write `out/dataset.toml`.

    A task that asks for what Proctor does not honour is named in the dataset as not runnable, with the reason.
    Raises ConfigError, before anything is written, for a task that is wrong.
    """
    folders = [source] if (source / TASK_FILE).is_file() else []
    if not folders and source.is_dir():
        folders = sorted(child for child in source.iterdir() if (child / TASK_FILE).is_file())
    if not folders:
        raise ConfigError("holds no task directories", field=str(source), remedy="each has a task.toml")
    runnable: list[Path] = []
    unrunnable: list[Unrunnable] = []
    for folder in folders:
        _, found = read_task(folder)
        errors = [problem for problem in found if problem.severity == "error"]
        if errors and all(problem.rule == "refused" for problem in errors):
            unrunnable.append(Unrunnable(folder.name, "; ".join(describe(problem) for problem in errors)))
        else:
            raise_problems(folder, errors)
            runnable.append(folder)
    with clear_errors("write the tasks", out):
        return _write(source, runnable, unrunnable, out, progress)


def _write(
    source: Path,
    runnable: list[Path],
    unrunnable: list[Unrunnable],
    out: Path,
    progress: Callable[[str, int, int], None] | None,
) -> HarborReport:
    imported, kept = _copy(runnable, out, progress)
    document: dict[str, Any] = {
        "schema_version": "1.0",
        "dataset": {"name": source.resolve().name, "version": "1"},
        "tasks": [{"path": folder.name, "digest": task_digest(out / folder.name)} for folder in runnable] or None,
        "unrunnable": [{"name": one.name, "reason": one.reason} for one in unrunnable] or None,
    }
    atomic_write(out / "dataset.toml", dump_toml(document).encode())
    return HarborReport(out, tuple(imported), tuple(kept), tuple(unrunnable))


def _copy(
    folders: list[Path], out: Path, progress: Callable[[str, int, int], None] | None
) -> tuple[list[str], list[str]]:
    out.mkdir(parents=True, exist_ok=True)
    imported: list[str] = []
    kept: list[str] = []
    for done, folder in enumerate(folders):
        if progress:
            progress(folder.name, done, len(folders))
        target = out / folder.name
        if target.exists():
            if task_digest(target) != task_digest(folder):
                raise ConfigError("is already there with other content", field=str(target), remedy="remove it first")
            kept.append(folder.name)
            continue
        draft = Path(tempfile.mkdtemp(dir=out, prefix=f".{folder.name}."))
        try:
            shutil.copytree(folder, draft, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        imported.append(folder.name)
    if progress:
        progress("", len(folders), len(folders))
    return imported, kept
