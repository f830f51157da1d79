"""The shape of `task.toml`: Harbor's tables (schema 1.4) and our `[proctor]` table. Unknown keys are errors.

Only shapes and ranges are judged here; what depends on other files is judged in `load`, and what we cannot
honour yet is refused in `refusals`. Key by key documentation: docs/tasks.md.
"""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from proctor.tasks.model import CarryKind, RunnerKind

NEWEST_SCHEMA = (1, 4)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT])(?:i?B)?", re.IGNORECASE)
_TO_MB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _absolute(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/"):
        raise ValueError("should be an absolute path without `..`")
    return value


def _inside(value: str) -> str:
    if not value or value.startswith("/") or ".." in value.split("/"):
        raise ValueError("should be a path relative to the task directory without `..`")
    return value


def _env_names(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _ENV_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of an environment variable")
        if "\0" in text:
            raise ValueError(f"the value of {name} has a NUL byte")
    return value


def _date_text(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    if isinstance(value, str):
        try:
            datetime.datetime.fromisoformat(value)
        except ValueError as error:
            raise ValueError("should be a date (2026-11-30) or a time in ISO 8601") from error
    return value


def _user_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _artifact(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


def size_mb(text: str) -> int:
    """MiB of a size string of older tasks (`2G`, `512M`). Raises ValueError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("should be a size such as `2G` or `512M`")
    return max(1, int(float(found.group(1)) * _TO_MB[found.group(2).upper()]))


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
TaskPath = Annotated[str, AfterValidator(_inside)]
EnvTable = Annotated[dict[str, str], AfterValidator(_env_names)]
DateText = Annotated[str, BeforeValidator(_date_text)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
AblationName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$")]
User = Annotated[str, BeforeValidator(_user_text)]
NetworkMode = Literal["public", "no-network", "allowlist"]


class Table(BaseModel):
    """Base of every table: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Author(Table):
    """One author of a task or a dataset."""

    name: Name
    email: str | None = None


class TaskTable(Table):
    """`[task]`: the name under which a registry lists the task."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")]
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []


class AgentTable(Table):
    """`[agent]`: its time limit and user. Network keys override the environment's for this phase."""

    timeout_sec: Seconds | None = None
    user: User | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class CollectTable(Table):
    """`[[verifier.collect]]`: a command to run in the agent's environment before artifacts are taken."""

    command: Name
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: User | None = None


class HealthcheckTable(Table):
    """`[environment.healthcheck]`: Docker's HEALTHCHECK polling."""

    command: Name
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: SecondsOrZero = 0.0
    start_interval_sec: Seconds = 5.0
    retries: Annotated[int, Field(ge=1)] = 3


class TpuTable(Table):
    """`[environment.tpu]`."""

    type: Name
    topology: Annotated[str, Field(pattern=r"^\d+(x\d+)+$")]


class McpServerTable(Table):
    """`[[environment.mcp_servers]]`."""

    name: Name
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}


class EnvironmentTable(Table):
    """`[environment]`."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    build_timeout_sec: Seconds = 600.0
    docker_image: Name | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: list[str] | None = None
    tpu: TpuTable | None = None
    env: EnvTable = {}
    skills_dir: str | None = None
    workdir: AbsolutePath | None = None
    healthcheck: HealthcheckTable | None = None
    mcp_servers: list[McpServerTable] = []

    @field_validator("memory", "storage")
    @classmethod
    def _is_size(cls, value: str | None) -> str | None:
        if value is not None:
            size_mb(value)
        return value

    @model_validator(mode="after")
    def _one_spelling(self) -> EnvironmentTable:
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if getattr(self, old) is not None and getattr(self, new) is not None:
                raise ValueError(f"has both `{old}` and `{new}`; keep `{new}`")
        if self.allow_internet is not None and self.network_mode is not None:
            raise ValueError("has both `allow_internet` and `network_mode`; keep `network_mode`")
        return self

    @property
    def effective_memory_mb(self) -> int | None:
        """`memory_mb`, or the deprecated size string in MiB."""
        return size_mb(self.memory) if self.memory is not None else self.memory_mb

    @property
    def effective_storage_mb(self) -> int | None:
        """`storage_mb`, or the deprecated size string in MiB."""
        return size_mb(self.storage) if self.storage is not None else self.storage_mb


class VerifierTable(Table):
    """`[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: EnvTable = {}
    user: User | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    collect: list[CollectTable] = []


class SolutionTable(Table):
    """`[solution]`."""

    env: EnvTable = {}


class ArtifactTable(Table):
    """One entry of `artifacts`, when it is not just a path."""

    source: Name
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None

    @field_validator("source", "destination")
    @classmethod
    def _stays_inside(cls, value: str | None) -> str | None:
        if value is not None and ".." in value.split("/"):
            raise ValueError("should have no `..`")
        return value


class LimitsTable(Table):
    """`[proctor.limits]`: limits of one trial that this task sets itself."""

    steps: Annotated[int, Field(gt=0)] | None = None
    total_s: Seconds | None = None
    tool_call_s: Seconds | None = None
    tokens: Annotated[int, Field(gt=0)] | None = None
    cost_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


LogFormat = Literal[
    "pytest-rA",
    "pytest-rA-v2",
    "pytest-rA-options",
    "pytest-rA-passed",
    "django-runtests-verbosity2",
    "sympy-bin-test-verbose",
]


class TestsTable(Table):
    """`[proctor.tests]`: which tests decide and how they are run in the clean room."""

    runner: RunnerKind
    command: Name
    cwd: AbsolutePath | None = None
    groups: TaskPath | None = None
    fail_to_pass: list[Name] | None = None
    pass_to_pass: list[Name] | None = None
    env: EnvTable = {}
    patch: TaskPath | None = None
    files: TaskPath | None = None
    protected: list[TaskPath] | None = None
    junit_path: str | None = None
    truncated_ids: bool | None = None
    compat_log_format: LogFormat | None = None
    timeout_s: Seconds | None = None

    @model_validator(mode="after")
    def _coherent(self) -> TestsTable:
        inline = self.fail_to_pass is not None or self.pass_to_pass is not None
        if inline == (self.groups is not None):
            raise ValueError("needs either `groups` (a JSON file) or `fail_to_pass`/`pass_to_pass`, and not both")
        if (self.runner == "junit") != (self.junit_path is not None):
            raise ValueError("`junit_path` goes with runner `junit`, and only with it")
        return self


class GroupsFile(Table):
    """The JSON file that `groups` names."""

    fail_to_pass: list[Name]
    pass_to_pass: list[Name]


class AblationTable(Table):
    """`[proctor.ablations.NAME]`: something to give to the agent, or to take from it, in runs that ask for it."""

    kind: Literal["knowledge", "plan", "tool", "budget", "remove"]
    text: Name | None = None
    file: TaskPath | None = None
    path: AbsolutePath | None = None
    remove: list[Name] = []
    limits: LimitsTable = LimitsTable()
    factor: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _coherent(self) -> AblationTable:
        limits = bool(self.limits.model_dump(exclude_none=True))
        given = {"text": self.text is not None, "file": self.file is not None, "path": self.path is not None,
                 "remove": bool(self.remove), "limits": limits, "factor": self.factor is not None}  # fmt: skip
        allowed = {"knowledge": ("text", "file"), "plan": ("text", "file"), "tool": ("file", "path", "text"),
                   "budget": ("limits", "factor"), "remove": ("remove",)}[self.kind]  # fmt: skip
        if foreign := [name for name, is_given in given.items() if is_given and name not in allowed]:
            raise ValueError(f"kind {self.kind!r} takes {', '.join(allowed)}, not {foreign[0]}")
        if self.kind == "tool":
            if not (given["file"] and given["path"]):
                raise ValueError("kind 'tool' needs `file`, the program, and `path`, where it is to be in the sandbox")
        elif sum(given[name] for name in allowed) != 1:
            raise ValueError(f"kind {self.kind!r} needs exactly one of {', '.join(allowed)}")
        return self


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return text


class AnswerRuleTable(Table):
    """One `[[proctor.user.rules]]`: an answer to questions in which a pattern is found."""

    match: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_pattern)]
    answer: Annotated[str, Field(min_length=1)]
    times: Annotated[int, Field(ge=1)] | None = None


class UserTable(Table):
    """`[proctor.user]`: who answers an agent's questions, by rules or as a model that knows one text."""

    rules: list[AnswerRuleTable] = []
    knowledge: Annotated[str, Field(min_length=1)] | None = None
    default: Annotated[str, Field(min_length=1)] = "I don't know. Please decide for yourself."
    max_questions: Annotated[int, Field(ge=1, le=1000)] = 10

    @model_validator(mode="after")
    def _one_way(self) -> UserTable:
        if bool(self.rules) == (self.knowledge is not None):
            raise ValueError("takes either `rules` or `knowledge`")
        return self


class ProctorTable(Table):
    """`[proctor]`: what Harbor's format lacks."""

    carry: CarryKind | None = None
    carry_paths: list[AbsolutePath] = []
    repo: AbsolutePath | None = None
    base_commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,64}$")] | None = None
    history: Literal["scrub", "keep"] | None = None
    system: bool = False
    image: Name | None = None
    network: Literal["none"] | None = None
    instance_id: Name | None = None
    tests: TestsTable | None = None
    limits: LimitsTable = LimitsTable()
    ablations: dict[AblationName, AblationTable] = {}
    user: UserTable | None = None
    capabilities: list[Name] = []
    difficulty: Name | None = None
    domain: Name | None = None
    cluster: Name | None = None
    source: Name | None = None
    date: DateText | None = None

    @model_validator(mode="after")
    def _coherent(self) -> ProctorTable:
        if (self.carry == "paths") != bool(self.carry_paths):
            raise ValueError('`carry_paths` goes with carry = "paths", and only with it')
        if self.carry == "patch" and self.repo is None:
            raise ValueError('carry = "patch" needs `repo`, the repository in the image')
        if self.system and self.carry not in (None, "filesystem"):
            raise ValueError('`system` goes with carry = "filesystem" only')
        return self


class TaskToml(Table):
    """The whole file. `steps` is read only as far as refusing it by name needs."""

    schema_version: str = "1.4"
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: list[Annotated[ArtifactTable, BeforeValidator(_artifact)]] = []
    task: TaskTable | None = None
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    steps: list[dict[str, Any]] = []
    proctor: ProctorTable | None = None

    @field_validator("schema_version")
    @classmethod
    def _known_schema(cls, value: str) -> str:
        found = re.fullmatch(r"(\d+)\.(\d+)", value)
        if found is None:
            raise ValueError('should be a version such as "1.4"')
        if (int(found.group(1)), int(found.group(2))) > NEWEST_SCHEMA or int(found.group(1)) < 1:
            raise ValueError("is not one that this Proctor reads (1.0 to 1.4)")
        return value
