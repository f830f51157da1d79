"""The report as Markdown, for a pull request or a wiki: the same sections without pictures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from markupsafe import Markup

from proctor.analysis.report.assemble import after_matrix, before_matrix
from proctor.analysis.report.page import MARKS
from proctor.analysis.report.sections import Badge, Figure, Links, Named, Note, Table, Two
from proctor.common.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proctor.analysis.report.model import Mark, Report
    from proctor.analysis.report.sections import Section

_SPECIAL = re.compile(r"[\\`*_{}\[\]()#+!|~$:-]")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@&#8203;"}  # the last so that nobody is called
_TASKS = 200


def render_markdown(report: Report) -> str:
    """The report as GitHub-flavoured Markdown. Texts from records are escaped: they make no links, tags or mentions."""
    lines = [f"# {_escape(report.title)}", "", _escape(report.lead), ""]
    for section in before_matrix(report):
        lines += _section(section, report)
    lines += _matrix(report)
    for section in after_matrix(report):
        lines += _section(section, report)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section, report: Report) -> Iterator[str]:
    yield from (f"## {_escape(section.title)}", "")
    for part in section.parts:
        if isinstance(part, Table):
            yield from _table(part, report)
        elif isinstance(part, Note):
            yield from (f"- {_escape(part.text)}", "")
        elif isinstance(part, Figure):
            continue


def _table(table: Table, report: Report) -> Iterator[str]:
    kept = [place for place, column in enumerate(table.columns) if column.kind != "picture"]
    yield from (f"**{_escape(table.caption)}**", "")
    yield "| " + " | ".join(_escape(table.columns[place].name) for place in kept) + " |"
    yield "| " + " | ".join("---:" if table.columns[place].kind == "number" else "---" for place in kept) + " |"
    for row in table.rows:
        yield "| " + " | ".join(_cell(row[place], report) for place in kept) + " |"
    yield ""
    if table.note:
        yield from (_escape(table.note), "")


def _cell(value: object, report: Report) -> str:
    if isinstance(value, Two):
        return _escape(f"{value.main} ({value.sub})" if value.sub else value.main)
    if isinstance(value, Named):
        return _escape(value.name)
    if isinstance(value, Badge):
        return _escape(value.text)
    if isinstance(value, Links):
        names = [_escape(_name(number, report)) for number in value.numbers]
        return ", ".join(names) + (f" and {value.more} more" if value.more else "")
    return "" if isinstance(value, Markup) else _escape(str(value))


def _name(number: int, report: Report) -> str:
    for row in report.matrix.rows:
        for cell in row.cells:
            for mark in cell:
                if mark.number == number:
                    return mark.trial_id
    return ""


def _matrix(report: Report) -> Iterator[str]:
    matrix = report.matrix
    yield from ("## Tasks and attempts", "")
    yield "| task | " + " | ".join(_escape(agent) for agent in matrix.agents) + " |"
    yield "| --- |" + " --- |" * len(matrix.agents)
    for row in matrix.rows[:_TASKS]:
        yield f"| {_escape(row.task)} | " + " | ".join(_signs(cell) for cell in row.cells) + " |"
    left_out = matrix.left_out + max(0, len(matrix.rows) - _TASKS)
    legend = ", ".join(f"{MARKS[name][0]} {MARKS[name][1]}" for name in matrix.outcomes)
    more = f" {left_out:,} more tasks are in the numbers but not listed." if left_out else ""
    yield from ("", f"{legend}.{more}", "")


def _signs(cell: tuple[Mark, ...]) -> str:
    return " ".join(MARKS[mark.outcome][0] for mark in cell)


def _escape(text: str) -> str:
    """One line of Markdown that shows `text` as it is."""
    line = _SPECIAL.sub(r"\\\g<0>", " ".join(visible(text).split()))
    return "".join(_ENTITIES.get(character, character) for character in line)
