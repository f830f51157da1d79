"""The ledger: what was written is read back, and any change shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.runs.ledger import GENESIS, LedgerError, LedgerWriter, make_row, parse_ledger, read_ledger, verify_ledger

if TYPE_CHECKING:
    from pathlib import Path

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
DATA = st.dictionaries(st.text(), VALUES, max_size=4)


def lines(items: list[dict[str, object]]) -> list[bytes]:
    prev, made = GENESIS, []
    for seq, data in enumerate(items, 1):
        row, line = make_row(seq, "2026-01-01T00:00:00Z", "started", data, prev)
        made.append(line)
        prev = row.hash
    return made


@given(st.lists(DATA, max_size=5))
def test_round_trip(items: list[dict[str, object]]) -> None:
    ledger = parse_ledger(b"".join(lines(items)))
    assert [row.data for row in ledger.rows] == items
    assert ledger.torn == 0


@given(st.lists(DATA, min_size=1, max_size=4), st.data())
def test_any_flipped_bit_is_found(items: list[dict[str, object]], data: st.DataObject) -> None:
    content = bytearray(b"".join(lines(items)))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        ledger = parse_ledger(bytes(content))
    except LedgerError:
        return
    # Only the very last newline can be hit without a row being wrong; then the last row counts as torn.
    assert position == len(content) - 1
    assert ledger.torn


@settings(deadline=None)
@given(items=st.lists(DATA, min_size=1, max_size=4), data=st.data())
def test_any_truncation_is_found(
    items: list[dict[str, object]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    with LedgerWriter(folder) as writer:
        for item in items:
            writer.append("started", item)
    verify_ledger(folder)
    path = folder / "ledger.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(LedgerError):
        verify_ledger(folder)


@given(st.lists(DATA, min_size=2, max_size=5, unique_by=repr), st.data())
def test_removed_or_swapped_rows_are_found(items: list[dict[str, object]], data: st.DataObject) -> None:
    made = lines(items)
    index = data.draw(st.integers(0, len(made) - 2))
    for changed in (
        made[:index] + made[index + 1 :],
        [*made[:index], made[index + 1], made[index], *made[index + 2 :]],
    ):
        with pytest.raises(LedgerError):
            parse_ledger(b"".join(changed))


def test_a_torn_last_line_is_dropped_on_opening(run_dir: Path) -> None:
    with LedgerWriter(run_dir) as writer:
        writer.append("run", {"run_id": "r"})
    path = run_dir / "ledger.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"at":"20')
    assert read_ledger(run_dir).torn == 9
    with LedgerWriter(run_dir) as writer:
        writer.append("started", {"trial": "t"})
    assert path.read_bytes().startswith(whole)
    assert [row.kind for row in verify_ledger(run_dir).rows] == ["run", "started"]


def test_a_cut_below_the_head_is_refused_on_opening(run_dir: Path) -> None:
    with LedgerWriter(run_dir) as writer:
        writer.extend([("run", {}), ("started", {})])
    path = run_dir / "ledger.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(LedgerError, match="cut off"):
        LedgerWriter(run_dir)


def test_an_anchor_kept_elsewhere_finds_a_rewritten_history(run_dir: Path) -> None:
    with LedgerWriter(run_dir) as writer:
        anchor = writer.append("run", {"run_id": "honest"}).hash
    assert verify_ledger(run_dir, anchor=anchor)
    (run_dir / "ledger.jsonl").unlink()
    (run_dir / "ledger.head").unlink()
    with LedgerWriter(run_dir) as writer:
        writer.append("run", {"run_id": "forged"})
    verify_ledger(run_dir)
    with pytest.raises(LedgerError, match="not the ledger"):
        verify_ledger(run_dir, anchor=anchor)


def test_only_one_process_holds_a_ledger(run_dir: Path) -> None:
    with LedgerWriter(run_dir), pytest.raises(ConfigError, match="another process"):
        LedgerWriter(run_dir)


def test_a_missing_ledger_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is this a run directory"):
        read_ledger(tmp_path)
