"""The boundary of one sandbox: every lookup and connection of it comes here, and is answered, served, dialled or
refused by the policy of that moment.

The transport brings raw bytes and decides nothing. A boundary outlives the incarnations of its sandbox (`attach`); the
policy is replaced as a whole, by compare-and-set on its version, and connections that the new one forbids are cut.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio

from proctor.common import ConfigError, ProctorError, RefusedError
from proctor.sandbox.net import names
from proctor.sandbox.net.connection import Connection
from proctor.sandbox.net.dialer import Dialer
from proctor.sandbox.net.events import NetworkEvent, Recorder
from proctor.sandbox.net.faults import FaultPlayer
from proctor.sandbox.net.lookups import AddressBook, Answerer
from proctor.sandbox.net.policy import NONE, NetworkPolicy
from proctor.sandbox.net.secrets import Keyring
from proctor.sandbox.net.services import Service, check_names

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from proctor.sandbox.net.authority import Authority
    from proctor.sandbox.net.events import OnNetwork
    from proctor.sandbox.net.faults import FaultProfile
    from proctor.sandbox.net.policy import Rule
    from proctor.sandbox.net.secrets import Secret

    Spawn = Callable[..., object]

CONNECTIONS_MAX = 500
LISTENERS_MAX = 960
"""Both a little below what a guest has, who would end the sandbox or refuse without a record."""

_DIALS_MAX = 16
_END_S = 5.0
_WIDTH = ("none", "allow", "public", "open")


class Transport(Protocol):
    """What the boundary asks of a sandbox's channel."""

    async def listen(self, address: str, port: int) -> None:
        """Listen inside; connections come to `Boundary.accepted`."""
        ...

    async def unlisten(self, address: str, port: int) -> None:
        """Listen no more; connections that were accepted live on."""
        ...


class CarriedPipe(Protocol):
    """A connection that the transport has accepted: a `Pipe` that knows its ends."""

    local: tuple[str, int]
    peer: tuple[str, int]

    async def receive(self, max_bytes: int = 65536) -> bytes: ...
    async def send(self, data: bytes | memoryview) -> None: ...
    async def send_eof(self) -> None: ...
    def reset(self) -> None: ...
    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Network:
    """What a caller gives for a sandbox's network beside its policy: objects of the host, kept over fork and reset."""

    services: Mapping[str, Service] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    faults: FaultProfile | None = None
    on_network: OnNetwork | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "services", check_names(self.services))

    def __bool__(self) -> bool:
        return bool(self.services or self.secrets)


