"""Small pieces of text for people: durations, shares, and foreign text made safe to print."""

from __future__ import annotations

from proctor.common.text import visible

_HEAD_LINES, _TAIL_LINES, _WIDTH = 12, 6, 2000


def duration(seconds: float) -> str:
    """`75` as `1m15s`, `2.5` as `2.5s`, `0.025` as `25ms`."""
    if seconds < 1:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def percent(value: float | None) -> str:
    """`0.5` as `50.0 %`; unknown as `-`."""
    return "-" if value is None else f"{100 * value:.1f} %"


def safe(text: str) -> str:
    """Text with control characters, bidirectional overrides and lone surrogates as visible escapes, cut when very
    long.

    What came from a sandbox or a model must not be able to move the reader's cursor or recolour the page.
    """
    shown = visible(text)
    return shown if len(shown) <= _WIDTH else f"{shown[:_WIDTH]} … {len(shown) - _WIDTH} characters left out"


def shorten(text: str) -> list[str]:
    """The first and last lines of a text, each made safe to print, with a count of what is left out."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) > _HEAD_LINES + _TAIL_LINES + 1:
        left_out = len(lines) - _HEAD_LINES - _TAIL_LINES
        lines = [*lines[:_HEAD_LINES], f"… {left_out} lines left out …", *lines[-_TAIL_LINES:]]
    return [safe(line) for line in lines]


def brief(value: object, width: int = 60) -> str:
    """A value in at most about `width` characters on one line."""
    text = safe(value if isinstance(value, str) else str(value))
    return repr(text) if len(text) <= width else f"{text[:width]!r}…"


def quantity(name: str, value: object) -> str:
    """A measured value with its unit, which its name ends in: `memory_bytes 1048576` as `memory 1.0 MB`."""
    if isinstance(value, (int, float)) and name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes')} {value / (1 << 20):.1f} MB"
    if isinstance(value, (int, float)) and name.endswith("_s"):
        return f"{name.removesuffix('_s')} {duration(value)}"
    return f"{name.replace('_', ' ')} {value}"
