"""A chat-completions client for any OpenAI-compatible endpoint: one whole answer out, or one clear error."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio

from proctor.common import ConfigError
from proctor.models.contract import ModelAnswer, ModelError, ModelFault, ModelSpec
from proctor.models.reply import Assembler, BadReply, Draft, ErrorReply, parse_json, usage_of, whole_answer
from proctor.models.retry import MAX_RETRY_AFTER_S, delay_s, is_retried, retry_after_s
from proctor.models.spec import is_loopback
from proctor.models.sse import EventDecoder

if TYPE_CHECKING:
    import httpx

MAX_REPLY_BYTES = 64 << 20
"""A longer reply is refused: no answer has that size, and it has to fit into memory."""

_EXCERPT_CHARS = 2000
_MIN_KEY_CHARS = 8
_DRAIN_S = 0.1
_LAST_S = 0.05
_CONTEXT_WORDS = ("context length", "context window", "context_length", "context size", "prompt is too long")


class _Failure(Exception):
    """One failed try: what became of it, and whether another makes sense."""

    def __init__(
        self,
        fault: ModelFault,
        message: str,
        *,
        retried: bool,
        status: int | None = None,
        excerpt: str = "",
        wait_s: float | None = None,
        remedy: str | None = None,
    ) -> None:
        self.fault = fault
        self.message = message
        self.retried = retried
        self.status = status
        self.excerpt = excerpt
        self.wait_s = wait_s
        self.remedy = remedy
        self.attempts = 1
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class _Hop:
    """What a gateway in between says of a call: how often it tried, and for how long before its last try began."""

    attempts: int = 1
    waited_s: float = 0.0

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> _Hop:
        if "x-proctor-attempts" not in headers:
            return cls()
        return cls(int(headers["x-proctor-attempts"]), float(headers["x-proctor-waited-s"]))


class OpenAIChatClient:
    """Talks to `spec.base_url`. One client may be shared by any number of trials.

    The key is read from the environment variable that the spec names, when the client is made; it is sent in the
    Authorization header and replaced by `[redacted]` wherever a reply or an error repeats it. With a gateway's
    `transport` it holds no key, and tries again only what broke off after the answer had begun.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.spec = spec
        self._transport = transport
        # Behind a gateway the key, the time-outs and the tries are the gateway's business.
        self._key = _key_from_environment(spec) if transport is None else None
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._http: httpx.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"OpenAIChatClient({self.spec.name!r}, {self.spec.base_url!r})"

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ModelAnswer:
        """The model's answer. Retries what may go away by itself; raises ModelError for the rest.

        Retries end before the caller's deadline does (anyio's effective deadline), so that an endpoint that fails
        until then is a ModelError and not a caller that ran out of time.
        """
        body = request_body(self.spec, messages, tools)
        attempt = before = 0
        while True:
            attempt += 1
            start = anyio.current_time()
            try:
                draft, first_token_s, hop = await self._attempt(body, again=attempt > 1)
                latency_s = anyio.current_time() - start - hop.waited_s
                return self._answer(draft, latency_s, first_token_s, before + hop.attempts)
            except _Failure as failure:
                before += failure.attempts
                if not failure.retried or attempt > self.spec.max_retries:
                    raise self._error(failure, before) from failure
                if failure.wait_s is not None and failure.wait_s > MAX_RETRY_AFTER_S:
                    failure.message += f"; it asks to wait {failure.wait_s:.0f} s"
                    raise self._error(failure, before) from failure
                wait_s = delay_s(attempt, failure.wait_s, self._rng)
                if anyio.current_time() + wait_s >= anyio.current_effective_deadline() - _LAST_S:
                    failure.message += "; no time is left to try again"
                    raise self._error(failure, before) from failure
                await self._sleep(wait_s)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            import httpx

            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            timeout = httpx.Timeout(None, connect=self.spec.connect_timeout_s)
            if self._transport is not None:
                self._http = httpx.AsyncClient(transport=self._transport, timeout=None)
                return self._http
            # Trials share the client, and how many there are is the scheduler's business.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            local = is_loopback(self.spec.base_url)
            self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=not local)
        return self._http

    async def _attempt(self, body: Mapping[str, Any], *, again: bool) -> tuple[Draft, float | None, _Hop]:
        """One try: the answer, the seconds to its first token, and what a gateway did for it. Raises _Failure."""
        import httpx

        spec, start = self.spec, anyio.current_time()
        latest = start + spec.timeout_s if self._transport is None else float("inf")
        if again:
            latest = min(latest, anyio.current_effective_deadline() - _LAST_S)
        first = latest
        if spec.stream and spec.first_token_timeout_s is not None and self._transport is None:
            first = min(latest, start + spec.first_token_timeout_s)
        with anyio.CancelScope(deadline=first) as scope:

            def on_start() -> None:
                scope.deadline = latest

            try:
                async with self._client().stream("POST", f"{spec.base_url}/chat/completions", json=body) as response:
                    return (*await self._read(response, start, on_start), _Hop.of(response.headers))
            except httpx.ConnectTimeout as error:
                message = f"no connection to {spec.base_url} within {spec.connect_timeout_s:g} s"
                raise _Failure(ModelFault.UNREACHABLE, message, retried=True) from error
            except (httpx.ConnectError, httpx.ProxyError) as error:
                message = f"cannot reach {spec.base_url}: {error}"
                remedy = "check the URL and that it is up"
                raise _Failure(ModelFault.UNREACHABLE, message, retried=True, remedy=remedy) from error
            except httpx.DecodingError as error:
                raise _Failure(ModelFault.BAD_REPLY, f"the reply cannot be decoded: {error}", retried=False) from error
            except httpx.TransportError as error:
                what = str(error) or type(error).__name__
                raise _Failure(ModelFault.CUT, f"the connection broke: {what}", retried=True) from error
            except (httpx.InvalidURL, httpx.HTTPError) as error:
                raise _Failure(ModelFault.REFUSED, f"the request cannot be sent: {error}", retried=False) from error
        waited_s = anyio.current_time() - start
        what = "no whole answer" if scope.deadline == latest else "no first token"
        raise _Failure(ModelFault.TIMEOUT, f"{what} within {waited_s:.1f} s", retried=True)

    async def _read(
        self, response: httpx.Response, start: float, on_start: Callable[[], None]
    ) -> tuple[Draft, float | None]:
        if response.status_code != 200:
            text = await _body(response)
            if "x-proctor-code" in response.headers:
                raise _gateway_failure(response.headers, text)
            failure = _status_failure(response.status_code, response.headers, text, self.spec)
            if "x-proctor-attempts" in response.headers:
                failure.attempts, failure.retried = _Hop.of(response.headers).attempts, False
            raise failure
        if "text/event-stream" in response.headers.get("content-type", ""):
            return await _read_stream(response, start, on_start)
        text = await _body(response)
        try:
            return whole_answer(parse_json(text)), None
        except BadReply as error:
            raise _bad_reply(error, text) from error
        except ErrorReply as error:
            raise _error_failure(error, text) from error

    def _answer(self, draft: Draft, latency_s: float, first_token_s: float | None, attempts: int) -> ModelAnswer:
        return ModelAnswer(
            text=self._redacted(draft.text),
            tool_calls=tuple(
                replace(call, name=self._redacted(call.name), arguments=self._redacted(call.arguments))
                for call in draft.tool_calls
            ),
            reasoning=self._redacted(draft.reasoning),
            finish_reason=draft.finish_reason,
            usage=usage_of(draft.usage, self.spec.prices),
            requested_model=self.spec.name,
            returned_model=draft.returned_model,
            latency_s=latency_s,
            first_token_s=first_token_s,
            attempts=attempts,
            raw=self._redacted(draft.raw),
        )

    def _error(self, failure: _Failure, attempts: int) -> ModelError:
        tries = f" after {attempts} tries" if attempts > 1 else ""
        return ModelError(
            self._redacted(failure.message) + tries,
            fault=failure.fault,
            status=failure.status,
            excerpt=self._redacted(failure.excerpt)[:_EXCERPT_CHARS],
            attempts=attempts,
            remedy=self._redacted(failure.remedy),
        )

    def _redacted(self, value: Any) -> Any:
        """`value` without the key, at any depth. A key of a few characters is a placeholder, not a secret."""
        if not self._key or len(self._key) < _MIN_KEY_CHARS:
            return value
        if isinstance(value, str):
            return value.replace(self._key, "[redacted]")
        if isinstance(value, Mapping):
            return {self._redacted(name): self._redacted(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._redacted(item) for item in value]
        return value


def request_body(
    spec: ModelSpec, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The JSON of one request. Sampling parameters that the spec leaves open are not sent."""
    body: dict[str, Any] = {**spec.extra_body, "model": spec.name, "messages": list(messages)}
    for name in ("temperature", "top_p", "seed", "max_tokens"):
        if (value := getattr(spec, name)) is not None:
            body[name] = value
    if tools:
        body["tools"] = list(tools)
    if spec.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body


async def _read_stream(
    response: httpx.Response, start: float, on_start: Callable[[], None]
) -> tuple[Draft, float | None]:
    decoder, assembler = EventDecoder(), Assembler()
    first_token_s: float | None = None
    chunks = _capped(response)
    kept = ""
    done = False

    def take(events: Sequence[Any]) -> None:
        nonlocal first_token_s, kept, done
        for event in events:
            if done := event.data.strip() == "[DONE]":
                return
            kept = event.data
            assembler.add(event.data)
            if first_token_s is None and assembler.started:
                first_token_s = anyio.current_time() - start
                on_start()

    try:
        async for chunk in chunks:
            take(decoder.feed(chunk))
            if done:
                # Reading to the end lets the connection be used again; an endpoint that keeps it open loses it.
                with anyio.move_on_after(_DRAIN_S):
                    async for _ in chunks:
                        pass
                break
        if not done:
            take(decoder.finish())
        if not done and assembler.finish_reason is None:
            raise _Failure(ModelFault.CUT, "the stream ended before the answer did", retried=True, excerpt=kept)
        return assembler.answer(), first_token_s
    except BadReply as error:
        raise _bad_reply(error, kept) from error
    except ErrorReply as error:
        raise _error_failure(error, kept) from error


async def _capped(response: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            message = f"the reply is longer than {MAX_REPLY_BYTES} bytes"
            raise _Failure(ModelFault.BAD_REPLY, message, retried=False)
        yield chunk


async def _body(response: httpx.Response) -> str:
    return b"".join([chunk async for chunk in _capped(response)]).decode("utf-8", "replace")


def _bad_reply(error: BadReply, text: str) -> _Failure:
    return _Failure(ModelFault.BAD_REPLY, str(error), retried=False, excerpt=text)


def _error_failure(error: ErrorReply, text: str) -> _Failure:
    """An error object inside a reply with status 200, whole or in mid-stream."""
    status = int(error.code) if error.code.isdigit() else None
    busy = any(word in f"{error.code} {error.kind}".lower() for word in ("overload", "rate_limit", "server_error"))
    retried = busy or (status is not None and is_retried(status))
    fault = _context_fault(error.code, error.message) or (ModelFault.OVERLOADED if retried else ModelFault.REFUSED)
    message = f"the endpoint reports an error: {error.message}"
    return _Failure(fault, message, retried=retried, status=status, excerpt=text)


def _status_failure(status: int, headers: Mapping[str, str], text: str, spec: ModelSpec) -> _Failure:
    """A reply with a status other than 200."""
    said, code = "", ""
    try:
        parse_json(text)
    except ErrorReply as error:
        said, code = error.message, error.code
    except BadReply:
        said = " ".join(text.split())[:200]
    message = f"status {status} from {spec.base_url}" + (f": {said}" if said else "")
    if is_retried(status):
        wait_s = retry_after_s(headers.get("retry-after"), datetime.now(UTC))
        fault = ModelFault.OVERLOADED
        return _Failure(fault, message, retried=True, status=status, excerpt=text, wait_s=wait_s)
    remedy = None
    if status in (401, 403):
        remedy = f"check ${spec.api_key_env}" if spec.api_key_env else "name the key's variable in api_key_env"
    elif status == 404:
        remedy = f"check base_url (it ends in /v1 for most) and that {spec.name} is served there"
    elif 300 <= status < 400:
        remedy = f"give the final address: {headers.get('location', 'unknown')}"
    fault = _context_fault(code, said) or ModelFault.REFUSED
    return _Failure(fault, message, retried=False, status=status, excerpt=text, remedy=remedy)


def _gateway_failure(headers: Mapping[str, str], text: str) -> _Failure:
    """An error that the gateway reports in its own words."""
    fault = ModelFault(headers["x-proctor-fault"])
    try:
        parse_json(text)
        said = text
    except ErrorReply as error:
        said = error.message
    except BadReply:
        said = " ".join(text.split())[:200]
    remedy = "check the URL and that it is up" if fault is ModelFault.UNREACHABLE else None
    failure = _Failure(fault, said, retried=False, excerpt=text, remedy=remedy)
    failure.attempts = max(1, _Hop.of(headers).attempts)
    return failure


def _context_fault(code: str, message: str) -> ModelFault | None:
    text = f"{code} {message}".lower()
    return ModelFault.CONTEXT if any(word in text for word in _CONTEXT_WORDS) else None


def _key_from_environment(spec: ModelSpec) -> str | None:
    if spec.api_key_env is None:
        return None
    key = os.environ.get(spec.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"the environment variable {spec.api_key_env} is not set", field="api_key_env", remedy="export the key"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"${spec.api_key_env} holds characters that no key has", field="api_key_env")
    return key
