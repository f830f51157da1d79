"""The ledger of a run: every planned trial first, then everything that became of it; append-only and hash-chained.

One row a line, in canonical JSON. A row's `hash` is the SHA-256 of the canonical JSON of the row without it, and each
row carries the hash of the row before, so a change anywhere breaks every row after it. `ledger.head` names the number
of rows and the last hash, so that a cut at a row's end shows as well. Who can rewrite both files can rewrite history:
keep the head that `proctor run` prints somewhere else (`verify_ledger(..., anchor=…)`) when that matters.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from proctor.common import ConfigError, ProctorError, canonical_json, digest_bytes
from proctor.runs.clock import now_iso

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

LEDGER_VERSION = 1
GENESIS = "sha256:" + "0" * 64
RowKind = Literal[
    "run",
    "planned",
    "unrunnable",
    "started",
    "ended",
    "retry",
    "cancelled",
    "stopped",
    "relocked",
    "resumed",
    "finished",
]
_KINDS = frozenset(get_args(RowKind))
_HEAD = "ledger.head"


class LedgerError(ProctorError):
    """The ledger is damaged; the message names the row."""


class Head(BaseModel):
    """Content of `ledger.head`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    rows: int
    hash: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `data` depends on `kind`; docs/design/record.md lists the fields."""

    seq: int
    at: str
    kind: RowKind
    data: Mapping[str, Any]
    prev: str
    hash: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger that was read and checked. `torn` counts the bytes of a last line that a crash left unfinished."""

    rows: tuple[Row, ...]
    torn: int = 0

    @property
    def head(self) -> Head:
        """Number of rows and hash of the last one."""
        return Head(rows=len(self.rows), hash=self.rows[-1].hash if self.rows else GENESIS)

    def of(self, *kinds: RowKind) -> Iterator[Row]:
        """The rows of these kinds, in order."""
        return (row for row in self.rows if row.kind in kinds)


def make_row(seq: int, at: str, kind: RowKind, data: Mapping[str, Any], prev: str) -> tuple[Row, bytes]:
    """A row and its line (with the newline)."""
    body = {"v": LEDGER_VERSION, "seq": seq, "at": at, "kind": kind, "data": data, "prev": prev}
    digest = digest_bytes(canonical_json(body))
    return Row(seq, at, kind, data, prev, digest), canonical_json({**body, "hash": digest}) + b"\n"


def parse_ledger(content: bytes) -> Ledger:
    """Read rows and check the chain. Raises LedgerError at the first row that is not exactly what was written."""
    rows: list[Row] = []
    *lines, tail = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        rows.append(_parse_row(line, number, rows[-1].hash if rows else GENESIS))
    return Ledger(tuple(rows), torn=len(tail))


def _parse_row(line: bytes, number: int, prev: str) -> Row:
    try:
        value = json.loads(line.decode("utf-8", "surrogatepass"))
        exact = canonical_json(value) == line
    except (ValueError, RecursionError) as error:
        raise LedgerError("not a row of a ledger", field=f"ledger.jsonl:{number}") from error
    if not exact or not isinstance(value, dict) or value.keys() != {"v", "seq", "at", "kind", "data", "prev", "hash"}:
        raise LedgerError("not the canonical form of a row", field=f"ledger.jsonl:{number}")
    digest = value.pop("hash")
    if value["v"] != LEDGER_VERSION or value["kind"] not in _KINDS or not isinstance(value["data"], dict):
        raise LedgerError(f"unknown version or kind ({value['v']}, {value['kind']})", field=f"ledger.jsonl:{number}")
    if digest_bytes(canonical_json(value)) != digest:
        raise LedgerError("the row was changed: its hash does not match", field=f"ledger.jsonl:{number}")
    if value["prev"] != prev or value["seq"] != number:
        raise LedgerError(
            "the chain is broken: a row before this one is missing or changed", field=f"ledger.jsonl:{number}"
        )
    return Row(number, value["at"], value["kind"], value["data"], prev, digest)


def read_ledger(directory: Path) -> Ledger:
    """The ledger of a run, chain checked. A torn last line is reported, not raised: a crash leaves one."""
    return parse_ledger(_read(directory / "ledger.jsonl"))


