"""When to ask again, and how long to wait before it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

RETRIED_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Statuses that may go away by themselves: time-outs, conflicts, rate limits, and the server's own faults."""

BASE_S = 0.5
CAP_S = 30.0
MAX_RETRY_AFTER_S = 120.0


def is_retried(status: int) -> bool:
    """Whether a status is worth another try: the listed ones and every other 5xx except 501 and 505."""
    return status in RETRIED_STATUSES or (status >= 500 and status not in (501, 505))


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """A Retry-After header as seconds from `now` (RFC 9110, 10.2.3: seconds or an HTTP date); None if unreadable."""
    if value is None:
        return None
    text = value.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - now).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def delay_s(
    attempt: int, asked_for_s: float | None, rng: random.Random, *, base_s: float = BASE_S, cap_s: float = CAP_S
) -> float:
    """Seconds to wait after failed try number `attempt` (from 1).

    What the endpoint asks for (up to MAX_RETRY_AFTER_S) is the least; on top comes exponential backoff with full
    jitter: a uniform draw between 0 and `base_s * 2 ** (attempt - 1)`, at most `cap_s` (Brooker, "Exponential
    Backoff And Jitter", AWS Architecture Blog, 2015).
    """
    ceiling = min(cap_s, base_s * 2 ** min(attempt - 1, 20))
    least = min(asked_for_s, MAX_RETRY_AFTER_S) if asked_for_s is not None else 0.0
    return least + rng.uniform(0.0, ceiling)
