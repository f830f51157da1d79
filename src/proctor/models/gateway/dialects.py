"""The three wire protocols: where they live, how a request is made to obey, and what an error looks like.

Nothing is translated. A request is edited member by member, and only where something is enforced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proctor.models.gateway.body import REMOVED, Body
from proctor.models.gateway.offsite import strip
from proctor.models.gateway.spelling import folded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.models.gateway.config import ModelConfig, Protocol, Sampling


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that can be asked for: its path below `/v1`, its protocol, and whether it makes an answer."""

    name: str
    path: str
    protocol: Protocol
    generates: bool = True


CHAT = Operation("chat", "chat/completions", "chat")
RESPONSES = Operation("responses", "responses", "responses")
MESSAGES = Operation("messages", "messages", "messages")
COUNT_TOKENS = Operation("count_tokens", "messages/count_tokens", "messages", generates=False)

OPERATIONS: Mapping[str, Operation] = {one.path: one for one in (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS)}


@dataclass(slots=True)
class Prepared:
    """A request as it goes upstream, and what was changed on the way: one line of text for each change."""

    raw: bytes
    streamed: bool
    changes: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    """What the provider was asked to do by itself, and was not let."""
    hide_usage: bool = False
    """The stream's chunk with the token counts is ours: the client did not ask for it and does not get it."""
    max_tokens: int | None = None
    answers: int = 1
    """How many answers one call asks for; each may be as long as `max_tokens`."""


def prepare(operation: Operation, body: Body, model: ModelConfig) -> Prepared:
    """The request with everything enforced that the model's configuration says."""
    values = body.values
    edits: dict[str, Any] = {}
    changes: list[str] = []

    def put(name: str, value: Any) -> None:
        before = values.get(name)
        if before != value or type(before) is not type(value):
            edits[name] = value
            changes.append(f"{name}: {_shown(before) if name in values else 'absent'} → {_shown(value)}")

    if values.get("model") != model.id:
        edits["model"] = model.id
        changes.append(f"model: {_shown(values.get('model'))} → {model.id}")
    offsite, removed = strip(operation.protocol, values, model.provider_tools)
    edits.update(offsite)
    changes.extend(f"removed: {name}" for name in removed)
    streamed = operation.generates and values.get("stream") is True
    hide_usage = False
    ceiling: int | None = None
    if operation.generates:
        for name, value in _fixed(operation.protocol, model.sampling).items():
            put(name, value)
        for name, value in model.extra_body.items():
            put(name, value)
        fixed = {folded(name) for name in model.extra_body}
        for name in values:
            if name not in model.extra_body and folded(name) in fixed:
                edits[name] = REMOVED
                changes.append(f"removed: {_shown(name)}")
        if model.sampling.seed is not None and operation.protocol != "chat":
            changes.append("seed: not enforced, the protocol has none")
        bounds = _ceilings(operation.protocol, values, model)
        for name, bound in bounds.items():
            if bound is not None and values.get(name) != bound:
                put(name, bound)
        ceiling = max((bound for bound in bounds.values() if bound is not None), default=None)
        if operation is CHAT and streamed:
            options = values.get("stream_options")
            if not (isinstance(options, dict) and options.get("include_usage") is True):
                edits["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
                hide_usage = True
    answers = max((values[name] for name in ("n", "best_of") if _is_number(values.get(name))), default=1)
    return Prepared(body.edited(edits), streamed, changes, removed, hide_usage, ceiling, answers)


def _fixed(protocol: Protocol, sampling: Sampling) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if protocol == "chat":
        found["seed"] = sampling.seed
    return {name: value for name, value in found.items() if value is not None}


_CHAT_BOUNDS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_output_tokens", "n_predict")
"""The official names, and those that servers of their own know besides."""


def _ceilings(protocol: Protocol, values: Mapping[str, Any], model: ModelConfig) -> dict[str, int | None]:
    """The bounds of an answer by name: the smaller of what was asked and what is allowed. A request may give several,
    and nobody knows which of them a server goes by: all are bounded."""
    if protocol == "chat":
        names = [name for name in _CHAT_BOUNDS if values.get(name) is not None] or [model.max_tokens_field]
    else:
        names = ["max_output_tokens" if protocol == "responses" else "max_tokens"]
    return {name: _bound(values.get(name), model.sampling.max_tokens) for name in names}


def _bound(asked: Any, allowed: int | None) -> int | None:
    if not _is_number(asked):
        return allowed
    bound: int = asked if allowed is None else min(asked, allowed)
    return bound


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value is not REMOVED else "removed"
    return text if len(text) <= 80 else f"{text[:79]}…"


def error_body(protocol: Protocol, message: str, *, kind: str, code: str) -> bytes:
    """An error in the protocol's own shape. `kind` is the protocol's type of error, `code` ours, for programs."""
    if protocol == "messages":
        return json.dumps({"type": "error", "error": {"type": kind, "message": message, "code": code}}).encode()
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def error_kind(protocol: Protocol, status: int) -> str:
    """The protocol's name for an error of that status."""
    if protocol == "messages":
        kinds = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}  # fmt: skip
        return kinds.get(status, "api_error")
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
