"""Small pictures as inline SVG: no library, no script, no colour that a style sheet cannot change.

Every x is a percentage of the width, so that a picture fits a phone and a sheet of paper without shrinking its words.
Colours are classes (`c0` … `c7` for agents), so that light, dark and print each have their own. Each picture stands
beside a table with the same numbers; where it says more than one cell of it, it carries a title and a description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from proctor.common.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

COLOURS = 8
_ROW = 22


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to percentages of the width."""

    low: float
    high: float

    def x(self, value: float) -> str:
        """The place of a value, cut to the picture."""
        span = (self.high - self.low) or 1.0
        return f"{min(100.0, max(0.0, 100 * (value - self.low) / span)):.2f}%"


UNIT = Scale(0.0, 1.0)


def symmetric(values: Iterable[float | None]) -> Scale:
    """A scale around zero that holds all values, its ends a round number; [-1, 1] at most when they are."""
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=1.0)
    end = nice(largest) or 1.0
    return Scale(-end, end)


def nice(value: float) -> float:
    """The smallest round number that is not below `value`."""
    if value <= 0 or not math.isfinite(value):
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(
        (step * unit for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8) if step * unit >= value * (1 - 1e-9)), 10 * unit
    )


def element(name: str, *inner: Markup | str, **attributes: object) -> Markup:
    """One SVG element. `class_` becomes class, underscores become hyphens; texts are escaped."""
    shown = Markup("").join(
        Markup(' {}="{}"').format(_attribute(key), visible(str(value)))
        for key, value in attributes.items()
        if value is not None
    )
    body = Markup("").join(item if isinstance(item, Markup) else escape(visible(item)) for item in inner)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), shown, body)


def _attribute(key: str) -> Markup:
    return Markup(key.rstrip("_").replace("_", "-"))


def interval_bar(
    point: float, low: float, high: float, *, scale: Scale = UNIT, colour: int | None = None, zero: bool = False
) -> Markup:
    """A dot with its interval, as wide as its cell. Decorative: the numbers stand in the same row."""
    tone = f" c{colour % COLOURS}" if colour is not None else ""
    middle = _ROW / 2
    parts = [element("line", x1="0%", x2="100%", y1=middle, y2=middle, class_="rail")]
    parts += [
        element("line", x1=scale.x(tick), x2=scale.x(tick), y1=3, y2=_ROW - 3, class_="zero" if zero else "tick")
        for tick in ([0.0] if zero else [0.25, 0.5, 0.75])
    ]
    parts.append(element("line", x1=scale.x(low), x2=scale.x(high), y1=middle, y2=middle, class_=f"span{tone}"))
    for end in (low, high):
        parts.append(element("line", x1=scale.x(end), x2=scale.x(end), y1=middle - 4, y2=middle + 4,
                             class_=f"span{tone}"))  # fmt: skip
    parts.append(element("circle", cx=scale.x(point), cy=middle, r=4.5, class_=f"dot{tone}"))
    return element("svg", *parts, class_="bar", height=_ROW, aria_hidden="true", focusable="false")


def axis(labels: Sequence[tuple[float, str]], scale: Scale = UNIT) -> Markup:
    """The labels of a column of interval bars."""
    parts = []
    for value, label in labels:
        place = scale.x(value)
        anchor = "start" if place == "0.00%" else "end" if place == "100.00%" else "middle"
        parts.append(element("text", label, x=place, y=11, text_anchor=anchor, class_="label"))
    return element("svg", *parts, class_="bar", height=14, aria_hidden="true", focusable="false")


def stacked_bar(parts: Sequence[tuple[str, int]]) -> Markup:
    """Shares of a whole, each a class (an outcome) and a count. Decorative."""
    total = sum(count for _, count in parts) or 1
    drawn, begin = [], 0.0
    for name, count in parts:
        width = 100 * count / total
        if count:
            drawn.append(element("rect", x=f"{begin:.3f}%", width=f"{width:.3f}%", y=3, height=_ROW - 6,
                                 class_=f"o-{name}"))  # fmt: skip
        begin += width
    return element("svg", *drawn, class_="bar stack", height=_ROW, aria_hidden="true", focusable="false")


