"""What in a text may differ although the same thing happened: times, and names drawn at random. Pure functions.

A mask replaces what it knows by a fixed word; two texts that are equal under the mask differ by nothing else. Masks are
only ever used to *name the cause* of a difference that is there, and to tell what the clock did from what it did not.
"""

from __future__ import annotations

import re
import struct

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_UNIT = r"(?:ns|us|µs|ms|s|sec|secs|second|seconds|m|min|mins|minute|minutes|h)"
_TIMES = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?", "<time>"),
    (rf"(?:{_DAY},? )?(?:\d{{1,2}} {_MONTH}|{_MONTH} {{1,2}}\d{{1,2}}),?(?: \d{{4}})? +\d\d:\d\d(?::\d\d)?"
     rf"(?: ?[AP]M)?(?: (?:UTC|GMT|[A-Z]{{3,4}}|[+-]\d{{4}}))?(?: \d{{4}})?", "<time>"),
    (r"\b\d{4}[-/]\d\d[-/]\d\d\b", "<date>"),
    (r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b", "<time>"),
    (r"\b\d\d:\d\d\b", "<time>"),
    (r"\b1[6-9]\d{8}(?:\.\d+)?\b", "<epoch>"),
    (r"\b1[6-9]\d{11}\b|\b1[6-9]\d{17}\b", "<epoch>"),
    (rf"\b\d+m\d+(?:\.\d+)?s\b|\b\d+(?:\.\d+)? ?{_UNIT}\b", "<duration>"),
)  # fmt: skip
_CHANCE = (
    (r"(?<![0-9a-fA-F])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![0-9a-fA-F])", "<uuid>"),
    (r"\b0x[0-9a-fA-F]+\b", "<address>"),
    (r"\b(?:tmp|temp|pytest-)[._-]?[A-Za-z0-9_-]{6,}", "<name>"),
    (r"(?<=/tmp/)[\w.-]+", "<name>"),
    (r"\b(?:pid|PID|process)[ =:]+\d+\b", "<pid>"),
    (r"\[\d+\](?: \d+)?", "<job>"),
    (r"\b[0-9a-f]{7,64}\b", "<hash>"),
    (r"\b\d+\.\d{6,}(?:e-?\d+)?\b", "<number>"),
)
_TIME_RULES = [(re.compile(pattern), word) for pattern, word in _TIMES]
_CHANCE_RULES = [(re.compile(pattern), word) for pattern, word in _CHANCE]
_RULE = re.compile(r"([=_*-])\1{3,}")
PYC_HEADER = 16
"""Magic, flags, then the time and size of the source (PEP 552)."""
_PYC_HASH_BASED = 1
_INDEX_ENTRY = 62
_INDEX_STAT = 24
"""The first bytes of an entry of git's index: times, device and inode of the file (gitformat-index)."""


def without_times(text: str) -> str:
    """The text with dates, times of day, epochs and durations replaced, and rulers of any length alike: many programs
    centre a duration in one."""
    for pattern, word in _TIME_RULES:
        text = pattern.sub(word, text)
    return _RULE.sub(r"\1\1\1\1", text)


def without_chance(text: str) -> str:
    """The text without times, and without what is usually drawn at random: ids, addresses, temporary names, hashes."""
    text = without_times(text)
    for pattern, word in _CHANCE_RULES:
        text = pattern.sub(word, text)
    return text


def lines_in_order(text: str) -> list[str]:
    """The lines of a text without times, sorted: equal for texts that differ in order alone."""
    return sorted(without_times(text).splitlines())


def file_without_times(path: str, data: bytes) -> bytes:
    """A file's bytes without the times that its format holds: compiled Python, git's index, and text."""
    if path.endswith(".pyc") and len(data) >= PYC_HEADER:
        (flags,) = struct.unpack_from("<I", data, 4)
        if not flags & _PYC_HASH_BASED:
            return data[:8] + bytes(4) + data[12:]
    if path.endswith("/.git/index") and data[:4] == b"DIRC" and len(data) >= 32:
        return _index_without_times(data)
    try:
        return without_times(data.decode("utf-8")).encode()
    except UnicodeDecodeError:
        return data


def _index_without_times(data: bytes) -> bytes:
    """Git's index, versions 2 and 3, with each entry's times, device and inode zeroed, and without its checksum."""
    version, count = struct.unpack_from(">II", data, 4)
    if version not in (2, 3):
        return data
    out, at = bytearray(data[:-20]), 12
    for _ in range(count):
        if at + _INDEX_ENTRY > len(out):
            return data
        out[at : at + _INDEX_STAT] = bytes(_INDEX_STAT)
        (flags,) = struct.unpack_from(">H", data, at + 60)
        start = at + _INDEX_ENTRY + (2 if flags & 0x4000 else 0)
        end = data.find(b"\0", start)
        if end < 0:
            return data
        at += (end - at + 8) // 8 * 8
    return bytes(out)
