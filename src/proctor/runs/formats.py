"""The files of a record, as pydantic models: each carries a version and forbids unknown fields.

docs/design/record.md is the page that lists them; a test holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from proctor.common import ConfigError
from proctor.runs.outcome import Outcome

if TYPE_CHECKING:
    from pathlib import Path


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Format = TypeVar("Format", bound=BaseModel)


class Stage(StrEnum):
    """The seven stages of a trial's life, in order."""

    DISPATCH = "dispatch"
    ADMISSION = "admission"
    START = "start"
    MODEL_ACCESS = "model_access"
    EXECUTION = "execution"
    COLLECTION = "collection"
    GRADING_ARCHIVE = "grading_archive"


class StageTime(_Record):
    """When a stage began and ended. An error or a cut ends the stage that it meets, and no later one begins."""

    stage: Stage
    started_at: str
    ended_at: str | None = None
    duration_s: float | None = None


class HarnessLock(_Record):
    """The harness half of an agent. `ref` is what was asked for: a built-in name, `module:Class`, or a recipe."""

    ref: str
    name: str
    version: str
    injected: dict[str, str] = {}
    """Digests, by name, of everything that a recipe brings into a trial."""
    layers: list[str] = []
    """Digests of the toolkit's layers, which lie above the image of the task, lowest first."""


class ModelLock(_Record):
    """The model half of an agent: which, where, and with which sampling parameters. Never a key."""

    name: str
    base_url: str
    api_key_env: str | None = None
    sampling: dict[str, Any] = {}


class AgentLock(_Record):
    """One agent: harness and model, recorded apart."""

    label: str
    harness: HarnessLock
    model: ModelLock | None = None
    options: dict[str, Any] = {}
    option_digests: dict[str, str] = {}
    """Digests of the files and folders that options name: what they hold is part of the agent."""


class TaskLock(_Record):
    """One task, by the digest of its content, and the image that its trials start from."""

    name: str
    digest: str
    path: str
    image_ref: str | None = None
    image_digest: str | None = None
    history: dict[str, str] = {}
    """For each repository of the image that was looked at: what its git history was proved to hold, or `kept`."""
    split: str = "public"
    weight: float = 1.0
    difficulty: str | None = None
    capabilities: list[str] = []
    domain: str | None = None
    cluster: str | None = None
    """What tasks share that succeed or fail together; absent: the task stands alone."""
    limits: dict[str, float | None] = {}
    """What a trial of the task may use: Proctor's defaults, the task's own, then the run's."""
    notes: list[str] = []


class TreatedLock(_Record):
    """What a condition changes at one task: a digest of all of it, the ablations by name with their kinds, limits."""

    digest: str
    ablations: dict[str, str] = {}
    limits: dict[str, float] = {}


class ConditionLock(_Record):
    """One condition that changes something; tasks that it leaves out come with the reason."""

    name: str
    perturb: list[str] = []
    tool_faults: dict[str, Any] | None = None
    network_faults: dict[str, Any] | None = None
    """The fault profile of its sandboxes' networks (`--faults`)."""
    tasks: dict[str, TreatedLock] = {}
    left_out: dict[str, str] = {}


class UnrunnableLock(_Record):
    """A task of the dataset that cannot be run here; it stays in the count, with its reason."""

    name: str
    reason: str


class DatasetLock(_Record):
    """The dataset that the tasks came from."""

    name: str
    version: str
    digest: str


class HostFacts(_Record):
    """The machine a run was started on."""

    kernel: str
    machine: str
    cpus: int
    memory_mb: int
    python: str


class ParentLock(_Record):
    """The trial that a run does again (`model-calls`) or branches off (`branch`), and what was changed in it."""

    kind: Literal["model-calls", "branch"]
    run_id: str
    trial: str
    record: str | None = None
    """The digest of the parent's record, by its ledger."""
    step: int | None = None
    change: str | None = None
    restored: Literal["replay", "snapshot"] | None = None
    endpoint: str | None = None
    """Where the model is in truth: the agents of these trials have the address at which answers were played."""


class RunLock(_Record):
    """`run.json`: everything that is needed to run the exam again, fixed before the first trial."""

    version: Literal[1] = 1
    run_id: str
    created_at: str
    proctor_version: str
    git_commit: str | None = None
    mode: Literal["agents", "predictions"] = "agents"
    dataset: DatasetLock
    sources: list[str]
    tasks: list[TaskLock]
    unrunnable: list[UnrunnableLock] = []
    agents: list[AgentLock]
    attempts: int
    seed: int
    limits: dict[str, float]
    condition: str = "plain"
    """What the trials ran under (the first of `conditions`): `plain`, or the name of a perturbation, a fault profile or
    an ablation."""
    conditions: list[ConditionLock] = []
    """Every condition that changes something."""
    predictions: str | None = None
    predictions_digest: str | None = None
    network: dict[str, Any] | None = None
    """What tasks were allowed to reach at most, as a policy document (`--allow-network`); absent: nothing."""
    parent: ParentLock | None = None
    """The trial that these trials were made from; absent for an exam."""
    host: HostFacts
    options: dict[str, Any] = {}


