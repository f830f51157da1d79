"""What the boundary saw and decided: one event per lookup, connection and request, and the counts of a receipt.

A candidate decides how many there are, so memory and size are bounded here: texts are cut, an event that repeats the
last one of its kind within a second only raises a count, and above a rate events are counted instead of kept.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

log = logging.getLogger(__name__)

Decision = Literal["allowed", "refused", "failed"]
Kind = Literal["lookup", "connection", "request", "policy", "dropped"]
OnNetwork = Callable[["NetworkEvent"], None]

KEPT = 1000
_TEXT_MAX = 512
_RATE = 200.0
_BURST = 2000.0
_NAMES_MAX = 200
_REASONS_MAX = 200
"""There are some dozens, but types of look-ups have numbers, and the candidate chooses them."""


@dataclass(frozen=True, slots=True)
class NetworkEvent:
    """One line of `network.jsonl`. Unset fields are left out there.

    `at` is Unix time in seconds of the beginning, `duration_s` the time until the end; `sent` and `received` are bytes
    from and to the sandbox. `connection` numbers the connections of one sandbox, and ties requests to theirs.
    """

    kind: Kind
    at: float
    phase: str = ""
    decision: Decision = "allowed"
    reason: str = ""
    name: str = ""
    port: int | None = None
    type: str = ""
    protocol: str = ""
    sni: str | None = None
    address: str = ""
    service: bool = False
    terminated: bool = False
    connection: int | None = None
    method: str = ""
    path: str = ""
    status: int | None = None
    sent: int = 0
    received: int = 0
    duration_s: float | None = None
    fault: str = ""
    secrets: tuple[str, ...] = ()
    sandbox: str = ""
    policy_version: int = 0
    count: int = 1

    def as_json(self) -> dict[str, Any]:
        """The event without what is unset."""
        document = {name: value for name, value in asdict(self).items() if value not in ("", None, (), False)}
        document["at"] = round(self.at, 6)
        if self.duration_s is not None:
            document["duration_s"] = round(self.duration_s, 6)
        if self.kind != "connection":
            document = {name: value for name, value in document.items() if name not in ("sent", "received") or value}
        if self.count == 1:
            del document["count"]
        return document


@dataclass(slots=True)
class Counts:
    """Totals for the receipt."""

    decisions: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    unrecorded: int = 0

    def add(self, event: NetworkEvent) -> None:
        """Count one event."""
        self.decisions[f"{event.kind}s_{event.decision}"] += event.count
        if event.reason and event.decision != "allowed":
            reason = f"{event.kind}: {event.reason}"
            known = reason in self.reasons or len(self.reasons) < _REASONS_MAX
            self.reasons[reason if known else f"{event.kind}: (others)"] += event.count
        if event.kind == "connection":
            known = event.name in self.names or len(self.names) < _NAMES_MAX
            self.names[event.name if known else "(others)"] += event.count
            self.sent += event.sent
            self.received += event.received

    def as_json(self) -> dict[str, Any]:
        """The totals, in a fixed order."""
        return {
            **dict(sorted(self.decisions.items())),
            "reasons": dict(sorted(self.reasons.items())),
            "connections_by_name": dict(sorted(self.names.items())),
            "bytes_sent": self.sent,
            "bytes_received": self.received,
            "events_unrecorded": self.unrecorded,
        }


class Recorder:
    """Takes events, counts them all, keeps the last ones and hands them to `on_network`, at a bounded rate."""

    def __init__(self, on_network: OnNetwork | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = Counts()
        self.kept: deque[NetworkEvent] = deque(maxlen=KEPT)
        self._on_network = on_network
        self._clock = clock
        self._tokens = _BURST
        self._filled_at = clock()
        self._dropped = 0
        self._closed = False

    def add(self, event: NetworkEvent) -> None:
        """Record `event`; its texts are cut to a bounded length."""
        if self._closed:
            return
        event = replace(event, name=_cut(event.name), path=_cut(event.path), sni=_cut(event.sni) or None)
        self.counts.add(event)
        at = self._clock()
        self._tokens = min(self._tokens + (at - self._filled_at) * _RATE, _BURST)
        self._filled_at = at
        if self._tokens < 1:
            self._dropped += event.count
            self.counts.unrecorded += event.count
            return
        self._tokens -= 1
        self.flush()
        self._emit(event)

    def close(self) -> None:
        """The last word: what comes later is not recorded."""
        self.flush()
        self._closed = True

    def flush(self) -> None:
        """Say how many events were only counted, if any were."""
        if dropped := self._dropped:
            self._dropped = 0
            self._emit(NetworkEvent("dropped", time.time(), reason="event-rate", count=dropped))

    def _emit(self, event: NetworkEvent) -> None:
        self.kept.append(event)
        if self._on_network is not None:
            try:
                self._on_network(event)
            except Exception:
                # The record is the caller's; what it does with an event must not open or close a connection.
                log.exception("a network event could not be recorded")


def _cut(text: str | None) -> str:
    if text is None or len(text) <= _TEXT_MAX:
        return text or ""
    return text[: _TEXT_MAX - 1] + "…"
