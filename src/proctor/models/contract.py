"""What a model is to a harness: a client that turns messages into an answer and tells what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from proctor.common import ProctorError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model, where, and with which fixed sampling parameters."""

    name: str
    base_url: str
    api_key_env: str | None = None
    temperature: float | None = 0.0
    top_p: float | None = None
    seed: int | None = 0
    max_tokens: int | None = None
    stream: bool = True
    timeout_s: float = 120.0
    """One attempt, from the request to the last byte of the answer."""
    connect_timeout_s: float = 10.0
    first_token_timeout_s: float | None = None
    """From the request to the first event of the answer; None: only `timeout_s` counts."""
    max_retries: int = 5
    prices: Mapping[str, float] | None = None
    """USD per million tokens: `prompt`, `cached`, `cache_write`, `completion`. None: price and cost are unknown."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, sent as they are (`reasoning_effort`, …)."""


class ModelFault(StrEnum):
    """What kind of failure kept an answer away. A closed list."""

    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"
    CUT = "cut"
    REFUSED = "refused"
    CONTEXT = "context_length"
    BAD_REPLY = "bad_reply"


class ModelError(ProctorError):
    """No answer could be had. `excerpt` is the start of the raw reply, with the key redacted.

    `attempts` counts every try. The endpoint's fault, not the candidate's, except for CONTEXT (the conversation
    has outgrown the model's window).
    """

    def __init__(
        self,
        message: str,
        *,
        fault: ModelFault,
        status: int | None = None,
        excerpt: str = "",
        attempts: int = 1,
        remedy: str | None = None,
    ) -> None:
        self.fault = fault
        self.status = status
        self.excerpt = excerpt
        self.attempts = attempts
        super().__init__(message, field="model", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and cost of one call; None means unknown, never zero."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class ModelToolCall:
    """A tool call as the model sent it; `arguments` is raw text and may not be JSON at all."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One answer. `returned_model` is the id in the response; `attempts` counts tries including the last."""

    text: str
    tool_calls: tuple[ModelToolCall, ...]
    reasoning: str | None
    finish_reason: str | None
    usage: Usage
    requested_model: str
    returned_model: str | None
    latency_s: float
    first_token_s: float | None
    attempts: int
    raw: Mapping[str, Any] = field(default_factory=dict)


class ModelClient(Protocol):
    """A chat-completions client. `complete` raises ModelError when no answer could be had."""

    spec: ModelSpec

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ModelAnswer: ...
    async def aclose(self) -> None: ...
