"""A conversation that fits a model's window: what is dropped, when and why is said, never silent.

The instruction and the system prompt always stay. When the next request would be too large, the oldest tool results are
replaced by a line that says how large they were; when that is not enough, the oldest exchanges go as a whole, with a
line in their place. The newest exchange is never touched. Sizes are estimates from characters, put right by what the
endpoint counted last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CHARS_PER_TOKEN = 4.0
"""Before anything was counted: English and code have about as many."""
_SLACK = 0.9
"""After shrinking, how much of the budget may be used: or the next result would shrink it again."""
_SHORT_CHARS = 200
"""A result that is not longer is not worth replacing."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What one shrinking took out. `results` are call ids; tokens are estimates of the whole request."""

    why: str
    results: tuple[str, ...]
    exchanges: int
    characters: int
    tokens_before: int
    tokens_after: int
    budget: int

    def as_json(self) -> dict[str, Any]:
        """Plain values for a step's `extra`."""
        return {
            "why": self.why,
            "results": list(self.results),
            "exchanges": self.exchanges,
            "characters": self.characters,
            "tokens_before": self.tokens_before,
            "tokens_after": self.tokens_after,
            "budget": self.budget,
        }

    def line(self) -> str:
        """One line for people."""
        parts = [f"{len(self.results)} tool results"] if self.results else []
        parts += [f"{self.exchanges} exchanges"] if self.exchanges else []
        what = " and ".join(parts) or "nothing"
        return (
            f"dropped {what} ({self.characters} characters) from the conversation: {self.why}; "
            f"about {self.tokens_before} tokens before, {self.tokens_after} after, {self.budget} allowed"
        )


class Conversation:
    """The messages of a trial, in exchanges: an answer of the model and everything that was said to it after."""

    def __init__(self, opening: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._opening = list(opening)
        self._exchanges: list[list[dict[str, Any]]] = []
        self._dropped = 0
        self._characters = _size(tools) + _size(opening)
        self._chars_per_token = _CHARS_PER_TOKEN
        self.said = len(self._opening)
        """How many messages there have been, dropped ones included."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the next request holds."""
        gone = [_absent(self._dropped)] if self._dropped else []
        return [*self._opening, *gone, *(message for exchange in self._exchanges for message in exchange)]

    def add(self, exchange: Sequence[dict[str, Any]]) -> None:
        """An answer and the results of its calls."""
        self._exchanges.append(list(exchange))
        self._characters += _size(exchange)
        self.said += len(exchange)

    def say(self, message: dict[str, Any]) -> None:
        """One more message after the last answer."""
        (self._exchanges[-1] if self._exchanges else self._opening).append(message)
        self._characters += _size([message])
        self.said += 1

    def counted(self, prompt_tokens: int | None) -> None:
        """What the endpoint counted for the request just made: estimates follow it."""
        if prompt_tokens:
            self._chars_per_token = max(0.5, min(16.0, self._characters / prompt_tokens))

    def tokens(self) -> int:
        """About how many tokens the next request has."""
        return round(self._characters / self._chars_per_token)

    def fit(self, budget: int | None) -> Dropped | None:
        """Make the next request fit; what was dropped, or None when it fitted or nothing is left to drop."""
        if budget is None or self.tokens() <= budget:
            return None
        return self._shrink(round(budget * _SLACK), budget, "it had outgrown its budget")

    def halve(self) -> Dropped | None:
        """The endpoint refused the request as too long: get to half of it. None when nothing is left to drop."""
        half = self.tokens() // 2
        return self._shrink(half, half, "the endpoint refused it as too long")

    def _shrink(self, target: int, budget: int, why: str) -> Dropped | None:
        tokens, characters = self.tokens(), self._characters
        results: list[str] = []
        for message in [message for exchange in self._exchanges[:-1] for message in exchange]:
            content = message.get("content")
            if self.tokens() <= target:
                break
            if message.get("role") == "tool" and isinstance(content, str) and len(content) > _SHORT_CHARS:
                self._characters -= _size([message])
                message["content"] = f"[result dropped to save context: {len(content)} characters]"
                self._characters += _size([message])
                results.append(str(message.get("tool_call_id")))
        exchanges = 0
        while self.tokens() > target and len(self._exchanges) > 1:
            self._characters -= _size(self._exchanges.pop(0))
            exchanges += 1
        self._dropped += exchanges
        if not results and not exchanges:
            return None
        gone = characters - self._characters
        return Dropped(why, tuple(results), exchanges, gone, tokens, self.tokens(), budget)


def _absent(count: int) -> dict[str, Any]:
    """The message in the place of what was dropped; as the user, since every endpoint takes that there."""
    return {"role": "user", "content": f"[{count} earlier exchanges were dropped to save context]"}


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(json.dumps(dict(message), ensure_ascii=False, default=str)) for message in messages)
