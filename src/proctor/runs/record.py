"""Writing the record of a trial: in a directory nobody looks at, then committed by one rename.

A reader, or a crash, sees a whole trial or none. Everything is written by the host, outside the sandbox.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import shutil
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from proctor.agents.room import covered_bytes
from proctor.common import ExitCode, ProctorError, digest_bytes, digest_tree
from proctor.runs.calls import by_agent, call_line, findings_of, is_down, usage_totals, was_at_work
from proctor.runs.clock import now_iso
from proctor.runs.events import EventWriter, step_data
from proctor.runs.formats import (
    CompatResult,
    DiffFile,
    DiffItem,
    ExecLine,
    FindingEntry,
    FindingsFile,
    GradeFile,
    ReceiptFile,
    Stage,
    StageTime,
    StreamLine,
    TestResult,
    TrialResult,
    UsageTotals,
    dump,
    dump_json,
    plain,
)
from proctor.runs.reconcile import account_differs
from proctor.runs.trajectory import clean, total_usage
from proctor.sandbox.net import NetworkEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pydantic import BaseModel

    from proctor.agents.contract import Step
    from proctor.agents.room import RoomEvent
    from proctor.grading.contract import Grade
    from proctor.models.contract import Usage
    from proctor.models.gateway import CallRecord
    from proctor.sandbox.contract import DiffEntry, ExecResult, Output, Receipt

_LOGGED = 2000
_SECRET = re.compile(r"key|token|secret|passw|credential", re.I)
REDACTED = "[redacted]"
_FULL = {errno.ENOSPC, errno.EDQUOT}
TEMPORARY = ".tmp-"
_MAX_NAME = 200
_MAX_NETWORK_BYTES = 32 << 20
_MAX_KEPT_BYTES = 128 << 20
"""How much of an agent's own files is kept for a trial."""


class RecordError(ProctorError):
    """The record cannot be written; the run stops, and what was committed stays whole."""

    exit_code = ExitCode.INFRA


