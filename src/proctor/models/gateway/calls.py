"""One call as it is put on record, and the removal of secrets from everything that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proctor.models.contract import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proctor.models.contract import ModelFault

MIN_SECRET_CHARS = 8
"""A shorter key is a placeholder, not a secret."""
REDACTED = "[redacted]"


class Redactor:
    """Replaces secrets by `[redacted]`, in text and in bytes, also where JSON has escaped a slash in them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        spellings = set()
        for secret in secrets:
            if len(secret) >= MIN_SECRET_CHARS:
                spellings |= {secret, secret.replace("/", "\\/")}
        self._texts = tuple(sorted(spellings, key=len, reverse=True))
        self._bytes = tuple(text.encode() for text in self._texts)

    def text(self, value: str) -> str:
        """`value` without a secret."""
        for secret in self._texts:
            if secret in value:
                value = value.replace(secret, REDACTED)
        return value

    def raw(self, value: bytes) -> bytes:
        """`value` without a secret; the same object when there was none."""
        for secret in self._bytes:
            if secret in value:
                value = value.replace(secret, REDACTED.encode())
        return value

    def tree(self, value: Any) -> Any:
        """A JSON value without a secret, at any depth, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self.tree(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.tree(item) for item in value]
        return value


@dataclass(frozen=True, slots=True)
class Try:
    """One try of a call that did not succeed: where, what went wrong, and how long was waited after it."""

    upstream: str
    fault: str
    message: str
    status: int | None
    duration_s: float
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Begun:
    """A call before it goes upstream. `request` is its JSON as it came, without secrets."""

    number: int
    at: str
    operation: str
    asked_model: str
    upstream: str
    pinned_model: str
    request: bytes


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call, as it is told before its last byte goes back. Secrets are gone from every field.

    `request` is what the agent asked, `changes` what was enforced on it. `response` is the answer as one object
    (assembled, when it was streamed); `stream` the raw bytes of a streamed answer, `raw` those of an error or of
    anything else that is not an answer. `started` is true as soon as a byte of the answer was passed on.
    """

    seq: int
    trial_id: str
    at: str
    operation: str
    asked_model: str
    model: str
    upstream: str
    pinned_model: str
    streamed: bool
    request: Mapping[str, Any]
    changes: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    status: int | None = None
    response: Mapping[str, Any] | None = None
    stream: bytes | None = field(default=None, repr=False)
    raw: bytes | None = field(default=None, repr=False)
    returned_model: str | None = None
    fingerprint: str | None = None
    usage: Usage = field(default_factory=Usage)
    cache_write_tokens: int | None = None
    price_since: str | None = None
    queued_s: float = 0.0
    latency_s: float | None = None
    """The last try alone, from the request to the last byte."""
    first_token_s: float | None = None
    total_s: float = 0.0
    attempts: int = 0
    tries: tuple[Try, ...] = ()
    fault: ModelFault | None = None
    error: str | None = None
    left: bool = False
    """The caller ended it (hung up, or its trial ended), not the upstream."""
    number: int = 0
    """Which call of the trial it was, in the order in which they began; `seq` is the order in which they ended."""
    flags: tuple[str, ...] = ()
    """What a reader of the record must know: `fallback: …`, `model changed: …`, `fingerprint changed: …`,
    `provider tool removed: …`, `the client left`."""
