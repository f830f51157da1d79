"""The host's half of the carried network (docs/design/guest-protocol.md): what programs dial arrives here as streams.

The guest decides nothing: it says who dialled which address, and forwards bytes and raw name queries. Names, addresses
and policy are the business of whoever called `carry`. Everything the guest says is checked; what cannot be true ends
the sandbox.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import anyio

from proctor.sandbox.contract import GuestProtocolError, SandboxError, SandboxLost
from proctor.sandbox.native.execs import again
from proctor.sandbox.native.frames import GUEST_ID, U32, Frame, FrameType, frame
from proctor.sandbox.native.streams import Address, CarriedStream, StreamReset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.abc import TaskGroup

__all__ = ["AddressError", "CarriedStream", "Carrier", "DnsHandler", "Refusals", "StreamReset"]

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 512
LISTENERS_MAX: Final = 4096
QUERIES_MAX: Final = 128
WIDE_MAX: Final = 64
"""Connections that may have more than the first window on its way to us; what nobody reads is our memory."""
QUERY_MIN, QUERY_MAX = 12, 4096
ANSWER_MAX: Final = 65_507
NAMESERVER: Final = ("127.0.0.53", 53)
_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
_LISTEN_TCP, _LISTEN_NAMES = 0, 1
_DNS_S = 30.0
_DNS_STREAMS_MAX = 32
_CONGESTED = 512 << 10
_ADDRESS = struct.Struct("<4sH")
_ACCEPTED = struct.Struct("<I4sH")
_CONNECTED = struct.Struct("<iI")
_REFUSED = struct.Struct("<III")

DnsHandler = Callable[[bytes, Literal["udp", "tcp"]], Awaitable[bytes | None]]
"""Answers one raw query. None: no answer at all, as a lost datagram."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """Name queries that the guest did not forward since its last word on it: too many in a second, too many at once, or
    too short or too long to be one."""

    rate: int
    table: int
    malformed: int


class AddressError(SandboxError):
    """An address inside the sandbox cannot be listened on or dialled; `errno` is the kernel's reason."""

    def __init__(self, number: int, address: str, port: int) -> None:
        self.errno = number
        super().__init__(f"{address}:{port} inside the sandbox: {os.strerror(number)}", field="port")


@dataclass(slots=True, eq=False)
class _Listener:
    address: Address
    listening: anyio.Event
    ended: anyio.Event
    ending: bool = False
    error: int = 0


@dataclass(slots=True, eq=False)
class _Dial:
    address: Address
    answered: anyio.Event
    abandoned: bool = False
    error: int = 0
    stream: CarriedStream | None = None