@contextmanager
def record_errors(what: str) -> Iterator[None]:
    """Turn an OSError of writing into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise RecordError(
                f"the disk is full: cannot write {what}",
                field="record",
                remedy="make room, then continue with --resume; finished trials are intact",
            ) from error
        raise RecordError(f"cannot write {what}: {error.strerror or error}", field="record",
                          remedy="finished trials are intact; continue with --resume") from error  # fmt: skip


class StageClock:
    """The stages of one attempt, in order; entering one ends the one before."""

    def __init__(self, on_enter: Callable[[Stage], None] = lambda stage: None) -> None:
        self._times: list[StageTime] = []
        self._started = 0.0
        self._on_enter = on_enter

    def enter(self, stage: Stage) -> None:
        """Begin a stage. Stages come in the order of `Stage`, each at most once."""
        if self._times and list(Stage).index(stage) <= list(Stage).index(self._times[-1].stage):
            raise ValueError(f"stage {stage} cannot follow {self._times[-1].stage}")
        self.leave()
        self._times.append(StageTime(stage=stage, started_at=now_iso()))
        self._started = monotonic()
        self._on_enter(stage)

    def leave(self) -> None:
        """End the current stage."""
        if self._times and self._times[-1].ended_at is None:
            ended = {"ended_at": now_iso(), "duration_s": round(monotonic() - self._started, 6)}
            self._times[-1] = self._times[-1].model_copy(update=ended)

    @property
    def times(self) -> list[StageTime]:
        """The stages so far."""
        return list(self._times)

    @property
    def current(self) -> Stage | None:
        """The stage that is going on."""
        return self._times[-1].stage if self._times and self._times[-1].ended_at is None else None


class TrialRecord:
    """The record of one attempt while it is being made. It is also the harness's Recorder."""

    def __init__(self, directory: Path, *, on_stage: Callable[[Stage], None] = lambda stage: None) -> None:
        self.directory = directory
        self.stages = StageClock(self._stage)
        self._on_stage = on_stage
        self.steps: list[Step] = []
        self.execs = 0
        self.injected = 0
        self.returned_models: list[str] = []
        self.model_calls = 0
        self.model_errors = 0
        self.endpoint_failed = False
        self.endpoint_down = False
        self._tools_noted = False
        self._answered = False
        self._used: list[tuple[Usage, bool]] = []
        self.final_message = ""
        self.grade: Grade | None = None
        self._kept_bytes = 0
        self._network_bytes = 0
        self._files: dict[str, Any] = {}
        self._receipts = ReceiptFile()
        self._findings: list[FindingEntry] = []
        self.secrets: list[str] = []
        with record_errors(directory.name):
            (directory / "logs").mkdir(parents=True)
        self.events = EventWriter(self._append)

    @property
    def agent_has_acted(self) -> bool:
        """True once the agent has taken a step, or anything was done in its sandbox or asked of its model."""
        return bool(self.execs or self.model_calls or any(step.source == "agent" for step in self.steps))

    def hide(self, secret: str) -> None:
        """Cover a secret wherever it would be written from here on, whoever brought it there."""
        self.secrets.append(secret)

    def _covered(self, content: bytes) -> bytes:
        for secret in self.secrets:
            content = covered_bytes(content, secret)
        return content

    def _stage(self, stage: Stage) -> None:
        self.events.write("stage", {"stage": str(stage)})
        self._on_stage(stage)

    # What a harness calls.

    def step(self, step: Step) -> None:
        """Take one step of the trajectory. It is in the event log when this returns."""
        self.steps.append(step)
        self.events.write("step", plain(step_data(step)))

    def log(self, line: str) -> None:
        """Append a line to `logs/harness.log`."""
        self._append("logs/harness.log", line.encode("utf-8", "backslashreplace") + b"\n")
        self.events.write("log", {"text": line[:_LOGGED]})

    def keep(self, name: str, data: bytes) -> None:
        """Keep a file of the agent's own in `agent/`, as far as there is room for it. Names come from the sandbox."""
        safe = re.sub(r"[^A-Za-z0-9._@+-]+", "_", name).lstrip(".")[:_MAX_NAME] or "file"
        folder = self.directory / "agent"
        with record_errors(f"{self.directory.name}/agent"):
            folder.mkdir(exist_ok=True)
            if (folder / safe).exists():
                safe = f"{len(os.listdir(folder))}-{safe}"
        room = _MAX_KEPT_BYTES - self._kept_bytes
        if len(data) > room:
            self.log(f"agent/{safe}: {len(data) - room} of {len(data)} bytes were not kept")
        self._kept_bytes += len(data[:room])
        self.put_bytes(f"agent/{safe}", data[:room])

    # What the host observes.

    def room_event(self, event: RoomEvent) -> None:
        """Append one call on the agent's sandbox to `exec.jsonl`, before the harness sees its result."""
        for secret in self.secrets:
            event = event.without(secret)
        self.execs += 1
        self.injected += event.injected is not None
        data = event.given.data
        line = exec_line(event, self.execs, input_digest=self._keep(data) if data is not None else None)
        if event.content is not None:
            self._keep(event.content)
        content = self._covered(dump_json(line.model_dump(exclude_none=True)))
        self._append("exec.jsonl", content)
        self.events.write("exec", {"line": self.execs, "digest": digest_bytes(content)})

    def _keep(self, data: bytes) -> str:
        """Keep what a call was given, or what it read, once, by its digest."""
        digest = digest_bytes(data)
        folder = self.directory / "blobs"
        path = folder / digest.removeprefix("sha256:")
        if not path.exists():
            with record_errors(f"{self.directory.name}/blobs"):
                folder.mkdir(exist_ok=True)
                path.write_bytes(data)
        return digest

    def model_call(self, call: CallRecord) -> None:
        """Append one call of the model to `model-calls.jsonl`, before the last byte of its answer goes back."""
        if (tools := call.request.get("tools")) and not self._tools_noted:
            self._tools_noted = True
            self.events.write("tools", {"definitions": clean(plain(tools))})
        self.model_calls += 1
        failed = call.error is not None
        self.model_errors += failed
        self.endpoint_failed = failed and not by_agent(call, answered_before=self._answered)
        self.endpoint_down = self.endpoint_failed and is_down(call)
        self._answered = self._answered or not failed
        self._used.append((call.usage, was_at_work(call)))
        if call.returned_model and call.returned_model not in self.returned_models:
            self.returned_models.append(call.returned_model)
        for finding in findings_of(call):
            if finding not in self._findings:
                self._findings.append(finding)
        content = self._covered(dump_json(call_line(call)))
        self._append("model-calls.jsonl", content)
        self.events.write("model_call", {"line": self.model_calls, "digest": digest_bytes(content)})

    def user_call(self, call: CallRecord) -> None:
        """Append one call of the model that plays the simulated user to `user-calls.jsonl`: it is not the agent's, and
        in no sum of what the agent used."""
        self._append("user-calls.jsonl", dump_json(call_line(call)))

    def usage(self) -> UsageTotals:
        """What the trial used: as the gateway counted it, or (no call passed one) as the steps say."""
        return usage_totals(self._used) if self._used else total_usage(self.steps)

    def network_event(self, event: NetworkEvent) -> None:
        """Append one look-up, connection or request of a sandbox to `network.jsonl`. How many there are is for the
        candidate to say, so the file has a largest size; beyond it they are in the receipt's totals."""
        content = dump_json({"v": 1, **event.as_json()})
        if self._network_bytes > _MAX_NETWORK_BYTES:
            return
        self._network_bytes += len(content)
        if self._network_bytes > _MAX_NETWORK_BYTES:
            last = NetworkEvent("dropped", event.at, reason="size", sandbox=event.sandbox)
            content = dump_json({"v": 1, **last.as_json()})
        self._append("network.jsonl", content)

    def agent_receipt(self, receipt: Receipt) -> None:
        """Keep the receipt of the agent's sandbox."""
        self._receipts = self._receipts.model_copy(update={"agent": plain(_fields(receipt))})

    def diff(self, entries: Sequence[DiffEntry], *, archive: str = "diff.tar.zst") -> None:
        """Keep the list of paths that the agent changed; `archive` says where, or why not, their content is kept."""
        items = [DiffItem(**_fields(entry)) for entry in entries]
        self.put("diff.json", DiffFile(entries=items, archive=archive))

    def graded(self, grade: Grade) -> None:
        """Keep the grade, its findings, the receipts of the grading rooms and the verifier's raw output."""
        self.grade = grade
        self.put("grade.json", grade_file(grade))
        self._findings.extend(FindingEntry(kind=f.kind, detail=f.detail, severity=f.severity) for f in grade.findings)
        self._receipts = self._receipts.model_copy(update={"grading": [plain(receipt) for receipt in grade.receipts]})
        for name, text in grade.logs.items():
            safe = name.replace("/", "_").lstrip(".") or "log"
            self._append(f"logs/{safe}", text.encode("utf-8", "backslashreplace"))

    def failure(self, error: Exception) -> None:
        """Keep the traceback of the exception that ended the attempt in `logs/error.log`."""
        text = "".join(traceback.format_exception(error))
        self._append("logs/error.log", text.encode("utf-8", "backslashreplace"))

    def put(self, name: str, model: BaseModel) -> None:
        """Write one JSON file of the record."""
        self.put_bytes(name, dump(model))

    def put_bytes(self, name: str, content: bytes) -> None:
        """Write one file of the record."""
        with record_errors(f"{self.directory.name}/{name}"):
            (self.directory / name).write_bytes(self._covered(content))

    def _append(self, name: str, content: bytes) -> None:
        with record_errors(f"{self.directory.name}/{name}"):
            if name not in self._files:
                self._files[name] = (self.directory / name).open("ab", buffering=0)
            view = memoryview(self._covered(content))
            while view:
                view = view[self._files[name].write(view) :]

    # The end.

    def finish(self, result: TrialResult) -> None:
        """Write what is written last, and close every file."""
        self.events.write("end", {"outcome": str(result.outcome), "stop": result.stop})
        self.put("receipt.json", self._receipts)
        if (differs := account_differs(self.steps, self.model_calls - self.model_errors)) is not None:
            self._findings.append(differs)
        self.put("findings.json", FindingsFile(findings=self._findings))
        self.put("result.json", result)
        self._close()

    def discard(self) -> None:
        """Remove everything: this attempt is not kept."""
        self._close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


