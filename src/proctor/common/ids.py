"""Identifiers that sort by time of birth."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str = "") -> str:
    """A 20-character id: 9 of milliseconds since the epoch, 11 random, in Crockford base 32, lower case."""
    value = (time.time_ns() // 1_000_000 << 55) | secrets.randbits(55)
    digits = []
    for _ in range(20):
        digits.append(_ALPHABET[value & 31])
        value >>= 5
    text = "".join(reversed(digits))
    return f"{prefix}-{text}" if prefix else text
