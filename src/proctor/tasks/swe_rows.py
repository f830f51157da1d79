"""SWE-bench rows, classic and 5.x, and the environment recipe beside one: read strictly, named in errors.

What real rows look like, and what they do to a naive reader, is told in docs/tasks.md.
"""

from __future__ import annotations

import ast
import datetime
import io
import json
import re
import tokenize
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from proctor.common import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.tasks.rows import Row

_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_INSTANCE_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

# Columns that other spellings of the same dataset use (SWE-bench Pro writes its lists in lower case).
_SPELLINGS = {"fail_to_pass": "FAIL_TO_PASS", "pass_to_pass": "PASS_TO_PASS"}
LOG_FORMATS = {
    "parse_log_pytest": ("pytest", "pytest-rA"),
    "parse_log_pytest_v2": ("pytest", "pytest-rA-v2"),
    "parse_log_pytest_options": ("pytest", "pytest-rA-options"),
    "parse_log_seaborn": ("pytest", "pytest-rA-passed"),
    "parse_log_django": ("django", "django-runtests-verbosity2"),
    "parse_log_sympy": ("sympy", "sympy-bin-test-verbose"),
}
"""Log parsers of SWE-bench 5.x that we know: (runner, our name of the log format)."""


def id_list(value: Any) -> list[str]:
    """A list of test ids written as a list, a JSON string or a Python literal.

    Raises ValueError for anything else, and for a printed array without commas (`['a' 'b']`), which Python
    would read as one joined string.
    """
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = _python_list(text)
    if isinstance(value, tuple):
        value = list(value)
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError("should be a list of test ids, as a list, a JSON string or a Python literal")
    return list(dict.fromkeys(value))


def _python_list(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("is neither a JSON list nor a Python list") from error
    strings = sum(token.type == tokenize.STRING for token in tokenize.generate_tokens(io.StringIO(text).readline))
    if isinstance(value, list | tuple) and strings != len(value):
        raise ValueError("has strings without commas between them (a printed array, not a list)")
    return value


class SweRow(BaseModel):
    """One instance. Columns that we do not use are kept by name only, in `unused`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    instance_id: Annotated[str, Field(pattern=_INSTANCE_ID)]
    repo: Annotated[str, Field(min_length=1)]
    base_commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,64}$")] | None = None
    patch: str | None = None
    test_patch: str = ""
    problem_statement: Annotated[str, Field(pattern=r"\S")]
    FAIL_TO_PASS: list[str]
    PASS_TO_PASS: list[str]
    version: str | None = None
    created_at: str | None = None
    difficulty: str | None = None
    image: str | None = None
    log_parser: str | None = None
    eval_type: str | None = None
    eval_script: str | None = None

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="before")
    @classmethod
    def _ids(cls, value: Any) -> list[str]:
        return id_list(value)

    @field_validator("created_at", "version", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Some copies of the dataset hold times and version numbers as such."""
        if hasattr(value, "isoformat"):
            return value.isoformat()
        return str(value) if isinstance(value, int | float) else value

    @property
    def date(self) -> str | None:
        """`created_at` when it is in ISO 8601."""
        try:
            datetime.datetime.fromisoformat(self.created_at or "")
        except ValueError:
            return None
        return self.created_at

    @property
    def unused(self) -> list[str]:
        """Names of columns that play no part here (`hints_text`, …)."""
        return sorted(self.model_extra or ())


class Archive(BaseModel):
    """The repository at the base commit, as one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.tar(\.zst|\.gz)?$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: int | None = None
    made_by: str | None = None
    dropped: list[str] = []


class EnvRecipe(BaseModel):
    """`env.json`: how the environment of one instance is made and how its tests are run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance_id: str
    repo: str
    base_commit: str
    dataset: str | None = None
    row_source: str | None = None
    python: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)?$")]
    python_series: str | None = None
    pip: Annotated[str, Field(pattern=r"^[0-9][0-9a-z.]*$")] | None = None
    requirements: list[str]
    environment: dict[str, str] = {}
    install_commands: list[str] = []
    test_command: Annotated[str, Field(min_length=1)]
    test_files_in_test_patch: list[str] = []
    log_format: str
    upstream_spec: dict[str, Any] = {}
    network: str | None = None
    archive: Archive
    apply: str | None = None
    notes: list[str] = []

    @field_validator("requirements")
    @classmethod
    def _pinned(cls, value: list[str]) -> list[str]:
        for one in value:
            if not _PIN.fullmatch(one):
                raise ValueError(f"{one!r} is not an exact pin (name==version)")
        return value

    @property
    def series(self) -> str:
        """The Python series, `3.11` of `3.11.7`."""
        return ".".join(self.python.split(".")[:2])


def parse_row(row: Row) -> SweRow:
    """Check one row. Raises ConfigError naming the row and the first column that is wrong."""
    data = {_SPELLINGS.get(name, name): value for name, value in row.data.items() if not _is_null(value)}
    try:
        return SweRow.model_validate(data)
    except ValidationError as error:
        raise _named(error, row.where, data.get("instance_id")) from error


def _is_null(value: Any) -> bool:
    """How files without a null spell one: an empty cell, or NaN from a data frame."""
    return value is None or value == "" or (isinstance(value, float) and value != value)


def parse_env(path: Path) -> EnvRecipe:
    """Read an `env.json`. Raises ConfigError naming the file and the field."""
    try:
        data = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid JSON: {error}", field=str(path)) from error
    try:
        return EnvRecipe.model_validate(data)
    except ValidationError as error:
        raise _named(error, str(path), None) from error


def _named(error: ValidationError, where: str, name: Any) -> ConfigError:
    detail = error.errors(include_url=False)
    first = detail[0]
    column = ".".join(str(part) for part in first["loc"])
    message = "is missing" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
    more = f"; and {len(detail) - 1} more" if len(detail) > 1 else ""
    instance = f" ({name})" if isinstance(name, str) else ""
    return ConfigError(f"{column}: {message}{more}", field=f"{where}{instance}")
