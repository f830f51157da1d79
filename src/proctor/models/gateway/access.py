"""A trial's access: its token, what it may ask for, what it has used, and which budget ended it."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import anyio

from proctor.models.gateway.calls import Redactor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proctor.models.contract import Usage
    from proctor.models.gateway.calls import Begun, CallRecord
    from proctor.models.gateway.config import Budgets, ModelConfig

_BYTES_PER_TOKEN = 3
"""For estimates where nothing was counted: text has rarely fewer bytes in a token."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a call may use, roughly: to hold a place in a budget before it is made, or where its counts never came."""

    tokens: int
    usd: float


@dataclass(slots=True)
class Spent:
    """What has been used. `uncounted_calls` and `unpriced_calls` say for how many calls the sums lack a part;
    `estimated` stands in for these parts, so that a budget holds for calls whose counts never came, too."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cost_usd: float = 0.0
    uncounted_calls: int = 0
    unpriced_calls: int = 0
    estimated_tokens: int = 0
    estimated_usd: float = 0.0

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens together, estimates included."""
        return self.prompt_tokens + self.completion_tokens + self.estimated_tokens

    @property
    def usd(self) -> float:
        """Cost, estimates included."""
        return self.cost_usd + self.estimated_usd

    def add(self, usage: Usage, estimate: Estimate) -> None:
        """Add one call."""
        if usage.prompt_tokens is None or usage.completion_tokens is None:
            self.uncounted_calls += 1
            self.estimated_tokens += estimate.tokens
        else:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens
            self.cached_tokens += usage.cached_tokens or 0
            self.reasoning_tokens += usage.reasoning_tokens or 0
        if usage.cost_usd is None:
            self.unpriced_calls += 1
            self.estimated_usd += estimate.usd
        else:
            self.cost_usd += usage.cost_usd


@dataclass(frozen=True, slots=True)
class Exceeded:
    """The budget that is used up: whose, of what, how much there was and how much has been used."""

    scope: Literal["trial", "run"]
    budget: Literal["tokens", "cost_usd", "calls"]
    limit: float
    used: float

    def line(self) -> str:
        """One line for people."""
        if self.budget == "cost_usd":
            return f"the {self.scope}'s budget of ${self.limit:g} is used up (${self.used:.4f})"
        return f"the {self.scope}'s budget of {self.limit:.0f} {self.budget} is used up ({self.used:.0f})"


class Purse:
    """A budget and what is spent of it, for one trial or a whole run."""

    def __init__(self, scope: Literal["trial", "run"], budgets: Budgets) -> None:
        self.scope = scope
        self.budgets = budgets
        self.spent = Spent()
        self.exceeded: Exceeded | None = None
        self._in_flight = 0
        self._reserved = Estimate(0, 0.0)
        self._largest = 0
        self._settled = anyio.Event()

    def check(self) -> Exceeded | None:
        """The budget that does not allow one more call; sticky."""
        spent, budgets = self.spent, self.budgets
        if self.exceeded is None and budgets.calls is not None and spent.calls >= budgets.calls:
            self.exceeded = Exceeded(self.scope, "calls", budgets.calls, spent.calls)
        return self.exceeded

    def fits(self, estimate: Estimate) -> bool:
        """Whether a call may start beside those in flight: alone it always may, together only if all may fit. So a
        budget is overshot by one call at most (and by what an estimate was wrong)."""
        if self._in_flight == 0:
            return True
        budgets, spent, reserved = self.budgets, self.spent, self._reserved
        # What the largest call so far took, each call in flight may take as well.
        expected = max(estimate.tokens, self._largest) + max(reserved.tokens, self._in_flight * self._largest)
        if budgets.tokens is not None and spent.tokens + expected > budgets.tokens:
            return False
        return budgets.cost_usd is None or spent.usd + reserved.usd + estimate.usd <= budgets.cost_usd

    async def wait(self) -> None:
        """Until a call in flight has been settled."""
        await self._settled.wait()

    def begin(self, estimate: Estimate) -> None:
        """A call starts."""
        self.spent.calls += 1
        self._in_flight += 1
        self._reserve(estimate, 1)

    def settle(self, reserved: Estimate, usage: Usage, estimate: Estimate) -> None:
        """A call has ended."""
        self._in_flight -= 1
        self._reserve(reserved, -1)
        before = self.spent.tokens
        self.spent.add(usage, estimate)
        self._largest = max(self._largest, self.spent.tokens - before)
        spent, budgets = self.spent, self.budgets
        if budgets.tokens is not None and spent.tokens > budgets.tokens:
            self.exceeded = self.exceeded or Exceeded(self.scope, "tokens", budgets.tokens, spent.tokens)
        if budgets.cost_usd is not None and spent.usd > budgets.cost_usd:
            self.exceeded = self.exceeded or Exceeded(self.scope, "cost_usd", budgets.cost_usd, spent.usd)
        self._settled.set()
        self._settled = anyio.Event()

    def _reserve(self, estimate: Estimate, sign: int) -> None:
        self._reserved = Estimate(
            self._reserved.tokens + sign * estimate.tokens, self._reserved.usd + sign * estimate.usd
        )


