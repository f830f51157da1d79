"""The network face of a sandbox: its policy, what it was allowed and refused, and ways in to servers inside."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, cast

import anyio

from proctor.common import ConfigError, ProctorError, RefusedError
from proctor.sandbox._environment import default_environment
from proctor.sandbox._plans import is_open
from proctor.sandbox._trust import TrustLayer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from proctor.sandbox._carry import Carry
    from proctor.sandbox._durable import Commands
    from proctor.sandbox.contract import Image, SandboxSpec
    from proctor.sandbox.edge import Edge
    from proctor.sandbox.native.streams import CarriedStream
    from proctor.sandbox.net.boundary import Boundary
    from proctor.sandbox.net.events import NetworkEvent
    from proctor.sandbox.net.pipes import SocketPipe
    from proctor.sandbox.net.policy import NetworkPolicy
    from proctor.sandbox.receipts import History
    from proctor.sandbox.runtimes.contract import Incarnation

_EXPOSED_MAX = 256


class _Using(Protocol):
    def _use(self, *, active: bool = True) -> AbstractAsyncContextManager[Incarnation]: ...


class NetworkedBox:
    """What `Box` has for its network."""

    id: str
    spec: SandboxSpec
    image: Image
    _history: History
    _edge: Edge
    _commands: Commands | None
    _environment: dict[str, str]

    # --- what Box and Edge call -------------------------------------------------------------------------------------

    def _begin_network(self, boundary: Boundary | None) -> None:
        self._boundary = boundary
        self._trusted: TrustLayer | None = None
        self._history.network = "open" if is_open(self.spec) else "none"
        if boundary is not None:
            boundary.trusted = False
            boundary.before_change = self._note_policy
            self._history.network = boundary.summary
            self._history.decisions = boundary.decisions

    @property
    def _twin(self) -> Carry | None:
        return self._boundary.twin if self._boundary is not None else None

    def _trust(self, folder: Path, paths: tuple[Path | int, ...]) -> tuple[Path, ...]:
        """The layer that makes programs believe our certificates, when TLS may have to end here; and what they find in
        their environment."""
        boundary = self._boundary
        assert boundary is not None
        environment = boundary.environment
        layers: tuple[Path, ...] = ()
        boundary.trusted = boundary.needs_authority or boundary.trusted
        if boundary.trusted or boundary.policy.trust is not None:
            if self._trusted is None:
                self._trusted = TrustLayer(folder)
                authorities = (boundary.policy.trust or "") + (boundary.authority.pem if boundary.trusted else "")
                self._trusted.make(paths[: len(self.image.layers)], authorities)
            environment = {**environment, **self._trusted.environment}
            layers = (self._trusted.folder,)
        self._environment = {**default_environment(self.spec, self.image), **environment, **self.spec.env}
        return layers

    def _carry(self, live: Incarnation) -> None:
        """Serve the network of a new incarnation."""
        if (boundary := self._boundary) is not None:
            boundary.attach(live.channel)
            live.channel.carry(
                boundary.accepted,
                boundary.dns,
                lambda lost: boundary.queries_lost(lost.rate + lost.table, lost.malformed),
            )

    async def _end_network(self) -> None:
        if self._boundary is not None:
            await self._boundary.aclose()

    def _forget_trust(self) -> None:
        """Nothing of the sandbox is left."""
        if self._trusted is not None:
            self._trusted.remove()

    # --- what callers use -------------------------------------------------------------------------------------------

    @property
    def network(self) -> tuple[NetworkPolicy, int]:
        """The policy in force and its version, for `set_network`'s `expect`."""
        from proctor.sandbox.net.boundary import as_policy

        if self._boundary is None:
            return as_policy(self.spec.network), 1
        return self._boundary.policy, self._boundary.version

    @property
    def network_events(self) -> tuple[NetworkEvent, ...]:
        """The last thousand look-ups, connections and requests."""
        return tuple(self._boundary.recorder.kept) if self._boundary is not None else ()

    @property
    def secret_tokens(self) -> dict[str, str]:
        """What the sandbox holds in the place of each secret (also in its environment, under these names)."""
        return self._boundary.environment if self._boundary is not None else {}

    def _note_policy(self, policy: NetworkPolicy, version: int) -> None:
        """Of a durable sandbox: on disk before it is in force."""
        if self._commands is not None:
            self._edge._estate.note_policy(self.id, policy, version)

    async def set_network(self, policy: NetworkPolicy, expect: int | None = None, *, phase: str | None = None) -> int:
        """Replace the policy as a whole, if its version is still `expect`; returns the new version.

        Look-ups, connections and requests are judged by the new one from this moment on, and what it forbids is cut.
        `phase` names what begins now, in the records. Raises RefusedError when somebody else was first, for `open`,
        and for a sandbox that was made without a carried network.
        """
        async with cast("_Using", self)._use():
            if self._boundary is None:
                raise RefusedError(
                    f"sandbox {self.id} has no carried network",
                    field="network",
                    remedy='create it with a NetworkPolicy, NetworkPolicy("none") to begin with nothing',
                )
            version = await self._boundary.set_policy(policy, expect=expect, phase=phase)
            self._history.network = self._boundary.summary
            return version

    @asynccontextmanager
    async def connect(self, port: int, *, timeout_s: float = 10.0) -> AsyncIterator[CarriedStream]:
        """A connection to a server inside that listens on `port` of its loopback; closed at the end."""
        _check_port(port, "port")
        async with cast("_Using", self)._use() as guest:
            stream = await guest.channel.connect(port, timeout_s=timeout_s)
            try:
                yield stream
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()

    @asynccontextmanager
    async def expose(self, port: int, host_port: int = 0) -> AsyncIterator[tuple[str, int]]:
        """Listen on `host_port` (0: any) of the host's loopback for a server inside on `port`; gives the address."""
        _check_port(port, "port")
        _check_port(host_port, "host_port", lowest=0)
        try:
            listener = socket.create_server(("127.0.0.1", host_port))
        except OSError as error:
            raise RefusedError(
                f"127.0.0.1:{host_port}: {error.strerror}", field="host_port", remedy="0 takes a free one"
            ) from error
        listener.setblocking(False)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._serve_exposed, listener, port, tasks)
                yield listener.getsockname()
                tasks.cancel_scope.cancel()
        finally:
            listener.close()

    async def _serve_exposed(self, listener: socket.socket, port: int, tasks: Any) -> None:
        from proctor.sandbox.net.pipes import SocketPipe

        loop, room = asyncio.get_running_loop(), anyio.Semaphore(_EXPOSED_MAX)
        while True:
            await room.acquire()
            sock, _ = await loop.sock_accept(listener)
            tasks.start_soon(self._carry_in, SocketPipe(sock), port, room)

    async def _carry_in(self, outside: SocketPipe, port: int, room: anyio.Semaphore) -> None:
        from proctor.sandbox.net.pipes import relay

        try:
            with suppress(ProctorError, OSError):
                async with self.connect(port) as stream:
                    await relay(outside, stream)
        finally:
            outside.reset()  # what was not carried to its end
            room.release()


def _check_port(port: int, field: str, *, lowest: int = 1) -> None:
    if not lowest <= port <= 65535:
        raise ConfigError(f"{port} is not a port", field=field)
