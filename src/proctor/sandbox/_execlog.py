"""The log of a durable sandbox's commands: what was about to start, and how it ended. One JSON object a line.

Like the journal, a record is one write on an append-only descriptor, so a process killed between two leaves whole
lines.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from proctor.common import InfraError
from proctor.sandbox.contract import EndReason, ExecResult, OutputLimit, SandboxLost
from proctor.sandbox.journal import now

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    exec: int


class StartedRecord(_Record):
    """A command that is about to start. Arguments are bytes, one character each."""

    kind: Literal["started"] = "started"
    at: str
    argv: tuple[str, ...]
    request: str | None = None
    subs: tuple[int, ...]
    limit: tuple[int, int]
    keep: bool = False
    monotonic: float
    """When, on CLOCK_MONOTONIC."""
    deadline: float | None = None
    """When its time is up, on the same clock."""
    baseline: tuple[int, ...] | None = None
    """The sandbox's event counters at its start."""

    @classmethod
    def of(
        cls,
        *,
        exec_id: int,
        argv: tuple[str, ...],
        request: str | None,
        subs: frozenset[int],
        limit: OutputLimit,
        keep: bool,
        monotonic: float,
        deadline: float | None,
        baseline: object,
    ) -> Self:
        """The record of a command with these arguments."""
        return cls(
            exec=exec_id,
            at=now(),
            argv=tuple(os.fsencode(item).decode("latin-1") for item in argv),
            request=request,
            subs=tuple(sorted(subs)),
            limit=(limit.head_bytes, limit.tail_bytes),
            keep=keep,
            monotonic=monotonic,
            deadline=deadline,
            baseline=baseline if isinstance(baseline, tuple) else None,
        )

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments as the caller gave them."""
        return tuple(os.fsdecode(item.encode("latin-1")) for item in self.argv)


class EndedRecord(_Record):
    """How a command ended; its output is in the spool."""

    kind: Literal["ended"] = "ended"
    exit_code: int | None
    signal: int | None
    timed_out: bool
    reason: EndReason | None
    duration_s: float
    cpu_s: float | None
    max_rss_kb: int | None
    leftover: int
    message: str = ""
    """What is shown instead of standard error, when the command could not be run. Bytes, one character each."""

    @classmethod
    def of(cls, exec_id: int, result: ExecResult) -> Self:
        """The record of a result (without its output)."""
        return cls(
            exec=exec_id,
            exit_code=result.exit_code,
            signal=result.signal,
            timed_out=result.timed_out,
            reason=result.reason,
            duration_s=result.duration_s,
            cpu_s=result.cpu_s,
            max_rss_kb=result.max_rss_kb,
            leftover=result.leftover,
            message=result.stderr.data.decode("latin-1"),
        )

    @classmethod
    def unknown(cls, exec_id: int, error: Exception) -> Self:
        """The record of a command of which the end will never be known, and why."""
        return cls(
            exec=exec_id,
            exit_code=None,
            signal=None,
            timed_out=False,
            reason=error.reason if isinstance(error, SandboxLost) else EndReason.GUEST_LOST,
            duration_s=0.0,
            cpu_s=None,
            max_rss_kb=None,
            leftover=0,
        )


_RECORD: TypeAdapter[StartedRecord | EndedRecord] = TypeAdapter(
    Annotated[StartedRecord | EndedRecord, Field(discriminator="kind")]
)


class ExecLog:
    """The open log of one sandbox."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = _open(path)
        self._torn = False

    def read(self) -> Iterator[tuple[StartedRecord, EndedRecord | None]]:
        """Every command with its end, if that is known, oldest first. Torn lines (a full disk) are passed over."""
        started: dict[int, StartedRecord] = {}
        ended: dict[int, EndedRecord] = {}
        for line in filter(None, self._path.read_bytes().split(b"\n")):
            try:
                record = _RECORD.validate_json(line)
            except ValueError as error:
                log.warning("%s: passed over what is not a record of a command: %s", self._path, error)
                continue
            if isinstance(record, StartedRecord):
                started[record.exec] = record
            else:
                ended[record.exec] = record
        for exec_id, start in sorted(started.items()):
            yield start, ended.get(exec_id)

    def write(self, record: StartedRecord | EndedRecord) -> None:
        """Append a record. Raises InfraError when it could not be written whole."""
        line = b"\n" * self._torn + record.model_dump_json().encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
            self._torn = written != len(line)
        except OSError as error:
            raise InfraError(f"cannot write {self._path}: {error.strerror}", remedy="free disk space") from error
        if self._torn:
            raise InfraError(f"cannot write {self._path}: the disk is full", remedy="free disk space")

    def compact(self, ended: Mapping[int, EndedRecord | None], started: Sequence[StartedRecord]) -> None:
        """Go on in a new file with these alone. On a full disk the old file serves on."""
        part = self._path.with_suffix(".part")
        records: list[_Record] = []
        for record in started:
            records.append(record)
            if (end := ended.get(record.exec)) is not None:
                records.append(end)
        try:
            part.write_bytes(b"".join(record.model_dump_json().encode() + b"\n" for record in records))
            os.replace(part, self._path)
        except OSError:
            return
        os.close(self._descriptor)
        self._descriptor = _open(self._path)

    def close(self) -> None:
        """Close. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
