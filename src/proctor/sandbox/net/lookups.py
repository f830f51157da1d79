"""The answers that a sandbox gets when it looks a name up: an address of its own loopback, or that there is none.

Nothing that is asked goes any further: no resolver sees it, so a name cannot carry data out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, Protocol

from proctor.common import ProctorError
from proctor.sandbox.net import dnswire, names
from proctor.sandbox.net.dnswire import Code, Type
from proctor.sandbox.net.events import NetworkEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proctor.sandbox.net.events import Decision, Recorder

NAMES_MAX = 4096
LABEL_MAX = 40
"""Labels that only a wildcard covers may have so many characters: enough for names that people gave."""
_RATE = 500.0
_BURST = 1000.0
_FIRST = int.from_bytes(bytes((127, 64, 0, 1)), "big")
_EMPTY = frozenset({Type.AAAA, Type.HTTPS, Type.SVCB, Type.SRV, Type.PTR, Type.CNAME, Type.MX, Type.NS, Type.SOA})


class Full(ProctorError):
    """As many names as one sandbox may look up have been looked up."""


class AddressBook:
    """Addresses of 127.64.0.0/10 for names, in the order of their first lookup, and never taken back: a program may
    remember one for as long as it lives."""

    def __init__(self, capacity: int = NAMES_MAX) -> None:
        self._capacity = capacity
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def allot(self, name: str) -> str:
        """The address of `name`. Raises Full."""
        if (address := self._addresses.get(name)) is None:
            if len(self._addresses) >= self._capacity:
                raise Full(f"more than {self._capacity} names were looked up", field="network")
            number = _FIRST + len(self._addresses)
            address = ".".join(str(part) for part in number.to_bytes(4, "big"))
            self._addresses[name], self._names[address] = address, name
        return address

    def name_at(self, address: str) -> str | None:
        """The name that `address` was given to."""
        return self._names.get(address)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Names and their addresses."""
        return iter(self._addresses.items())


class Directory(Protocol):
    """What the answerer asks of the boundary."""

    def known(self, name: str) -> Literal["exact", "wildcard"] | None:
        """Whether `name` (in normal form) may be reached, and how it is named."""
        ...

    async def open(self, name: str) -> str:
        """See that connections to `name` arrive, and return its address. Raises ProctorError."""
        ...

    def event(self, event: NetworkEvent) -> NetworkEvent:
        """The event with the phase and version of now."""
        ...


class Answerer:
    """Answers raw queries. Every one is recorded; floods are dropped and counted."""

    def __init__(
        self, directory: Directory, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._recorder = recorder
        self._clock = clock
        self._tokens = _BURST
        self._filled_at = clock()
        self._flooded = 0
        self._flood_told_at = float("-inf")

    async def answer(self, data: bytes, transport: Literal["udp", "tcp"] = "udp") -> bytes | None:
        """The reply to `data`, or None for no reply."""
        if not self._admit():
            return None
        try:
            query = dnswire.parse(data)
        except dnswire.Malformed as error:
            self._record("refused", f"malformed: {error}", "", "")
            return dnswire.reply_malformed(error)
        return await self._decide(query)

    def _admit(self) -> bool:
        at = self._clock()
        self._tokens = min(self._tokens + (at - self._filled_at) * _RATE, _BURST)
        self._filled_at = at
        if self._tokens < 1:
            self._flooded += 1
            if at - self._flood_told_at >= 1:
                self._tell_flood(at)
            return False
        self._tokens -= 1
        if self._flooded and at - self._flood_told_at >= 1:
            self._tell_flood(at)
        return True

    def _tell_flood(self, at: float) -> None:
        count, self._flooded, self._flood_told_at = self._flooded, 0, at
        self._record("refused", "flood", "", "", count)

    async def _decide(self, query: dnswire.Query) -> bytes:
        kind = query.type if query.type not in Type._value2member_map_ else Type(query.type).name
        name = names.normal(query.name)
        if query.type != Type.A and query.type not in _EMPTY:
            return self._refuse(query, Code.REFUSED, f"type-{kind}", kind)
        if name is None:
            return self._refuse(query, Code.NXDOMAIN, "not-a-host-name", kind)
        how = self._directory.known(name)
        if how is None:
            return self._refuse(query, Code.NXDOMAIN, "unlisted", kind)
        if how == "wildcard" and query.longest_label > LABEL_MAX:
            return self._refuse(query, Code.REFUSED, "long-label", kind)
        if query.type != Type.A:
            self._record("allowed", "empty", name, str(kind))
            return dnswire.reply(query, Code.NOERROR)
        try:
            address = await self._directory.open(name)
        except ProctorError as error:
            self._record("failed", error.line(), name, str(kind))
            return dnswire.reply(query, Code.SERVFAIL)
        self._record("allowed", "", name, str(kind), address=address)
        return dnswire.reply(query, Code.NOERROR, address)

    def _refuse(self, query: dnswire.Query, code: Code, reason: str, kind: object) -> bytes:
        self._record("refused", reason, query.name.lower(), str(kind))
        return dnswire.reply(query, code)

    def _record(
        self, decision: Decision, reason: str, name: str, kind: str, count: int = 1, *, address: str = ""
    ) -> None:
        event = NetworkEvent(
            "lookup", time.time(), "", decision, reason, name, type=kind, protocol="dns", address=address, count=count
        )
        self._recorder.add(self._directory.event(event))
