"""The same work in the right form: what is changed mechanically, and what is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.grading.deliverable import Change, Collected, FileState
from proctor.grading.near_miss import _alike, in_right_form, plain_text


@pytest.mark.parametrize(
    ("data", "plain", "why"),
    [
        (b"a\n", b"a\n", []),
        (b"\xef\xbb\xbfa\r\nb\r\n", b"a\nb\n", ["its byte-order mark", "carriage returns"]),
        ("é\n".encode("utf-16"), "é\n".encode(), ["UTF-16"]),
        (b'```json\n{"a": 1}\n```\n', b'{"a": 1}\n', ["the fence around it"]),
        (b"text\n```\ncode\n```\n", b"text\n```\ncode\n```\n", []),
        (b"\x89PNG\r\n\x00\r\n", b"\x89PNG\r\n\x00\r\n", []),
    ],
)
def test_only_what_programs_put_around_a_text_is_removed(data: bytes, plain: bytes, why: list[str]) -> None:
    assert plain_text(data) == (plain, why)


@given(st.binary(max_size=60))
def test_nothing_is_ever_added_but_a_last_newline(data: bytes) -> None:
    plain, why = plain_text(data)
    if not why:
        assert plain == data
    elif why != ["UTF-16"]:
        assert set(plain) <= set(data) | {10}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["/app/out/report.json"], "/app/out/report.json"),
        (["/app/Report.JSON", "/app/report.txt"], "/app/Report.JSON"),
        (["/app/report.txt"], "/app/report.txt"),
        (["/a/report.json", "/b/report.json"], None),
        (["/app/report.txt", "/app/report.csv"], None),
        (["/app/other.json"], None),
    ],
)
def test_one_file_that_is_called_alike_or_none(files: list[str], found: str | None) -> None:
    assert _alike("/app/report.json", files) == found


def test_a_deliverable_in_the_right_form_is_as_it_is() -> None:
    collected = Collected(kind="paths", changes=(Change("/app/a.txt", None, FileState(0o644, b"1\n")),))
    assert in_right_form(collected) is None
    moved = Change("/app/b.txt", None, FileState(0o644, b"2\r\n"))
    mended = in_right_form(Collected(kind="paths", changes=collected.changes, misplaced=(("/tmp/b.txt", moved),)))
    assert mended is not None
    assert [(one.path, one.after and one.after.data) for one in mended[0].changes or ()] == [
        ("/app/a.txt", b"1\n"), ("/app/b.txt", b"2\n"),
    ]  # fmt: skip
    assert mended[1] == "/tmp/b.txt moved to /app/b.txt; /app/b.txt without carriage returns"
