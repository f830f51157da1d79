"""Numbers that stand in a text and nowhere else: what an agent reports and no tool ever told it.

A guess, and named so: a number may have been worked out rightly in the head. So small whole numbers, years and what
follows from two numbers on record by one operation are not counted.
"""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\w,]|\.\d)|(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w]|\.\d)"
)
_PLAIN = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_MOST = 60
"""Numbers on record from which others may follow. With more of them, anything follows from some two; then none do."""


def claimed(text: str) -> list[str]:
    """The numbers of a text that say something: three significant digits or more, and no year or date."""
    found = []
    for match in _NUMBER.finditer(text):
        number = match.group()
        digits = re.sub(r"[^\d]", "", number).strip("0")
        is_year = re.fullmatch(r"(?:19|20)\d\d", number) is not None
        is_date = re.match(r"[-/:]\d", text[match.end() : match.end() + 2]) is not None
        if len(digits) >= 3 and not is_year and not is_date:
            found.append(number)
    return found


def values_in(text: str) -> set[float]:
    """Every number of a text by its value, however it is written."""
    plain = text.replace(",", "") if re.search(r"\d,\d{3}(?!\d)", text) else text
    values = {float(match) for source in {text, plain} for match in _PLAIN.findall(source)}
    return {value for value in values if math.isfinite(value)}


def unsupported(text: str, known: set[float]) -> list[str]:
    """The numbers of `text` that are not among `known`, do not round one of them, and follow from no two of them."""
    return [number for number in claimed(text) if not _follows(number, known)]


def _follows(number: str, known: set[float]) -> bool:
    value = abs(float(number.replace(",", "")))
    decimals = len(number.partition(".")[2])
    margin = 0.5 * 10**-decimals * (1 + 1e-9)
    # As it stands, as a share in percent or the reverse, or rounded.
    if any(abs(value - scale * one) <= margin for one in known for scale in (1, 100, 0.01)):
        return True
    some = sorted(known) if len(known) <= _MOST else []
    return any(
        abs(value - result) <= margin
        for place, one in enumerate(some)
        for other in some[place:]
        for result in (one + other, other - one, one * other, *_shares(one, other))
    )


def _shares(one: float, other: float) -> tuple[float, ...]:
    ratios = [a / b for a, b in ((one, other), (other, one)) if b]
    return tuple(scale * ratio for ratio in ratios for scale in (1, 100))
