"""HTTP/1.x between a program in the sandbox and a server, every request of the connection read and judged.

One request at a time: its head is read, judged, written anew and sent on, its body follows, and the response comes back
with its end found by the same strict rules, so that the next head is a head and not a piece of something else.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import anyio

from proctor.sandbox.net import httphead
from proctor.sandbox.net.dialer import DialError
from proctor.sandbox.net.events import NetworkEvent
from proctor.sandbox.net.httpbody import Body
from proctor.sandbox.net.httphead import HeadError, Request, Response
from proctor.sandbox.net.pipes import CHUNK, PrefixedPipe, relay
from proctor.sandbox.net.secrets import Mask, SecretElsewhere

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proctor.sandbox.net.events import Decision
    from proctor.sandbox.net.faults import RequestFaults
    from proctor.sandbox.net.pipes import Pipe
    from proctor.sandbox.net.secrets import Keyring

_HEAD_S = 60.0
_HEAD_CHUNK = 16 << 10
"""Hundreds of connections may wait with half a head: what they hold is bounded by little more than a head."""
_KEEP_ALIVE_S = 600.0
_LINGER_S = 2.0
_QUIET_S = 0.05
"""After so long a silence what may be the beginning of a value is let through: a message may just end like that."""
_LINGER_MAX = 1 << 20
_PHRASES = {400: "Bad Request", 403: "Forbidden", 429: "Too Many Requests", 500: "Internal Server Error"}
_PHRASES |= {502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout"}


class Judge(Protocol):
    """What the relay asks of the boundary, for one connection."""

    name: str
    port: int
    keyring: Keyring
    encrypted: bool

    def judge(self, request: Request) -> str | None:
        """Why `request` is refused now, or None. An allowed one is the connection's current request from then on."""
        ...

    def faults(self) -> RequestFaults: ...
    def event(self, event: NetworkEvent) -> None: ...


