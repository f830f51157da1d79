"""Importing SWE-bench instances: one task directory per row that can be run, and a dataset that names the rest.

A row alone cannot be run: it needs an environment. That is an `env.json` with the repository's archive in a
folder beside it, or an `image` column with an evaluation script (rows of SWE-bench 5.x).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError, atomic_write, digest_file, digest_json
from proctor.tasks.instruction import strip_canary
from proctor.tasks.io_errors import clear_errors
from proctor.tasks.load import task_digest
from proctor.tasks.model import Unrunnable
from proctor.tasks.rows import ROW_SUFFIXES, read_rows
from proctor.tasks.swe_recipe import COMMENT, REPO, recipe_document
from proctor.tasks.swe_rows import LOG_FORMATS, EnvRecipe, SweRow, parse_env, parse_row
from proctor.tasks.toml_write import dump_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROW_FILE = "instance.json"
ENV_FILE = "env.json"
_RUNNERS = {log_format: runner for runner, log_format in LOG_FORMATS.values()}
_TEST_BLOCK = re.compile(
    r"^: '>>>>> Start Test Output'\s*$\n(?P<command>.*?)\n^: '>>>>> End Test Output'\s*$", re.MULTILINE | re.DOTALL
)
_EXPORT = re.compile(r"""^export ([A-Za-z_][A-Za-z0-9_]*)=('[^'$]*'|"[^"$`]*"|[^\s$`'"]*)\s*$""", re.MULTILINE)
_CONDA = re.compile(r"^(?:source|\.) (/\S+)/bin/activate\s*$", re.MULTILINE)
_ACTIVATED = re.compile(r"^conda activate ([A-Za-z0-9._-]+)\s*$", re.MULTILINE)
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SIZES = {"memory_mb": 4096, "storage_mb": 2048}  # a disk that fits into memory needs no disk image
_TIMEOUT_S = 1800.0  # the limit of SWE-bench's own harness
_SOLVE = f"""#!/bin/sh
# Applies the reference patch to the repository.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd {REPO}
git apply --whitespace=nowarn "$here/gold.patch"
"""


@dataclass(frozen=True, slots=True)
class Instance:
    """A row, where it came from, and the folder that may hold its environment."""

    row: SweRow
    where: str
    folder: Path | None


@dataclass(frozen=True, slots=True)
class Planned:
    """A task directory about to be written: small files by name, and the archive with its expected digest."""

    name: str
    files: dict[str, bytes]
    archive: Path | None = None
    sha256: str = ""

    @property
    def digest(self) -> str:
        """Names what will be written, before it is written."""
        contents = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(self.files.items())}
        return digest_json({"files": contents, "archive": self.sha256})


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Everything that an import will do. Nothing has been written yet."""

    name: str
    tasks: tuple[Planned, ...]
    unrunnable: tuple[Unrunnable, ...]

    @property
    def digest(self) -> str:
        """Equal for equal sources, wherever they are."""
        rest = [[one.name, one.reason] for one in self.unrunnable]
        return digest_json({"name": self.name, "tasks": [task.digest for task in self.tasks], "unrunnable": rest})


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did: `kept` tasks were already there, unchanged."""

    out: Path
    imported: tuple[str, ...]
    kept: tuple[str, ...]
    unrunnable: tuple[Unrunnable, ...]


def is_swe_folder(path: Path) -> bool:
    """Whether `path` is one instance (`instance.json`) or a folder of such folders."""
    if not path.is_dir():
        return False
    return (path / ROW_FILE).is_file() or any((folder / ROW_FILE).is_file() for folder in _subfolders(path))


