"""An exam declared in a file, `run.toml`: models x harnesses x tasks x attempts, to be kept beside the results.

It says what the options of `proctor run` say, so a declared run and a typed one have the same lock. Paths are taken
from where the file is, so that it means the same wherever it is run from.
"""

from __future__ import annotations

import json
import os
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proctor.common import ConfigError
from proctor.runs.request import Request

if TYPE_CHECKING:
    from pathlib import Path


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class HarnessEntry(_Table):
    """One harness: what `--agent` takes as NAME, its label, and options of its own."""

    use: Annotated[str, Field(min_length=1)]
    label: str | None = None
    options: dict[str, Any] = {}


class Declaration(_Table):
    """The file. Every harness that needs a model is run with every model; every agent at every task, `attempts`
    times."""

    version: Literal[1] = 1
    tasks: Annotated[list[str], Field(min_length=1)]
    harnesses: Annotated[list[str | HarnessEntry], Field(min_length=1)]
    models: list[str] = []
    attempts: Annotated[int, Field(ge=1)] = 1
    seed: int = 0
    condition: str | None = None
    ablate: list[str] = []
    perturb: list[str] = []
    tool_faults: list[str] = []
    faults: list[str] = []
    allow_network: str | None = None
    """`asked`, or the path of a policy document."""
    select: list[str] = []
    split: Literal["public", "held_out", "private"] | None = None
    stop_when: str | None = None
    record_snapshots: Literal["every"] | Annotated[int, Field(ge=1)] | None = None
    gateway: str | None = None
    """A gateway's file; `models` are then names of models in it."""
    limits: dict[str, int | float] = {}
    options: dict[str, Any] = {}
    """For every harness that takes them."""


def read_declaration(path: Path) -> Request:
    """The request that a file declares. Raises ConfigError naming the file and the first thing wrong in it."""
    try:
        content = path.read_text(encoding="utf-8")
        declared = Declaration.model_validate(tomllib.loads(content))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"] if part != "HarnessEntry")
        raise ConfigError(first["msg"], field=f"{path}: {place}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"not TOML: {error}", field=str(path)) from error
    folder = path.resolve().parent
    harnesses = [HarnessEntry(use=one) if isinstance(one, str) else one for one in declared.harnesses]
    options = [_option("", key, value, folder) for key, value in declared.options.items()]
    for entry in harnesses:
        name = f"{entry.label or entry.use}."
        options += [_option(name, key, value, folder) for key, value in entry.options.items()]
    return Request(
        sources=tuple(os.path.normpath(folder / task) for task in declared.tasks),
        agents=tuple(
            f"{entry.label}={_path(entry.use, folder)}" if entry.label else _path(entry.use, folder)
            for entry in harnesses
        ),
        models=tuple(_path(model, folder) for model in declared.models),
        attempts=declared.attempts,
        limits=tuple(f"{name}={value}" for name, value in declared.limits.items()),
        options=tuple(options),
        select=tuple(declared.select),
        split=declared.split,
        seed=declared.seed,
        condition=declared.condition,
        ablate=tuple(_path(one, folder) for one in declared.ablate),
        perturb=tuple(declared.perturb),
        tool_faults=tuple(declared.tool_faults),
        faults=tuple(_path(one, folder) for one in declared.faults),
        allow_network=_path(declared.allow_network, folder) if declared.allow_network is not None else None,
        stop_when=declared.stop_when,
        record_snapshots=str(declared.record_snapshots) if declared.record_snapshots is not None else None,
        gateway=os.path.normpath(folder / declared.gateway) if declared.gateway is not None else None,
    )


def _option(prefix: str, key: str, value: Any, folder: Path) -> str:
    if "=" in key or "." in key:
        raise ConfigError("an option's name holds neither = nor .", field=f"options.{key}")
    return f"{prefix}{key}={json.dumps(_path(value, folder) if isinstance(value, str) else value)}"


def _path(text: str, folder: Path) -> str:
    """The path of something that exists beside the file, absolute; any other text as it is."""
    looks_like_path = os.sep in text or os.path.splitext(text)[1] != ""
    return os.path.normpath(folder / text) if looks_like_path and (folder / text).exists() else text
