"""What journals say (see `journal`): each line checked, and folded into the sandboxes that have not ended.

Apart from the writer because an Edge only writes, and need not load what checks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from proctor.common import InfraError
from proctor.sandbox.contract import EndReason
from proctor.sandbox.journal import VERSION, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class JournalRecord(BaseModel):
    """One line of the journal."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = VERSION
    at: str
    sandbox: str
    state: State
    incarnation: int = 1
    slot: str | None = None
    pid: int | None = None
    image: str | None = None
    reason: EndReason | None = None
    detail: str = ""
    labels: dict[str, str] = {}


def read(path: Path) -> Iterator[JournalRecord]:
    """Records of a journal, oldest first. Lines that are only begun (the disk was full) are passed over; others that
    are no records are errors."""
    data = path.read_bytes()
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield JournalRecord.model_validate_json(line)
        except ValueError as error:
            if number == len(lines) or _torn(line):
                continue
            raise InfraError(f"{path}:{number}: not a journal record: {error}") from error


def _torn(line: bytes) -> bool:
    """Whether a line is the beginning of a record and no more."""
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(b'{"version":')
    return False


def fold(records: Iterator[JournalRecord]) -> Mapping[str, JournalRecord]:
    """The latest record of each sandbox that has not ended, with the facts of its earlier records filled in."""
    latest: dict[str, JournalRecord] = {}
    for record in records:
        if record.state is State.CLOSED:
            latest.pop(record.sandbox, None)
            continue
        before = latest.get(record.sandbox)
        if before is not None:
            known = before.model_dump(exclude_none=True) | record.model_dump(exclude_none=True, exclude_defaults=True)
            record = JournalRecord.model_validate(known)
        latest[record.sandbox] = record
    return latest
