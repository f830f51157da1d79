"""The checklist: every item, what checks it, and why those that nothing here checks are checked elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proctor.sandbox.selftest import network, places, privilege

if TYPE_CHECKING:
    from proctor.sandbox.selftest.checks import FactCheck, LiveCheck

VERSION: Final = 1
"""Of the list: it goes up when an item is added or means something else. Receipts name it."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item: it is green when all of its checks are."""

    number: int
    section: str
    title: str
    facts: tuple[FactCheck, ...] = ()
    live: tuple[LiveCheck, ...] = ()
    elsewhere: str = ""
    """Where it is dealt with, if not here."""


_PRIVILEGE = "Identity and privilege"
_PLACES = "Namespaces and mounts"
_NETWORK = "Network"

ITEMS: Final[tuple[Item, ...]] = (
    Item(1, _PRIVILEGE, "root inside is an unprivileged id outside", (privilege.ids,)),
    Item(2, _PRIVILEGE, "capabilities are the declared ones", (privilege.capabilities,)),
    Item(3, _PRIVILEGE, "no program gains privileges", (privilege.no_new_privileges,), (privilege.gain,)),
    Item(4, _PRIVILEGE, "dangerous system calls, sockets and ioctls are refused", (privilege.calls,)),
    Item(5, _PRIVILEGE, "process 1 cannot be looked into or touched", (privilege.process_one,)),
    Item(6, _PLACES, "every namespace is the sandbox's own", (places.namespaces,)),
    Item(7, _PLACES, "mounts are private and show no path of the machine", (places.mount_table,)),
    Item(8, _PLACES, "/proc is masked, its settings read-only", (places.proc,)),
    Item(9, _PLACES, "/sys is empty, control groups out of reach", (places.sys,)),
    Item(10, _PLACES, "/dev is minimal, no device can be made", (places.devices,)),
    Item(11, _PLACES, "no layer can be forged by attributes", (places.attributes,), (places.forged_layers,)),
    Item(12, _PLACES, "no descriptor is inherited", (places.descriptors,)),
    Item(13, _PLACES, "climbing ends at the root", (places.ways_out,)),
    Item(26, _NETWORK, "no device but loopback, no route", (network.devices,)),
    Item(27, _NETWORK, "metadata services are out of reach", (network.metadata,)),
    Item(28, _NETWORK, "private ranges and the machine's servers are out of reach", (network.internal,)),
    Item(29, _NETWORK, "IPv6 gets no further", (network.version_six,)),
    Item(30, _NETWORK, "raw, UDP, QUIC and SCTP have nowhere to go", (network.other_protocols,)),
    Item(34, _NETWORK, "no unix socket of the machine is in sight", (network.unix_sockets,)),
    Item(42, "Integrity of the evaluation", "nobody listens to forged calls", (network.listeners,)),
)


def table() -> str:
    """The checklist as a Markdown table, for docs/design/threat-model.md."""
    lines = ["| item | what must hold | checked by |", "| --- | --- | --- |"]
    for item in ITEMS:
        names = [check.__name__.replace("_", " ") for check in (*item.facts, *item.live)]
        how = f"`{'`, `'.join(names)}`" if names else f"elsewhere: {item.elsewhere}"
        lines.append(f"| {item.number} | {item.title} | {how} |")
    return "\n".join(lines) + "\n"
