"""Which addresses may be dialled: checklist items 27 and 28, after resolution and in every spelling."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.sandbox.net import addresses


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("169.254.169.254", "metadata"),
        ("fd00:ec2::254", "metadata"),
        ("100.100.100.200", "metadata"),
        ("168.63.129.16", "metadata"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "shared"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("0.0.0.0", "this-network"),
        ("169.254.1.1", "link-local"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("240.0.0.1", "reserved"),
        ("192.0.2.1", "reserved"),
        ("198.18.0.1", "reserved"),
        ("::", "reserved"),
        ("::1", "loopback"),
        ("fe80::1", "link-local"),
        ("fe80::1%1", "link-local"),
        ("fc00::1", "private"),
        ("ff02::1", "multicast"),
        ("2001:db8::1", "reserved"),
        ("4000::1", "reserved"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:a9fe:a9fe", "metadata"),
        ("::ffff:0:10.0.0.1", "private"),
        ("::127.0.0.1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("2002:a9fe:a9fe::1", "metadata"),
        ("64:ff9b::10.0.0.1", "private"),
        ("64:ff9b::a9fe:a9fe", "metadata"),
        ("64:ff9b:1::169.254.169.254", "metadata"),
        ("2001:0:808:808::f5ff:fffe", "private"),
        ("2600::5efe:10.0.0.1", "private"),
    ],
)
def test_internal_addresses_are_refused(text: str, reason: str) -> None:
    assert addresses.refusal(ipaddress.ip_address(text)) == reason


@pytest.mark.parametrize(
    "text", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2600::1", "2a00:1450:4001::1", "64:ff9b::8.8.8.8"]
)
def test_public_addresses_are_not(text: str) -> None:
    assert addresses.refusal(ipaddress.ip_address(text)) is None


@pytest.mark.parametrize(
    "text", ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "0xA9.254.0251.254"]
)
def test_spellings_resolve_to_what_is_refused(text: str) -> None:
    """What the C library makes of a number is judged as the address that it is."""
    found = socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)[0][4][0]
    assert addresses.refusal(ipaddress.ip_address(found)) == "metadata"


@given(st.integers(0, 2**32 - 1))
def test_an_ipv4_address_is_refused_under_every_ipv6_name(value: int) -> None:
    inner = ipaddress.IPv4Address(value)
    reason = addresses.refusal(inner)
    if reason is None:
        return
    for text in (f"::ffff:{inner}", f"64:ff9b::{inner}", f"2002:{value >> 16:x}:{value & 0xFFFF:x}::"):
        assert addresses.refusal(ipaddress.ip_address(text)) == reason


@given(st.integers(0, 2**128 - 1))
def test_only_global_unicast_is_ever_public(value: int) -> None:
    address = ipaddress.IPv6Address(value)
    if addresses.refusal(address) is None:
        assert address in ipaddress.ip_network("2000::/3") or address in ipaddress.ip_network("64:ff9b::/47")


def test_this_machine_is_refused_by_its_own_addresses() -> None:
    local = addresses.of_this_machine()
    assert ipaddress.ip_address("127.0.0.1") in local
    public = ipaddress.ip_address("8.8.8.8")
    assert addresses.refusal(public, frozenset({public})) == "this-machine"
    assert addresses.refusal(ipaddress.ip_address("::ffff:8.8.8.8"), frozenset({public})) == "this-machine"
