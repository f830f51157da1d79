"""The parts that a report is put together from: sections of sentences, tables and figures.

A table is described once and rendered by each format: as HTML with its pictures, as Markdown without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proctor.analysis.report.charts import short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from proctor.analysis.proportions import Interval
    from proctor.analysis.report.model import Tone

Kind = Literal["text", "number", "picture"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column. A `picture` column has an axis instead of a name, and is left out where there are no pictures."""

    name: str
    kind: Kind = "text"
    axis: Markup | None = None


@dataclass(frozen=True, slots=True)
class Two:
    """A cell with a second, quieter line."""

    main: str
    sub: str


@dataclass(frozen=True, slots=True)
class Badge:
    """A word with a tone; the word says it all, the colour only repeats it."""

    text: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class Links:
    """Trials by their numbers in the matrix, and how many more there are."""

    numbers: tuple[int, ...]
    more: int = 0


@dataclass(frozen=True, slots=True)
class Named:
    """The name of an agent with the colour and shape that its lines and dots have in figures."""

    name: str
    colour: int
    sub: str = ""


Content = "str | Markup | Two | Badge | Links | Named"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns; the first cell of a row is its header."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[object, ...], ...]
    note: str = ""

    @property
    def pictured(self) -> bool:
        """It has a column of pictures, which wants all the width there is."""
        return any(column.kind == "picture" for column in self.columns)

    @property
    def brief(self) -> bool:
        """It fits on a sheet of paper, and should not be torn apart there."""
        return len(self.rows) <= 12

    @property
    def stacks(self) -> bool:
        """It is too wide for a phone, where each row is shown as a card."""
        return len(self.columns) > 3

    @property
    def spans(self) -> tuple[int, ...]:
        """For each row how many rows its first cell heads: 0 where the row above has the same one."""
        spans: list[int] = []
        start = 0
        for number, row in enumerate(self.rows):
            if number and row[0] == self.rows[number - 1][0]:
                spans[start] += 1
                spans.append(0)
            else:
                start = number
                spans.append(1)
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with a caption and a legend of (name, colour, dashed)."""

    picture: Markup
    caption: str
    legend: tuple[tuple[str, int, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph with a tone."""

    text: str
    tone: Tone = "quiet"


@dataclass(frozen=True, slots=True)
class Section:
    """One section. `folded` sections are closed until they are asked for."""

    key: str
    title: str
    parts: tuple[Table | Figure | Note, ...]
    folded: bool = False


def percent(value: float | None) -> str:
    """0.667 as `66.7 %`; None as `unknown`."""
    return "unknown" if value is None else f"{100 * value:.1f} %"


def points(value: float) -> str:
    """A difference of rates in percentage points: 0.05 as `+5.0`."""
    return f"{100 * value:+.1f}"


def span(interval: Interval | None) -> str:
    """The ends of a rate's interval: `12.1 to 64.6 %`."""
    return "unknown" if interval is None else f"{100 * interval.low:.1f} to {100 * interval.high:.1f} %"


def point_span(low: float, high: float) -> str:
    """The ends of a difference's interval, in points."""
    return f"{points(low)} to {points(high)}"


def amount(value: float | None, measure: str) -> str:
    """A quantity with its unit: `cost_usd`, `wall_s`, `cpu_s` have one."""
    if value is None:
        return "unknown"
    if measure == "cost_usd":
        return f"${value:.4f}" if abs(value) < 1 else f"${short(value)}"
    if measure.endswith("_s"):
        return f"{value * 1000:.3g} ms" if value < 1 else f"{short(value)} s"
    return short(value)


def probability(p: float) -> str:
    """A p-value to two digits; never `0`."""
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 task`, `2 tasks`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def grouped(lines: Sequence[tuple[str, str]], agents: int) -> list[str]:
    """Lines of agents, those that are the same put together: `one, two: only 9 tasks`."""
    found = []
    for line in dict.fromkeys(line for _, line in lines):
        who = [agent for agent, said in lines if said == line]
        found.append(f"{'all agents' if len(who) == agents > 1 else ', '.join(who)}: {line}")
    return found


def reasons(counts: object) -> str:
    """{"infra_error": 2} as `2 infra_error`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) if isinstance(counts, dict) else ""
