"""Durations as text."""

import re

UNITS = {"h": 3600, "m": 60, "s": 1}


def parse_duration(text):
    """Seconds of a text such as `1h 30m`."""
    return sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)\s*([hms])", text))


def format_duration(seconds):
    """The shortest text for a number of seconds."""
    parts = []
    for unit, size in UNITS.items():
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"
