"""Wall-clock time as records carry it."""

from __future__ import annotations

from datetime import UTC, datetime


def now_iso() -> str:
    """Now, as RFC 3339 in UTC with microseconds (`2026-11-30T08:43:00.000000Z`)."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