def verify_ledger(directory: Path, *, anchor: str | None = None) -> Ledger:
    """Check chain, head and the absence of a torn line. `anchor` is a head hash that was kept elsewhere.

    Raises LedgerError naming what is wrong: any changed byte, and any cut below the head, is found.
    """
    ledger = read_ledger(directory)
    if ledger.torn:
        raise LedgerError(f"the last line is unfinished ({ledger.torn} bytes)", field="ledger.jsonl",
                          remedy="a crash leaves this; `proctor run --resume` repairs it")  # fmt: skip
    _check_head(ledger, _read_head(directory))
    if anchor is not None and anchor not in {row.hash for row in ledger.rows}:
        raise LedgerError(
            f"no row has the hash {anchor}: this is not the ledger it was taken from", field="ledger.jsonl"
        )
    return ledger


def _check_head(ledger: Ledger, head: Head) -> None:
    if len(ledger.rows) < head.rows:
        raise LedgerError(f"rows were cut off: {head.rows} written, {len(ledger.rows)} left", field="ledger.jsonl")
    if head.rows and ledger.rows[head.rows - 1].hash != head.hash:
        raise LedgerError(f"row {head.rows} is not the one that the head names", field="ledger.jsonl")


def _read_head(directory: Path) -> Head:
    try:
        return Head.model_validate_json(_read(directory / _HEAD), strict=True)
    except ValidationError as error:
        raise LedgerError("not a ledger head", field=_HEAD) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path.name} is missing", field=str(path.parent), remedy="is this a run directory?"
        ) from error


def being_written(directory: Path) -> bool:
    """Whether a process holds the ledger, as a run does until it ends. What a reader sees of it may be half-written."""
    with (directory / "ledger.jsonl").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class LedgerWriter:
    """Appends rows to the ledger of one run. Only one process at a time can hold it.

    Opening an existing ledger checks it and drops an unfinished last line. `append` returns when the row is in the
    file; with `durable` it has reached the disk.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], str] = now_iso) -> None:
        self._directory = directory
        self._lock = threading.Lock()  # rows come from the event loop and from the threads that commit records
        self._clock = clock
        self._file = (directory / "ledger.jsonl").open("a+b", buffering=0)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError("another process is working on this run", field=str(directory)) from error
            self._ledger = self._recover()
        except BaseException:
            self._file.close()
            raise

    def _recover(self) -> Ledger:
        self._file.seek(0)
        content = self._file.read()
        ledger = parse_ledger(content)
        if content and (self._directory / _HEAD).exists():
            _check_head(ledger, _read_head(self._directory))
        if ledger.torn:
            self._file.truncate(len(content) - ledger.torn)
        self._rows = list(ledger.rows)
        return ledger

    @property
    def ledger(self) -> Ledger:
        """Everything written so far."""
        return Ledger(tuple(self._rows))

    def append(self, kind: RowKind, data: Mapping[str, Any], *, durable: bool = False) -> Row:
        """Append one row."""
        return self.extend([(kind, data)], durable=durable)[0]

    def extend(self, items: Sequence[tuple[RowKind, Mapping[str, Any]]], *, durable: bool = False) -> list[Row]:
        """Append several rows with one write."""
        with self._lock:
            start, made, chunk = len(self._rows), [], b""
            prev = self._rows[-1].hash if self._rows else GENESIS
            for offset, (kind, data) in enumerate(items, 1):
                row, line = make_row(start + offset, self._clock(), kind, data, prev)
                made.append(row)
                chunk += line
                prev = row.hash
            self._write(chunk)
            self._rows.extend(made)
            if durable:
                os.fsync(self._file.fileno())
            self._write_head()
            return made

    def _write(self, chunk: bytes) -> None:
        """Write all of `chunk` or none of it: a full disk must not leave half a row before the next one."""
        size = os.fstat(self._file.fileno()).st_size
        view = memoryview(chunk)
        try:
            while view:
                view = view[os.write(self._file.fileno(), view) :]
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise

    def _write_head(self) -> None:
        # Replaced, not fsynced: the chain is the truth, and a head that lags behind it is accepted.
        temporary = self._directory / f".{_HEAD}"
        last = self._rows[-1]
        temporary.write_bytes(canonical_json(Head(rows=last.seq, hash=last.hash).model_dump()) + b"\n")
        os.replace(temporary, self._directory / _HEAD)

    def close(self) -> None:
        """Flush to disk and let go of the run."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
