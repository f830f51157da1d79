"""`proctor box net`, `expose` and `connect`: the network of a sandbox that --detach has left, and ways into it."""

from __future__ import annotations

import base64
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proctor.sandbox.box import Box

    Send = Callable[[dict[str, Any]], Awaitable[None]]

_EVENTS = 20


# --- in the background Edge -------------------------------------------------------------------------------------------


async def answer(made: Box, request: dict[str, Any], send: Send, lines: Any) -> None:
    """One request of a client: `net`, `expose` or `connect`."""
    if request["op"] == "net":
        await send({"result": await _net(made, request)})
    elif request["op"] == "expose":
        async with made.expose(request["port"], request["host_port"]) as (host, port):
            await send({"stream": "address", "data": base64.b64encode(f"{host}:{port}".encode()).decode()})
            await _until_gone(lines)
    else:
        await _connect(made, request["port"], send, lines)


async def _net(made: Box, request: dict[str, Any]) -> dict[str, Any]:
    from proctor.sandbox.net import NetworkPolicy

    if request["policy"] is not None:
        await made.set_network(NetworkPolicy.from_json(request["policy"]), request["expect"])
    policy, version = made.network
    receipt = await made.receipt()
    return {
        "network": receipt.network,
        "version": version,
        "policy": policy.as_json(),
        "decisions": dict(receipt.network_decisions),
        "events": [event.as_json() for event in made.network_events[-request["events"] :]],
    }


async def _until_gone(lines: Any) -> None:
    with suppress(Exception):  # whatever it says or however it leaves
        while True:
            await lines.receive_until(b"\n", 1 << 16)


async def _connect(made: Box, port: int, send: Send, lines: Any) -> None:
    import anyio

    async with made.connect(port) as stream, anyio.create_task_group() as tasks:

        async def feed() -> None:
            try:
                while True:
                    message = json.loads(await lines.receive_until(b"\n", 16 << 20))
                    if message.get("eof"):
                        await stream.send_eof()
                    else:
                        await stream.send(base64.b64decode(message["stdin"]))
            except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
                tasks.cancel_scope.cancel()

        tasks.start_soon(feed)
        with suppress(ConnectionResetError):
            while data := await stream.receive():
                await send({"stream": "stdout", "data": base64.b64encode(data).decode()})
        await send({"result": {}})
        tasks.cancel_scope.cancel()


# --- the commands -----------------------------------------------------------------------------------------------------


@click.command()
@click.option("--set", "path", type=click.Path(dir_okay=False), help="Replace the policy by this document.")
@click.option("--expect", type=click.IntRange(1), help="Only if the version is still this one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("sandbox")
def net(path: str | None, expect: int | None, as_json: bool, sandbox: str) -> None:
    """Show (or replace, with --set) what a sandbox may reach, and what it was allowed and refused."""
    from proctor.cli._boxclient import Client
    from proctor.cli._network import read_policy
    from proctor.common import ConfigError

    if expect is not None and path is None:
        raise ConfigError("goes with --set", field="expect")
    policy = read_policy(path).as_json() if path is not None else None
    with Client.find(sandbox) as client:
        found = client.ask("net", policy=policy, expect=expect, events=1000 if as_json else _EVENTS)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"network {found['network']}, policy version {found['version']}")
    for rule in found["policy"].get("rules", []):
        click.echo(f"  {_rule_line(rule)}")
    decisions = found["decisions"]
    for kind in ("lookups", "connections", "requests"):
        words = [
            f"{decisions[key]:,} {word}"
            for word in ("allowed", "refused", "failed")
            if (key := f"{kind}_{word}") in decisions
        ]
        if words:
            click.echo(f"{kind}: {', '.join(words)}")
    for event in found["events"]:
        click.echo(f"  {_event_line(event)}")


def _rule_line(rule: dict[str, Any]) -> str:
    parts = [rule["host"], "ports " + ",".join(map(str, rule["ports"]))]
    parts += [f"{name} {','.join(rule[name])}" for name in ("methods", "paths") if name in rule]
    parts += [f"protocol {rule['protocol']}"] if "protocol" in rule else []
    parts += ["internal" + (f" at {rule['target']}" if "target" in rule else "")] if "internal" in rule else []
    return "; ".join(parts)


def _event_line(event: dict[str, Any]) -> str:
    place = event.get("name", "") + (f":{event['port']}" if "port" in event else "")
    what = " ".join(str(event[key]) for key in ("method", "path", "type", "status") if key in event)
    return " ".join(part for part in (event["kind"], place, what, event["decision"], event.get("reason", "")) if part)


@click.command()
@click.option("--host-port", type=click.IntRange(0, 65535), default=0, help="Port of this machine; a free one if 0.")
@click.argument("sandbox")
@click.argument("port", type=click.IntRange(1, 65535))
def expose(host_port: int, sandbox: str, port: int) -> None:
    """Reach a server in a sandbox through a port of this machine's loopback, until Ctrl-C."""
    from proctor.cli._boxclient import Client

    with Client.find(sandbox) as client:
        for message in client.stream("expose", port=port, host_port=host_port):
            click.echo(f"{base64.b64decode(message['data']).decode()} is port {port} of {client.sandbox}")


@click.command()
@click.argument("sandbox")
@click.argument("port", type=click.IntRange(1, 65535))
def connect(sandbox: str, port: int) -> None:
    """Connect standard input and output to a server in a sandbox.

    \b
    printf 'GET / HTTP/1.0\\r\\n\\r\\n' | proctor box connect $id 8000
    """
    from proctor.cli._boxclient import Client

    def show(_: str, data: bytes) -> None:
        with suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), data)

    with Client.find(sandbox) as client:
        client.ask("connect", stdin=sys.stdin.fileno(), on_output=show, port=port)
