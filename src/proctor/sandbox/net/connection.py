"""One connection out of a sandbox, from the first byte to the record of its end."""

from __future__ import annotations

import logging
import ssl
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox.net import clienthello, httphead, names, paths
from proctor.sandbox.net.clienthello import HelloError
from proctor.sandbox.net.dialer import DialError
from proctor.sandbox.net.events import NetworkEvent
from proctor.sandbox.net.faults import ConnectionFaults, FaultyPipe, RequestFaults
from proctor.sandbox.net.httprelay import HttpRelay
from proctor.sandbox.net.pipes import MeteredPipe, PrefixedPipe, TlsPipe, relay
from proctor.sandbox.net.services import Desk, Visit, serve

if TYPE_CHECKING:
    from proctor.sandbox.net.boundary import Boundary
    from proctor.sandbox.net.events import Decision
    from proctor.sandbox.net.httphead import Request
    from proctor.sandbox.net.pipes import Pipe

log = logging.getLogger(__name__)

_FIRST_BYTES_S = 60.0
_HANDSHAKE_S = 30.0


class _End(Exception):
    """The connection is not let through (`refused`) or cannot be made."""

    def __init__(self, reason: str, *, refused: bool = True) -> None:
        super().__init__(reason)
        self.refused = refused


class Connection:
    """Serves one accepted stream. Also the `Judge` of its HTTP requests."""

    def __init__(self, boundary: Boundary, stream: Pipe, name: str, port: int, number: int) -> None:
        self.boundary = boundary
        self.name = name
        self.port = port
        self.number = number
        self.keyring = boundary.keyring
        self.encrypted = False
        self._phase = boundary.phase
        self._faults = ConnectionFaults()
        if boundary.player is not None:
            self._faults = boundary.player.connection(name, port)
        self._client: MeteredPipe = FaultyPipe(stream, self._faults) if self._faults.text else MeteredPipe(stream)
        self._upstream: Pipe | None = None
        self._scope = anyio.CancelScope()
        self._cut_reason = ""
        self._service = boundary.service_for(name)
        if self._service is not None and port not in self._service.all_ports:
            self._service = None
        self._protocol = ""
        self._sni: str | None = None
        self._address = ""
        self._internal = False
        self._request: Request | None = None

    # --- judging ----------------------------------------------------------------------------------------------------

    def judge(self, request: Request) -> str | None:
        """Why a request is refused by the policy of now; an allowed one is remembered as the current one."""
        rules = self.boundary.rules_for(self.name, self.port)
        if not rules:
            return "not-allowed"
        reason = "method-not-allowed"
        path = request.target.partition(b"?")[0]
        for rule in rules:
            if rule.methods is not None and request.method not in rule.methods:
                continue
            if rule.paths is not None and not paths.below(path, rule.paths):
                reason = "path-not-allowed"
                continue
            if rule.restricted and request.overrides:
                reason = "http-override-field"
                continue
            if request.wants_websocket and rule.restricted:
                reason = "upgrade-not-allowed"
                continue
            self._request = request
            return None
        return reason

    def still_allowed(self) -> bool:
        """Whether the policy of now would let the connection be as it is."""
        if self._service is not None:
            return True
        rules = self.boundary.rules_for(self.name, self.port)
        if not rules or (self._internal and not any(rule.internal for rule in rules)):
            return False
        if self._protocol == "tcp":
            return any(rule.protocol == "tcp" for rule in rules)
        if self._protocol == "tls":
            return not self.boundary.reads(self.name, self.port)
        return self._request is None or self.judge(self._request) is None

    def faults(self) -> RequestFaults:
        """What the next request suffers."""
        player = self.boundary.player
        return player.request(self.name, self.port) if player is not None else RequestFaults()

    def event(self, event: NetworkEvent) -> None:
        """Record a request of this connection."""
        self.boundary.record(replace(event, connection=self.number))

    def cut(self, reason: str) -> None:
        """End it now, from outside."""
        self._cut_reason = self._cut_reason or reason
        self._client.reset()
        if self._upstream is not None:
            self._upstream.reset()
        self._scope.cancel()

    # --- serving ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """To the end; never raises but for cancellation."""
        at, began = time.time(), time.monotonic()
        decision: Decision = "allowed"
        reason = ""
        try:
            with self._scope:
                decision, reason = await self._run()
        except _End as end:
            decision, reason = ("refused" if end.refused else "failed"), str(end)
            self._client.reset()
        except OSError:
            decision, reason = "allowed", "reset"
            self._client.reset()
        except Exception as error:
            log.exception("connection %s of %s", self.number, self.boundary.sandbox_id)
            decision, reason = "failed", f"internal: {type(error).__name__}"
            self._client.reset()
        finally:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()
                if self._upstream is not None:
                    await self._upstream.aclose()
            self._record(at, began, decision, self._cut_reason or reason)

    def _record(self, at: float, began: float, decision: Decision, reason: str) -> None:
        if self._cut_reason == "policy-changed":
            decision = "refused"
        self.boundary.record(
            NetworkEvent(
                "connection",
                at,
                self._phase,
                decision,
                reason,
                self.name,
                self.port,
                protocol=self._protocol,
                sni=self._sni,
                address=self._address,
                service=self._service is not None,
                terminated=self.encrypted,
                connection=self.number,
                sent=self._client.received,
                received=self._client.sent,
                duration_s=time.monotonic() - began,
                fault=self._faults.text,
            )
        )

    async def _run(self) -> tuple[Decision, str]:
        """What became of it. Raises _End, or OSError when one side broke off."""
        if self._faults.delay_s:
            await anyio.sleep(self._faults.delay_s)
        if self._faults.refuse:
            self._client.reset()
            return "allowed", "fault"
        if self._service is not None:
            return await self._serve_service()
        rules = self.boundary.rules_for(self.name, self.port)
        if not rules:
            raise _End("not-allowed")
        if any(rule.protocol == "tcp" for rule in rules):
            self._protocol = "tcp"
            await self._pass_through(b"")
            return "allowed", ""
        first = await self._first_bytes()
        if not first:
            return "allowed", "no-data"
        if clienthello.looks_like_tls(first):
            return await self._serve_tls(first)
        if not httphead.may_be_http(first):
            raise _End("protocol-not-allowed")
        self._protocol = "http"
        return await HttpRelay(self, self._client, self._connect, first).run()

    async def _serve_service(self) -> tuple[Decision, str]:
        service, pipe = self._service, self._client
        assert service is not None
        desk_pipe: Pipe = pipe
        if self.port in service.tls_ports:
            first = await self._first_bytes()
            if not clienthello.looks_like_tls(first):
                raise _End("protocol-not-allowed")
            self._protocol = "tls"
            desk_pipe = await self._end_tls(await self._hello(first))
        else:
            self._protocol = "http" if service.app is not None else "tcp"
        visit = Visit(self.boundary.sandbox_id, self.name, self.port, self.boundary.phase, self.number, self.encrypted)
        await serve(service, desk_pipe, Desk(visit, self.boundary.record, self.faults))
        return "allowed", ""

    async def _first_bytes(self) -> bytes:
        """What the program says first: enough to tell TLS from HTTP. Who waits for the server to speak is refused."""
        data = b""
        with anyio.move_on_after(_FIRST_BYTES_S):
            while len(data) < 2:
                more = await self._client.receive()
                if not more:
                    return data
                data += more
            return data
        raise _End("no-data")

    async def _hello(self, data: bytes) -> bytes:
        """Read and judge the ClientHello; returns all that has been read."""
        try:
            with anyio.fail_after(_HANDSHAKE_S):
                while (hello := clienthello.read(data)) is None:
                    more = await self._client.receive()
                    if not more:
                        raise HelloError("tls-cut-off")
                    data += more
            self._sni = hello.server_name
            if names.normal(hello.server_name) != self.name:
                raise HelloError("tls-other-name")
        except (HelloError, TimeoutError) as error:
            await self._deny_tls()
            raise _End(str(error) or "tls-too-slow") from error
        return data

    async def _deny_tls(self) -> None:
        """Say in TLS's own words that it was refused, so that a program can tell that from a broken network."""
        with suppress(OSError), anyio.move_on_after(1):
            await self._client.send(clienthello.ACCESS_DENIED)
            await self._client.send_eof()
            await self._client.receive()  # until it has read that, or gives up: a reset could overtake it

    async def _serve_tls(self, first: bytes) -> tuple[Decision, str]:
        self._protocol = "tls"
        data = await self._hello(first)
        if not self.boundary.reads(self.name, self.port):
            await self._pass_through(data)
            return "allowed", ""
        pipe = await self._end_tls(data)
        self._protocol = "https"
        return await HttpRelay(self, pipe, self._connect).run()

    async def _end_tls(self, data: bytes) -> TlsPipe:
        """Be the server that the program believes to talk to."""
        context = self.boundary.authority.context(self.name)
        try:
            with anyio.fail_after(_HANDSHAKE_S):
                pipe = await TlsPipe.wrap(PrefixedPipe(self._client, data), context, server_side=True)
        except (ssl.SSLError, OSError) as error:
            # Most often a program that has certificates of its own and does not believe ours.
            raise _End("tls-client-handshake", refused=False) from error
        self.encrypted = True
        return pipe

    async def _connect(self) -> Pipe:
        """The connection to the server, over TLS when the program's is. Raises DialError."""
        rules = self.boundary.rules_for(self.name, self.port)
        if not rules:
            raise DialError("not-allowed", refused=True)
        try:
            async with self.boundary.dialling:
                pipe, self._address, self._internal = await self.boundary.dialer.dial(self.name, self.port, rules)
        except DialError as error:
            self._address = error.address
            raise
        self._upstream = pipe
        if not self.still_allowed():
            raise DialError("policy-changed", refused=True)
        if not self.encrypted:
            return pipe
        try:
            with anyio.fail_after(_HANDSHAKE_S):
                return await TlsPipe.wrap(pipe, self.boundary.upstream_context(), server_side=False, hostname=self.name)
        except ssl.SSLCertVerificationError as error:
            raise DialError("upstream-certificate") from error
        except OSError as error:
            raise DialError("upstream-tls") from error

    async def _pass_through(self, data: bytes) -> None:
        try:
            upstream = await self._connect()
        except DialError as error:
            if self._protocol == "tls" and error.refused:
                await self._deny_tls()
            raise _End(str(error), refused=error.refused) from error
        if data:
            await upstream.send(data)
        await relay(self._client, upstream)
