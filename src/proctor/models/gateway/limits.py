"""How fast: a rate with a small burst, and an upstream that is left alone after it failed. Pure: the clock is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proctor.models.gateway.config import Circuit


class Rate:
    """At most so many starts a minute, evenly, with a burst of up to six seconds' worth (the generic cell rate
    algorithm, ITU-T I.371)."""

    def __init__(self, per_minute: float) -> None:
        self._interval_s = 60.0 / per_minute
        self._burst_s = max(0.0, min(6.0, 60.0 - self._interval_s) - self._interval_s)
        self._next = float("-inf")

    def reserve(self, now: float) -> float:
        """Take the next place and say how many seconds away it is."""
        place = max(self._next, now - self._burst_s)
        self._next = place + self._interval_s
        return max(0.0, place - now)


class Breaker:
    """Closed: everything passes. Open: nothing, for a while. Then one try decides."""

    def __init__(self, config: Circuit) -> None:
        self._config = config
        self._failures = 0
        self._until = float("-inf")
        self._probing_since: float | None = None
        self.opened = 0
        """How often it has opened."""

    def wait_s(self, now: float) -> float:
        """Seconds until a try makes sense; 0 means now, and takes the place of the one try of a half-open circuit."""
        if self._failures < self._config.failures:
            return 0.0
        if now < self._until:
            return self._until - now
        # A try that never came back (its caller was cancelled) must not keep the circuit shut for good.
        if self._probing_since is not None and now < self._probing_since + self._config.open_s:
            return self._probing_since + self._config.open_s - now
        self._probing_since = now
        return 0.0

    def is_open(self, now: float) -> bool:
        """Whether calls are kept away right now."""
        return self._failures >= self._config.failures and now < self._until

    def succeeded(self) -> None:
        """A try was answered."""
        self._failures, self._probing_since = 0, None

    def failed(self, now: float) -> None:
        """A try was not answered, or by a fault of the upstream."""
        self._failures += 1
        self._probing_since = None
        if self._failures >= self._config.failures:
            self.opened += not self.is_open(now)
            self._until = now + self._config.open_s
