"""The report as one HTML file, and the pages of trials: jinja2 templates with autoescape, nothing from any network.

Every text that a record holds is hostile. Three things keep it a text: jinja2 escapes whatever is printed, `visible`
shows control and bidirectional characters, and a content security policy allows exactly our own style and script (by
digest), so that even markup that got through could neither run nor load anything.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from proctor.analysis.report.assemble import after_matrix, before_matrix
from proctor.analysis.report.charts import COLOURS, element, is_square
from proctor.analysis.report.sections import Badge, Figure, Links, Named, Table, Two
from proctor.common.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import jinja2

    from proctor.analysis.report.model import Mark, Report, Story

MARKS = {
    "resolved": ("✓", "resolved"),
    "unresolved": ("✗", "unresolved"),
    "agent_limit": ("L", "limit of the agent fired"),
    "disqualified": ("D", "disqualified"),
    "infra_error": ("I", "infrastructure error"),
    "verifier_error": ("V", "verifier error"),
    "cancelled": ("-", "cancelled"),
    "stopped": ("s", "left out by a stopping rule"),
    "planned": ("·", "not run"),
    "unrunnable": ("u", "cannot be run here"),
}
"""Outcome -> its mark and its words."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Where the pages of trials are: in the page (`stories`), in `folder` beside it, or nowhere."""

    stories: Mapping[int, Story]
    folder: str | None = None

    def href(self, mark: Mark) -> str | None:
        """The link of a trial's page, relative to the report."""
        if not mark.story:
            return None
        return f"#t{mark.number}" if self.folder is None else f"{quote(self.folder)}/{file_name(mark.number)}"


def file_name(number: int) -> str:
    """The name of a trial's page. A number, since names of trials are not ours."""
    return f"{number:05d}.html"


def render_page(report: Report, trials: Trials) -> str:
    """The report as one HTML document."""
    environment = _environment()
    marks = {mark.number: (mark, row.task, report.matrix.agents[place])
             for row in report.matrix.rows for place, cell in enumerate(row.cells) for mark in cell}  # fmt: skip
    return environment.get_template("report.html.j2").render(
        report=report,
        before=before_matrix(report),
        after=after_matrix(report),
        matrix=Markup("").join(_matrix_rows(report, trials)),
        legend=[(name, *MARKS[name]) for name in report.matrix.outcomes],
        marks=marks,
        trials=trials,
        **_assets(whole=True),
    )


def render_trial(story: Story, back: str) -> str:
    """The page of one trial, with a link `back` to the report."""
    return _environment().get_template("trial.html.j2").render(story=story, back=quote(back), **_assets(whole=False))


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("proctor.analysis.report", "assets"),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(marks_of=MARKS, symbol=symbol)
    kinds = {"a_table": Table, "a_figure": Figure, "two": Two, "badge": Badge, "links": Links, "named": Named}
    environment.tests.update({name: _is(kind) for name, kind in kinds.items()})
    return environment


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def _shown(value: Any) -> Any:
    """Whatever a template prints: markup of ours as it is, everything else without invisible characters."""
    if isinstance(value, Markup):
        return value
    return visible(value) if isinstance(value, str) else "" if value is None else visible(str(value))


def symbol(colour: int, dashed: bool = False) -> Markup:
    """The dot or square that stands for an agent in figures."""
    tone = f"dot c{colour % COLOURS}" + (" hollow" if dashed else "")
    inner = element("rect", x=1.5, y=1.5, width=9, height=9, class_=tone) if is_square(colour) else element(
        "circle", cx=6, cy=6, r=5, class_=tone)  # fmt: skip
    return element("svg", inner, class_="symbol", width=12, height=12, aria_hidden="true", focusable="false")


def _matrix_rows(report: Report, trials: Trials) -> Iterator[Markup]:
    """The body of the matrix, written directly: there may be tens of thousands of marks."""
    row_head = Markup('<tr data-d="{}" data-u="{}"><th scope="row">{}</th>')
    linked = Markup('<a class="m o-{}" href="{}" aria-label="attempt {}: {}">{}</a>')
    unlinked = Markup('<span class="m o-{}" role="img" aria-label="attempt {}: {}">{}</span>')
    for row in report.matrix.rows:
        yield row_head.format(int(row.differs), int(row.unsolved), visible(row.task))
        for cell in row.cells:
            yield Markup("<td>")
            for mark in cell:
                sign, words = MARKS[mark.outcome]
                if mark.condition != "plain":
                    words = f"{words}, {visible(mark.condition)}"
                href = trials.href(mark)
                if href is None:
                    yield unlinked.format(mark.outcome, mark.attempt, words, sign)
                else:
                    yield linked.format(mark.outcome, href, mark.attempt, words, sign)
            yield Markup("</td>")
        yield Markup("</tr>\n")


@functools.cache
def _assets(*, whole: bool) -> dict[str, Any]:
    """Style and script with their digests; a page of a trial has the common style only, since there may be many."""
    style = _asset("page.css") + (_asset("report.css") if whole else "")
    script = _asset("report.js") if whole else ""
    return {"style": Markup(style), "script": Markup(script),
            "style_digest": _csp_digest(style), "script_digest": _csp_digest(script)}  # fmt: skip


def _asset(name: str) -> str:
    return (resources.files("proctor.analysis.report") / "assets" / name).read_text(encoding="utf-8")


def _csp_digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