def count_bar(count: int, most: int) -> Markup:
    """One horizontal bar. Decorative."""
    width = f"{100 * count / most if most else 0:.2f}%"
    return element("svg", element("rect", x="0%", width=width, y=4, height=_ROW - 8, rx=2, class_="count"),
                   class_="bar", height=_ROW, aria_hidden="true", focusable="false")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: points (x, y, low, high)."""

    name: str
    colour: int
    points: tuple[tuple[float, float, float, float], ...]
    dashed: bool = False


_HEIGHT = 240


def curves(title: str, description: str, series: Sequence[Series], ticks: Sequence[float], x_label: str) -> Markup:
    """Rates (0 to 1) over a whole number such as k: solid and dashed lines with their intervals."""
    scale = Scale(min(ticks), max(ticks))
    parts: list[Markup] = [*_rate_grid()]
    parts += [
        element("text", f"{tick:g}", x=scale.x(tick), y=_HEIGHT + 18, text_anchor="middle", class_="label")
        for tick in ticks
    ]
    parts.append(element("text", x_label, x="50%", y=_HEIGHT + 38, text_anchor="middle", class_="label"))
    for place, line in enumerate(series):
        tone = f"c{line.colour % COLOURS}" + (" dashed" if line.dashed else "")
        drawn: list[Markup] = []
        for one, other in zip(line.points, line.points[1:], strict=False):
            drawn.append(element("line", x1=scale.x(one[0]), y1=_y(one[1]), x2=scale.x(other[0]), y2=_y(other[1]),
                                 class_=f"line {tone}"))  # fmt: skip
        for x, y, low, high in line.points:
            drawn.append(element("line", x1=scale.x(x), x2=scale.x(x), y1=_y(low), y2=_y(high),
                                 class_=f"whisker {tone}"))  # fmt: skip
            drawn.append(_marker(scale.x(x), _y(y), line.colour, hollow=line.dashed))
        # A few pixels aside, so that one interval does not hide another.
        aside = 4 * (place - (len(series) - 1) / 2)
        parts.append(element("g", *drawn, transform=f"translate({aside:g} 0)"))
    return _chart(title, description, parts)


@dataclass(frozen=True, slots=True)
class Spot:
    """One agent between cost and success: (x, low, high), (y, low, high)."""

    name: str
    colour: int
    x: tuple[float, float, float]
    y: tuple[float, float, float]


def scatter(title: str, description: str, spots: Sequence[Spot], x_label: str, ticks: Callable[[float], str]) -> Markup:
    """Success (0 to 1) against a cost, with both intervals. Names stand beside their dots without covering each
    other."""
    finite = [value for spot in spots for value in spot.x if math.isfinite(value)]
    end = nice(min(max(finite, default=1.0), 2.5 * max((spot.x[0] for spot in spots), default=1.0))) or 1.0
    scale = Scale(0.0, end)
    parts: list[Markup] = [*_rate_grid()]
    parts += [
        element(
            "text",
            ticks(end * share),
            x=f"{100 * share:g}%",
            y=_HEIGHT + 18,
            text_anchor="end" if share == 1 else "middle",
            class_="label",
        )
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    parts.append(element("text", x_label, x="50%", y=_HEIGHT + 38, text_anchor="middle", class_="label"))
    taken: list[float] = []
    for spot in sorted(spots, key=lambda one: -one.y[0]):
        tone = f"c{spot.colour % COLOURS}"
        x, y = scale.x(spot.x[0]), _y(spot.y[0])
        parts.append(element("line", x1=scale.x(spot.x[1]), x2=scale.x(spot.x[2]), y1=y, y2=y,
                             class_=f"whisker {tone}"))  # fmt: skip
        parts.append(element("line", x1=x, x2=x, y1=_y(spot.y[1]), y2=_y(spot.y[2]), class_=f"whisker {tone}"))
        parts.append(_marker(x, y, spot.colour))
        at = y - 8
        while any(abs(at - other) < 15 for other in taken):
            at += 3
        taken.append(at)
        left = spot.x[0] / end > 0.6
        parts.append(element("text", cut(spot.name, 28), x=x, dx=-9 if left else 9, y=at,
                             text_anchor="end" if left else "start", class_=f"name {tone}"))  # fmt: skip
    return _chart(title, description, parts)


def _chart(title: str, description: str, parts: Sequence[Markup]) -> Markup:
    return element("svg", element("title", title), element("desc", description), *parts,
                   class_="chart", height=_HEIGHT + 46, role="img")  # fmt: skip


def _rate_grid() -> Iterable[Markup]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        yield element("line", x1="0%", x2="100%", y1=y, y2=y, class_="grid")
        yield element("text", f"{100 * share:g} %", x=-8, y=y + 4, text_anchor="end", class_="label")


def _y(rate: float) -> float:
    return round(8 + (_HEIGHT - 16) * (1 - rate), 2)


def _marker(x: str, y: float, colour: int, *, hollow: bool = False) -> Markup:
    tone = f"c{colour % COLOURS}" + (" hollow" if hollow else "")
    if is_square(colour):
        return element("svg", element("rect", x=-4.5, y=-4.5, width=9, height=9, class_=f"dot {tone}"), x=x, y=y,
                       overflow="visible")  # fmt: skip
    return element("circle", cx=x, cy=y, r=5, class_=f"dot {tone}")


def is_square(colour: int) -> bool:
    """Agents differ by shape as well as by colour: discs and squares in turn, the other way round from the ninth on."""
    return (colour + colour // COLOURS) % 2 == 1


def short(value: float) -> str:
    """A number in few characters: 1250000 as `1.25M`, 0.0042 as `0.0042`."""
    if not math.isfinite(value):
        return "∞"
    for unit, name in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cut(text: str, width: int) -> str:
    """At most `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"