def estimated(prompt_bytes: int, completion_tokens: int, prices: Mapping[str, float] | None) -> Estimate:
    """An estimate from the size of a request and of an answer."""
    prompt = prompt_bytes // _BYTES_PER_TOKEN + 1
    usd = 0.0
    if prices is not None:
        usd = (prompt * prices.get("prompt", 0.0) + completion_tokens * prices.get("completion", 0.0)) / 1_000_000
    return Estimate(prompt + completion_tokens, usd)


def tokens_in(size_bytes: int) -> int:
    """How many tokens so many bytes of text may be."""
    return size_bytes // _BYTES_PER_TOKEN + 1


class InFlight(Protocol):
    """A call that has not ended."""

    def leave(self, problem: str) -> None: ...


@dataclass(eq=False)
class TrialAccess:
    """One trial's way to its models. The token is worth nothing elsewhere, and nothing after `close`."""

    trial_id: str
    models: Sequence[ModelConfig]
    record: Callable[[CallRecord], None]
    purse: Purse
    run_purse: Purse
    slots: anyio.Semaphore
    on_close: Callable[[TrialAccess], None]
    begun: Callable[[Begun], None] | None = None
    """Told of every call before it goes upstream."""
    token: str = field(default_factory=lambda: f"sk-proctor-{secrets.token_urlsafe(32)}", repr=False)
    exceeded: Exceeded | None = None
    """The budget that ended the trial: its own, or the run's when a call was refused for it."""
    closed: bool = False
    failure: BaseException | None = None
    """Why a call could not be recorded; nothing more is answered then."""

    def __post_init__(self) -> None:
        self.redactor = Redactor([self.token])
        self.seq = 0
        self.numbers = 0
        self.held_bytes = 0
        """What its requests that have not ended take in memory."""
        self.response_ids: set[str] = set()
        self._ended = anyio.Event()
        self._quiet = anyio.Event()
        self._in_flight: set[InFlight] = set()

    @property
    def usage(self) -> Spent:
        """What the trial has used so far."""
        return self.purse.spent

    def refused(self, exceeded: Exceeded) -> None:
        """Note the budget that this trial has met; the first one stays the reason."""
        self.exceeded = self.exceeded or exceeded
        self._ended.set()

    async def wait_exceeded(self) -> Exceeded:
        """Until a budget is used up."""
        await self._ended.wait()
        assert self.exceeded is not None
        return self.exceeded

    def enter(self, call: InFlight) -> None:
        """A call begins."""
        self._in_flight.add(call)

    def leave(self, call: InFlight) -> None:
        """A call is over."""
        self._in_flight.discard(call)
        if not self._in_flight:
            self._quiet.set()
            self._quiet = anyio.Event()

    async def finish(self, seconds: float) -> None:
        """Revoke the token, let calls in flight end for so long (their counts come last), then `close`."""
        self.on_close(self)
        with anyio.move_on_after(seconds):
            while self._in_flight:
                await self._quiet.wait()
        self.close()

    def close(self) -> None:
        """Revoke the token and put the calls in flight on record as cut off; they are answered no further."""
        if not self.closed:
            self.closed = True
            self.on_close(self)
            for call in list(self._in_flight):
                call.leave("the trial ended before the answer did")


def token_digest(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
