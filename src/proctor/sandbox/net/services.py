"""Names that are answered by us instead of being dialled: the model gateway, a dated mirror, a honeypot.

A service is an async handler of one connection, or an ASGI application (spoken to in HTTP/1.1 by uvicorn's own
protocol, over a socket pair: streaming, back-pressure and disconnects are those of a real connection).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from proctor.common import ConfigError
from proctor.sandbox.net import names
from proctor.sandbox.net.events import NetworkEvent
from proctor.sandbox.net.pipes import Pipe, SocketPipe, relay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.sandbox.net.faults import RequestFaults

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
SCOPE_KEY = "proctor.visit"
_GRACE_S = 2.0
"""How long an application may take to end after its caller has gone."""


@dataclass(frozen=True, slots=True)
class Visit:
    """Who is calling: the sandbox, the name and port that it dialled, the phase of now. ASGI applications find it
    in `scope["extensions"]["proctor.visit"]`."""

    sandbox_id: str
    name: str
    port: int
    phase: str
    connection: int
    encrypted: bool


Handler = Callable[[Pipe, Visit], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Service:
    """What answers a name. On `tls_ports` TLS ends before it; the sandbox is then made to trust our certificates."""

    handler: Handler | None = None
    app: Asgi | None = None
    ports: tuple[int, ...] = (80,)
    tls_ports: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ports and not self.tls_ports:
            raise ConfigError("a service needs a port", field="services")
        if bad := [port for port in (*self.ports, *self.tls_ports) if not 1 <= port <= 65535]:
            raise ConfigError(f"{bad[0]} is not a port", field="services")
        if set(self.ports) & set(self.tls_ports):
            raise ConfigError("a port speaks TLS or it does not", field="services")

    @classmethod
    def stream(cls, handler: Handler, *, ports: tuple[int, ...] = (80,), tls_ports: tuple[int, ...] = ()) -> Service:
        """`await handler(pipe, visit)` for each connection; it is closed when the handler returns."""
        return cls(handler=handler, ports=ports, tls_ports=tls_ports)

    @classmethod
    def asgi(cls, app: Asgi, *, ports: tuple[int, ...] = (80,), tls_ports: tuple[int, ...] = ()) -> Service:
        """An ASGI application. Its lifespan is its owner's business."""
        return cls(app=app, ports=ports, tls_ports=tls_ports)

    @property
    def all_ports(self) -> frozenset[int]:
        """Where it answers."""
        return frozenset((*self.ports, *self.tls_ports))


def check_names(services: Mapping[str, Service]) -> dict[str, Service]:
    """Services by their names in normal form. Raises ConfigError."""
    checked = {}
    for name, service in services.items():
        written = names.pattern(name)
        if written is None or written == "*":
            raise ConfigError(f"{name!r} is neither a host name nor `*.name.example`", field="services")
        checked[written] = service
    return checked


@dataclass(frozen=True, slots=True)
class Desk:
    """What a connection to a service needs of the boundary: where to record, and what a request shall suffer."""

    visit: Visit
    record: Callable[[NetworkEvent], None]
    faults: Callable[[], RequestFaults]


async def serve(service: Service, pipe: Pipe, desk: Desk) -> None:
    """Answer one connection to its end."""
    if service.handler is not None:
        try:
            await service.handler(pipe, desk.visit)
        finally:
            with anyio.CancelScope(shield=True):
                await pipe.aclose()
        return
    assert service.app is not None
    await _serve_asgi(_Recorded(service.app, desk), pipe)


async def _serve_asgi(app: Asgi, pipe: Pipe) -> None:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState

    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=3600,
    )
    config.load()
    state = ServerState()
    ours, theirs = socket.socketpair()
    bridge = SocketPipe(ours)
    loop = asyncio.get_running_loop()
    theirs.setblocking(False)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: H11Protocol(config=config, server_state=state, app_state={}), theirs
        )
    except BaseException:
        theirs.close()
        await bridge.aclose()
        raise
    try:
        await relay(pipe, bridge)
    finally:
        transport.abort()
        with anyio.CancelScope(shield=True):
            await _end(state.tasks)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """An application whose caller has gone hears of it, may finish what it has to, and is then made to."""
    for how in ("let", "make"):
        if left := set(tasks):
            if how == "make":
                for task in left:
                    task.cancel()
            await asyncio.wait(left, timeout=_GRACE_S)


class _Recorded:
    """An application whose requests are recorded, and meet the faults that are due."""

    def __init__(self, app: Asgi, desk: Desk) -> None:
        self._app = app
        self._desk = desk

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("extensions", {})[SCOPE_KEY] = self._desk.visit
        began, at = time.monotonic(), time.time()
        faults = self._desk.faults()
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        reason = ""
        try:
            if faults.delay_s:
                await anyio.sleep(faults.delay_s)
            if faults.status is not None:
                await _answer_fault(faults, noted)
            else:
                await self._app(scope, receive, noted)
        except BaseException as error:
            reason = f"service: {type(error).__name__}"
            raise
        finally:
            visit = self._desk.visit
            self._desk.record(
                NetworkEvent(
                    "request",
                    at,
                    visit.phase,
                    "failed" if reason else "allowed",
                    reason,
                    visit.name,
                    visit.port,
                    protocol="http",
                    service=True,
                    terminated=visit.encrypted,
                    connection=visit.connection,
                    method=str(scope["method"]),
                    path=str(scope["path"]),
                    status=status,
                    duration_s=time.monotonic() - began,
                    fault=faults.text,
                )
            )


async def _answer_fault(faults: RequestFaults, send: Send) -> None:
    headers = [(b"content-type", b"text/plain")]
    if faults.retry_after_s is not None:
        headers.append((b"retry-after", str(faults.retry_after_s).encode()))
    await send({"type": "http.response.start", "status": faults.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"the service is not available\n"})
