"""What an Edge counts while it works: cheap numbers, without the library that shows them (`metrics`)."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the latency buckets, seconds: a sandbox is made in milliseconds, a command may take half an hour."""


class Latency:
    """A histogram of durations."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration."""
        self.counts[bisect.bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count how long the block takes, however it ends."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.observe(time.monotonic() - begun)


class Meters:
    """The counters of one Edge."""

    def __init__(self) -> None:
        self.creating = 0
        self.created = 0
        self.adopted = 0
        self.launcher_starts = 0
        self.commands = 0
        self.pauses = 0
        self.failures: Counter[str] = Counter()
        """Creates that failed, by class of error and field."""
        self.ends: Counter[str] = Counter()
        """Sandboxes that ended, by reason."""
        self.command_reasons: Counter[str] = Counter()
        """Commands that something else than themselves decided, by reason."""
        self.admission = Latency()
        self.launch = Latency()
        self.command = Latency()
        self.close = Latency()

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "creating": self.creating,
            "created": self.created,
            "adopted": self.adopted,
            "launcher_starts": self.launcher_starts,
            "commands": self.commands,
            "pauses": self.pauses,
            "failures": dict(self.failures),
            "ends": dict(self.ends),
            "command_reasons": dict(self.command_reasons),
            **{
                name: {"counts": latency.counts, "total_s": latency.total_s}
                for name in ("admission", "launch", "command", "close")
                if isinstance(latency := getattr(self, name), Latency)
            },
        }
