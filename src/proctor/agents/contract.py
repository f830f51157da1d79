"""What a harness is: it gets an instruction and a room, and acts until it ends or a limit fires."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from proctor.models.contract import ModelClient, Usage
    from proctor.sandbox.contract import ExecResult, FileStat, Layer, OutputLimit, Sandbox
    from proctor.sandbox.images.store import ImageStore
    from proctor.sandbox.images.tools import Progress
    from proctor.tasks.model import AgentLimits, Task


class StopReason(StrEnum):
    """Why a harness stopped. `LIMIT_*` become the outcome `agent_limit`; ERROR is the harness' own failure.

    MODEL_ERROR means that the endpoint gave no usable answer: an infrastructure fault, never a zero. A sandbox
    that is lost is not a reason here: it is raised (`SandboxLost`).
    """

    FINISHED = "finished"
    GAVE_UP = "gave_up"
    LIMIT_TIME = "limit:total_time"
    LIMIT_STEPS = "limit:steps"
    LIMIT_TOKENS = "limit:tokens"
    LIMIT_COST = "limit:cost"
    LIMIT_CALLS = "limit:calls"
    LIMIT_RUN_TOKENS = "limit:run_tokens"
    LIMIT_RUN_COST = "limit:run_cost"
    LIMIT_RUN_CALLS = "limit:run_calls"
    MODEL_ERROR = "model_error"
    ERROR = "error"


@dataclass(slots=True)
class ToolCall:
    """One tool call of a step. `raw_arguments` is what the model sent, `arguments` what was parsed from it."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]
    raw_arguments: str
    result: str | None = None
    error: str | None = None
    duration_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """One step of a trajectory, in the terms of ATIF v1.8 (the runs room serialises it)."""

    source: Literal["system", "user", "agent"]
    message: str
    timestamp: str
    model_name: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    usage: Usage | None = None
    llm_calls: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How a harness ended. The trajectory itself went to the recorder as it happened."""

    stop: StopReason
    detail: str = ""
    final_message: str = ""


class Recorder(Protocol):
    """Where a harness reports. Written outside the sandbox before the harness goes on."""

    def step(self, step: Step) -> None: ...
    def log(self, line: str) -> None: ...
    def keep(self, name: str, data: bytes) -> None:
        """Keep a file of the agent's own (a log, a transcript) in the record, below `agent/`."""
        ...


class Room(Protocol):
    """The sandbox as a harness sees it: every call is bounded and recorded by the host.

    Relative paths are taken from `workdir`. Calls raise TimeoutError (files) or return a result that says
    `timed_out` (commands) at their limit, FileError for what the sandbox refuses, SandboxLost when it ended.
    """

    sandbox: Sandbox
    workdir: str

    async def bash(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """One shell command as a tool call: bounded by `tool_call_s` and by what is left of the total time.

        What it leaves in the background lives on, as in a terminal.
        """
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        limit: OutputLimit | None = None,
        secret: str | None = None,
    ) -> ExecResult:
        """A command of the harness itself (the oracle's script, an agent's program): bounded by the rest of the total
        time only. `limit` says how much output is kept; `secret` is replaced where what was given is recorded."""
        ...

    async def read(self, path: str) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def list(self, path: str) -> list[FileStat]: ...
    async def upload(self, source: Path, target: str) -> None:
        """Copy a directory of the host (its content), or one file, to the directory `target`; root owns it there."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it. Also allowed when a limit has fired: it is how a
        harness takes away what it brought."""
        ...


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Where a program in the sandbox finds the model: the gateway, under a name that only the sandbox knows.

    `origin` has no path; `base_url` is what most clients call a base URL. The token is good for this trial alone, as
    an API key of any client. `protocols` are those that the model can be asked in: `chat`, `responses`, `messages`.
    """

    origin: str
    token: str = field(repr=False)
    model: str
    protocols: tuple[str, ...]

    @property
    def base_url(self) -> str:
        """The origin with `/v1`."""
        return f"{self.origin}/v1"


@dataclass(slots=True)
class HarnessContext:
    """Everything a harness may use. `task` is given to `oracle` only for its reference solution."""

    instruction: str
    room: Room
    recorder: Recorder
    limits: AgentLimits
    model: ModelClient | None
    task: Task
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    endpoint: ModelEndpoint | None = None
    """The model as a program in the sandbox reaches it; None where there is no model, or no way to it."""
    user_model: ModelClient | None = None
    """Who plays the task's simulated user, where the agent's options name a model for that."""


class Harness(Protocol):
    """A harness: built-in by name, an `agent.toml`, or any Python class given as `module.path:ClassName`.

    A class may have `options_model`, the pydantic model of its options: they are then checked before a run starts. One
    that is an `InstalledHarness` besides is given what it asks for inside the sandbox.
    """

    name: str
    version: str
    needs_model: bool

    async def run(self, context: HarnessContext) -> AgentResult: ...


@runtime_checkable
class InstalledHarness(Protocol):
    """What a harness has besides whose agent is a program inside the sandbox."""

    @property
    def protocols(self) -> tuple[str, ...]:
        """What the program speaks with its model, any of them; empty: it needs no endpoint."""
        ...

    @property
    def injected(self) -> dict[str, str]:
        """Digests, by name, of everything that it brings into a trial: they are part of the lock."""
        ...

    @property
    def memory_mb(self) -> int:
        """Memory that the program itself needs, on top of what the task allows for the work."""
        ...

    async def layers(self, store: ImageStore, progress: Progress) -> tuple[Layer, ...]:
        """Read-only layers to stack above the task's image, built before any trial's clock starts."""
        ...
