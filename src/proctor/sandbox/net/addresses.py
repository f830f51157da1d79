"""Which addresses a sandbox may be connected to: those of the public internet, and none of this machine.

The question is asked of an address after resolution, as 4 or 16 bytes, so its spelling (decimal, octal, hexadecimal,
a name that an attacker's server answers) plays no part. Sources: the IANA special-purpose registries (RFC 6890 and its
successors) as Python's `ipaddress` knows them, and the addresses that clouds give to their metadata services.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "169.254.169.123",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
    )
)
"""Metadata services of clouds (and the one public address that a cloud gives to its own)."""

_V4 = {
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    "shared": ("100.64.0.0/10",),
    "loopback": ("127.0.0.0/8",),
    "link-local": ("169.254.0.0/16",),
    "multicast": ("224.0.0.0/4",),
    "this-network": ("0.0.0.0/8",),
    "reserved": (
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "240.0.0.0/4",
    ),
}
_V6 = {
    "private": ("fc00::/7", "fec0::/10"),
    "loopback": ("::1/128",),
    "link-local": ("fe80::/10",),
    "multicast": ("ff00::/8",),
}
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_RESERVED_V6 = tuple(map(ipaddress.IPv6Network, ("2001:db8::/32", "2001::/23", "3fff::/20")))
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_KINDS = [(kind, ipaddress.ip_network(text)) for table in (_V4, _V6) for kind, texts in table.items() for text in texts]


def refusal(address: Address, local: frozenset[Address] = frozenset()) -> str | None:
    """Why a sandbox may not be connected to `address` (`private`, `metadata`, …), or None when it may.

    `local`: the machine's own addresses. An IPv6 address that stands for an IPv4 one (mapped, compatible, 6to4,
    Teredo, NAT64, ISATAP) is refused when that one is.
    """
    if address in METADATA:
        return "metadata"
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return "link-local"
        for inner in _embedded(address):
            if (reason := refusal(inner, local)) is not None:
                return reason
    for kind, network in _KINDS:
        if network.version == address.version and address in network:
            return kind
    reserved = _reserved_v6(address) if isinstance(address, ipaddress.IPv6Address) else not address.is_global
    if reserved:
        return "reserved"
    return "this-machine" if address in local else None


def _reserved_v6(address: ipaddress.IPv6Address) -> bool:
    """Only global unicast is public; what translates to IPv4 was judged by that."""
    if any(address in network for network in (*_NAT64, _TEREDO, _SIX_TO_FOUR)) or address.ipv4_mapped is not None:
        return False
    return address not in _PUBLIC_V6 or any(address in network for network in _RESERVED_V6)


_TEREDO = ipaddress.IPv6Network("2001::/32")
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
_ISATAP = (0x00005EFE, 0x02005EFE)


def _embedded(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 address stands for, by any of the known ways."""
    value = int(address)
    low = ipaddress.IPv4Address(value & 0xFFFFFFFF)
    found = []
    if address.ipv4_mapped is not None or value >> 32 == 0 or any(address in network for network in _NAT64):
        found.append(low)
    if value >> 32 == 0xFFFF0000:  # RFC 2765, ::ffff:0:a.b.c.d
        found.append(low)
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if address.teredo is not None:
        found += list(address.teredo)
    if (value >> 32) & 0xFFFFFFFF in _ISATAP:
        found.append(low)
    return [] if value in (0, 1) else found


def of_this_machine() -> frozenset[Address]:
    """Every address that this machine's own interfaces have, from the kernel's tables."""
    found: set[Address] = set()
    try:
        lines = Path("/proc/net/fib_trie").read_text().splitlines()
    except OSError:
        lines = []
    last = ""
    for line in lines:
        if "|--" in line:
            last = line.rpartition("|--")[2].strip()
        elif "/32 host LOCAL" in line:
            found.add(ipaddress.IPv4Address(last))
    try:
        rows = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        rows = []
    found.update(ipaddress.IPv6Address(int(row.split()[0], 16)) for row in rows)
    return frozenset(found)
