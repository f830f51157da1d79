"""An endpoint on loopback that answers as the model once did, in order.

Any harness can be given it in place of its model: those in this process, and command-line agents, since all reach their
model through the gateway. What it is asked is not its business: the new trial's record is compared with the old one's,
request by request. For a branch it answers up to one call, and hands what comes after to the live endpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proctor.models.contract import ModelFault
from proctor.models.spec import is_loopback
from proctor.runs.calls import unpacked
from proctor.runs.replay.wire import chat_completion, chat_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from proctor.runs.formats import ModelCallLine

_PREFIX = "/v1"
_HOP = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})
_KEPT = frozenset({"content-type", "retry-after"})


@dataclass(frozen=True, slots=True)
class Live:
    """Where calls go after the branch point, and what is done before the first of them goes there.

    `after` calls are answered from the record (then `reply`, if there is one, once). `on_branch` is awaited before call
    number `after` + 1 is answered, whoever answers it.
    """

    base_url: str
    after: int
    reply: Mapping[str, Any] | None = None
    on_branch: Callable[[], Awaitable[None]] | None = None
    seed: int | None = None
    """The seed that live calls are made with, in place of the one that they ask for."""
    timeout_s: float = 600.0


@dataclass(slots=True)
class AnswerServer:
    """The endpoint. `begin` it anew for every trial; read `asked`, `extra` and `unasked` afterwards."""

    calls: Sequence[ModelCallLine]
    live: Live | None = None
    asked: int = 0
    extra: int = 0
    counts: Sequence[ModelCallLine] = ()
    """Recorded counts of tokens (of the messages protocol), which are no calls of the model."""
    _counted: int = 0

    def begin(self, live: Live | None = None) -> None:
        """Forget what was asked: a new trial begins, which goes on at `live`, if at all."""
        self.live = live
        self.asked = self.extra = self._counted = 0

    @property
    def unasked(self) -> int:
        """Recorded answers that nobody asked for."""
        return max(0, len(self.calls) - self.asked) if self.live is None else max(0, self.live.after - self.asked)

    @property
    def app(self) -> Starlette:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route(f"{_PREFIX}/models", self._models, methods=["GET"]),
                Route(f"{_PREFIX}/{{path:path}}", self._answer, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        names = dict.fromkeys(call.requested_model for call in self.calls)
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    async def _answer(self, request: Request) -> Response:
        raw = await request.body()
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            return _refused(f"not a request: {error}")
        if request.url.path.endswith("/count_tokens"):
            return self._count_tokens(raw)
        number, self.asked = self.asked, self.asked + 1
        live = self.live
        if live is not None and number >= live.after:
            if number == live.after and live.on_branch is not None:
                await live.on_branch()
            if number == live.after and live.reply is not None:
                return _sent(live.reply, str(body.get("model")), body)
            return await _forward(live, request, _seeded(raw, body, live.seed))
        if number >= len(self.calls):
            self.extra += 1
            return _refused(f"the record has {len(self.calls)} answers, and this is request {number + 1}")
        return _recorded(self.calls[number], body)

    def _count_tokens(self, raw: bytes) -> Response:
        """A count that was recorded, in order; else an estimate: no answer of the model depends on it."""
        from starlette.responses import JSONResponse

        if self._counted < len(self.counts):
            self._counted += 1
            return JSONResponse(self.counts[self._counted - 1].response or {})
        return JSONResponse({"input_tokens": len(raw) // 4})


def _recorded(call: ModelCallLine, body: Mapping[str, Any]) -> Response:
    from starlette.responses import JSONResponse, Response

    if call.stream is not None and body.get("stream"):
        return Response(unpacked(call.stream), media_type="text/event-stream")
    if call.response is not None and (call.protocol == "chat" or not body.get("stream")):
        return (
            _sent(call.response, call.requested_model, body) if call.protocol == "chat" else JSONResponse(call.response)
        )
    if call.response is not None:
        return _refused(f"the record has no stream of this answer ({call.protocol})")
    if call.fault == ModelFault.BAD_REPLY:
        return Response((call.raw or "").encode(), 200, media_type="application/json")
    if call.raw is not None and call.status is not None and 400 <= call.status < 500:
        # What is tried again would only be tried again: it was the last word then.
        status = 400 if call.status in (408, 409, 425, 429) else call.status
        return Response(call.raw.encode(), status, media_type="application/json")
    code = "context_length_exceeded" if call.fault == ModelFault.CONTEXT else "replayed_error"
    return _refused(f"as recorded: {call.error}", code=code)


def _sent(response: Mapping[str, Any], model: str, body: Mapping[str, Any]) -> Response:
    from starlette.responses import JSONResponse, Response

    whole = chat_completion(response, model)
    if not body.get("stream"):
        return JSONResponse(whole)
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return Response(b"".join(chat_events(whole, with_usage=with_usage)), media_type="text/event-stream")


def _refused(message: str, *, code: str = "replay") -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": code}}, 400)


def _seeded(raw: bytes, body: Mapping[str, Any], seed: int | None) -> bytes:
    if seed is None or "seed" not in body:
        return raw
    return json.dumps({**body, "seed": seed}).encode()


async def _forward(live: Live, request: Request, raw: bytes) -> Response:
    """Hand the request to the live endpoint, and its answer back as it comes."""
    import httpx
    from starlette.responses import Response, StreamingResponse

    headers = {name: value for name, value in request.headers.items() if name not in _HOP}
    url = live.base_url + request.url.path.removeprefix(_PREFIX)
    client = httpx.AsyncClient(timeout=live.timeout_s, trust_env=not is_loopback(live.base_url))
    try:
        answer = await client.send(client.build_request("POST", url, content=raw, headers=headers), stream=True)
    except httpx.HTTPError as error:
        await client.aclose()
        message = json.dumps({"error": {"message": f"cannot reach {live.base_url}: {error}", "code": "unreachable"}})
        return Response(message, 503, media_type="application/json")

    async def chunks() -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.aiter_bytes():
                yield chunk
        finally:
            await answer.aclose()
            await client.aclose()

    kept = {name: value for name, value in answer.headers.items() if name in _KEPT}
    return StreamingResponse(chunks(), answer.status_code, kept)
