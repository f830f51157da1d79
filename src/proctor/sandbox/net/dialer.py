"""From a name to a connection: resolve once, judge every address, dial only what was judged.

The host resolves for itself, when a connection is made; what the sandbox was answered or has in its files plays no
part. A name of which one address is internal is refused as a whole (rebinding); nothing is looked up a second time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from typing import TYPE_CHECKING, cast

import anyio
import anyio.to_thread

from proctor.sandbox.net import addresses
from proctor.sandbox.net.pipes import SocketPipe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from proctor.sandbox.net.addresses import Address
    from proctor.sandbox.net.policy import Rule

    Resolve = Callable[[str], Awaitable[Sequence[str]]]

_RESOLVE_S = 10.0
_CONNECT_S = 10.0
_ATTEMPTS = 4
_THREADS = 128
_LOCAL_FRESH_S = 5.0
_OWN_NETWORK = frozenset({"private", "shared", "reserved"})
_OWN_MACHINE = frozenset({"loopback", "this-machine"})


class DialError(Exception):
    """No connection. `refused` tells our decision from what failed on the way; the message is the reason."""

    def __init__(self, reason: str, *, refused: bool = False, address: str = "") -> None:
        super().__init__(reason)
        self.refused = refused
        self.address = address


class Dialer:
    """Resolves, judges and connects. One serves any number of sandboxes."""

    def __init__(self, resolve: Resolve | None = None) -> None:
        self._resolve = resolve or self._ask_the_machine
        self._threads: anyio.CapacityLimiter | None = None
        self._local: frozenset[Address] = frozenset()
        self._local_read_at = float("-inf")

    async def dial(self, name: str, port: int, rules: tuple[Rule, ...]) -> tuple[SocketPipe, str, bool]:
        """Connect to `name`; returns the connection, the address that was dialled, and whether it was exempt from the
        rule that addresses are public. Raises DialError."""
        internal = any(rule.internal for rule in rules)
        target = next((place for rule in rules if (place := rule.dials(port)) is not None), None)
        host, to_port = target or (name, port)
        found = await self._addresses(host)
        if target is None:
            exempt = _exempt(name, rules)
            for address in found:
                reason = addresses.refusal(address, self._of_this_machine())
                if reason is not None and reason not in exempt:
                    raise DialError(f"address-{reason}", refused=True, address=str(address))
        pipe, dialled = await _connect(found[:_ATTEMPTS], to_port)
        return pipe, dialled, internal

    async def _addresses(self, host: str) -> list[Address]:
        """All addresses of `host`, in the resolver's order, each once."""
        try:
            with anyio.fail_after(_RESOLVE_S):
                texts = await self._resolve(host)
        except TimeoutError:
            raise DialError("resolve-timeout") from None
        except OSError as error:
            raise DialError("resolve-failed") from error
        found = dict.fromkeys(ipaddress.ip_address(text) for text in texts)
        if not found:
            raise DialError("resolve-failed")
        return list(found)

    async def _ask_the_machine(self, host: str) -> list[str]:
        """What the machine's own resolver says, in threads of its own: slow names must not hold up other work."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(_THREADS)
        return await anyio.to_thread.run_sync(_look_up, host, abandon_on_cancel=True, limiter=self._threads)

    def _of_this_machine(self) -> frozenset[Address]:
        at = time.monotonic()
        if at - self._local_read_at > _LOCAL_FRESH_S:
            self._local, self._local_read_at = addresses.of_this_machine(), at
        return self._local


def _look_up(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [cast("str", entry[4][0]) for entry in found]


def _exempt(name: str, rules: tuple[Rule, ...]) -> frozenset[str]:
    """The kinds of address that `internal` rules open for `name`. Metadata services and the like are for no name, only
    for a `target`; this machine is only for a name that is written out, since who makes names below a suffix may not be
    who wrote the rule."""
    if not any(rule.internal for rule in rules):
        return frozenset()
    exactly = any(rule.internal and rule.host == name for rule in rules)
    return _OWN_NETWORK | _OWN_MACHINE if exactly else _OWN_NETWORK


async def _connect(found: list[Address], port: int) -> tuple[SocketPipe, str]:
    """Connect to the first address that answers. Raises DialError."""
    reason = "connect-failed"
    for address in found:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            with anyio.fail_after(_CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
            return SocketPipe(sock), str(address)
        except TimeoutError:
            sock.close()
            reason = "connect-timeout"
        except OSError as error:
            sock.close()
            reason = "connect-refused" if isinstance(error, ConnectionRefusedError) else "connect-failed"
        except BaseException:
            sock.close()
            raise
    raise DialError(reason, address=str(found[0]))