@dataclass(frozen=True, slots=True)
class Committed:
    """A trial that has been committed: where it is, and the digest of its content."""

    directory: Path
    digest: str


def commit(record: TrialRecord, target: Path, *, superseded: Path) -> Committed:
    """Make the record durable and visible: fsync every file, then one rename.

    A record that is already there (an earlier `infra_error` that was run again) is moved to `superseded` first, never
    lost.
    """
    with record_errors(target.name):
        for folder, _, names in os.walk(record.directory):
            for name in names:
                _fsync(Path(folder, name))
            _fsync(Path(folder))
        digest = digest_tree(record.directory)
        if target.exists():
            superseded.mkdir(exist_ok=True)
            os.rename(target, superseded / _free_name(superseded, target.name))
        os.rename(record.directory, target)
        _fsync(target.parent)
    return Committed(target, digest)


def _free_name(folder: Path, name: str) -> str:
    number = 1
    while (folder / f"{name}.{number}").exists():
        number += 1
    return f"{name}.{number}"


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def grade_file(grade: Grade) -> GradeFile:
    """A Grade as `grade.json` holds it."""
    compat = None
    if grade.compat is not None:
        compat = CompatResult(
            resolved=grade.compat.resolved,
            status=grade.compat.status,
            patch_applied=grade.compat.patch_applied,
            graded=grade.compat.graded,
            tests=plain(grade.compat.tests),
        )
    return GradeFile(
        verdict=grade.verdict,
        resolved=grade.resolved,
        rewards=dict(grade.rewards),
        tests=[
            TestResult(
                test_id=t.test_id, group=t.group, status=str(t.status), ok=t.ok, unstable=t.unstable, runs=plain(t.runs)
            )
            for t in grade.tests
        ],
        compat=compat,
        in_place=grade.in_place,
        carry=grade.carry,
        carried=plain(grade.carried),
        error=grade.error,
        infra=grade.infra,
        duration_s=grade.duration_s,
        rooms=grade.rooms,
    )


