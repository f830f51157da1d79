"""A request's JSON object, read so that what is checked is what is sent.

The text of every top-level member is kept, so a member that nobody has to change goes on byte for byte. A key that
occurs twice, at any depth, is refused: two parsers might see two different requests.
"""

from __future__ import annotations

import json
import math
import re
from itertools import islice
from typing import Any

from proctor.models.gateway.spelling import other_spelling

REMOVED = object()
"""The edit that takes a member out."""

VALUES_MAX = 250_000
DEPTH_MAX = 100
"""Far more than any conversation has. All requests are read in one process: reading one must not hold up the others,
nor take many times its bytes in memory; and what was read must be writable, however deep the writer stands."""
_SPACE = " \t\r\n"
_PIECE = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[,\[{]', re.DOTALL)
_CONTAINERS = (dict, list)


class BadBody(ValueError):
    """The request is not one JSON object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadBody(f"the key {twice[:60]!r} occurs twice in one object")
    return found


def _constant(name: str) -> float:
    raise BadBody(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise BadBody(f"{text[:40]} is out of range")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)


class Body:
    """One request: its values, and the text that each of them had.

    Raises BadBody for anything but one JSON object in UTF-8 without repeated keys.
    """

    __slots__ = ("_members", "_raw", "values")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        if len(raw) > VALUES_MAX and _has_too_many(raw):
            raise BadBody(f"more than {VALUES_MAX} values")
        try:
            text = raw.decode("utf-8")
            self.values, self._members = _read(text)
        except BadBody:
            raise
        except UnicodeDecodeError as error:
            raise BadBody(f"not UTF-8: {error.reason}") from error
        except RecursionError as error:
            raise BadBody("nested too deeply") from error
        except ValueError as error:  # also of a whole number with thousands of digits
            raise BadBody(f"not JSON: {error}") from error
        _check_depth(self.values)
        if found := other_spelling(self.values):
            raise BadBody(f"the key {found[0][:60]!r} is {found[1]!r} to some servers: write it like that")

    def edited(self, edits: dict[str, Any]) -> bytes:
        """The bytes with some members replaced, added or REMOVED; untouched members keep their text."""
        if not edits:
            return self._raw
        members = []
        for name, text in self._members.items():
            if name not in edits:
                members.append(text)
            elif edits[name] is not REMOVED:
                members.append(_member(name, edits[name]))
        for name, value in edits.items():
            if name not in self._members and value is not REMOVED:
                members.append(_member(name, value))
        return ("{" + ",".join(members) + "}").encode("utf-8")


def _has_too_many(raw: bytes) -> bool:
    """Whether there are more values than a request may have: told by what is between them, outside of texts."""
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") <= VALUES_MAX:
        return False
    outside = (match for match in _PIECE.finditer(raw) if raw[match.start()] != 34)
    return next(islice(outside, VALUES_MAX, None), None) is not None


def _check_depth(values: dict[str, Any]) -> None:
    level: list[Any] = [values]
    for _ in range(DEPTH_MAX):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _CONTAINERS)
        ]
        if not level:
            return
    raise BadBody("nested too deeply")


def _member(name: str, value: Any) -> str:
    # ASCII, so that a lone surrogate inside a text (JSON allows it) goes on as the escape it came as.
    return f"{json.dumps(name)}:{json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(',', ':'))}"


def _read(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise BadBody("not a JSON object")
    values: dict[str, Any] = {}
    members: dict[str, str] = {}
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        at += 1
    else:
        while True:
            start = at
            if text[at : at + 1] != '"':
                raise BadBody(f"not JSON: a key is missing at character {at}")
            name, at = _DECODER.raw_decode(text, at)
            at = _skip(text, at)
            if text[at : at + 1] != ":":
                raise BadBody(f"not JSON: a colon is missing at character {at}")
            at = _skip(text, at + 1)
            value, at = _DECODER.raw_decode(text, at)
            if name in values:
                raise BadBody(f"the key {name[:60]!r} occurs twice in one object")
            values[name], members[name] = value, text[start:at]
            at = _skip(text, at)
            following = text[at : at + 1]
            at = _skip(text, at + 1)
            if following == "}":
                break
            if following != ",":
                raise BadBody(f"not JSON: a comma is missing at character {at}")
    if _skip(text, at) != len(text):
        raise BadBody("there is something after the JSON object")
    return values, members


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
