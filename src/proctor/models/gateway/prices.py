"""What a model costs on a day. A model that no entry fits has no known price, and an unknown price is not zero."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date


@dataclass(frozen=True, slots=True)
class Price:
    """USD per million tokens of the models whose id fits `model` (a shell pattern), from a day on."""

    model: str
    since: date
    prompt: float
    completion: float
    cached: float | None = None
    cache_write: float | None = None

    @property
    def amounts(self) -> dict[str, float]:
        """As `cost_of` takes them: what is unknown is missing."""
        found = {"prompt": self.prompt, "completion": self.completion, "cached": self.cached,
                 "cache_write": self.cache_write}  # fmt: skip
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Dated prices. An exact id wins over a pattern, a longer pattern over a shorter, the latest day over earlier."""

    entries: tuple[Price, ...]

    def find(self, model_id: str, day: date) -> Price | None:
        """The price of a model on a day, or None when nobody knows it."""
        fitting = [entry for entry in self.entries if entry.since <= day and fnmatchcase(model_id, entry.model)]
        return max(fitting, key=lambda entry: (entry.model == model_id, len(entry.model), entry.since), default=None)

    def as_json(self) -> list[dict[str, Any]]:
        """The table as the lock of a run holds it."""
        return [{**asdict(entry), "since": entry.since.isoformat()} for entry in self.entries]


@dataclass(frozen=True, slots=True)
class Tariff:
    """The prices that a model's calls are charged at, and the day they are from (None: given without one)."""

    amounts: Mapping[str, float] | None
    since: str | None = None
