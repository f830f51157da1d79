"""Rows from every format, SWE instances, and predictions: read alike, and named when they are wrong."""

from __future__ import annotations

import csv
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.tasks import Prediction, load_predictions
from proctor.tasks.rows import Row, read_rows
from proctor.tasks.swe_rows import id_list, parse_row

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [
    {"instance_id": "a__b-1", "patch": 'one\n"two", three\n', "n": "x"},
    {"instance_id": "a__b-2", "patch": "\n\n", "n": "ü"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", ROWS)
    assert [row.data for row in read_rows(path)] == ROWS


def test_where_a_row_is(tmp_path: Path) -> None:
    assert [row.where.removeprefix(str(tmp_path)) for row in read_rows(write(tmp_path / "r.csv", ROWS))] == [
        "/r.csv:2",
        "/r.csv:5",
    ]
    assert [row.where.removeprefix(str(tmp_path)) for row in read_rows(write(tmp_path / "r.jsonl", ROWS))] == [
        "/r.jsonl:1",
        "/r.jsonl:2",
    ]
    assert read_rows(write(tmp_path / "r.json", ROWS))[1].where == f"{tmp_path}/r.json row 2"


def test_json_may_be_one_row_or_a_map(tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "map.json"
    one.write_text(json.dumps(ROWS[0]))
    many.write_text(json.dumps({row["instance_id"]: row for row in ROWS}))
    assert [row.data for row in read_rows(one)] == ROWS[:1]
    assert [row.data for row in read_rows(many)] == ROWS


def test_a_cell_may_be_larger_than_the_csv_modules_default(tmp_path: Path) -> None:
    rows = [{"instance_id": "a", "patch": "x" * 300_000}]
    assert read_rows(write(tmp_path / "big.csv", rows))[0].data == rows[0]


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "json": ("r.json", b'[{"a": 1},\n oops]', "r.json:2: not valid JSON"),
    "json-scalar": ("r.json", b"[1]", "r.json row 1: a row should be a JSON object, not int"),
    "jsonl": ("r.jsonl", b'{"a": 1}\n{"a": \n', "r.jsonl:2: not valid JSON"),
    "jsonl-list": ("r.jsonl", b"[]\n", "r.jsonl:1: a row should be a JSON object"),
    "jsonl-deep": ("r.jsonl", b"[" * 100_000 + b"\n", "r.jsonl:1: not valid JSON"),
    "csv-empty": ("r.csv", b"", "r.csv: has no header line"),
    "csv-short": ("r.csv", b"a,b\n1,2\n3\n", "r.csv:3: the row should have 2 columns"),
    "csv-long": ("r.csv", b"a,b\n1,2,3\n", "r.csv:2: the row should have 2 columns"),
    "csv-quote": ("r.csv", b'a,b\n1,"2\n', "r.csv:2: not valid CSV"),
    "csv-bytes": ("r.csv", b"a,b\n1,\xff\n", "r.csv:2: not UTF-8 text"),
    "parquet": ("r.parquet", b"PAR1 nothing", "r.parquet: not a readable Parquet file"),
    "suffix": ("r.xlsx", b"", "r.xlsx: unknown kind of row file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_gives_one_clear_error(tmp_path: Path, name: str) -> None:
    file, content, words = BAD_FILES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_rows(tmp_path / file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs the package pyarrow.*pip install"):
        read_rows(path)


# Lists of ids.


@pytest.mark.parametrize(
    "value",
    [
        ["a", "b[(1,"],
        ("a", "b[(1,"),
        '["a", "b[(1,"]',
        "['a', 'b[(1,']",
        "('a', \"b[(1,\")",
        ' ["a", "b[(1,", "a"]\n',
    ],
)
def test_lists_of_ids_in_every_spelling(value: Any) -> None:
    assert id_list(value) == ["a", "b[(1,"]


@pytest.mark.parametrize(
    "value", ["['a' 'b']", "['a'\n 'b']", "a, b", "", "{}", "[1]", "[''] ", None, 3, ["a", 1], "__import__('os')"]
)
def test_what_is_no_list_of_ids(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        id_list(value)


ids = st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=6)


@given(ids)
def test_ids_survive_both_spellings(names: list[str]) -> None:
    assert id_list(json.dumps(names)) == names
    assert id_list(repr(names)) == names


# Instances.

GOOD_ROW: dict[str, Any] = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "patch": "diff",
    "test_patch": "diff",
    "problem_statement": "It fails.",
    "hints_text": "Look there.",
    "FAIL_TO_PASS": '["t"]',
    "PASS_TO_PASS": "[]",
}


def test_a_row_keeps_names_of_what_it_does_not_use() -> None:
    row = parse_row(Row("x", GOOD_ROW))
    assert row.unused == ["hints_text"]
    assert row.FAIL_TO_PASS == ["t"]


def test_lower_case_columns_and_empty_cells() -> None:
    data = {**GOOD_ROW, "fail_to_pass": "['t']", "image": "", "difficulty": float("nan"), "version": None}
    del data["FAIL_TO_PASS"]
    row = parse_row(Row("x", data))
    assert (row.FAIL_TO_PASS, row.image, row.difficulty) == (["t"], None, None)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("instance_id", "../x", "instance_id"),
        ("instance_id", None, "instance_id: is missing"),
        ("repo", 3, "repo"),
        ("base_commit", "main", "base_commit"),
        ("problem_statement", "", "problem_statement: is missing"),
        ("problem_statement", " \n", "problem_statement"),
        ("FAIL_TO_PASS", "['a' 'b']", "FAIL_TO_PASS: has strings without commas"),
        ("PASS_TO_PASS", "oops", "PASS_TO_PASS: is neither"),
        ("patch", ["x"], "patch"),
    ],
)
def test_a_bad_row_is_named(column: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_row(Row("rows.csv:7", {**GOOD_ROW, column: value}))
    assert "rows.csv:7" in str(caught.value)
    assert words in str(caught.value)


# Predictions.


@pytest.mark.parametrize("key", ["model_patch", "patch"])
@pytest.mark.parametrize("shape", ["jsonl", "list", "map", "plain-map"])
def test_predictions_in_every_shape(tmp_path: Path, shape: str, key: str) -> None:
    rows = [
        {"instance_id": "a", key: "diff\n", "model_name_or_path": "m", "full_output": "…"},
        {"instance_id": "b", key: None, "model_name_or_path": "m"},
    ]
    path = tmp_path / ("p.jsonl" if shape == "jsonl" else "p.json")
    document: Any = rows
    if shape == "map":
        document = {row["instance_id"]: {k: v for k, v in row.items() if k != "instance_id"} for row in rows}
    elif shape == "plain-map":
        document = {row["instance_id"]: row[key] for row in rows}
    path.write_text("\n".join(map(json.dumps, rows)) if shape == "jsonl" else json.dumps(document))
    found = load_predictions(path)
    model = None if shape == "plain-map" else "m"
    assert found == {"a": Prediction("a", "diff\n", model), "b": Prediction("b", "", model)}
    assert [one.empty for one in found.values()] == [False, True]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", '{"instance_id": "a", "model_patch": 3}\n', "p.jsonl:1 (a): model_patch should be a string"),
        ("p.jsonl", '{"model_patch": ""}\n', "p.jsonl:1: instance_id is missing"),
        ("p.jsonl", '{"instance_id": "a"}\n', "p.jsonl:1 (a): neither model_patch nor patch"),
        ("p.jsonl", '{"instance_id": "a", "patch": ""}\n' * 2, "p.jsonl:2: a second prediction for a"),
        ("p.jsonl", '{"instance_id": "a"}\n{"patch": ""}\n', "2 rows are wrong"),
        ("p.jsonl", "", "holds no predictions"),
        ("p.json", '{"a": 3}', "p.json key a: a prediction should be an object or a patch, not int"),
        ("p.json", "{", "p.json:1: not valid JSON"),
        ("p.csv", "a,b\n", "unknown kind of predictions file"),
    ],
)
def test_bad_predictions_are_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_predictions(tmp_path / name)
    assert words in str(caught.value)


def test_predictions_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_predictions(tmp_path / "p.jsonl")