class UsageTotals(_Record):
    """Model use of a trial. A sum with an unknown part is unknown (absent), never too low."""

    model_calls: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: float | None = None


class TrialResult(_Record):
    """`result.json`: what a trial came to, for those who read nothing else."""

    version: Literal[1] = 1
    run_id: str
    trial_id: str
    task: str
    task_digest: str
    agent: str
    attempt: int
    seed: int
    condition: str = "plain"
    tries: int
    outcome: Outcome
    stop: str
    detail: str = ""
    verdict: Literal["resolved", "unresolved", "error"] | None = None
    """What the examiner said, also when the outcome is `agent_limit` or `disqualified`; absent when nothing was
    graded."""
    compat_resolved: bool | None = None
    rewards: dict[str, float] = {}
    steps: int = 0
    execs: int = 0
    tool_calls: int | None = None
    """Calls of tools in the trajectory; absent in records of earlier versions."""
    malformed_calls: int | None = None
    """Those that could not even be tried: no such tool, no JSON, not what the tool takes."""
    questions: int | None = None
    """Those that asked the simulated user."""
    model_errors: int = 0
    injected: int = 0
    """Calls on the sandbox that were made to go wrong on purpose."""
    usage: UsageTotals = UsageTotals()
    returned_models: list[str] = []
    stages: list[StageTime] = []
    started_at: str
    ended_at: str
    duration_s: float
    final_message: str = ""


class TestResult(_Record):
    """One expected test in `grade.json`."""

    test_id: str
    group: Literal["fail_to_pass", "pass_to_pass"]
    status: str
    ok: bool
    unstable: bool = False
    runs: list[str] = []


class CompatResult(_Record):
    """The verdict by SWE-bench's own rules."""

    resolved: bool
    status: str
    patch_applied: bool
    graded: bool
    tests: dict[str, dict[str, list[str]]]


class GradeFile(_Record):
    """`grade.json`. `carried` and `rooms` tell what crossed into the clean room and how many there were."""

    version: Literal[1] = 1
    verdict: Literal["resolved", "unresolved", "error"]
    resolved: bool | None
    rewards: dict[str, float] = {}
    tests: list[TestResult] = []
    compat: CompatResult | None = None
    in_place: bool = False
    carry: str = ""
    carried: dict[str, Any] = {}
    error: str = ""
    infra: bool = False
    duration_s: float = 0.0
    rooms: int = 0


class FindingEntry(_Record):
    """One integrity signal."""

    kind: str
    detail: str
    severity: Literal["note", "review", "disqualify"]
    source: str = "grading"


class FindingsFile(_Record):
    """`findings.json`."""

    version: Literal[1] = 1
    findings: list[FindingEntry] = []


class ReceiptFile(_Record):
    """`receipt.json`: what each sandbox of the trial really was. Every value was observed by the host."""

    version: Literal[1] = 1
    agent: dict[str, Any] | None = None
    grading: list[dict[str, Any]] = []


class DiffItem(_Record):
    """One path that the agent's trial changed."""

    path: str
    change: Literal["added", "modified", "deleted"]
    kind: str
    size: int = 0
    mode: int = 0


class DiffFile(_Record):
    """`diff.json`: what the agent changed on disk; the content is in `diff.tar.zst` unless `archive` says why not."""

    version: Literal[1] = 1
    entries: list[DiffItem] = []
    archive: str = "diff.tar.zst"


class SnapshotItem(_Record):
    """One fork point: the private layer before `step`. `file` in `snapshots/` is absent when `note` says why it was
    not kept; several steps share one when nothing had changed. `processes` lived then, and are not in it."""

    step: int
    file: str | None = None
    digest: str | None = None
    size_bytes: int | None = None
    processes: int = 0
    took_s: float | None = None
    note: str | None = None


class SnapshotsFile(_Record):
    """`snapshots.json`: the fork points of a trial, taken before every `every`-th step, `max_bytes` in all."""

    version: Literal[1] = 1
    every: int
    max_bytes: int
    snapshots: list[SnapshotItem] = []


class StreamLine(_Record):
    """One captured stream of a command. `text` when it is UTF-8, else `base64`; `total` bytes were written, `dropped`
    not kept."""

    text: str | None = None
    base64: str | None = None
    total: int = 0
    dropped: int = 0


