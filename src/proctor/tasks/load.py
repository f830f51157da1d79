"""Reading one task directory: `task.toml` and its neighbours become a Task, or a list of what is wrong.

Nothing is dropped in silence: unknown keys are errors, what cannot be honoured is refused by name
(`refusals`), and every problem is collected before any is reported.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from proctor.common import ConfigError, digest_json, digest_tree
from proctor.tasks.ablations import declared_ablations
from proctor.tasks.findings import Findings, Source, raise_problems
from proctor.tasks.hostenv import resolve
from proctor.tasks.ignorefile import visible_directory
from proctor.tasks.instruction import strip_canary
from proctor.tasks.io_errors import clear_errors
from proctor.tasks.model import Carry, CarryKind, Environment, Problem, Solution, Task, TestSpec, Verifier
from proctor.tasks.network import decide
from proctor.tasks.patches import patch_paths
from proctor.tasks.refusals import refuse_steps, refuse_unsupported
from proctor.tasks.test_ids import is_truncated
from proctor.tasks.toml_lines import KeyPath, TomlSyntaxError, parse_toml
from proctor.tasks.user import simulated_user

if TYPE_CHECKING:
    from proctor.tasks.schema import ProctorTable, TaskToml, TestsTable

TASK_FILE = "task.toml"
_DIGEST_IGNORES = frozenset({".git"})
_MAX_TEXT = 16 << 20
_MAX_FILE = 16 << 30


def load_task(
    path: Path,
    *,
    overlay: Mapping[str, Any] | None = None,
    overlay_source: Source | None = None,
    host_env: Mapping[str, str] | None = None,
    network: bool = False,
) -> Task:
    """Read the task in directory `path`.

    `overlay` is merged over its `[proctor]` table (a dataset's way to complete a task that must stay unedited).
    `host_env` (default: the process's) answers `${VAR}` references. `network`: whether the run gives tasks the network
    that they ask for.

    Raises ConfigError for a task that is wrong and RefusedError for one that asks for what Proctor does not
    honour; the message names file, line and field of the first problem and how many more there are.
    """
    task, found = read_task(path, overlay=overlay, overlay_source=overlay_source, host_env=host_env, network=network)
    raise_problems(path, found)
    if task is None:
        raise ConfigError("could not be read", field=str(path))
    return task


def problems(
    path: Path,
    *,
    overlay: Mapping[str, Any] | None = None,
    overlay_source: Source | None = None,
    host_env: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Everything that is wrong with the task in `path`, errors and warnings, lint rules included."""
    from proctor.tasks.lint import lint_task

    task, found = read_task(path, overlay=overlay, overlay_source=overlay_source, host_env=host_env)
    return found + (lint_task(task) if task is not None else [])


def read_task(
    path: Path,
    *,
    overlay: Mapping[str, Any] | None = None,
    overlay_source: Source | None = None,
    host_env: Mapping[str, str] | None = None,
    network: bool = False,
) -> tuple[Task | None, list[Problem]]:
    """The task (None when there is an error) and every problem found while reading it."""
    path = Path(os.path.abspath(path))
    try:
        with clear_errors("read the task", path):
            return _read_task(path, overlay, overlay_source, os.environ if host_env is None else host_env, network)
    except ConfigError as error:
        return None, [Problem(error.field or str(path), None, None, error.message, error.remedy)]


def _read_task(
    path: Path,
    overlay: Mapping[str, Any] | None,
    overlay_source: Source | None,
    host_env: Mapping[str, str],
    network: bool,
) -> tuple[Task | None, list[Problem]]:
    file = path / TASK_FILE
    if not file.is_file():
        what = "is not a task directory: it has no task.toml" if path.is_dir() else "does not exist"
        return None, [Problem(str(path), None, None, what, "give a directory with a task.toml")]
    try:
        config, lines = parse_toml(file.read_bytes())
    except TomlSyntaxError as error:
        return None, [Problem(TASK_FILE, error.line, None, f"not valid TOML: {error}")]
    findings = Findings(Source(TASK_FILE, lines))
    if overlay:
        findings.overlay = overlay_source or Source("overlay")
        findings.overlay_value = overlay
        config["proctor"] = _merge(config.get("proctor", {}), overlay)
    _accept_old_version_key(config, findings)
    if refuse_steps(config, path, findings):
        return None, findings.problems
    parsed = _validate(config, findings)
    _check_links(path, findings)
    if parsed is None or not _check_sizes(path, findings):
        return None, findings.problems
    refuse_unsupported(parsed, path, findings)
    reader = _Reader(path, parsed, findings, host_env, network)
    task = reader.task(overlay)
    return (None if findings.failed else task), findings.problems


def task_digest(path: Path) -> str:
    """Digest of a task directory's content (git's own folder does not count)."""
    return digest_tree(path, ignore=_DIGEST_IGNORES)


def _merge(below: Any, above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below) if isinstance(below, Mapping) else {}
    for key, value in above.items():
        merged[key] = _merge(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


def _accept_old_version_key(config: dict[str, Any], findings: Findings) -> None:
    """Tasks before schema 1.1 say `version` where newer ones say `schema_version`."""
    if "version" not in config:
        return
    if "schema_version" in config:
        findings.error(("version",), "is the old name of `schema_version`, which is also there", "keep one of them")
        del config["version"]
        return
    config["schema_version"] = config.pop("version")
    lines = dict(findings.source.lines)
    if line := lines.get(("version",)):
        lines[("schema_version",)] = line
    findings.source.lines = lines


def _validate(config: dict[str, Any], findings: Findings) -> TaskToml | None:
    from pydantic import ValidationError

    from proctor.tasks.schema import TaskToml

    try:
        return TaskToml.model_validate(config)
    except ValidationError as error:
        findings.validation(error, TaskToml)
        return None


def _check_links(root: Path, findings: Findings) -> None:
    """A link out of the directory would bring in content that the task's digest does not cover.

    Where it points is asked twice: by its words, and by what is there, since `..` behind another link leads elsewhere.
    """
    real_root = os.path.realpath(root)
    for folder, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                target = os.path.normpath(os.path.join(folder, os.readlink(path)))
                if not (_is_within(target, str(root)) and _is_within(os.path.realpath(path), real_root)):
                    relative = os.path.relpath(path, root)
                    findings.file_error(relative, "is a link that leaves the task directory", "copy the file instead")


def _check_sizes(root: Path, findings: Findings) -> bool:
    """Whether every file can be read in reasonable time: a sparse terabyte takes no place and hours to digest."""
    sound = True
    for folder, _, files in os.walk(root):
        for name in files:
            info = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(info.st_mode) and info.st_size > _MAX_FILE:
                relative = os.path.relpath(os.path.join(folder, name), root)
                findings.file_error(relative, f"is larger than {_MAX_FILE >> 30} GiB", "put large data into an image")
                sound = False
    return sound


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


class _Reader:
    """Turns a valid `task.toml` and the files beside it into a Task, collecting what is missing or amiss."""

    def __init__(
        self, root: Path, config: TaskToml, findings: Findings, host_env: Mapping[str, str], network: bool
    ) -> None:
        self.root = root
        self.config = config
        self.findings = findings
        self.host_env = host_env
        self.network = network
        self.proctor: ProctorTable | None = config.proctor
        self.notes: list[str] = []

    def task(self, overlay: Mapping[str, Any] | None) -> Task:
        """The task as far as it can be made; only to be used when nothing was found to be wrong."""
        config, proctor = self.config, self.proctor
        forced = proctor is not None and proctor.network == "none"
        decision = decide(config, self.findings, allowed=self.network, forced_none=forced)
        self.notes += decision.notes
        instruction = self._instruction()
        environment = self._environment()
        verifier = self._verifier()
        solution = self._solution()
        digest = task_digest(self.root)
        if overlay:
            digest = digest_json({"task": digest, "proctor": overlay})
        self._artifacts()
        return Task(
            name=config.task.name if config.task else self.root.name,
            path=self.root,
            digest=digest,
            instruction=instruction,
            environment=environment,
            verifier=verifier,
            carry=self._carry(verifier),
            solution=solution,
            agent_timeout_s=config.agent.timeout_sec,
            agent_user=config.agent.user,
            artifacts=tuple(artifact.model_dump() for artifact in config.artifacts),
            capabilities=tuple(proctor.capabilities) if proctor else (),
            difficulty=self._said("difficulty", "difficulty"),
            domain=self._said("domain", "category"),
            cluster=self._said("cluster", "repo"),
            source=(proctor.source if proctor else None) or config.source,
            date=proctor.date if proctor else None,
            metadata=_plain(config.metadata),
            base_commit=proctor.base_commit if proctor else None,
            instance_id=proctor.instance_id if proctor else None,
            history=self._history(),
            network=decision.network,
            limits=proctor.limits.model_dump(exclude_none=True) if proctor else {},
            ablations=declared_ablations(proctor.ablations if proctor else {}, self.root, instruction, self.findings),
            user=simulated_user(proctor.user) if proctor and proctor.user else None,
            notes=tuple(self.notes),
        )

    def _said(self, field: str, metadata: str) -> str | None:
        """What `[proctor]` says in `field`, else what `[metadata]` says in `metadata`, where that is text."""
        said = (self.proctor and getattr(self.proctor, field)) or self.config.metadata.get(metadata)
        return said if isinstance(said, str) and said else None

    def _text(self, name: str) -> str | None:
        """A text file of the task; says what is wrong with it and returns None when it cannot be read."""
        path = self.root / name
        if not path.is_file():
            self.findings.file_error(name, "is missing")
            return None
        if path.stat().st_size > _MAX_TEXT:
            self.findings.file_error(name, "is larger than 16 MiB")
            return None
        data = path.read_bytes()
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            self.findings.file_error(name, "is not UTF-8 text", line=line)
            return None

    def _instruction(self) -> str:
        text = self._text("instruction.md")
        if text is None:
            return ""
        stripped = strip_canary(text)
        if not stripped.strip():
            self.findings.file_error("instruction.md", "is empty", "say what the agent is to do")
        return stripped

    def _env(self, values: Mapping[str, str], *path: str) -> dict[str, str]:
        resolved = {}
        for name, text in values.items():
            resolved[name], missing = resolve(text, self.host_env)
            for variable in missing:
                remedy = f"set {variable}, or write ${{{variable}:-default}}"
                self.findings.error((*path, name), f"the host does not set {variable}", remedy)
        return resolved

    def _environment(self) -> Environment:
        table = self.config.environment
        folder = self.root / "environment"
        image, recipe, dockerfile = self._image_source(folder)
        if image is None and recipe is None and dockerfile is None:
            remedy = "add environment/Dockerfile or environment/recipe.toml, or name an image"
            self.findings.file_error("environment/", "no Dockerfile, no recipe.toml and no image is named", remedy)
        builds = (folder / "Dockerfile").is_file() or (folder / "recipe.toml").is_file()
        loose = image is not None and folder.is_dir() and not builds and any(folder.iterdir())
        return Environment(
            image=image,
            dockerfile=dockerfile,
            recipe=recipe,
            files=folder if loose else None,
            workdir=table.workdir,
            env=self._env(table.env, "environment", "env"),
            cpus=float(table.cpus or 1.0),
            memory_mb=table.effective_memory_mb or 2048,
            storage_mb=table.effective_storage_mb or 10240,
            build_timeout_s=table.build_timeout_sec,
            healthcheck=table.healthcheck.model_dump() if table.healthcheck else None,
        )

    def _image_source(self, folder: Path) -> tuple[str | None, Path | None, Path | None]:
        """(image, recipe, dockerfile), one of them set: `[proctor] image`, then what is in `environment/`
        (it is part of the task's digest, a tag is not), then `[environment] docker_image`."""
        docker_image = self.config.environment.docker_image
        if self.proctor is not None and self.proctor.image is not None:
            image = self.proctor.image
            if not image.endswith(".toml"):
                return image, None, None
            source = self.findings.where(("proctor", "image"))[0]
            base = self.root if source == TASK_FILE else Path(source).parent
            recipe = (base / image).resolve()
            if not recipe.is_file():
                self.findings.error(("proctor", "image"), f"the recipe {image} does not exist")
            return None, recipe, None
        if (folder / "recipe.toml").is_file():
            return None, folder / "recipe.toml", None
        if (folder / "Dockerfile").is_file():
            if docker_image is not None:
                note = f"image: built from environment/Dockerfile, docker_image {docker_image} is not used"
                self.notes.append(note)
                self.findings.warn(("environment", "docker_image"), note, rule="image-not-used")
            return None, None, folder / "Dockerfile"
        return docker_image, None, None

    def _verifier(self) -> Verifier:
        table = self.config.verifier
        tests = self.proctor.tests if self.proctor else None
        folder = self.root / "tests"
        visible = visible_directory(folder) if folder.is_dir() else None
        script = (visible or folder) / "test.sh"
        if tests is None and (folder / "test.sh").is_file():
            self._text("tests/test.sh")
            if not script.is_file():
                self.findings.file_error("tests/test.sh", "is left out by tests/.harborignore")
        elif tests is None and not (folder / "test.bat").is_file():
            self.findings.file_error("tests/test.sh", "is missing", "add it, or a [proctor.tests] table")
        return Verifier(
            kind="reward" if tests is None else "tests",
            tests_dir=visible,
            script=script if tests is None else None,
            tests=self._tests(tests) if tests is not None else None,
            timeout_s=table.timeout_sec,
            env=self._env(table.env, "verifier", "env"),
            user=table.user,
        )

    def _tests(self, table: TestsTable) -> TestSpec:
        where: KeyPath = ("proctor", "tests")
        repo = self.proctor.repo if self.proctor else None
        cwd = table.cwd or repo or self.config.environment.workdir
        if cwd is None:
            self.findings.error((*where, "cwd"), "is missing", "say where the tests run")
        fail_to_pass, pass_to_pass = self._groups(table)
        patch = self._tests_file(table.patch, "patch", directory=False)
        files = self._tests_file(table.files, "files", directory=True)
        protected = tuple(table.protected) if table.protected is not None else ()
        if table.protected is None and patch is not None:
            protected = patch_paths(patch.read_text(encoding="utf-8", errors="surrogateescape"))
        ids = (*fail_to_pass, *pass_to_pass)
        truncated = any(is_truncated(one) for one in ids) if table.truncated_ids is None else table.truncated_ids
        return TestSpec(
            runner=table.runner,
            command=table.command,
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            cwd=cwd or "/",
            env=self._env(table.env, *(str(part) for part in where), "env"),
            patch=patch,
            files=visible_directory(files) if files is not None else None,
            protected=protected,
            junit_path=table.junit_path,
            truncated_ids=truncated,
            compat_log_format=table.compat_log_format,
            timeout_s=table.timeout_s or self.config.verifier.timeout_sec,
        )

    def _tests_file(self, name: str | None, key: str, *, directory: bool) -> Path | None:
        """A path of `[proctor.tests]`: it must be in `tests/`, which the agent's sandbox never holds."""
        if name is None:
            return None
        path = self.root / name
        field: KeyPath = ("proctor", "tests", key)
        if not name.startswith("tests/") and name != "tests":
            self.findings.error(field, f"{name} is not in tests/", "move it there: only tests/ is kept from the agent")
        elif directory and not path.is_dir():
            self.findings.error(field, f"the directory {name} does not exist")
        elif not directory and not path.is_file():
            self.findings.error(field, f"the file {name} does not exist")
        else:
            return path
        return None

    def _groups(self, table: TestsTable) -> tuple[tuple[str, ...], tuple[str, ...]]:
        where: KeyPath = ("proctor", "tests")
        groups: dict[str, list[str]] = {
            "fail_to_pass": table.fail_to_pass or [],
            "pass_to_pass": table.pass_to_pass or [],
        }
        if table.groups is not None:
            where = (*where, "groups")
            path = self._tests_file(table.groups, "groups", directory=False)
            read = self._groups_file(path, table.groups) if path is not None else None
            if read is None:
                return (), ()
            groups = read
        for name, ids in groups.items():
            if repeated := sorted({one for one in ids if ids.count(one) > 1}):
                self.findings.error(where, f"{name} names {repeated[0]!r} more than once")
        if both := sorted(set(groups["fail_to_pass"]) & set(groups["pass_to_pass"])):
            self.findings.error(where, f"{both[0]!r} is in both groups", "a test is to be fixed or to be kept")
        if not groups["fail_to_pass"] and not groups["pass_to_pass"]:
            self.findings.error(where, "names no test at all")
        return tuple(groups["fail_to_pass"]), tuple(groups["pass_to_pass"])

    def _groups_file(self, path: Path, name: str) -> dict[str, list[str]] | None:
        from pydantic import ValidationError

        from proctor.tasks.schema import GroupsFile

        try:
            groups = GroupsFile.model_validate(json.loads(path.read_bytes()))
        except json.JSONDecodeError as error:
            self.findings.file_error(name, f"not valid JSON: {error.msg}", line=error.lineno)
        except (UnicodeDecodeError, ValidationError) as error:
            detail = error.errors()[0] if isinstance(error, ValidationError) else None
            what = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" if detail else "not UTF-8 text"
            self.findings.file_error(name, what, "an object of two arrays of ids: fail_to_pass, pass_to_pass")
        else:
            return {"fail_to_pass": groups.fail_to_pass, "pass_to_pass": groups.pass_to_pass}
        return None

    def _carry(self, verifier: Verifier) -> Carry:
        proctor, kind = self.proctor, self.proctor.carry if self.proctor else None
        repo = proctor.repo if proctor else None
        if kind is None and self.config.verifier.environment_mode == "separate":
            return self._separate_carry()
        chosen: CarryKind = kind or ("patch" if verifier.kind == "tests" and repo else "filesystem")
        paths = tuple(proctor.carry_paths) if proctor else ()
        return Carry(kind=chosen, repo=repo, paths=paths, system=proctor.system if proctor else False)

    def _separate_carry(self) -> Carry:
        """Harbor's separate verifier: a fresh environment into which only artifacts cross, at their own paths."""
        paths = ["/logs/artifacts"]
        for index, artifact in enumerate(self.config.artifacts):
            if artifact.exclude:
                self.findings.refuse(("artifacts", index, "exclude"), "`exclude` with a separate verifier")
            elif not artifact.source.startswith("/"):
                message = "should be an absolute path, since the verifier is separate"
                self.findings.error(("artifacts", index), message)
            else:
                paths.append(artifact.source)
        return Carry(kind="paths", paths=tuple(dict.fromkeys(paths)))

    def _history(self) -> Literal["scrub", "keep"]:
        """A declared repository is scrubbed. Any other may be the task's very matter (a lost commit, a leaked key)."""
        proctor = self.proctor
        if proctor is None or (proctor.history is None and proctor.repo is None):
            return "keep"
        if proctor.history == "keep" and proctor.repo is not None:
            self.notes.append(f"history: {proctor.repo} is left as the image has it, by choice of the task")
        return proctor.history or "scrub"

    def _artifacts(self) -> None:
        if self.config.artifacts and self.config.verifier.environment_mode != "separate":
            note = "artifacts: not collected one by one; the record holds every file that the agent changed"
            self.notes.append(note)
            self.findings.warn(("artifacts",), note, rule="artifacts-in-diff")

    def _solution(self) -> Solution | None:
        folder = self.root / "solution"
        env = self._env(self.config.solution.env, "solution", "env")
        visible = visible_directory(folder) if folder.is_dir() else folder
        script, patch = visible / "solve.sh", visible / "gold.patch"
        if not script.is_file() and not patch.is_file():
            message = "no solve.sh: no oracle can show that the task is solvable"
            self.findings.file_warning("solution/", None, message, rule="no-solution")
            return None
        return Solution(
            directory=visible,
            script=script if script.is_file() else None,
            patch=patch if patch.is_file() else None,
            env=env,
        )


def _plain(value: Any) -> Any:
    """Free metadata with dates as text, so that it can be written as JSON."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool) else str(value)