class Carrier(ABC):
    """The part of a guest's channel that carries its network."""

    _ids: Iterator[int]
    _unsent_bytes: int

    def __init__(self) -> None:
        self._listeners: dict[int, _Listener] = {}
        self._dials: dict[int, _Dial] = {}
        self._streams: dict[int, CarriedStream] = {}
        self._queries: set[int] = set()
        self._accepted: Callable[[CarriedStream], None] | None = None
        self._dns: DnsHandler | None = None
        self._refused: Callable[[Refusals], None] | None = None
        self._network_tasks: TaskGroup | None = None
        self._dns_streams = 0
        self._wide = 0
        self._calm: anyio.Event | None = None

    @property
    @abstractmethod
    def lost(self) -> SandboxLost | None:
        """Why the channel has ended, or None while it lives."""

    @abstractmethod
    def _send(self, data: bytes, payload: bytes | memoryview = b"") -> None: ...

    @abstractmethod
    def _lose(self, message: str) -> None: ...

    # -- for whoever carries -------------------------------------------------------------------------------------------

    def carry(
        self,
        accepted: Callable[[CarriedStream], None],
        dns: DnsHandler,
        refused: Callable[[Refusals], None] | None = None,
    ) -> None:
        """Serve the sandbox's network from now on; may be called again to serve it otherwise.

        `accepted` gets each connection that a program has made to an address that we listen on; it must return at once
        and owns the stream. `dns` answers raw queries sent to 127.0.0.53:53. `refused` hears of queries that never
        came. A sandbox in which the name server's address cannot be had is ended.
        """
        first = self._dns is None
        self._accepted, self._dns, self._refused = accepted, dns, refused
        if first:
            for kind in (_LISTEN_NAMES, _LISTEN_TCP):
                self._open_listener(*NAMESERVER, kind)

    async def listen(self, address: str, port: int) -> None:
        """Take connections to `address` (of 127.0.0.0/8, inside) and `port`. Raises AddressError; EADDRINUSE when a
        program inside has that port, on this address or on every one."""
        self._check_alive()
        if self._accepted is None:
            raise SandboxError("nothing carries this sandbox's network", field="network", remedy="call carry first")
        if found := self._find_listener(address, port):
            if not found[1].ending:
                raise AddressError(errno.EADDRINUSE, address, port)
            await self._wait(found[1].ended)
        if len(self._listeners) >= LISTENERS_MAX:
            raise AddressError(errno.ENFILE, address, port)
        number, listener = self._open_listener(address, port, _LISTEN_TCP)
        try:
            await self._wait(listener.listening)
        except anyio.get_cancelled_exc_class():
            self._end_listener(number, listener)
            raise
        if listener.error:
            self._listeners.pop(number, None)
            raise AddressError(listener.error, address, port)

    async def unlisten(self, address: str, port: int) -> None:
        """Take no more connections there; those that were made go on. Not listening is fine."""
        self._check_alive()
        if found := self._find_listener(address, port):
            self._end_listener(*found)
            await self._wait(found[1].ended)

    async def connect(self, port: int, address: str = "127.0.0.1", timeout_s: float = 10.0) -> CarriedStream:
        """Dial a server inside; one that is not at 127.0.0.1 may be at ::1, where `localhost` leads many programs.
        Raises AddressError; ECONNREFUSED when nobody listens there."""
        try:
            return await self._dial(port, address, timeout_s)
        except AddressError as error:
            if error.errno != errno.ECONNREFUSED or address != "127.0.0.1":
                raise
            with suppress(AddressError):
                return await self._dial(port, "::1", timeout_s)
            raise

    async def _dial(self, port: int, address: str, timeout_s: float) -> CarriedStream:
        self._check_alive()
        number, dial = next(self._ids), _Dial((address, port), anyio.Event())
        data = _pack_address(address, port, dialled=True)
        self._dials[number] = dial
        self._send(frame(FrameType.CONNECT, number, 0, data))
        try:
            with anyio.move_on_after(timeout_s):
                await self._wait(dial.answered)
        except anyio.get_cancelled_exc_class():
            if dial.stream:
                dial.stream.reset()
            raise
        finally:
            if not dial.answered.is_set():
                dial.abandoned = True
                self._send(frame(FrameType.RESET, number))
        if dial.stream is None:
            raise AddressError(dial.error or errno.ETIMEDOUT, address, port)
        return dial.stream

    # -- for the channel -----------------------------------------------------------------------------------------------

    async def _serve_network(self, ended: anyio.Event) -> None:
        """Run what the network needs until `ended`."""
        async with anyio.create_task_group() as tasks:
            self._network_tasks = tasks
            await ended.wait()
            tasks.cancel_scope.cancel()

    def _lose_network(self, error: SandboxLost) -> None:
        for stream in list(self._streams.values()):
            stream._lose()
        self._streams.clear()
        for listener in self._listeners.values():
            listener.listening.set()
            listener.ended.set()
        for dial in self._dials.values():
            dial.answered.set()
        self._drained()

    def _receive_network(self, received: Frame) -> None:
        kind, number, payload = received.type, received.stream, received.payload
        if kind == FrameType.QUERY and number & GUEST_ID and number not in self._queries:
            self._receive_query(number, payload)  # numbered apart from connections
        elif kind != FrameType.QUERY and (stream := self._streams.get(number)):
            if stream._take(received):
                del self._streams[number]
        elif kind == FrameType.ACCEPTED and len(payload) == _ACCEPTED.size:
            self._receive_accepted(number, payload)
        elif kind == FrameType.LISTENING and number in self._listeners and len(payload) == 4:
            self._receive_listening(self._listeners[number], U32.unpack(payload)[0])
        elif kind == FrameType.UNLISTENED and number in self._listeners and not payload:
            self._receive_unlistened(number)
        elif kind == FrameType.CONNECTED and number in self._dials and len(payload) == _CONNECTED.size:
            self._receive_connected(number, payload)
        elif kind == FrameType.REFUSED and not number and len(payload) == _REFUSED.size and self._dns:
            self._receive_refused(Refusals(*_REFUSED.unpack(payload)))
        else:
            raise GuestProtocolError(f"the guest sent a frame of type {kind} out of turn")

    def _receive_accepted(self, number: int, payload: bytes) -> None:
        on, address, port = _ACCEPTED.unpack(payload)
        listener = self._listeners.get(on)
        if listener is None or not listener.listening.is_set() or listener.error:
            raise GuestProtocolError("the guest accepted a connection where nobody listens")
        stream = self._new_stream(number, listener.address, (str(ipaddress.IPv4Address(address)), port))
        if listener.address == NAMESERVER:
            self._serve_names(stream)
            return
        assert self._accepted is not None
        try:
            self._accepted(stream)
        except Exception:
            # The caller's own code failed inside our reader: this connection is lost, nothing else.
            log.exception("a carried connection to %s could not be taken", listener.address)
            stream.reset()

    def _receive_listening(self, listener: _Listener, error: int) -> None:
        if listener.listening.is_set():
            raise GuestProtocolError("the guest listened twice")
        listener.error = error
        listener.listening.set()
        if error and listener.address == NAMESERVER:
            self._lose(f"the guest could not serve names: {os.strerror(error)}")

    def _receive_unlistened(self, number: int) -> None:
        listener = self._listeners[number]
        if not listener.listening.is_set() or not listener.ending:
            raise GuestProtocolError("the guest ended a listener that nobody ended")
        del self._listeners[number]
        listener.ended.set()

    def _receive_connected(self, request: int, payload: bytes) -> None:
        dial = self._dials[request]
        dial.error, number = _CONNECTED.unpack(payload)
        if not dial.error:
            dial.stream = self._new_stream(number, dial.address, dial.address)
            if dial.abandoned:
                dial.stream.reset()
        del self._dials[request]
        dial.answered.set()

    def _receive_refused(self, refusals: Refusals) -> None:
        if self._refused is None:
            log.warning("name queries were refused: %s", refusals)
            return
        try:
            self._refused(refusals)
        except Exception:
            log.exception("refused name queries could not be told")

    def _new_stream(self, number: int, local: Address, peer: Address) -> CarriedStream:
        if not number & GUEST_ID or number in self._streams or len(self._streams) >= CONNECTIONS_MAX:
            raise GuestProtocolError("the guest opened a connection that cannot be")
        stream = self._streams[number] = CarriedStream(self, number, local, peer)
        return stream

    # -- names ---------------------------------------------------------------------------------------------------------

    def _receive_query(self, number: int, payload: bytes) -> None:
        if self._dns is None or len(self._queries) >= QUERIES_MAX or not QUERY_MIN <= len(payload) <= QUERY_MAX:
            raise GuestProtocolError("the guest forwarded a query that cannot be")
        self._queries.add(number)
        assert self._network_tasks is not None
        self._network_tasks.start_soon(self._answer_datagram, number, payload)

    async def _answer_datagram(self, number: int, query: bytes) -> None:
        answer = await self._resolve(query, "udp")
        self._queries.discard(number)
        self._send(frame(FrameType.QUERY, number, 0, answer if answer and len(answer) <= ANSWER_MAX else b""))

    async def _resolve(self, query: bytes, over: Literal["udp", "tcp"]) -> bytes | None:
        assert self._dns is not None
        with anyio.move_on_after(_DNS_S):
            try:
                return await self._dns(query, over)
            except Exception:
                log.exception("a name query could not be answered")
        return None

    def _serve_names(self, stream: CarriedStream) -> None:
        if self._dns_streams >= _DNS_STREAMS_MAX or self._network_tasks is None:
            stream.reset()
            return
        self._dns_streams += 1
        self._network_tasks.start_soon(self._answer_stream, stream)

    async def _answer_stream(self, stream: CarriedStream) -> None:
        """Queries over TCP: each with its length before it (RFC 1035, 4.2.2), one after the other."""
        try:
            with anyio.fail_after(_DNS_S):
                while await self._answer_next(stream):
                    continue
            await stream.aclose()
        except (StreamReset, TimeoutError):
            stream.reset()
        finally:
            self._dns_streams -= 1

    async def _answer_next(self, stream: CarriedStream) -> bool:
        size = int.from_bytes(await _at_most(stream, 2), "big")
        if not QUERY_MIN <= size <= QUERY_MAX:  # 0: the end
            return False
        query = await _at_most(stream, size)
        answer = await self._resolve(query, "tcp") if len(query) == size else None
        if answer is None or len(answer) > 0xFFFF:
            return False
        await stream.send(len(answer).to_bytes(2, "big") + answer)
        return True

    # -- flow ----------------------------------------------------------------------------------------------------------

    def _open_listener(self, address: str, port: int, kind: int) -> tuple[int, _Listener]:
        self._check_alive()
        number, listener = next(self._ids), _Listener((address, port), anyio.Event(), anyio.Event())
        data = _pack_address(address, port)
        self._listeners[number] = listener
        self._send(frame(FrameType.LISTEN, number, kind, data))
        return number, listener

    def _find_listener(self, address: str, port: int) -> tuple[int, _Listener] | None:
        if (address, port) == NAMESERVER:
            raise AddressError(errno.EADDRINUSE, address, port)
        wanted = (address, port)
        return next(((number, one) for number, one in self._listeners.items() if one.address == wanted), None)

    def _end_listener(self, number: int, listener: _Listener) -> None:
        if not listener.ending:
            listener.ending = True
            self._send(frame(FrameType.UNLISTEN, number))

    async def _wait(self, event: anyio.Event) -> None:
        await event.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.lost:
            raise again(self.lost)

    async def _uncongested(self) -> None:
        """Wait while the guest does not read: bytes of connections must not delay what is asked of it otherwise."""
        while self._unsent_bytes > _CONGESTED and not self.lost:
            self._calm = self._calm or anyio.Event()
            await self._calm.wait()

    def _widen(self) -> bool:
        if self._wide >= WIDE_MAX:
            return False
        self._wide += 1
        return True

    def _narrow(self) -> None:
        self._wide -= 1

    def _drained(self) -> None:
        """The channel has sent all it had."""
        if self._calm:
            self._calm.set()
            self._calm = None


def _pack_address(address: str, port: int, *, dialled: bool = False) -> bytes:
    if dialled and address == "::1" and 0 < port < 65_536:
        return ipaddress.IPv6Address(address).packed + port.to_bytes(2, "little")
    try:
        packed = ipaddress.IPv4Address(address)
    except ValueError as error:
        raise SandboxError(f"{address!r} is no IPv4 address", field="address") from error
    if packed not in _LOOPBACK:
        raise SandboxError(f"{address} is not of the sandbox's own loopback", field="address", remedy="use 127.x.y.z")
    if not 0 < port < 65_536:
        raise SandboxError(f"{port} is no port", field="port", remedy="1 to 65535")
    return _ADDRESS.pack(packed.packed, port)


async def _at_most(stream: CarriedStream, size: int) -> bytes:
    """`size` bytes, or fewer where the stream ends before."""
    data = b""
    while len(data) < size and (more := await stream.receive(size - len(data))):
        data += more
    return data
