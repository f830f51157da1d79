"""Harbor's reward protocol: what a reward file may hold, and what follows from it. Pure.

Every value that is not plainly a finite number is refused: NaN, infinities, booleans, digits of other scripts,
separators, duplicate keys. Refusing is an `error`, never a pass and never a zero.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_REWARD_BYTES = 64 << 10
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_MAX_KEYS = 256


class BadReward(ValueError):
    """A reward file that is missing, empty or malformed; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """Finite rewards by name. Resolved: the key `reward` is at least 1, or, without it, all are."""

    values: Mapping[str, float]

    @property
    def resolved(self) -> bool:
        """Whether the task counts as done."""
        if "reward" in self.values:
            return self.values["reward"] >= 1
        return bool(self.values) and all(value >= 1 for value in self.values.values())


def parse_text(data: bytes) -> Rewards:
    """`reward.txt`: exactly one finite decimal number in ASCII, with white space around it at most."""
    try:
        text = data.decode("ascii").strip(" \t\r\n")
    except UnicodeDecodeError as error:
        raise BadReward("reward.txt is not ASCII text") from error
    if not text:
        raise BadReward("reward.txt is empty")
    if not _NUMBER.fullmatch(text):
        raise BadReward(f"reward.txt does not hold one number: {text[:60]!r}")
    return Rewards({"reward": _finite(float(text), "reward")})


def parse_json(data: bytes) -> Rewards:
    """`reward.json`: one flat object from names to finite numbers, no name twice."""
    if not data.strip():
        raise BadReward("reward.json is empty")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise BadReward("reward.json has a key twice")
        return found

    def refuse(text: str) -> Any:
        raise BadReward(f"reward.json holds {text}")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=refuse)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadReward(f"reward.json is not JSON: {error}") from error
    if not isinstance(value, dict) or not value:
        raise BadReward("reward.json is not an object with at least one reward")
    if len(value) > _MAX_KEYS:
        raise BadReward(f"reward.json has more than {_MAX_KEYS} rewards")
    rewards: dict[str, float] = {}
    for name, item in value.items():
        if isinstance(item, bool) or not isinstance(item, int | float):
            raise BadReward(f"reward.json: {name!r} is not a number")
        try:
            rewards[name] = _finite(float(item), name)
        except OverflowError as error:
            raise BadReward(f"reward.json: {name!r} is too large") from error
    return Rewards(rewards)


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise BadReward(f"reward {name!r} is not finite")
    return value
