"""The order of a report's sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proctor.analysis.report import agents, closing, overview

if TYPE_CHECKING:
    from proctor.analysis.report.model import Report
    from proctor.analysis.report.sections import Section

MATRIX = "matrix"
"""The section before which the matrix stands; it is drawn by each renderer."""


def before_matrix(report: Report) -> list[Section]:
    """What comes before the matrix."""
    return [overview.headline(report), overview.trust(report), overview.endings(report)]


def after_matrix(report: Report) -> list[Section]:
    """What comes after it."""
    found = [
        overview.comparison(report),
        agents.repeats(report),
        agents.economy(report),
        agents.groups(report),
        agents.holds(report),
        closing.crossed(report),
        closing.causes(report),
        closing.drift(report),
        closing.provenance(report),
    ]
    return [section for section in found if section is not None]
