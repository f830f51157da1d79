"""The shape of `dataset.toml`: Harbor's manifest (schema 1.0) with paths, splits, weights and overlays."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from proctor.tasks.schema import Author, Name, Table


def _relative(value: str) -> str:
    if not value or value.startswith("/"):
        raise ValueError("should be a path relative to the dataset's file")
    return value


RelativePath = Annotated[str, AfterValidator(_relative)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class DatasetTable(Table):
    """`[dataset]`."""

    name: Name
    version: str | None = None
    description: str = ""
    authors: list[Author] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)


class TaskEntry(Table):
    """`[[tasks]]`: `path` is relative to the file and may lead out of its folder; `proctor` is merged over the task's
    own `[proctor]` table."""

    path: RelativePath
    name: str | None = None
    digest: Digest | None = None
    split: Literal["public", "held_out", "private"] = "public"
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    proctor: dict[str, Any] = Field(default_factory=dict)


class FileEntry(Table):
    """`[[files]]`: refused by name, since nothing here reads them."""

    path: Name
    digest: Digest | None = None


class UnrunnableEntry(Table):
    """`[[unrunnable]]`: a row that is known by name but has no environment."""

    name: Name
    reason: Name


class DatasetToml(Table):
    """The whole file."""

    schema_version: Literal["1.0"] = "1.0"
    dataset: DatasetTable
    tasks: list[TaskEntry] = Field(default_factory=list)
    files: list[FileEntry] = Field(default_factory=list)
    unrunnable: list[UnrunnableEntry] = Field(default_factory=list)
