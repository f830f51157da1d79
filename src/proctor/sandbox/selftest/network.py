"""The network: items 26 to 36."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from proctor.sandbox.selftest.checks import NO_WAY, REFUSED, Verdict, judge, not_applicable, red

if TYPE_CHECKING:
    from proctor.sandbox.selftest.checks import View
    from proctor.sandbox.selftest.facts import Facts

_OPEN: Final = not_applicable("the network is open: it is the machine's, asked for by that word, and marked")
_METADATA: Final = ("169.254.", "::ffff:169.254.", "fd00:ec2", "100.100.")
_HARMLESS: Final = frozenset(
    {"lo", "sit0", "tunl0", "ip6tnl0", "ip6gre0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0"}
)
"""Devices that kernels with tunnels built in make in every namespace: they are down and lead nowhere."""
_NAME_SERVER: Final = "3500007F:0035"
"""127.0.0.53, port 53, as /proc/net writes it."""


def _dialled(facts: Facts) -> dict[str, str]:
    return facts.group("dial.")


def devices(facts: Facts, view: View) -> Verdict:
    """There is no device but loopback, and no route."""
    if view.network == "open":
        return _OPEN
    wrong = {
        name: "a device" for name in facts.many("device") if name not in ("lo", "sit0", "tunl0", "ip6tnl0", "gre0")
    }
    if facts.one("routes") not in ("0", "-1"):
        wrong["routes"] = facts.one("routes")
    return judge(wrong, f"devices: {', '.join(facts.many('device')) or 'none'}; {facts.one('routes')} routes")


def metadata(facts: Facts, view: View) -> Verdict:
    """Metadata services cannot be reached, however they are written."""
    if view.network == "open":
        return _OPEN
    tried = {key: value for key, value in _dialled(facts).items() if key.removeprefix("[").startswith(_METADATA)}
    return judge({k: v for k, v in tried.items() if v not in NO_WAY}, f"{len(tried)} spellings: no way")


def internal(facts: Facts, view: View) -> Verdict:
    """Private ranges, and servers of the machine's loopback, cannot be reached."""
    if view.network == "open":
        return _OPEN
    tried = {key: value for key, value in _dialled(facts).items() if not key.removeprefix("[").startswith(_METADATA)}
    local = {key: value for key, value in tried.items() if key.startswith(("[127.", "[::1]"))}
    wrong = {k: v for k, v in tried.items() if v not in (NO_WAY | {"ECONNREFUSED"} if k in local else NO_WAY)}
    return judge(wrong, f"{len(tried) - len(local)} addresses: no way; {len(local)} ports of loopback: nobody")


def version_six(facts: Facts, view: View) -> Verdict:
    """IPv6 gets no further than IPv4."""
    if view.network == "open":
        return _OPEN
    tried = {key: value for key, value in _dialled(facts).items() if "2606:" in key or "fd00:" in key}
    tried["udp"] = facts.one("throw.quic6")
    return judge({k: v for k, v in tried.items() if v not in NO_WAY}, f"{len(tried)} attempts: no way")


def other_protocols(facts: Facts, view: View) -> Verdict:
    """Raw sockets, UDP, QUIC and SCTP have nowhere to go."""
    raw = {key: value for key, value in facts.group("socket.").items() if key.endswith("raw") or key == "sctp"}
    wrong = {key: value for key, value in raw.items() if value not in REFUSED | {"EINVAL"}}
    if view.network == "open":
        return judge(wrong, f"{len(raw)} kinds of socket refused; UDP is the machine's")
    thrown = facts.group("throw.")
    wrong |= {key: value for key, value in thrown.items() if value not in NO_WAY}
    return judge(wrong, f"{len(raw)} kinds of socket refused, {len(thrown)} datagrams: no way")


def unix_sockets(facts: Facts, view: View) -> Verdict:
    """No abstract socket and no socket of the machine's services is in sight."""
    paths = facts.group("path.")
    wrong = {key: value for key, value in paths.items() if value not in ("ENOENT", "EACCES", "ENOTDIR")}
    if view.network == "open":
        return judge(wrong, f"{len(paths)} paths absent; abstract sockets are the machine's, as asked for")
    wrong |= {name: "an abstract socket" for name in facts.many("abstract")}
    return judge(wrong, f"no abstract sockets; {len(paths)} paths of the machine's services absent")


def listeners(facts: Facts, view: View) -> Verdict:
    """Nothing listens inside that the sandbox did not start: there is nobody to forge a call to."""
    if view.network == "open":
        return _OPEN
    if facts.one("listeners") not in ("?", "1"):
        return red(f"/proc/net/tcp: {facts.one('listeners')}")
    if facts.one("listeners") == "?":
        return not_applicable("the full form looks for listeners")
    allowed = {_NAME_SERVER} if view.network == "carried" else set()
    wrong = {name: "listens" for name in facts.many("listener") if name not in allowed}
    return judge(
        wrong, f"listeners: {', '.join(facts.many('listener')) or 'none'}; the guest has one inherited channel"
    )
