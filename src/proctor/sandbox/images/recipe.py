"""`recipe.toml`: our own build format, as a value.

A recipe says which image it starts from, which Python it wants, and steps; each step is one layer. See docs/images.md.
"""

from __future__ import annotations

import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from proctor.common import ConfigError
from proctor.sandbox.images.manifest import AbsolutePath, absolute_path

KINDS = ("run", "copy", "unpack", "git", "write")


def _inside_name(value: str) -> str:
    """A path below the recipe's own directory."""
    path = PurePosixPath(value)
    if not value or path.is_absolute() or ".." in path.parts or "\0" in value:
        raise ValueError(f"{value!r} does not stay below the recipe's directory")
    return value


RelativePath = Annotated[str, AfterValidator(_inside_name)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Copy(_Table):
    """A file, or a directory's content, from beside the recipe; with `image`, from another image (absolute, real
    path)."""

    source: str = Field(alias="from")
    to: AbsolutePath
    image: str | None = None

    @model_validator(mode="after")
    def _source_fits(self) -> Copy:
        if self.image is None:
            _inside_name(self.source)
        elif ".." in PurePosixPath(absolute_path(self.source)).parts:
            raise ValueError(f"{self.source!r} climbs")
        return self


class Unpack(_Table):
    """An archive from beside the recipe (.tar, .tar.gz, .tar.zst, .tar.xz); its digest is part of the recipe."""

    archive: RelativePath
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    to: AbsolutePath


class Git(_Table):
    """Make `path` a repository with one commit of everything in it, by a fixed author at a fixed time."""

    path: AbsolutePath
    message: str = "base"


class Write(_Table):
    """A small file."""

    path: AbsolutePath
    text: str
    mode: str = Field(default="0644", pattern=r"^0?[0-7]{3,4}$")


class Step(_Table):
    """Exactly one of the five; `cwd` and `env` belong to `run` and hold while building only."""

    run: str | None = None
    copy_: Copy | None = Field(default=None, alias="copy")
    unpack: Unpack | None = None
    git: Git | None = None
    write: Write | None = None
    cwd: AbsolutePath | None = None
    env: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _exactly_one(self) -> Step:
        given = [kind for kind in KINDS if getattr(self, "copy_" if kind == "copy" else kind) is not None]
        if len(given) != 1:
            raise ValueError(f"a step has exactly one of {', '.join(KINDS)}; this one has {', '.join(given) or 'none'}")
        if given != ["run"] and (self.cwd is not None or self.env):
            raise ValueError("cwd and env belong to run steps")
        return self

    @property
    def title(self) -> str:
        """One line for progress."""
        if self.run is not None:
            return f"run {' '.join(self.run.split())[:100]}"
        if self.copy_ is not None:
            return f"copy {self.copy_.source} to {self.copy_.to}"
        if self.unpack is not None:
            return f"unpack {self.unpack.archive} to {self.unpack.to}"
        if self.git is not None:
            return f"git repository at {self.git.path}"
        assert self.write is not None
        return f"write {self.write.path}"


class Recipe(_Table):
    """A whole recipe."""

    schema_version: Literal[1] = Field(alias="schema")
    base: str | None = None
    python: str | None = Field(default=None, pattern=r"^\d+\.\d+(\.\d+)?$")
    workdir: AbsolutePath = "/"
    user: str = "root"
    env: dict[str, str] = Field(default_factory=dict)
    run_env: dict[str, str] = Field(default_factory=dict)
    """Of the image, but not of steps that build on it: what would keep them from reaching a package registry."""
    steps: tuple[Step, ...] = Field(default=(), alias="step")

    @model_validator(mode="after")
    def _has_base(self) -> Recipe:
        if self.base is None and self.python is None:
            raise ValueError("a recipe needs base, python, or both")
        return self


def parse_recipe(document: dict[str, Any], *, name: str) -> Recipe:
    """Check a decoded recipe; ConfigError names the first wrong key."""
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise ConfigError(first["msg"], field=f"{name}: {where}", remedy="docs/images.md has the format") from error


def load_recipe(path: Path) -> Recipe:
    """Read and check `recipe.toml`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe: {error.strerror}", field=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a TOML file: {error}", field=str(path)) from error
    return parse_recipe(document, name=path.name)