class Incoming:
    """One direction of a connection with what has been read and not used."""

    def __init__(self, pipe: Pipe, data: bytes = b"") -> None:
        self.pipe = pipe
        self._buffer = bytearray(data)
        self._ahead: asyncio.Task[bytes] | None = None

    async def receive(self, max_bytes: int = CHUNK) -> bytes:
        """The next bytes from the pipe."""
        if self._ahead is None:
            return await self.pipe.receive(max_bytes)
        await asyncio.wait((self._ahead,))
        data, self._ahead = self._ahead.result(), None
        return data

    async def stirs(self) -> None:
        """Wait until the other side says something or ends, without taking it. May be cancelled, and nothing is lost:
        the read goes on, and the next `receive` has its result."""
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self.pipe.receive(_HEAD_CHUNK))
        await asyncio.wait((self._ahead,))

    async def aclose(self) -> None:
        """Close the pipe."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.wait((self._ahead,))
            if not self._ahead.cancelled():
                self._ahead.exception()
        await self.pipe.aclose()

    async def fill(self) -> bool:
        """Read more; False at the end."""
        data = await self.receive(_HEAD_CHUNK)
        self._buffer += data
        return bool(data)

    def take(self, count: int | None = None) -> bytes:
        """Take `count` bytes, or all that has been read."""
        data = bytes(self._buffer[:count])
        del self._buffer[: len(data)]
        return data

    async def some(self) -> bytes:
        """What has been read, or the next that comes; empty at the end."""
        return self.take() if self._buffer else await self.receive()

    def give_back(self, data: bytes) -> None:
        """Put what was not used in front again."""
        self._buffer[:0] = data

    async def head(self, *, wait_s: float) -> bytes | None:
        """The next head; None when the connection ends before it begins. Raises HeadError."""
        with anyio.move_on_after(wait_s):
            while not self._buffer:
                if not await self.fill():
                    return None
            seen = 0
            with anyio.move_on_after(_HEAD_S):
                while (end := httphead.end_of(self._buffer, seen)) is None:
                    seen = len(self._buffer)
                    if not await self.fill():
                        raise HeadError("http-head-cut-off")
                return self.take(end)
            raise HeadError("http-head-too-slow")
        return None


@dataclass(slots=True)
class _Exchange:
    """One request and what became of it."""

    request: Request
    at: float
    began: float
    fault: str = ""
    secrets: tuple[str, ...] = ()
    status: int | None = None


class _Refused(Exception):
    def __init__(self, status: int, reason: str, *, failed: bool = False, retry_after_s: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.failed = failed
        self.retry_after_s = retry_after_s
        self.decision: Decision = "failed" if failed else "allowed" if reason == "fault" else "refused"


class HttpRelay:
    """Serves one connection. `connect` makes the connection to the server, when the first request is let through."""

    def __init__(self, judge: Judge, client: Pipe, connect: Callable[[], Awaitable[Pipe]], data: bytes = b"") -> None:
        self._judge = judge
        self._client = Incoming(client, data)
        self._connect = connect
        self._server: Incoming | None = None

    async def run(self) -> tuple[Decision, str]:
        """To the end of the connection; returns what became of it."""
        try:
            while (head := await self._next_head()) is not None:
                if (end := await self._serve(head)) is not None:
                    return end
            return "allowed", ""
        except HeadError as error:
            await self._refuse(_Refused(400, str(error)), None)
            return "refused", str(error)
        except OSError:
            self.reset()
            return "allowed", "reset"
        finally:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()
                if self._server is not None:
                    await self._server.aclose()

    async def _next_head(self) -> bytes | None:
        """The next request's head; None when there will be none, because one side has ended the connection.

        The server's end is told to the program at once, as it would be without us between them: a program that kept
        the connection for later would otherwise send its next request into nothing.
        """
        server = self._server
        if server is None:
            return await self._client.head(wait_s=_KEEP_ALIVE_S)
        head: bytes | None = None
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                await server.stirs()
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            try:
                head = await self._client.head(wait_s=_KEEP_ALIVE_S)
            except (HeadError, OSError) as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return head

    def reset(self) -> None:
        """Break off both sides."""
        self._client.pipe.reset()
        if self._server is not None:
            self._server.pipe.reset()

    async def _serve(self, head: bytes) -> tuple[Decision, str] | None:
        """One request; returns how the connection ends, None when it goes on."""
        exchange: _Exchange | None = None
        try:
            try:
                request = httphead.request(head, self._judge.name, self._judge.port)
            except HeadError as error:
                raise _Refused(403 if str(error) in _POLICY else 400, str(error)) from error
            exchange = _Exchange(request, time.time(), time.monotonic())
            prepared, masks = await self._prepare(exchange)
            server = await self._upstream()
            goes_on = await self._exchange(exchange, prepared, server, masks)
        except _Refused as refused:
            await self._refuse(refused, exchange)
            return refused.decision, refused.reason
        except HeadError as error:  # the server's
            self._record(exchange, "failed", f"server: {error}")
            self.reset()
            return "failed", str(error)
        except OSError:
            self._record(exchange, "failed", "reset")
            raise
        self._record(exchange, "allowed", "")
        return None if goes_on else ("allowed", "")

    async def _prepare(self, exchange: _Exchange) -> tuple[Request, tuple[bytes, ...]]:
        """Judge, delay, and put secrets in place: the request as it is sent on, and what must not come back."""
        request, judge = exchange.request, self._judge
        if (reason := judge.judge(request)) is not None:
            raise _Refused(403, reason)
        faults = judge.faults()
        exchange.fault = faults.text
        if faults.delay_s:
            await anyio.sleep(faults.delay_s)
            if (reason := judge.judge(request)) is not None:  # the policy may have changed meanwhile
                raise _Refused(403, reason)
        if faults.status is not None:
            raise _Refused(faults.status, "fault", retry_after_s=faults.retry_after_s)
        if not request.wants_websocket and b"upgrade" in request.tokens(b"connection"):
            # A server may ignore an upgrade; this way it has to (HTTP/2 over cleartext cannot be judged).
            request = _without_upgrade(request)
        exposed = judge.keyring.exposed(judge.name)
        if exposed:
            request = request.without(b"accept-encoding")
            request = replace(request, fields=(*request.fields, (b"Accept-Encoding", b"identity")))
            request = request.without(b"sec-websocket-extensions")  # compression is one
        try:
            substituted = judge.keyring.substitute(request, judge.name, encrypted=judge.encrypted)
        except SecretElsewhere as error:
            exchange.secrets = tuple(str(error).split(","))
            raise _Refused(403, "secret-elsewhere") from error
        exchange.secrets = substituted.used
        return substituted.request, (*exposed, *substituted.exposed)

    async def _upstream(self) -> Incoming:
        if self._server is None:
            try:
                self._server = Incoming(await self._connect())
            except DialError as error:
                raise _Refused(403 if error.refused else 502, str(error), failed=not error.refused) from error
        return self._server

    async def _exchange(
        self, exchange: _Exchange, request: Request, server: Incoming, masks: tuple[bytes, ...]
    ) -> bool:
        """Send the request, bring the response; returns whether the connection can be used again."""
        await server.pipe.send(request.encode())
        body = Body(request.length, chunked=request.chunked)
        if body.done:
            return await self._respond(exchange, request, server, masks)
        goes_on = False
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:

            async def upload() -> None:
                nonlocal failure
                try:
                    with suppress(OSError):  # a server may answer and close before it has read everything
                        await _carry_body(self._client, server.pipe, body)
                except HeadError as error:
                    failure = _Refused(400, str(error))
                    tasks.cancel_scope.cancel()

            tasks.start_soon(upload)
            try:
                goes_on = await self._respond(exchange, request, server, masks)
            except (HeadError, OSError) as error:
                failure = failure or error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return goes_on and body.done

    async def _respond(self, exchange: _Exchange, request: Request, server: Incoming, masks: tuple[bytes, ...]) -> bool:
        """Bring all interim responses and the final one."""
        mask = Mask(masks) if masks else None
        while True:
            head = await server.head(wait_s=3600)
            if head is None:
                raise ConnectionResetError("the server ended the connection without an answer")
            response = httphead.response(head, request.method)
            exchange.status = response.status
            if response.status == 101:
                if not request.wants_websocket:
                    raise HeadError("http-unasked-upgrade")
                await self._become_raw(response, server, mask)
                return False
            if mask is not None:
                response = _masked(response, mask)
            if response.status >= 200:
                break
            await self._client.pipe.send(response.encode())
        await self._bring_body(response, server, mask)
        ends = response.length is None and not response.chunked
        return not (ends or response.closes or request.closes)

    async def _bring_body(self, response: Response, server: Incoming, mask: Mask | None) -> None:
        client = self._client.pipe
        body = Body(response.length, chunked=response.chunked)
        if mask is not None and not body.done:
            await client.send(response.encode())
            await _carry_masked(server, client, body, mask, chunked=response.chunked)
            return
        # Head and the first of the body in one go: half the wake-ups of a short answer.
        first = server.take()
        count = body.take(first)
        server.give_back(first[count:])
        await client.send(response.encode() + first[:count])
        await _carry_body(server, client, body)

    async def _become_raw(self, response: Response, server: Incoming, mask: Mask | None) -> None:
        """From here on it is no HTTP: a WebSocket that the policy lets pass. Values are masked in it, too."""
        await self._client.pipe.send((response if mask is None else _masked(response, mask)).encode())
        left = PrefixedPipe(self._client.pipe, self._client.take())
        right = PrefixedPipe(server.pipe, server.take()) if mask is None else _MaskedPipe(server, mask)
        await relay(left, right)

    async def _refuse(self, refused: _Refused, exchange: _Exchange | None) -> None:
        """Say so to the program, in words, and end the connection without losing them."""
        if exchange is not None:
            exchange.status = refused.status
        self._record(exchange, refused.decision, "" if refused.reason == "fault" else refused.reason, refused.status)
        text = f"proctor: {self._judge.name}:{self._judge.port}: {refused.reason}\n".encode()
        head = f"HTTP/1.1 {refused.status} {_PHRASES[refused.status]}\r\nContent-Type: text/plain\r\n"
        if refused.reason != "fault":
            head += f"X-Proctor-{'Failed' if refused.failed else 'Refused'}: {refused.reason}\r\n"
        if refused.retry_after_s is not None:
            head += f"Retry-After: {refused.retry_after_s}\r\n"
        head += f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        without_body = exchange is not None and exchange.request.method == "HEAD"
        client = self._client.pipe
        with suppress(OSError), anyio.move_on_after(_LINGER_S):
            await client.send(head.encode() + (b"" if without_body else text))
            await client.send_eof()
            # What is still coming must be read: closing on it would reset, and the answer be lost.
            rest = _LINGER_MAX if exchange is None or exchange.request.length != 0 else 0
            while rest > 0 and (data := await client.receive()):
                rest -= len(data)

    def _record(self, exchange: _Exchange | None, decision: Decision, reason: str, status: int | None = None) -> None:
        judge = self._judge
        event = NetworkEvent(
            "request",
            exchange.at if exchange else time.time(),
            decision=decision,
            reason=reason,
            name=judge.name,
            port=judge.port,
            protocol="http",
            terminated=judge.encrypted,
            status=status,
        )
        if exchange is not None:
            event = replace(
                event,
                method=exchange.request.method,
                path=exchange.request.path,
                status=exchange.status,
                duration_s=time.monotonic() - exchange.began,
                fault=exchange.fault,
                secrets=exchange.secrets,
            )
        judge.event(event)


_POLICY = frozenset({"http-other-host", "http-other-port", "http-connect", "http-absolute-form"})
"""Refusals that are ours, not a client's mistake."""


