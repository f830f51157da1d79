"""The gateway as an ASGI application: `/v1/chat/completions`, `/v1/responses`, `/v1/messages` and its `count_tokens`,
`/v1/models`, `/healthz`. Written against ASGI itself: this is the path of every call."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import anyio

from proctor.models.gateway.dialects import OPERATIONS, error_body, error_kind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from proctor.models.gateway.access import TrialAccess
    from proctor.models.gateway.config import Protocol
    from proctor.models.gateway.exchange import Exchange
    from proctor.models.gateway.gateway import Gateway

    Receive = Callable[[], Awaitable[Mapping[str, Any]]]
    Send = Callable[[dict[str, Any]], Awaitable[None]]

_BODY_S = 60.0
"""How long a request may take to arrive."""
_HELD_MAX = 8
"""How many requests of the greatest length one trial may have waiting at a time; they are held in memory here."""
_PASSED = frozenset({"accept", "user-agent", "openai-beta", "idempotency-key", "x-request-id", "x-client-request-id"})
_PASSED_PREFIXES = ("anthropic-", "x-stainless-")


class _Failed(Exception):
    """A request that never becomes a call."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class GatewayApp:
    """Serves one gateway. Callers prove who they are by their trial's token, as a bearer token or an `x-api-key`.

    `details` shows on the health page how each upstream is: for a page that no candidate can open.
    """

    def __init__(self, gateway: Gateway, *, details: bool = False) -> None:
        self._gateway = gateway
        self._details = details

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """One request. Lifespan messages and websockets are not for us."""
        if scope["type"] != "http":
            raise NotImplementedError(f"the gateway speaks HTTP, not {scope['type']}")
        path = scope["path"].strip("/").removeprefix("v1/")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        protocol: Protocol = "messages" if path.startswith("messages") or "anthropic-version" in headers else "chat"
        try:
            if path == "healthz":
                await _reply(send, 200, _json(self._gateway.health(details=self._details)))
                return
            access = self._access(headers)
            if path == "models" or path.startswith("models/"):
                await _reply(send, 200, _models(access, path.partition("/")[2]))
                return
            operation = OPERATIONS.get(path)
            if operation is None:
                raise _Failed(404, f"the gateway does not serve /v1/{path[:100]}", "not_served")
            if scope["method"] != "POST":
                raise _Failed(405, "only POST makes a call", "method_not_allowed")
            if headers.get("content-encoding", "identity") != "identity":
                raise _Failed(415, "send the request without a content encoding", "content_encoding")
            held = _Held(access, self._gateway.config.max_request_bytes)
            raw = await _body(receive, held)
        except _Failed as failure:
            kind = error_kind(protocol, failure.status)
            await _reply(send, failure.status, error_body(protocol, failure.message, kind=kind, code=failure.code))
            return
        if raw is None:
            return
        passed = {name: value for name, value in headers.items() if _passes(name)}
        try:
            await _answer(
                self._gateway.exchange(access, operation, raw, passed), receive, send, self._gateway.config.drain_s
            )
        finally:
            held.release()

    def _access(self, headers: Mapping[str, str]) -> TrialAccess:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = headers.get("x-api-key") or headers.get("api-key") or ""
        access = self._gateway.access_of(token.strip()) if token else None
        if access is None:
            raise _Failed(401, "this needs the token of a trial that is going on", "invalid_token")
        return access


def _passes(name: str) -> bool:
    """Headers are let through by name: what is not known to be harmless stays here."""
    return name in _PASSED or name.startswith(_PASSED_PREFIXES)


class _Held:
    """What one request takes of its trial's share of memory, from its first bytes to its end."""

    def __init__(self, access: TrialAccess, limit: int) -> None:
        self._access, self._limit = access, limit
        self._size = 0

    def add(self, size: int) -> None:
        """More has come. Raises _Failed."""
        self._size += size
        self._access.held_bytes += size
        if self._size > self._limit:
            raise _Failed(413, f"the request is longer than {self._limit} bytes", "request_too_large")
        if self._access.held_bytes > _HELD_MAX * self._limit:
            raise _Failed(429, "the trial's requests that are waiting are too long together", "too_much_at_once")

    def release(self) -> None:
        """The request is over."""
        self._access.held_bytes -= self._size
        self._size = 0


async def _body(receive: Receive, held: _Held) -> bytes | None:
    """The request's body; None when the client left before it was whole. What is given stays held."""
    raw: bytes | None = None
    try:
        with anyio.fail_after(_BODY_S):
            raw = await _whole(receive, held)
    except TimeoutError:
        raise _Failed(408, f"the request did not arrive within {_BODY_S:g} s", "request_timeout") from None
    finally:
        if raw is None:
            held.release()
    return raw


async def _whole(receive: Receive, held: _Held) -> bytes | None:
    pieces = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        piece = message.get("body", b"")
        held.add(len(piece))
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces) if len(pieces) > 1 else bytes(piece)


async def _answer(call: Exchange, receive: Receive, send: Send, drain_s: float) -> None:
    """Make the call and hand its answer over. When the client leaves, the rest is read for its counts, for a while."""
    delivery = _Delivery(send)
    with anyio.CancelScope() as scope:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            delivery.gone = True
            if call.status == 0:
                scope.cancel()
            else:
                scope.deadline = anyio.current_time() + drain_s

        # A plain task: one of these runs for every call, and a task group would cost as much as the rest of it.
        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            await call.open()
            await delivery.start(call.status, call.headers)
            async for chunk in call.chunks():
                await delivery.send(chunk, last=call.complete)
            await delivery.end()
        finally:
            watcher.cancel()
            call.close()


class _Delivery:
    """The way back to the client; once it has left, everything goes nowhere."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.gone = False
        self._ended = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        encoded = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._try({"type": "http.response.start", "status": status, "headers": encoded})

    async def send(self, chunk: bytes, *, last: bool) -> None:
        await self._try({"type": "http.response.body", "body": chunk, "more_body": not last})
        self._ended = last

    async def end(self) -> None:
        if not self._ended:
            await self._try({"type": "http.response.body", "body": b"", "more_body": False})

    async def _try(self, message: dict[str, Any]) -> None:
        if not self.gone:
            try:
                await self._send(message)
            except OSError:  # ASGI 2.4: the client has left
                self.gone = True


def _models(access: TrialAccess, name: str) -> bytes:
    """The trial's models, in a shape that both families of clients read."""
    entries = [
        {
            "id": model.name,
            "object": "model",
            "type": "model",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "display_name": model.name,
            "owned_by": "proctor",
        }
        for model in access.models
    ]
    if name:
        found = next((entry for entry in entries if entry["id"] == name), None)
        if found is None:
            raise _Failed(404, f"there is no model {name[:100]!r} for this trial", "model_not_found")
        return _json(found)
    ids = [entry["id"] for entry in entries]
    return _json({"object": "list", "data": entries, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


async def _reply(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