def plan_swe(source: Path, *, environments: Path | None = None) -> ImportPlan:
    """Read rows and environments from a folder of instances, one instance's folder, or a row file.

    `environments` is where to look for a row file's environments (default: folders beside the file), each in a
    folder named by its instance id. Raises ConfigError for rows that are wrong, each named in the message; rows
    that are right but have no environment end up in `unrunnable`.
    """
    instances, unrunnable = _gather(source, environments)
    planned: list[Planned] = []
    for instance in instances:
        outcome = plan_task(instance)
        if isinstance(outcome, Unrunnable):
            unrunnable.append(outcome)
        else:
            planned.append(outcome)
    name = source.parent.name if source.name == ROW_FILE else source.stem if source.is_file() else source.name
    return ImportPlan(name, tuple(planned), tuple(unrunnable))


def import_swe(
    source: Path,
    out: Path,
    *,
    environments: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ImportReport:
    """Write one task directory per runnable row of `source` into `out`, and `out/dataset.toml`.

    A task that is already there with the same content is kept; one with other content is an error, never
    overwritten. `progress(name, done, total)` is called before each task and once at the end.
    """
    return write_plan(plan_swe(source, environments=environments), out, progress=progress)


def write_plan(plan: ImportPlan, out: Path, *, progress: Callable[[str, int, int], None] | None = None) -> ImportReport:
    """Carry out a plan. Each task appears whole or not at all."""
    with clear_errors("write the tasks", out):
        return _write_plan(plan, out, progress)


def _write_plan(plan: ImportPlan, out: Path, progress: Callable[[str, int, int], None] | None) -> ImportReport:
    out.mkdir(parents=True, exist_ok=True)
    imported: list[str] = []
    kept: list[str] = []
    entries: list[dict[str, Any]] = []
    for done, task in enumerate(plan.tasks):
        if progress:
            progress(task.name, done, len(plan.tasks))
        (imported if _write_task(task, out) else kept).append(task.name)
        entries.append({"path": task.name, "digest": task_digest(out / task.name)})
    if progress:
        progress("", len(plan.tasks), len(plan.tasks))
    document = {
        "schema_version": "1.0",
        "dataset": {"name": plan.name, "version": plan.digest.removeprefix("sha256:")[:12]},
        "tasks": entries,
        "unrunnable": [{"name": one.name, "reason": one.reason} for one in plan.unrunnable] or None,
    }
    atomic_write(out / "dataset.toml", dump_toml(document).encode())
    return ImportReport(out, tuple(imported), tuple(kept), plan.unrunnable)


def plan_task(instance: Instance) -> Planned | Unrunnable:
    """The task directory of one instance, or why it cannot be run."""
    row, folder = instance.row, instance.folder
    if not row.FAIL_TO_PASS and not row.PASS_TO_PASS:
        return Unrunnable(row.instance_id, "it names no test at all")
    if both := sorted(set(row.FAIL_TO_PASS) & set(row.PASS_TO_PASS)):
        return Unrunnable(row.instance_id, f"{both[0]!r} is both in FAIL_TO_PASS and in PASS_TO_PASS")
    if folder is not None and (folder / ENV_FILE).is_file():
        env = parse_env(folder / ENV_FILE)
        _check_same(row, env, folder)
        archive = folder / env.archive.file
        if env.log_format not in _RUNNERS:
            return Unrunnable(row.instance_id, f"log format {env.log_format} is not known")
        if not archive.is_file():
            return Unrunnable(row.instance_id, f"the archive {env.archive.file} is missing")
        files = _common_files(row)
        try:
            recipe = recipe_document(env)
        except ConfigError as error:
            return Unrunnable(row.instance_id, error.message)
        files["environment/recipe.toml"] = (COMMENT + dump_toml(recipe)).encode()
        files["task.toml"] = dump_toml(_task_toml(row, _tests_from_env(row, env), env)).encode()
        return Planned(row.instance_id, files, archive, env.archive.sha256)
    if row.image is None or row.eval_script is None:
        return Unrunnable(row.instance_id, "no environment: neither env.json beside it nor an image in the row")
    return _plan_with_image(row)


def _plan_with_image(row: SweRow) -> Planned | Unrunnable:
    """A 5.x row: its image has the environment, its evaluation script the test command."""
    found = _TEST_BLOCK.search(row.eval_script or "")
    known = LOG_FORMATS.get(row.log_parser or "")
    if known is None:
        return Unrunnable(row.instance_id, f"log parser {row.log_parser} is not known")
    if row.eval_type not in (None, "pass_and_fail"):
        return Unrunnable(row.instance_id, f"evaluation type {row.eval_type} is not known")
    if found is None:
        return Unrunnable(row.instance_id, "the evaluation script has no test command between its markers")
    runner, log_format = known
    files = _common_files(row)
    environment = script_environment((row.eval_script or "")[: found.start()])
    tests = _tests_table(row, runner, found.group("command").strip(), log_format, environment)
    files["task.toml"] = dump_toml(_task_toml(row, tests, None)).encode()
    return Planned(row.instance_id, files)


def script_environment(prelude: str) -> dict[str, str]:
    """What an evaluation script sets before its tests: plain exports, and the conda environment it activates."""
    environment = {name: value.strip("'\"") for name, value in _EXPORT.findall(prelude)}
    conda, names = _CONDA.search(prelude), _ACTIVATED.findall(prelude)
    if conda is not None and names:
        prefix = f"{conda.group(1)}/envs/{names[-1]}"
        environment["PATH"] = f"{prefix}/bin:{conda.group(1)}/bin:{_SYSTEM_PATH}"
        environment["CONDA_PREFIX"] = prefix
    return environment


def _gather(source: Path, environments: Path | None) -> tuple[list[Instance], list[Unrunnable]]:
    instances: list[Instance] = []
    unrunnable: list[Unrunnable] = []
    if source.name == ROW_FILE and source.is_file():
        source = source.parent
    if (source / ROW_FILE).is_file():
        instances += _instances(source / ROW_FILE, source)
    elif source.is_dir():
        for folder in _subfolders(source):
            if (folder / ROW_FILE).is_file():
                instances += _instances(folder / ROW_FILE, folder)
            elif (folder / ENV_FILE).is_file():
                unrunnable.append(Unrunnable(folder.name, f"no {ROW_FILE} in its folder"))
    elif source.suffix.lower() in ROW_SUFFIXES:
        instances += _instances(source, None, beside=environments or source.parent)
    else:
        raise ConfigError(
            "holds no SWE instances", field=str(source), remedy="give a folder of instances or a row file"
        )
    if not instances and not unrunnable:
        raise ConfigError("holds no SWE instances", field=str(source), remedy=f"each in a folder with {ROW_FILE}")
    seen: dict[str, str] = {}
    for instance in instances:
        name = instance.row.instance_id
        if name in seen:
            raise ConfigError(f"instance {name} is also at {seen[name]}", field=instance.where)
        seen[name] = instance.where
    return instances, unrunnable


def _instances(file: Path, folder: Path | None, *, beside: Path | None = None) -> list[Instance]:
    """All rows of a file, with `folder` or each with its own folder in `beside`.

    Every bad row is named before the import is refused.
    """
    instances: list[Instance] = []
    errors: list[ConfigError] = []
    for row in read_rows(file):
        try:
            parsed = parse_row(row)
        except ConfigError as error:
            errors.append(error)
        else:
            own = beside / parsed.instance_id if beside is not None else folder
            instances.append(Instance(parsed, row.where, own))
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(
            f"{len(errors)} rows are wrong: " + "; ".join(error.line() for error in errors), field=str(file)
        )
    return instances


def _subfolders(path: Path) -> Iterable[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _check_same(row: SweRow, env: EnvRecipe, folder: Path) -> None:
    for name in ("instance_id", "repo", "base_commit"):
        if getattr(row, name) != getattr(env, name):
            message = f"{name} is {getattr(env, name)!r}, but the row says {getattr(row, name)!r}"
            raise ConfigError(message, field=str(folder / ENV_FILE))


def _common_files(row: SweRow) -> dict[str, bytes]:
    """Files that every imported task has. The instruction is the problem statement alone: no hints, no tests."""
    statement = row.problem_statement
    if strip_canary(statement) != statement:  # a first line that only looks like a canary belongs to the issue
        statement = "\n" + statement
    groups = {"fail_to_pass": row.FAIL_TO_PASS, "pass_to_pass": row.PASS_TO_PASS}
    files = {
        "instruction.md": _encode(statement),
        "tests/tests.json": _encode(json.dumps(groups, indent=1, ensure_ascii=False) + "\n"),
    }
    if row.test_patch:
        files["tests/test.patch"] = _encode(row.test_patch)
    if row.patch:
        files["solution/gold.patch"] = _encode(row.patch)
        files["solution/solve.sh"] = _SOLVE.encode()
    return files


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _tests_from_env(row: SweRow, env: EnvRecipe) -> dict[str, Any]:
    return _tests_table(row, _RUNNERS[env.log_format], env.test_command, env.log_format, env.environment)


def _tests_table(row: SweRow, runner: str, command: str, log_format: str, env: dict[str, str]) -> dict[str, Any]:
    return {
        "runner": runner,
        "command": command,
        "cwd": REPO,
        "groups": "tests/tests.json",
        "patch": "tests/test.patch" if row.test_patch else None,
        "compat_log_format": log_format,
        "timeout_s": _TIMEOUT_S,
        "env": env or None,
    }


def _task_toml(row: SweRow, tests: dict[str, Any], env: EnvRecipe | None) -> dict[str, Any]:
    metadata = {
        "repo": row.repo,
        "version": row.version,
        "created_at": row.created_at,
        "base_commit": row.base_commit,
        "difficulty": row.difficulty,
        "python": env.python if env else None,
        "row_source": env.row_source if env else None,
        "notes": env.notes if env and env.notes else None,
        "unused_columns": row.unused or None,
    }
    environment: dict[str, Any] = {"network_mode": "no-network", "workdir": REPO, "cpus": 1, **_SIZES}
    proctor: dict[str, Any] = {
        "carry": "patch",
        "repo": REPO,
        # A recipe makes a repository with one commit of its own, so the row's commit is not in it.
        "base_commit": None if env else row.base_commit,
        "instance_id": row.instance_id,
        "source": (env.dataset if env else None) or "SWE-bench",
        "date": row.date,
        "difficulty": row.difficulty,
        "capabilities": ["software-engineering"],
        "image": None if env else row.image,
        "tests": tests,
    }
    return {
        "schema_version": "1.4",
        "metadata": {key: value for key, value in metadata.items() if value is not None},
        "verifier": {"timeout_sec": _TIMEOUT_S},
        "environment": environment,
        "proctor": proctor,
    }


def _write_task(task: Planned, out: Path) -> bool:
    """Write a task beside its place and rename it there. Returns False when an equal one was there already."""
    target = out / task.name
    draft = Path(tempfile.mkdtemp(dir=out, prefix=f".{task.name}."))
    try:
        for name, data in task.files.items():
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
        if task.archive is not None:
            _place_archive(task, draft / "environment" / task.archive.name)
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            if task_digest(target) != task_digest(draft):
                raise ConfigError(
                    "is already there with other content", field=str(target), remedy="remove it"
                ) from None
            return False
        return True
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _place_archive(task: Planned, place: Path) -> None:
    """Link (or copy, across file systems) the archive, and check that it is the one the recipe names."""
    assert task.archive is not None
    try:
        os.link(task.archive, place)
    except OSError:
        shutil.copyfile(task.archive, place)
    found = digest_file(place).removeprefix("sha256:")
    if found != task.sha256:
        message = f"sha256 is {found}, but env.json says {task.sha256}"
        raise ConfigError(message, field=str(task.archive), remedy="fetch the archive again")
