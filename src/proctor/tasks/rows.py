"""Rows of a dataset from JSON, JSONL, CSV or Parquet, each with the place it came from."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.common import ConfigError
from proctor.tasks.io_errors import clear_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROW_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `where` is `file:line` for text formats and `file row N` (from 1) otherwise."""

    where: str
    data: dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Every row of a file, by its suffix (.json, .jsonl, .csv, .parquet).

    JSON may be a list of rows, one row, or a map from a name to rows; a map's key is not used.
    Raises ConfigError naming file and row for the first row that cannot be read: a file with one bad row is
    not read in part.
    """
    if not path.is_file():
        raise ConfigError("no such file", field=str(path))
    reader = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}.get(path.suffix.lower())
    if reader is None:
        raise ConfigError("unknown kind of row file", field=str(path), remedy=f"one of {', '.join(ROW_SUFFIXES)}")
    with clear_errors("read the rows", path):
        return list(reader(path))


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError("not UTF-8 text", field=f"{path}:{line}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"a row should be a JSON object, not {type(value).__name__}", field=where)
    return value


def _json(path: Path) -> Iterator[Row]:
    try:
        value = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _json_error(error, path, 0) from error
    if isinstance(value, dict) and "instance_id" not in value and all(isinstance(v, dict) for v in value.values()):
        value = list(value.values())
    for number, one in enumerate(value if isinstance(value, list) else [value], 1):
        where = f"{path} row {number}"
        yield Row(where, _object(one, where))


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(io.StringIO(_text(path)), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _json_error(error, path, number) from error
        yield Row(where, _object(value, where))


def _json_error(error: Exception, path: Path, line: int) -> ConfigError:
    message = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
    number = line or getattr(error, "lineno", 0)
    return ConfigError(f"not valid JSON: {message}", field=f"{path}:{number}" if number else str(path))


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # patches and logs exceed the module's default of 128 KiB
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    start = 1
    try:
        if not reader.fieldnames:
            raise ConfigError("has no header line", field=str(path))
        start = reader.line_num + 1
        for record in reader:
            where = f"{path}:{start}"
            start = reader.line_num + 1
            if None in record or None in record.values():
                raise ConfigError(f"the row should have {len(reader.fieldnames)} columns", field=where)
            yield Row(where, dict(record))
    except csv.Error as error:
        raise ConfigError(f"not valid CSV: {error}", field=f"{path}:{start}") from error


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        remedy = "pip install 'proctor[parquet]', or convert it to JSONL"
        raise ConfigError("Parquet needs the package pyarrow", field=str(path), remedy=remedy) from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"not a readable Parquet file: {error}", field=str(path)) from error
    for number, one in enumerate(rows, 1):
        yield Row(f"{path} row {number}", one)
