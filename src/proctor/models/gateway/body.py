"""A request's JSON object, read so that what is checked is what is sent.

The text of every top-level member is kept, so a member that nobody has to change goes on byte for byte. A key that
occurs twice, at any depth, is refused: two parsers might see two different requests.
"""

from __future__ import annotations

import json
import math
from typing import Any

REMOVED = object()
"""The edit that takes a member out."""

_SPACE = " \t\r\n"


class BadBody(ValueError):
    """The request is not one JSON object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
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
        try:
            text = raw.decode("utf-8")
            self.values, self._members = _read(text)
        except UnicodeDecodeError as error:
            raise BadBody(f"not UTF-8: {error.reason}") from error
        except RecursionError as error:
            raise BadBody("nested too deeply") from error
        except json.JSONDecodeError as error:
            raise BadBody(f"not JSON: {error}") from error

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
