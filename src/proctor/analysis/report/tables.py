"""The forms for programs: CSV with a row for each trial, JSON with everything that the page shows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from proctor.analysis.aggregate import as_json

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from proctor.analysis.report.model import Report


def write_csv(trials: pl.LazyFrame, path: Path) -> None:
    """One row for each planned trial; lists are joined by spaces, unknown is empty.

    A text that a spreadsheet would take for a formula gets an apostrophe before it: names and details are from records.
    """
    import polars as pl
    import polars.selectors as cs

    text = cs.string()
    guarded = pl.when(text.str.contains(r"^[=+\-@\t\r]")).then(pl.lit("'") + text).otherwise(text).name.keep()
    frame = trials.drop("record").with_columns(cs.list().list.join(" ")).with_columns(guarded)
    frame.sink_csv(path, mkdir=True)


def render_json(report: Report) -> str:
    """The whole report as one JSON document, `version` 1; what is unknown or infinite is null."""
    document = {
        "version": 1,
        "title": report.title,
        "lead": report.lead,
        "trust": as_json(report.trust),
        "aggregate": as_json(report.aggregate),
        "comparison": report.comparison.as_json() if report.comparison is not None else None,
        "matrix": as_json(report.matrix),
        "causes": as_json(report.causes),
        "drift": report.drift.as_json() if report.drift is not None else None,
        "crossed": report.crossed.as_json() if report.crossed is not None else None,
        "absent": as_json(report.absent),
    }
    return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
