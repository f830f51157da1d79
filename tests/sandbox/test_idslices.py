"""Ids of sandboxes: living Edges do not share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.sandbox.native.idslices import IdSlice

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_ten_edges_have_ten_slices_whatever_their_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = [IdSlice.take("the-same-name", tmp_path / "ids") for _ in range(10)]
    assert {one.number for one in taken} == set(range(10))
    assert len({one.uid_start for one in taken}) == len({one.guest_uid for one in taken}) == 10
    assert not caplog.messages
    extra = IdSlice.take("the-same-name", tmp_path / "ids")
    assert extra.number == IdSlice.by_name("the-same-name").number
    assert "also another Edge's" in caplog.text
    taken[7].close()
    taken[7].close()
    assert IdSlice.take("another-name", tmp_path / "ids").number == taken[7].number
    for one in taken:
        one.close()


def test_where_no_locks_can_be_the_name_decides_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert IdSlice.take("name", tmp_path / "file" / "ids").number == IdSlice.by_name("name").number
    assert "may be those of another Edge's" in caplog.text
