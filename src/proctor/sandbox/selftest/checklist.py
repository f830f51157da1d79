"""The checklist: every item, what checks it, and why those that nothing here checks are checked elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proctor.sandbox.selftest import exam, network, places, policies, privilege, resources, transfers

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
_RESOURCES = "Resources"
_NETWORK = "Network"
_DATA = "Data in and out"
_EXAM = "Integrity of the evaluation"

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
    Item(14, _RESOURCES, "a fork bomb is bounded and named", live=(resources.fork_bomb,)),
    Item(15, _RESOURCES, "a memory bomb ends inside and is named", live=(resources.memory_bomb,)),
    Item(16, _RESOURCES, "/dev/shm is counted", live=(resources.shared_memory,)),
    Item(17, _RESOURCES, "disk is bounded in bytes and files", live=(resources.disk_bytes, resources.disk_inodes)),
    Item(18, _RESOURCES, "what the machine has once is bounded for each", live=(resources.hoards,)),
    Item(19, _RESOURCES, "CPU time is bounded, nproc shows it", (resources.processors,), (resources.cpu_time,)),
    Item(20, _RESOURCES, "a flood of output is bounded and counted", live=(resources.flood,)),
    Item(21, _RESOURCES, "long lines, NUL and invalid UTF-8 survive", live=(resources.odd_bytes,)),
    Item(22, _RESOURCES, "deep trees are removed in time", live=(resources.deep_tree,)),
    Item(23, _RESOURCES, "disk bandwidth", elsewhere="not bounded, and said so in docs/design/threat-model.md"),
    Item(24, _RESOURCES, "swap is no way around the memory limit", live=(resources.swap,)),
    Item(25, _RESOURCES, "everything is killed within a second", live=(resources.hard_kill,)),
    Item(26, _NETWORK, "no device but loopback, no route", (network.devices,)),
    Item(27, _NETWORK, "metadata services are out of reach", (network.metadata,)),
    Item(28, _NETWORK, "private ranges and the machine's servers are out of reach", (network.internal,)),
    Item(29, _NETWORK, "IPv6 gets no further", (network.version_six,)),
    Item(30, _NETWORK, "raw, UDP, QUIC and SCTP have nowhere to go", (network.other_protocols,)),
    Item(31, _NETWORK, "only listed names are answered, none leads inside", live=(policies.names,)),
    Item(32, _NETWORK, "every request is for the name that was dialled", live=(policies.requests,)),
    Item(33, _NETWORK, "a mirror is no generic fetcher", live=(policies.paths,)),
    Item(34, _NETWORK, "no unix socket of the machine is in sight", (network.unix_sockets,)),
    Item(35, _NETWORK, "siblings share nothing", live=(policies.siblings,)),
    Item(36, _NETWORK, "secrets stay at the boundary", live=(policies.secrets,)),
    Item(37, _DATA, "hostile trees come out as what they are", live=(transfers.copies_out,)),
    Item(38, _DATA, "hostile archives stay in their target", live=(transfers.archives_in,)),
    Item(39, _DATA, "layers that a sandbox wrote gain nothing", live=(transfers.frozen_layers,)),
    Item(
        40,
        _DATA,
        "snapshots carry no state",
        elsewhere="only disks are frozen, never memory: clocks and randomness are the kernel's",
    ),
    Item(41, _EXAM, "the guest's program is out of reach", (exam.guest_binary,)),
    Item(42, _EXAM, "nobody listens to forged calls", (network.listeners,)),
    Item(43, _EXAM, "what was planted is not there in a clean room", live=(transfers.clean_rooms,)),
    Item(44, _EXAM, "canaries report touches", elsewhere="of each exam, not of the room: records and tasks hold them"),
    Item(45, _EXAM, "no answers in the image", elsewhere="of each task, not of the room"),
    Item(46, _EXAM, "the machine itself", (exam.core_limit,), (exam.machine,)),
)


def table() -> str:
    """The checklist as a Markdown table, for docs/design/threat-model.md."""
    lines = ["| item | what must hold | checked by |", "| --- | --- | --- |"]
    for item in ITEMS:
        names = [check.__name__.replace("_", " ") for check in (*item.facts, *item.live)]
        how = f"`{'`, `'.join(names)}`" if names else f"elsewhere: {item.elsewhere}"
        lines.append(f"| {item.number} | {item.title} | {how} |")
    return "\n".join(lines) + "\n"
