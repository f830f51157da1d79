"""The journal: whole lines, strict reading, and what is still owed after a death."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proctor.common import InfraError
from proctor.sandbox.contract import EndReason
from proctor.sandbox.journal import Journal, State
from proctor.sandbox.journal_reader import fold, read

if TYPE_CHECKING:
    from pathlib import Path


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("box-1", State.INTENT, image="host", labels={"task": "a"})
    journal.write("box-1", State.CREATED, slot="s1", pid=42)
    journal.write("box-1", State.CLOSING, reason=EndReason.TTL, detail="older than 1 s")
    journal.close()
    records = list(read(tmp_path / "journal.jsonl"))
    assert [record.state for record in records] == [State.INTENT, State.CREATED, State.CLOSING]
    assert records[1].pid == 42
    assert records[2].reason is EndReason.TTL


def test_what_has_not_ended_is_owed_with_all_its_facts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for box in ("box-1", "box-2"):
        journal.write(box, State.INTENT, image="host")
        journal.write(box, State.CREATED, slot=f"slot-of-{box}", pid=7)
    journal.write("box-1", State.CLOSING)
    journal.write("box-1", State.CLOSED)
    journal.write("box-2", State.CLOSING, reason=EndReason.IDLE)
    owed = fold(read(tmp_path / "journal.jsonl"))
    assert list(owed) == ["box-2"]
    assert (owed["box-2"].slot, owed["box-2"].state, owed["box-2"].image) == ("slot-of-box-2", State.CLOSING, "host")
    journal.close()


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("box-1", State.INTENT)
    journal.close()
    path.write_bytes(path.read_bytes() + b'{"version":1,"sand')
    assert [record.sandbox for record in read(path)] == ["box-1"]


@pytest.mark.parametrize("line", [b"not json\n", b'{"version":1,"at":"x","sandbox":"b","state":"CREATED","extra":1}\n'])
def test_a_line_that_is_no_record_is_an_error(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line)
    with pytest.raises(InfraError, match=r"journal\.jsonl:1"):
        list(read(path))


def test_a_full_disk_is_an_error_before_the_act() -> None:
    from pathlib import Path

    journal = Journal(Path("/dev/full"))
    with pytest.raises(InfraError, match="journal"):
        journal.write("box-1", State.INTENT)


def test_a_long_journal_is_cut_to_what_still_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.sandbox.journal._COMPACT_BYTES", 2000)
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("old", State.INTENT, image="host")
    journal.write("old", State.CREATED, pid=1)
    for number in range(100):
        for state in State:
            journal.write(f"box-{number}", state)
    assert (tmp_path / "journal.jsonl").stat().st_size < 4000
    journal.write("new", State.INTENT)
    assert list(fold(read(tmp_path / "journal.jsonl"))) == ["old", "new"]
    journal.close()