def stream_line(output: Output) -> StreamLine:
    """A captured stream: as text when it is UTF-8 as a whole, else exactly, in base64."""
    kept = output.head + output.tail
    try:
        return StreamLine(text=kept.decode("utf-8"), total=output.total, dropped=output.dropped)
    except UnicodeDecodeError:
        return StreamLine(base64=base64.b64encode(kept).decode("ascii"), total=output.total, dropped=output.dropped)


def _observed(result: ExecResult | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "reason": str(result.reason) if result.reason is not None else None,
        "timed_out": result.timed_out,
        "leftover": result.leftover,
        "stdout": stream_line(result.stdout),
        "stderr": stream_line(result.stderr),
    }


def exec_line(event: RoomEvent, seq: int, *, input_digest: str | None = None) -> ExecLine:
    """One call on a sandbox as `exec.jsonl` holds it."""
    given = event.given
    return ExecLine(
        seq=seq,
        started_at=event.started_at,
        kind=event.kind,
        subject=event.subject,
        argv=list(given.argv) or None,
        cwd=given.cwd,
        user=given.user,
        env=redacted(given.env) if given.env else None,
        input=input_digest,
        duration_s=round(event.duration_s, 6),
        limit_s=round(event.limit_s, 3),
        size_bytes=event.size_bytes,
        digest=event.digest,
        error=event.error,
        injected=event.injected,
        replayed=event.replayed or None,
        by_host=event.by_host or None,
        **_observed(event.result),
    )


def redacted(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without the values of those whose name says that they are secrets."""
    return {name: REDACTED if _SECRET.search(name) else value for name, value in env.items()}


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a `.jsonl` file of a record, one at a time."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                yield json.loads(line)
