"""What a task is, after it has been read and checked: plain values that every other room uses.

The file format is Harbor's (`task.toml`, schema 1.4) plus a `[proctor]` table; see docs/tasks.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from proctor.tasks.network import TaskNetwork

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from proctor.tasks.ablations import Ablation

CarryKind = Literal["patch", "paths", "filesystem", "live"]
RunnerKind = Literal["pytest", "unittest", "django", "sympy", "junit", "command"]
"""`sympy` is that project's own `bin/test`, whose ids are bare function names."""
VerifierKind = Literal["reward", "tests"]


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the agent works. Exactly one source: `dockerfile`, `recipe` or `image`.

    `image` is a reference for the image store; `dockerfile` and `recipe` are files of the task, built before
    any trial's clock starts. `files` is copied to the workdir when there is an image and no Dockerfile.
    """

    image: str | None = None
    dockerfile: Path | None = None
    recipe: Path | None = None
    files: Path | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    build_timeout_s: float = 600.0
    healthcheck: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TestSpec:
    """Which tests decide, and how they are run in the clean room.

    `command` is the argv prefix or shell text that runs the suite in `cwd`; `patch` (a diff) and `files` (a
    directory copied over the workspace) bring the tests in. Ids are those of the runner, one form per runner;
    ids that a dataset truncated are marked by `truncated_ids` and match by prefix, all matches agreeing.
    `compat_log_format` names the log parser of the compat verdict: `pytest-rA` (and its variants `-v2`,
    `-options`, `-passed`), `django-runtests-verbosity2` or `sympy-bin-test-verbose`.
    """

    __test__: ClassVar[bool] = False  # not a test class, whatever pytest makes of the name
    runner: RunnerKind
    command: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    patch: Path | None = None
    files: Path | None = None
    protected: tuple[str, ...] = ()
    junit_path: str | None = None
    truncated_ids: bool = False
    compat_log_format: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Carry:
    """What crosses from the agent's sandbox into the clean room.

    patch: a diff of `repo` against its base commit; paths: the named files and directories;
    filesystem: the frozen upper, sanitised; live: nothing crosses, graded in place (the grade says so).
    """

    kind: CarryKind
    repo: str | None = None
    paths: tuple[str, ...] = ()
    system: bool = False
    """filesystem only: also carry changes to system directories (default: those are restored)."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """How a trial is graded. `reward`: Harbor's tests/test.sh and reward file; `tests`: test groups."""

    kind: VerifierKind
    tests_dir: Path | None = None
    script: Path | None = None
    tests: TestSpec | None = None
    timeout_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Solution:
    """The reference solution, seen by the oracle only. A script (`solve.sh`) or a patch to the repository."""

    directory: Path | None = None
    script: Path | None = None
    patch: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """An answer to questions in which the pattern `match` is found; at most so many `times`, if that is set."""

    match: str
    answer: str
    times: int | None = None


@dataclass(frozen=True, slots=True)
class SimulatedUser:
    """Who answers an agent's questions about the task: by rules, or, where there is `knowledge`, a model that knows
    that text alone. `default` is said when no rule fits, and when the model says nothing."""

    rules: tuple[AnswerRule, ...] = ()
    knowledge: str | None = None
    default: str = "I don't know. Please decide for yourself."
    max_questions: int = 10


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Limits of one trial; the result names the one that fired."""

    total_s: float = 180.0
    tool_call_s: float = 20.0
    steps: int = 30
    tokens: int | None = None
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One task, named by the digest of its directory's content."""

    name: str
    path: Path
    digest: str
    instruction: str
    environment: Environment
    verifier: Verifier
    carry: Carry
    solution: Solution | None
    agent_timeout_s: float | None = None
    agent_user: str | None = None
    artifacts: tuple[Mapping[str, Any], ...] = ()
    capabilities: tuple[str, ...] = ()
    difficulty: str | None = None
    domain: str | None = None
    """The subject it belongs to, for tables and for weights; Harbor calls it the category."""
    cluster: str | None = None
    """Shared by tasks that succeed or fail together: a repository, a template. None: the task stands alone."""
    source: str | None = None
    date: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    base_commit: str | None = None
    """The commit in the image's repository that the work starts from; None: whatever HEAD is before it starts."""
    instance_id: str | None = None
    history: Literal["scrub", "keep"] = "keep"
    """Whether the repository is reduced to the past of its HEAD, or left as the image has it."""
    network: TaskNetwork = field(default_factory=TaskNetwork)
    """What it may reach in each phase: nothing, unless the run allows networks."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits the task itself sets, by the field names of `AgentLimits`; what is absent is the run's choice."""
    ablations: tuple[Ablation, ...] = ()
    user: SimulatedUser | None = None
    """Who an agent may ask, if the run lets it."""
    """Interventions that a run may ask for by name; without that they change nothing."""
    notes: tuple[str, ...] = ()
    """What was decided while reading the task and belongs in the record (for example: network none, unset)."""

    def agent_limits(self, base: AgentLimits | None = None) -> AgentLimits:
        """`base` (default: Proctor's) with the limits that this task sets; `[agent] timeout_sec` is the time
        limit unless `[proctor.limits] total_s` says otherwise."""
        own: dict[str, Any] = dict(self.limits)
        if self.agent_timeout_s is not None:
            own.setdefault("total_s", self.agent_timeout_s)
        return replace(base or AgentLimits(), **own)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a task or a dataset, where it can be said with file and line."""

    file: str
    line: int | None
    field: str | None
    message: str
    remedy: str | None = None
    severity: Literal["error", "warning"] = "error"
    rule: str | None = None
    """Name of the lint rule; `refused` for what is well formed but cannot be honoured yet."""


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """A task's place in a dataset."""

    task: Task
    split: Literal["public", "held_out", "private"] = "public"
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Unrunnable:
    """A row of a dataset that is known by name but cannot be run here. It stays in the count, with its reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """A named, versioned, digested list of tasks."""

    name: str
    version: str
    digest: str
    entries: tuple[DatasetEntry, ...]
    path: Path
    unrunnable: tuple[Unrunnable, ...] = ()
