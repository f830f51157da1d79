"""JUnit XML, which every CI system reads: an agent is a suite, a trial a case.

`unresolved`, `agent_limit` and `disqualified` are failures; `infra_error` and `verifier_error` are errors; what was
cancelled or never run is skipped. Nothing outside the denominator can look like a pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from proctor.analysis.frame import GRADED
from proctor.common.text import visible

if TYPE_CHECKING:
    import polars as pl

_ERRORS = ("infra_error", "verifier_error")


def render_junit(trials: pl.LazyFrame) -> str:
    """All trials as one JUnit document."""
    columns = ["run_id", "trial_id", "task", "agent", "attempt", "outcome", "detail", "stop", "wall_s", "condition"]
    frame = trials.select(columns).collect()
    root = ElementTree.Element("testsuites", {"name": "proctor", **_totals(frame)})
    for (agent,), rows in frame.partition_by("agent", as_dict=True, maintain_order=True).items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": visible(str(agent)), **_totals(rows)})
        for row in rows.sort("task", "run_id", "attempt").iter_rows(named=True):
            _case(suite, row)
    ElementTree.indent(root, space=" ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, row: dict[str, Any]) -> None:
    condition = "" if row["condition"] == "plain" else f" ({row['condition']})"
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=visible(f"{row['run_id']}.{row['agent']}"),
        name=visible(f"{row['task']} attempt {row['attempt']}{condition}"),
        time=_seconds(row["wall_s"]),
    )
    outcome = row["outcome"]
    if outcome == "resolved":
        return
    kind = "failure" if outcome in GRADED else "error" if outcome in _ERRORS else "skipped"
    said = visible(": ".join(part for part in (outcome, row["detail"]) if part))
    found = ElementTree.SubElement(case, kind, message=said)
    if kind != "skipped":
        found.set("type", outcome)
        found.text = visible(f"trial {row['trial_id']}, stopped: {row['stop'] or 'unknown'}")


def _totals(rows: pl.DataFrame) -> dict[str, str]:
    outcomes = rows["outcome"]
    failures = int((outcomes.is_in(GRADED) & (outcomes != "resolved")).sum())
    errors = int(outcomes.is_in(_ERRORS).sum())
    skipped = len(rows) - int(outcomes.is_in(GRADED).sum()) - errors
    return {
        "tests": str(len(rows)), "failures": str(failures), "errors": str(errors), "skipped": str(skipped),
        "time": _seconds(float(rows["wall_s"].sum())),
    }  # fmt: skip


def _seconds(value: float | None) -> str:
    return f"{value or 0.0:.3f}"
