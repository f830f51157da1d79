"""What a gateway is told: upstreams, models with their pins, limits, budgets. Values only: files are read elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from proctor.common import digest_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.models.gateway.prices import PriceTable

Protocol = Literal["chat", "responses", "messages"]
"""A wire protocol: OpenAI chat completions, OpenAI responses, Anthropic messages."""

PROTOCOLS: tuple[Protocol, ...] = ("chat", "responses", "messages")


@dataclass(frozen=True, slots=True)
class Limits:
    """How fast an upstream (that is, a key) or a model may be asked; None: as fast as anybody likes."""

    requests_per_minute: float | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how slowly a call is tried again: see `proctor.models.retry` for the statuses."""

    max_retries: int = 5
    base_s: float = 0.5
    cap_s: float = 30.0
    max_retry_after_s: float = 120.0
    """An upstream that asks for a longer wait gets no other try."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds of one try: to connect, to the first byte of the answer, between two bytes, to the last byte."""

    connect_s: float = 10.0
    first_byte_s: float | None = None
    idle_s: float | None = None
    total_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Circuit:
    """After `failures` failed tries in a row an upstream is left alone for `open_s` seconds, then tried once."""

    failures: int = 10
    open_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Health:
    """A GET of `path` (below the base URL, or from the root when it begins with `/`) every `interval_s` seconds."""

    path: str = "models"
    interval_s: float = 30.0
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """One place that answers, and the one key for it."""

    name: str
    base_url: str
    protocols: tuple[Protocol, ...] = PROTOCOLS
    key: str | None = field(default=None, repr=False)
    """The secret itself; it is never part of `as_json`, a log or a record."""
    key_source: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    retries: Retries = Retries()
    timeouts: Timeouts = Timeouts()
    circuit: Circuit = Circuit()
    health: Health | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that every call of a model has, whatever was asked for. None: as asked.

    `max_tokens` is a ceiling: a call that asks for less gets less. `seed` exists in the chat protocol alone.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model as agents may ask for it, and what they get. `id` is sent upstream, whatever name was asked for."""

    name: str
    upstream: str
    id: str
    aliases: tuple[str, ...] = ()
    """Patterns (as in a shell) of further names that mean this model: agents with a helper model in their code."""
    returns: str | None = None
    """The id that answers must carry. None: the first that comes, for the whole run."""
    fingerprint: str | None = None
    sampling: Sampling = Sampling()
    max_tokens_field: str = "max_tokens"
    """What a ceiling is called in a chat request that names none (`max_completion_tokens` for some models)."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    provider_tools: tuple[str, ...] = ()
    """Provider-side tools that are let through, by their type (patterns)."""
    prices: Mapping[str, float] | None = None
    limits: Limits = Limits()
    fallback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Budgets:
    """What may be used before the trial (or every trial of the run) ends as `agent_limit`. None: no budget."""

    tokens: int | None = None
    cost_usd: float | None = None
    calls: int | None = None


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything. `drain_s`: how long an answer is still read, for its token counts, after its reader has left."""

    upstreams: Mapping[str, UpstreamConfig]
    models: Mapping[str, ModelConfig]
    prices: PriceTable | None = None
    run_budgets: Budgets = Budgets()
    trial_budgets: Budgets = Budgets()
    max_parallel: int = 32
    """Calls of one trial at a time; further ones wait."""
    max_request_bytes: int = 32 << 20
    drain_s: float = 30.0

    def as_json(self) -> dict[str, Any]:
        """The configuration as the lock of a run holds it: no key, only where each comes from."""
        from dataclasses import asdict

        upstreams = {}
        for name, upstream in self.upstreams.items():
            upstreams[name] = {key: value for key, value in asdict(upstream).items() if key != "key"}
        return {
            "upstreams": upstreams,
            "models": {name: asdict(model) for name, model in self.models.items()},
            "prices": self.prices.as_json() if self.prices is not None else None,
            "run_budgets": asdict(self.run_budgets),
            "trial_budgets": asdict(self.trial_budgets),
            "max_parallel": self.max_parallel,
            "max_request_bytes": self.max_request_bytes,
            "drain_s": self.drain_s,
        }

    @property
    def digest(self) -> str:
        """Digest of `as_json`."""
        return digest_json(self.as_json())
