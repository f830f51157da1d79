"""Records of runs, or Parquet files of the same columns, as one trials frame (`proctor.analysis.frame.TRIALS`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import polars as pl

    from proctor.analysis.provenance import Input


@dataclass(frozen=True, slots=True)
class LoadedTrials:
    """Trials with where they came from. `trials` is lazy: Parquet is read only as far as it is used."""

    trials: pl.LazyFrame
    inputs: tuple[Input, ...]


def load_trials(paths: Iterable[Path]) -> LoadedTrials:
    """Run directories and Parquet files, mixed as you like. Raises ConfigError naming what is wrong with which."""
    raise NotImplementedError