class ExecLine(_Record):
    """One line of `exec.jsonl`: one call on the agent's sandbox, as the host saw it.

    `subject` is the command or the absolute path; `size_bytes` and `digest` are those of a file read or written.
    `input` is the digest of what was given (a file's content, standard input, a tar): it is in `blobs/`, as is what was
    read.
    """

    v: Literal[1] = 1
    seq: int
    started_at: str
    kind: str
    subject: str
    argv: list[str] | None = None
    cwd: str | None = None
    user: str | None = None
    env: dict[str, str] | None = None
    input: str | None = None
    duration_s: float
    limit_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    timed_out: bool = False
    leftover: int = 0
    stdout: StreamLine | None = None
    stderr: StreamLine | None = None
    size_bytes: int | None = None
    digest: str | None = None
    error: str | None = None
    injected: str | None = None
    """How the call was made to go wrong on purpose: `fail`, `timeout` or `truncate`."""
    replayed: bool | None = None
    """Not executed: what the parent's record has was given back (a branch that began at a snapshot)."""
    by_host: bool | None = None
    """Not the agent's doing: the host changed a file at the point where a branch begins."""


COUNT = "count_tokens"
"""The protocol of a call that counts tokens, and is none of the model."""


class ModelCallLine(_Record):
    """One line of `model-calls.jsonl`: a call of the model, request and answer as they crossed the wire."""

    v: Literal[1] = 1
    seq: int
    at: str
    protocol: str = "chat"
    """`chat`, `responses`, `messages`, or `count_tokens` (of messages)."""
    requested_model: str
    pinned_model: str | None = None
    returned_model: str | None = None
    fingerprint: str | None = None
    upstream: str | None = None
    request: dict[str, Any]
    """What the agent asked, without secrets."""
    changes: list[str] = []
    """What was enforced on it before it went upstream."""
    status: int | None = None
    streamed: bool = False
    response: dict[str, Any] | None = None
    """The answer as one object; assembled, when it was streamed."""
    stream: str | None = None
    """A streamed answer byte for byte: Zstandard in base64 (`proctor.runs.calls.unpacked`)."""
    raw: str | None = None
    """An error's body, or one that is no answer."""
    error: str | None = None
    fault: str | None = None
    """What kind of failure kept the answer away (`proctor.models.ModelFault`)."""
    attempts: int | None = None
    tries: list[dict[str, Any]] = []
    """The tries that failed: `upstream`, `fault`, `message`, `status`, `duration_s`, `waited_s`."""
    queued_s: float | None = None
    latency_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    usage: dict[str, Any] = {}
    price_since: str | None = None
    flags: list[str] = []


class NetworkLine(_Record):
    """One line of `network.jsonl`: one look-up, connection or request of a sandbox, or a change of its policy.

    `at` is Unix time in seconds. `sent` and `received` are bytes from and to the sandbox. `kind` `dropped` stands for
    `count` events that are only in the receipt's totals.
    """

    v: Literal[1] = 1
    kind: Literal["lookup", "connection", "request", "policy", "dropped"]
    at: float
    phase: str = ""
    decision: Literal["allowed", "refused", "failed"]
    reason: str = ""
    name: str = ""
    port: int | None = None
    type: str = ""
    protocol: str = ""
    sni: str | None = None
    address: str = ""
    service: bool = False
    terminated: bool = False
    connection: int | None = None
    method: str = ""
    path: str = ""
    status: int | None = None
    sent: int = 0
    received: int = 0
    duration_s: float | None = None
    fault: str = ""
    secrets: list[str] = []
    sandbox: str = ""
    policy_version: int = 0
    count: int = 1


def dump(model: BaseModel) -> bytes:
    """A record file as it is stored: one JSON document, ASCII (so that any text survives), one final newline."""
    return dump_json(model.model_dump(mode="python"), indent=1)


def dump_json(value: Any, *, indent: int | None = None) -> bytes:
    """JSON that keeps lone surrogates and control characters (escaped) and refuses NaN; one final newline."""
    separators = None if indent else (",", ":")
    return json.dumps(value, indent=indent, separators=separators, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def load(kind: type[Format], path: Path) -> Format:
    """Read one record file. Raises ConfigError naming the file and the first field that is wrong."""
    try:
        return parse(kind, path.read_bytes(), name=str(path))
    except FileNotFoundError as error:
        raise ConfigError("there is no such file", field=str(path), remedy="is this a run directory?") from error


def parse(kind: type[Format], content: bytes, *, name: str) -> Format:
    """Validate the bytes of a record file or of one line of it."""
    try:
        return kind.model_validate(json.loads(content))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(first["msg"], field=f"{name}: {place}" if place else name) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", field=name) from error


def plain(value: Any) -> Any:
    """Mappings, tuples and enums as the plain JSON values they stand for; non-finite numbers as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
