"""The one budget of a trial: time, steps, tokens and cost, counted by the host, with the limit that fired named."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

from proctor.agents.contract import AgentResult, Recorder, Step, StopReason
from proctor.common import ProctorError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proctor.models.contract import ModelAnswer, ModelClient, ModelSpec, Usage
    from proctor.tasks.model import AgentLimits


MAX_GIVEN_BACK_S = 300.0
"""How much time in all a trial gets back for tries of the model endpoint that failed."""


class LimitReached(ProctorError):
    """A limit of the trial fired; `stop` says which. A harness lets it pass."""

    def __init__(self, stop: StopReason, message: str) -> None:
        self.stop = stop
        super().__init__(message)

    def result(self) -> AgentResult:
        """The end of the trial that this limit means."""
        return AgentResult(self.stop, detail=self.message)


class LimitGuard:
    """Counts what a trial has used and refuses the next action once a limit is passed.

    Sticky: after a limit fired every later check raises it again, so a harness that swallows the first
    exception gains nothing.
    """

    def __init__(self, limits: AgentLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.steps = 0
        self.tokens = 0
        self.cost_usd = 0.0
        self.fired: LimitReached | None = None
        self.given_back_s = 0.0
        self.backstop: anyio.CancelScope | None = None
        """The scope that cuts a harness which hangs; it moves with the deadline."""
        self._clock = clock
        self._started_at = clock()

    def remaining_s(self) -> float:
        """Seconds left of the total time, never negative."""
        return max(0.0, self.limits.total_s + self.given_back_s - (self._clock() - self._started_at))

    def give_back(self, seconds: float) -> None:
        """Do not count time that the endpoint lost by failing: an infrastructure fault must not become a limit.

        At most MAX_GIVEN_BACK_S in all, so that a trial still has an end.
        """
        before = self.given_back_s
        self.given_back_s = min(before + max(0.0, seconds), MAX_GIVEN_BACK_S)
        if self.backstop is not None:
            self.backstop.deadline += self.given_back_s - before

    def check(self) -> None:
        """Raise LimitReached when no further action is allowed."""
        if self.fired:
            raise self.fired
        self.check_spent()
        if self.steps >= self.limits.steps:
            self.fire(StopReason.LIMIT_STEPS, f"the limit of {self.limits.steps} steps is used up")

    def check_spent(self) -> None:
        """Raise LimitReached when time, tokens or cost have been exceeded (true even of a finished harness)."""
        if self.fired:
            raise self.fired
        limits = self.limits
        if self.remaining_s() <= 0:
            self.fire(StopReason.LIMIT_TIME, f"the total time of {limits.total_s:g} s is used up")
        if limits.tokens is not None and self.tokens > limits.tokens:
            self.fire(StopReason.LIMIT_TOKENS, f"{self.tokens} tokens used, the limit is {limits.tokens}")
        if limits.cost_usd is not None and self.cost_usd > limits.cost_usd:
            self.fire(StopReason.LIMIT_COST, f"${self.cost_usd:.4f} spent, the limit is ${limits.cost_usd:g}")

    def fire(self, stop: StopReason, message: str) -> NoReturn:
        """Record that a limit fired, and raise it. The first one to fire stays the reason."""
        self.fired = self.fired or LimitReached(stop, message)
        raise self.fired

    def count_step(self) -> None:
        """Count one recorded agent step."""
        self.steps += 1

    def count_usage(self, usage: Usage) -> None:
        """Add one model call's tokens and cost. A limit on something the endpoint does not report is refused."""
        if usage.prompt_tokens is not None and usage.completion_tokens is not None:
            self.tokens += usage.prompt_tokens + usage.completion_tokens
        elif self.limits.tokens is not None:
            raise RefusedError(
                "the endpoint reports no token usage, so this limit cannot be enforced",
                field="limits.tokens",
                remedy="drop the limit, or use an endpoint that reports usage",
            )
        if usage.cost_usd is not None:
            self.cost_usd += usage.cost_usd
        elif self.limits.cost_usd is not None:
            raise RefusedError(
                "the cost of a call is unknown, so this limit cannot be enforced",
                field="limits.cost_usd",
                remedy="give the model's prices (prompt, cached, completion)",
            )


class MeteredModel:
    """A model client whose calls are counted, and cut when the total time is over."""

    def __init__(self, inner: ModelClient, guard: LimitGuard) -> None:
        self.inner = inner
        self.spec: ModelSpec = inner.spec
        self._guard = guard

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ModelAnswer:
        """As the inner client's; LimitReached instead when a limit has fired or fires during the call."""
        self._guard.check()
        start = anyio.current_time()
        with anyio.move_on_after(self._guard.remaining_s()):
            answer = await self.inner.complete(messages, tools)
            # Time that was lost to failed tries, or to waiting for a place at the endpoint, is not the agent's.
            self._guard.give_back(anyio.current_time() - start - answer.latency_s)
            self._guard.count_usage(answer.usage)
            return answer
        limit = self._guard.limits.total_s
        self._guard.fire(StopReason.LIMIT_TIME, f"the total time of {limit:g} s ended during a model call")

    async def aclose(self) -> None:
        """Nothing: the inner client belongs to whoever made it."""


class CountingRecorder:
    """A recorder that counts agent steps. Steps past the limit are still recorded: they are evidence.

    Steps that an agent tells of itself (a transcript) are not counted: nothing is decided by what the candidate says.
    """

    def __init__(self, inner: Recorder, guard: LimitGuard) -> None:
        self._inner = inner
        self._guard = guard

    def step(self, step: Step) -> None:
        """Hand the step on, then count it."""
        self._inner.step(step)
        if step.source == "agent" and step.extra.get("told_by") != "agent":
            self._guard.count_step()
            if self._guard.steps > self._guard.limits.steps:
                self._guard.check()

    def log(self, line: str) -> None:
        """Hand the line on."""
        self._inner.log(line)

    def keep(self, name: str, data: bytes) -> None:
        """Hand the file on."""
        self._inner.keep(name, data)
