"""What a number needs to be computed again: inputs by digest, the formula by id, seed, level, version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Input:
    """One thing that trials were read from.

    `digest` is the head of the ledger for a run (it covers every planned trial and the digest of every record), the
    digest of the bytes for a Parquet file. `lock` is the digest of `run.json`. `damage` says what is wrong with the
    ledger, if anything is.
    """

    kind: Literal["run", "parquet"]
    name: str
    path: str
    digest: str
    trials: int
    lock: str | None = None
    damage: str | None = None
    unrunnable: int = 0
    """Tasks of the dataset that could not be run there at all; no trial was planned for them."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a set of numbers was computed. `formulas` explains every formula id that occurs beside them."""

    version: str
    inputs: tuple[Input, ...]
    level: float
    seed: int
    resamples: int
    formulas: Mapping[str, str] = field(default_factory=dict)
