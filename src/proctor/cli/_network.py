"""What the command line says of a sandbox's network: options, and from them the policy and what goes with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from proctor.sandbox.net import FaultProfile, NetworkEvent, NetworkPolicy, Rule, Secret

_SHOWN = 3
_BOTH_WAYS = "one line of JSON for each look-up, connection and request"


def network_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `box run` about the network."""
    for option in reversed(
        (
            click.option(
                "--network",
                default="none",
                show_default=True,
                metavar="none|open|FILE",
                help="Nothing, the machine's own network, or a policy document.",
            ),
            click.option(
                "--allow",
                multiple=True,
                metavar="[tcp:]HOST[:PORT,…]",
                help="Reach this host (exact, *.suffix, or * for every public one); ports 80 and 443 unless given. "
                "tcp: carries anything unread, not only HTTP and TLS.",
            ),
            click.option(
                "--allow-internal",
                multiple=True,
                metavar="[tcp:]HOST[:PORT,…][=ADDRESS[:PORT]]",
                help="The same for a service at an address of your own network.",
            ),
            click.option(
                "--secret",
                "secrets",
                multiple=True,
                metavar="NAME@HOST",
                help="Hold the environment variable NAME back: inside it is a token, at HOST its value.",
            ),
            click.option(
                "--mirror",
                "mirrors",
                multiple=True,
                metavar="python|npm:URL@DATE",
                help="Answer this package index by one in which nothing is newer than the date.",
            ),
            click.option("--faults", type=click.Path(dir_okay=False), help="Break connections by this document."),
            click.option("--network-log", type=click.Path(dir_okay=False), help=f"Write {_BOTH_WAYS}."),
        )
    ):
        command = option(command)
    return command


def policy_of(
    network: str, allow: tuple[str, ...], internal: tuple[str, ...]
) -> Literal["none", "open"] | NetworkPolicy:
    """The spec's network. Raises ConfigError that names the option."""
    from proctor.common import ConfigError
    from proctor.sandbox.net import NetworkPolicy

    if not allow and not internal:
        return "none" if network == "none" else "open" if network == "open" else read_policy(network)
    if network != "none":
        raise ConfigError(
            f"goes with --allow only as none, not {network!r}", field="network", remedy="put the rules into the file"
        )
    return NetworkPolicy(
        "allow", (*(_rule(text, "allow") for text in allow), *(_rule(text, "allow-internal") for text in internal))
    )


def read_policy(path: str) -> NetworkPolicy:
    """A policy document from a file."""
    from proctor.sandbox.net import NetworkPolicy

    return NetworkPolicy.parse(_text(path, "network"), field=f"{path}")


def read_faults(path: str) -> FaultProfile:
    """A fault profile from a file."""
    from proctor.sandbox.net import FaultProfile

    return FaultProfile.parse(_text(path, "faults"), field=f"{path}")


def extras(
    secrets: tuple[str, ...], mirrors: tuple[str, ...], faults: str | None, network_log: str | None
) -> dict[str, Any]:
    """What goes with the policy into `Edge.create`."""
    given: dict[str, Any] = {}
    if mirrors:
        from proctor.sandbox.net.mirror import mirror

        given["services"] = dict(mirror(text) for text in mirrors)
    if secrets:
        given["secrets"] = dict(_secret(text) for text in secrets)
    if faults is not None:
        given["faults"] = read_faults(faults)
    if network_log is not None:
        given["on_network"] = _Log(network_log)
    return given


def what_was_refused(events: Iterable[NetworkEvent]) -> str:
    """A few words on what a command was refused, for a person who wonders why it failed."""
    found: dict[str, None] = {}
    for event in events:
        if event.decision == "refused" and event.kind in ("lookup", "connection", "request"):
            place = event.name + (f":{event.port}" if event.port is not None else "")
            found[f"{place} ({event.reason})"] = None
    shown = ", ".join(list(found)[:_SHOWN])
    return shown + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


class _Log:
    """Appends events to a file, each in one write."""

    def __init__(self, path: str) -> None:
        from proctor.common import ConfigError

        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", field="network-log") from error

    def __call__(self, event: NetworkEvent) -> None:
        os.write(self._descriptor, json.dumps(event.as_json()).encode() + b"\n")


def _text(path: str, field: str) -> bytes:
    from proctor.common import ConfigError

    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field=field) from error


def _rule(text: str, option: str) -> Rule:
    from proctor.common import ConfigError
    from proctor.sandbox.net import NetworkPolicy, Rule

    place, _, target = text.partition("=")
    is_tcp = place.startswith("tcp:")
    host, _, ports = place.removeprefix("tcp:").partition(":")
    try:
        numbers = tuple(int(port) for port in ports.split(",")) if ports else (80, 443)
    except ValueError:
        raise ConfigError(f"{text!r}: {ports!r} is not a list of ports", field=option) from None
    if target and option == "allow":
        raise ConfigError(f"{text!r} names an address", field=option, remedy="use --allow-internal for it")
    if is_tcp and not ports:
        raise ConfigError(f"{text!r} names no port", field=option, remedy="write tcp:HOST:PORT")
    internal = option == "allow-internal"
    rule = Rule(host, numbers, protocol="tcp" if is_tcp else "web", internal=internal, target=target or None)
    try:
        return NetworkPolicy("allow", (rule,)).rules[0]
    except ConfigError as error:
        raise ConfigError(error.message, field=option, remedy=error.remedy) from error


def _secret(text: str) -> tuple[str, Secret]:
    from proctor.common import ConfigError
    from proctor.sandbox.net import Secret

    name, at, hosts = text.partition("@")
    if not name or not at or not hosts:
        raise ConfigError(f"{text!r} is not NAME@HOST", field="secret")
    if name not in os.environ:
        raise ConfigError(f"{name} is not in the environment", field="secret", remedy=f"export {name}=… first")
    return name, Secret(os.environ[name], tuple(hosts.split(",")))