def _without_upgrade(request: Request) -> Request:
    kept = [word for word in request.tokens(b"connection") if word not in (b"upgrade", b"http2-settings")]
    request = request.without(b"connection", b"upgrade", b"http2-settings")
    fields = ((b"Connection", b", ".join(kept)),) if kept else ()
    return replace(request, fields=(*request.fields, *fields))


def _masked(response: Response, mask: Mask) -> Response:
    def clean(value: bytes) -> bytes:
        return mask.feed(value) + mask.rest()

    fields = tuple((name, clean(value)) for name, value in response.fields)
    return replace(response, fields=fields, line=clean(response.line))


class _MaskedPipe:
    """A server's side of a WebSocket with values masked: asterisks of the same length, so frames stay frames."""

    def __init__(self, source: Incoming, mask: Mask) -> None:
        self._source = source
        self._mask = mask
        self.send = source.pipe.send
        self.send_eof = source.pipe.send_eof
        self.reset = source.pipe.reset
        self.aclose = source.pipe.aclose

    async def receive(self, max_bytes: int = CHUNK) -> bytes:
        """What may be passed on now."""
        while True:
            if self._mask.holds:
                with anyio.move_on_after(_QUIET_S) as quiet:
                    await self._source.stirs()
                if quiet.cancelled_caught:
                    return self._mask.rest()
            data = await self._source.some()
            if clean := self._mask.feed(data) if data else self._mask.rest():
                return clean
            if not data:
                return b""


async def _carry_body(source: Incoming, sink: Pipe, body: Body) -> None:
    """The rest of a body, as it is."""
    while not body.done:
        data = await source.some()
        if not data:
            if body.until_close:
                return
            raise ConnectionResetError("the connection ended in the middle of a body")
        count = body.take(data)
        source.give_back(data[count:])
        await sink.send(data[:count] if count < len(data) else data)


async def _carry_masked(source: Incoming, sink: Pipe, body: Body, mask: Mask, *, chunked: bool) -> None:
    """The same with values masked. Chunks are cut anew, because a value may be cut in two by theirs."""

    async def pass_on(content: bytes) -> None:
        if content:
            await sink.send(b"%x\r\n%s\r\n" % (len(content), content) if chunked else content)

    while not body.done:
        data = await source.some()
        if not data:
            if not body.until_close:
                raise ConnectionResetError("the connection ended in the middle of a body")
            break
        count = body.take(data)
        source.give_back(data[count:])
        await pass_on(mask.feed(b"".join(body.content)))
    await pass_on(mask.rest())
    if chunked:
        await sink.send(b"0\r\n\r\n")
