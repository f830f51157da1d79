"""Whether a request's path lies below a prefix, whatever a server makes of its spelling.

Servers differ: some decode `%2e`, some merge `//`, some cut `;parameters`. A path is let through only if every one of
these readings lies below the prefix, and one that climbs (`..`, in any spelling) never is.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(rb"[\x00-\x1f\x7f\\]")


def below(path: bytes, prefixes: tuple[str, ...]) -> bool:
    """Whether `path` (raw, without the query) is below one of `prefixes` in every reading."""
    readings = _readings(path)
    return readings is not None and any(all(_under(reading, prefix) for reading in readings) for prefix in prefixes)


def _readings(path: bytes) -> list[bytes] | None:
    """All readings of `path`; None when it is one that no honest program sends."""
    if _ESCAPE.search(path):
        return None
    readings = [path]
    decoded = path
    # Twice: a proxy before the server may have decoded once already. A third spelling level is refused.
    for _ in range(2):
        decoded = unquote_to_bytes(decoded)
        readings.append(decoded)
    if unquote_to_bytes(decoded) != decoded or any(_CONTROL.search(reading) for reading in readings):
        return None
    for reading in tuple(readings):
        segments = [segment.partition(b";")[0] for segment in reading.split(b"/")]
        if any(segment in (b".", b"..") for segment in segments):
            return None
        readings.append(re.sub(rb"/{2,}", b"/", reading))
        readings.append(re.sub(rb"/{2,}", b"/", b"/".join(segments)))
    return readings


def _under(path: bytes, prefix: str) -> bool:
    start = prefix.encode("ascii")
    if start.endswith(b"/"):
        return path.startswith(start)
    return path == start or path.startswith(start + b"/")
