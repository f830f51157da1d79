"""What a harness asked its model, against what it asked then: a canonical difference of two JSON values. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from proctor.runs.replay.compare import Level
from proctor.runs.replay.masks import without_chance, without_times

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_CHANGES = 20
"""How many differences of one request are listed; the rest is counted."""
_ABSENT = object()
_AROUND = 60


@dataclass(frozen=True, slots=True)
class Change:
    """One place at which two requests part; texts are cut to the surroundings of the first difference."""

    path: str
    then: str
    now: str
    level: Level
    by_chance: bool = False
    """Equal once ids, addresses, hashes and temporary names are masked."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A request that is not what was recorded. `call` counts from 1; `more` changes are not listed."""

    call: int
    changes: tuple[Change, ...]
    more: int = 0

    @property
    def by_chance(self) -> bool:
        """Whether nothing but times and what is drawn at random differs, and something of the latter does."""
        return (
            self.level is Level.DIFFERENT
            and not self.more
            and all(one.by_chance or one.level is Level.CLOCK for one in self.changes)
        )

    @property
    def level(self) -> Level:
        """CLOCK when times alone differ."""
        return Level.CLOCK if all(one.level is Level.CLOCK for one in self.changes) else Level.DIFFERENT


def diverges(call: int, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> Divergence | None:
    """The divergence of a request, or None. A record that holds only some fields of a request vouches for those."""
    names = recorded.keys() | asked.keys() if "model" in recorded else recorded.keys()
    pairs = ((name, recorded.get(name, _ABSENT), asked.get(name, _ABSENT)) for name in sorted(names))
    found = (change for name, then, now in pairs for change in _changes(name, _empty(then), _empty(now)))
    changes = tuple(islice(found, MAX_CHANGES))
    if not changes:
        return None
    return Divergence(call, changes, sum(1 for _ in found))


def _empty(value: Any) -> Any:
    """An empty list of tools and none at all are one and the same."""
    return _ABSENT if value in ([], None) else value


def _changes(path: str, then: Any, now: Any) -> Iterator[Change]:
    if isinstance(then, dict) and isinstance(now, dict):
        for name in sorted(then.keys() | now.keys()):
            yield from _changes(f"{path}.{name}", then.get(name, _ABSENT), now.get(name, _ABSENT))
    elif isinstance(then, list) and isinstance(now, list):
        for number, (before, after) in enumerate(zip(then, now, strict=False)):
            yield from _changes(f"{path}[{number}]", before, after)
        if len(then) != len(now):
            yield Change(f"{path}.length", str(len(then)), str(len(now)), Level.DIFFERENT)
    elif type(then) is not type(now) or then != now:
        yield _change(path, then, now)


def _change(path: str, then: Any, now: Any) -> Change:
    if isinstance(then, str) and isinstance(now, str):
        level = Level.CLOCK if without_times(then) == without_times(now) else Level.DIFFERENT
        at = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
        by_chance = level is Level.DIFFERENT and without_chance(then) == without_chance(now)
        return Change(path, _excerpt(then, at), _excerpt(now, at), level, by_chance)
    return Change(path, _shown(then), _shown(now), Level.DIFFERENT)


def _excerpt(text: str, at: int) -> str:
    start, end = max(0, at - _AROUND), at + _AROUND
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 2 * _AROUND else text[: 2 * _AROUND] + "…"