class Boundary:
    """One sandbox's. `spawn(function, *args)` starts a task that outlives the caller's (the Edge's task group)."""

    def __init__(
        self,
        sandbox_id: str,
        policy: NetworkPolicy = NONE,
        network: Network = Network(),  # noqa: B008, RUF100 - frozen value
        *,
        spawn: Spawn,
        dialer: Dialer | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.network = network
        self.phase = ""
        self.dialer = dialer or Dialer()
        self.recorder = Recorder(network.on_network)
        self.keyring = keyring if keyring is not None else Keyring(dict(network.secrets))
        self.trusted = True
        """Whether programs inside believe our certificates, so that TLS can end here."""
        self.before_change: Callable[[NetworkPolicy, int], None] | None = None
        """Called before a new policy is in force; if it raises, nothing has changed."""
        self.player = FaultPlayer(network.faults) if network.faults is not None else None
        self._spawn = spawn
        self._policy = policy
        self._widest = policy.summary
        self._version = 1
        self._book = AddressBook()
        self._answerer = Answerer(self, self.recorder)
        self._transport: Transport | None = None
        self.dialling = anyio.Semaphore(_DIALS_MAX)
        """Names that are slow to resolve hold threads that all sandboxes of an Edge share."""
        self._listening: dict[str, set[int]] = {}
        self._lock = anyio.Lock(fast_acquire=True)
        self._connections: dict[int, Connection] = {}
        self._count = 0
        self._authority: Authority | None = None
        self._upstream_context: tuple[str | None, ssl.SSLContext] | None = None
        self._ended = anyio.Event()
        self._closed = False

    def twin(self, sandbox_id: str, spawn: Spawn) -> Boundary:
        """A boundary for a fork: the same policy, services, faults and tokens; its own addresses and records."""
        return Boundary(sandbox_id, self._policy, self.network, spawn=spawn, dialer=self.dialer, keyring=self.keyring)

    # --- the policy -------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> NetworkPolicy:
        """The policy in force."""
        return self._policy

    @property
    def version(self) -> int:
        """Goes up by one with each policy; begins with 1."""
        return self._version

    def restore(self, policy: NetworkPolicy, version: int) -> None:
        """Begin with the policy that an earlier Edge's boundary of this sandbox had last."""
        self._policy, self._version = policy, version
        self._widest = max(self._widest, policy.summary, key=_WIDTH.index)

    async def set_policy(self, policy: NetworkPolicy, *, expect: int | None = None, phase: str | None = None) -> int:
        """Replace the policy, if its version is still `expect`; returns the new version.

        From this call on every lookup, connection and request is judged by the new one; what it forbids is cut before
        this returns. Raises RefusedError when somebody else was first, or where `open` is concerned.
        """
        if expect is not None and expect != self._version:
            raise RefusedError(
                f"the policy is at version {self._version}, not {expect}",
                field="expect",
                remedy="read it again and decide anew",
            )
        if policy.mode == "open":
            raise RefusedError(
                "a sandbox is open from its creation or never", field="network", remedy="create one with network open"
            )
        if self._needs_authority(policy) and not self.trusted:
            raise RefusedError(
                "this policy needs TLS to end at the boundary, and the sandbox was not made to trust it",
                field="network",
                remedy="create the sandbox with a policy that has methods or paths",
            )
        if self.before_change is not None:
            self.before_change(policy, self._version + 1)
        self._policy, self._version = policy, self._version + 1
        self._widest = max(self._widest, policy.summary, key=_WIDTH.index)
        self.phase = self.phase if phase is None else phase
        # No await before this line's end: nobody can be judged by half of a change.
        cut = [connection for connection in self._connections.values() if not connection.still_allowed()]
        for connection in cut:
            connection.cut("policy-changed")
        self.record(NetworkEvent("policy", time.time(), reason=policy.digest, count=len(cut) or 1, type=policy.summary))
        await self._listen_anew()
        return self._version

    def rules_for(self, name: str, port: int) -> tuple[Rule, ...]:
        """The rules in force for `name` at `port`."""
        return self._policy.rules_for(name, port)

    def service_for(self, name: str) -> Service | None:
        """The service that answers `name`: exact names before wildcards."""
        services = self.network.services
        if (exact := services.get(name)) is not None:
            return exact
        return next((service for written, service in services.items() if names.matches(written, name)), None)

    def reads(self, name: str, port: int) -> bool:
        """Whether requests to `name` must be read, so that TLS has to end here."""
        rules = self.rules_for(name, port)
        faults = self.network.faults
        return (
            (bool(rules) and all(rule.restricted for rule in rules))
            or self.keyring.bound(name)
            or (faults is not None and faults.answers(name, port))
        )

    @property
    def needs_authority(self) -> bool:
        """Whether TLS may have to end here, so that the sandbox must trust our certificates."""
        return self._needs_authority(self._policy)

    def _needs_authority(self, policy: NetworkPolicy) -> bool:
        faults = self.network.faults
        return (
            any(rule.restricted for rule in policy.rules)
            or bool(self.keyring)
            or any(service.tls_ports for service in self.network.services.values())
            or (faults is not None and any(fault.kind == "status" for fault in faults.faults))
        )

    @property
    def authority(self) -> Authority:
        """The sandbox's own certificate authority, made when it is first needed."""
        if self._authority is None:
            from proctor.sandbox.net.authority import Authority

            self._authority = Authority(self.sandbox_id)
        return self._authority

    def upstream_context(self) -> ssl.SSLContext:
        """How servers are verified where TLS ends here. Kept, because reading the machine's roots takes a while."""
        if self._upstream_context is None or self._upstream_context[0] != self._policy.trust:
            from proctor.sandbox.net.authority import upstream_context

            self._upstream_context = self._policy.trust, upstream_context(self._policy.trust)
        return self._upstream_context[1]

    # --- the transport's calls --------------------------------------------------------------------------------------

    def attach(self, transport: Transport | None) -> None:
        """A new incarnation (or, with None, the end of the last): its guest listens nowhere yet."""
        for connection in list(self._connections.values()):
            connection.cut("sandbox-ended")
        self._transport = transport
        self._listening = {}

    async def aclose(self) -> None:
        """The sandbox has ended: end every connection, and record it. Nothing is recorded after this returns."""
        self._closed = True
        self.attach(None)
        with anyio.move_on_after(_END_S, shield=True):
            while self._connections:
                self._ended = anyio.Event()
                await self._ended.wait()
        self.recorder.close()

    async def dns(self, data: bytes, transport: Literal["udp", "tcp"] = "udp") -> bytes | None:
        """Answer a raw query."""
        return await self._answerer.answer(data, transport)

    def queries_lost(self, flooded: int, malformed: int) -> None:
        """Queries that the guest has refused by itself, because there were too many or they were none."""
        for count, reason in ((flooded, "flood"), (malformed, "malformed: size")):
            if count:
                self.record(NetworkEvent("lookup", time.time(), "", "refused", reason, protocol="dns", count=count))

    def accepted(self, stream: CarriedPipe) -> None:
        """A program inside has connected to an address of ours."""
        address, port = stream.local
        name = self._book.name_at(address)
        reason = ""
        if self._closed or name is None:
            reason = "no-such-address"
        elif len(self._connections) >= CONNECTIONS_MAX:
            reason = "too-many-connections"
        if reason or name is None:
            stream.reset()
            self.record(NetworkEvent("connection", time.time(), "", "refused", reason, name or address, port))
            return
        self._count += 1
        connection = Connection(self, stream, name, port, self._count)
        self._connections[connection.number] = connection
        self._spawn(self._serve, connection)

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._connections.pop(connection.number, None)
            self._ended.set()

    # --- Directory: what the answerer asks --------------------------------------------------------------------------

    def known(self, name: str) -> Literal["exact", "wildcard"] | None:
        """Whether `name` exists for this sandbox."""
        if name in self.network.services or self._policy.names_exactly(name):
            return "exact"
        return "wildcard" if self._ports_of(name) else None

    async def open(self, name: str) -> str:
        """Listen on all ports of `name`; returns its address."""
        async with self._lock:
            address = self._book.allot(name)
            await self._listen(name, address)
        return address

    def event(self, event: NetworkEvent) -> NetworkEvent:
        """The event with sandbox, version and, unless it began in another, the phase of now."""
        return replace(event, sandbox=self.sandbox_id, phase=event.phase or self.phase, policy_version=self._version)

    def record(self, event: NetworkEvent) -> None:
        """Record an event of now."""
        self.recorder.add(self.event(event))

    # --- listening --------------------------------------------------------------------------------------------------

    def _ports_of(self, name: str) -> frozenset[int]:
        service = self.service_for(name)
        return self._policy.ports_of(name) | (service.all_ports if service is not None else frozenset())

    async def _listen(self, name: str, address: str) -> None:
        """Make the guest listen on what `name` needs now, and no more on what it needs no longer."""
        transport = self._transport
        if transport is None:
            raise ProctorError("the sandbox is between two lives", field="network")
        listening = self._listening.setdefault(address, set())
        wanted = self._ports_of(name)
        for port in sorted(listening - wanted):
            with suppress(ProctorError):
                await transport.unlisten(address, port)
            listening.discard(port)
        self._listening[address] = self._listening.pop(address)  # the last in order is the last looked up
        await self._make_room(transport, len(wanted - listening))
        for port in sorted(wanted - listening):
            await transport.listen(address, port)
            listening.add(port)

    async def _make_room(self, transport: Transport, count: int) -> None:
        """The guest's table is bounded: names that were looked up longest ago have to be looked up again."""
        for address in list(self._listening)[:-1]:
            if sum(map(len, self._listening.values())) + count <= LISTENERS_MAX:
                return
            for port in self._listening.pop(address):
                with suppress(ProctorError):
                    await transport.unlisten(address, port)

    async def _listen_anew(self) -> None:
        """After a change of policy: names that were looked up already get the ports that they have now."""
        async with self._lock:
            for name, address in list(self._book):
                if address in self._listening:
                    with suppress(ProctorError):
                        await self._listen(name, address)

    @property
    def summary(self) -> str:
        """The word for the receipt: the widest policy's so far, or `services` where nothing but those is reached."""
        return "services" if self._widest == "none" and self.network.services else self._widest

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """Variables for programs inside: the tokens of secrets."""
        return self.keyring.environment

    @property
    def open_connections(self) -> int:
        """Connections that live now."""
        return len(self._connections)

    def decisions(self) -> dict[str, Any]:
        """For the receipt: policy, services, and totals of what was decided."""
        faults = self.network.faults
        return {
            "policy": self._policy.digest,
            "policy_version": self._version,
            "mode": self._policy.summary,
            "services": sorted(self.network.services),
            "secrets": sorted(self.network.secrets),
            "tls_ended_here": self._authority is not None,
            "faults": faults.digest if faults is not None else None,
            **self.recorder.counts.as_json(),
        }


def as_policy(network: str | NetworkPolicy) -> NetworkPolicy:
    """The policy that a spec's `network` stands for."""
    if isinstance(network, NetworkPolicy):
        return network
    if network not in ("none", "open"):
        raise ConfigError(f"{network!r} is neither none, nor open, nor a policy", field="network")
    return NetworkPolicy("open") if network == "open" else NONE
