"""`proctor box`: use a sandbox by itself.

Exit codes of `run` and `exec` are the command's own; 124 when it timed out, 128 + N when signal N ended it, 137 when it
ran out of memory. Proctor's own failures keep their documented codes (4 bad input, 5 refused, 6 infrastructure).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from proctor.cli import _boxlive, _boxnet
from proctor.cli._network import extras, network_options, policy_of, what_was_refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from proctor.sandbox.contract import ExecResult, SandboxSpec

_TIERS = ["process", "namespaces", "namespaces-userns", "gvisor", "microvm", "fullvm"]
TIMED_OUT = 124
OUT_OF_MEMORY = 137


@click.group()
def box() -> None:
    """Use a sandbox by itself: run, exec, shell, ls, rm, pause, net, expose, connect.

    \b
    proctor box run -- python3 -c 'print(6*7)'
    id=$(proctor box run --detach --memory 512)
    proctor box exec $id -- apt list --installed
    proctor box shell $id
    proctor box rm $id
    """


def _spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what a sandbox shall be."""
    for option in reversed(
        (
            click.option(
                "--runtime", type=click.Choice(["native", "runsc", "docker"]), default="native", show_default=True
            ),
            click.option("--min-tier", type=click.Choice(_TIERS), help="Refuse to run with less isolation."),
            click.option("--self-test", is_flag=True, help="Try its isolation first; no sandbox if that fails."),
            click.option("--image", default="host", show_default=True, help="Reference or digest of an image."),
            click.option("--memory", type=click.IntRange(8), default=1024, show_default=True, help="Memory, MB."),
            click.option("--cpus", type=click.FloatRange(0.01), default=1.0, show_default=True, help="Cores."),
            click.option("--pids", type=click.IntRange(1), default=512, show_default=True, help="Processes."),
            click.option("--disk", type=click.IntRange(1), default=1024, show_default=True, help="Private disk, MB."),
            click.option("--ttl", type=click.FloatRange(0.1), default=3600.0, show_default=True, help="Life, s."),
            click.option("--idle", type=click.FloatRange(0.1), help="End it when unused for so long, s."),
            click.option("--pause-after", type=click.FloatRange(0.1), help="Pause it when unused for so long, s."),
            click.option("-v", "--volume", "volumes", multiple=True, metavar="HOST:TARGET:ro", help="Read-only view."),
            click.option("-e", "--env", "env", multiple=True, metavar="NAME=VALUE", help="Environment."),
            click.option("-w", "--workdir", help="Working directory."),
            click.option("-u", "--user", help="User name, or uid[:gid]."),
            click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Shown by ls."),
        )
    ):
        command = option(command)
    return command


@box.command(context_settings={"ignore_unknown_options": True})
@_spec_options
@network_options
@click.option("--timeout", type=click.FloatRange(0.001), help="Kill the command after so long, s; exit code 124.")
@click.option("-i", "--stdin", "use_stdin", is_flag=True, help="Give standard input to the command.")
@click.option("-d", "--detach", is_flag=True, help="Leave the sandbox to a background Edge and print its id.")
@click.option("--json", "as_json", is_flag=True, help="Print result and receipt instead of the output.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    timeout: float | None, use_stdin: bool, detach: bool, as_json: bool, command: tuple[str, ...], **options: Any
) -> None:
    """Run a command in a new sandbox; without --detach the sandbox ends with it."""
    from proctor.common import ConfigError

    spec = _spec(**options)
    given = extras(options["secrets"], options["mirrors"], options["faults"], options["network_log"])
    if detach:
        from proctor.cli._boxd import start_detached

        box_id = start_detached(spec, command, given)
        click.echo(json.dumps({"sandbox": box_id}) if as_json else box_id)
        return
    if not command:
        raise ConfigError("no command given", field="command", remedy="proctor box run -- COMMAND")
    import anyio

    stdin = sys.stdin.buffer.read() if use_stdin else None
    sys.exit(anyio.run(_run_here, spec, given, command, timeout, stdin, as_json))


async def _run_here(
    spec: SandboxSpec,
    given: dict[str, Any],
    command: tuple[str, ...],
    timeout_s: float | None,
    stdin: bytes | None,
    as_json: bool,
) -> int:
    import asyncio
    import signal
    from dataclasses import asdict

    import anyio

    from proctor.sandbox import Edge

    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, scope.cancel)
        # One slot is enough for one sandbox; a pool would only be made to be thrown away.
        async with Edge(pool_size=1) as edge, await edge.create(spec, **given) as made:
            result = await made.exec(
                command, stdin=stdin, timeout_s=timeout_s, on_output=None if as_json else write_through
            )
            receipt = await made.close()
            refused = what_was_refused(made.network_events)
    if scope.cancelled_caught:
        return 128 + signal.SIGTERM
    if as_json:
        click.echo(json.dumps({"result": result_as_json(result), "receipt": asdict(receipt)}, indent=2, default=str))
    elif refused:
        click.echo(f"proctor: the network refused {refused}", err=True)
    return exit_code(result)


def write_through(stream: str, data: bytes) -> None:
    """Pass a chunk of output on as it is."""
    target = (sys.stdout if stream == "stdout" else sys.stderr).buffer
    target.write(data)
    target.flush()


def exit_code(result: ExecResult) -> int:
    """The exit code for a result, with a line on stderr when something other than the command decided."""
    from proctor.common import ExitCode
    from proctor.sandbox.contract import EndReason

    if result.reason is not None:
        click.echo(f"proctor: the command was ended: {result.reason}", err=True)
    if result.timed_out:
        return TIMED_OUT
    if result.reason is EndReason.OOM and result.exit_code is None:
        return OUT_OF_MEMORY
    if result.signal is not None:
        return 128 + result.signal
    return int(ExitCode.INFRA) if result.exit_code is None else result.exit_code


def result_as_json(result: ExecResult) -> dict[str, Any]:
    """A result as JSON values; output as text, undecodable bytes replaced, with the count of bytes dropped."""
    return {
        "argv": list(result.argv),
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "reason": result.reason,
        "duration_s": result.duration_s,
        "cpu_s": result.cpu_s,
        "max_rss_kb": result.max_rss_kb,
        "leftover": result.leftover,
        "stdout": result.text,
        "stdout_dropped": result.stdout.dropped,
        "stderr": result.error_text,
        "stderr_dropped": result.stderr.dropped,
    }


@box.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("--timeout", type=click.FloatRange(0.001), help="Kill the command after so long, s; exit code 124.")
@click.option("-i", "--stdin", "use_stdin", is_flag=True, help="Give standard input to the command.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal of the size of yours, and your keyboard.")
@click.option("-d", "--detach", is_flag=True, help="Leave it running and print its number (see ps, logs, attach).")
@click.option("--request-id", help="Run it once however often it is asked for by this id.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="Environment.")
@click.option("-w", "--workdir", help="Working directory.")
@click.option("-u", "--user", help="User name, or uid[:gid].")
@click.option("--json", "as_json", is_flag=True, help="Print the result instead of the output.")
@click.argument("sandbox")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(
    timeout: float | None,
    use_stdin: bool,
    tty: bool,
    detach: bool,
    request_id: str | None,
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    as_json: bool,
    sandbox: str,
    command: tuple[str, ...],
) -> None:
    """Run a command in a sandbox that --detach has left."""
    from proctor.cli._boxclient import Client

    variables = _pairs(env, "env")
    options: dict[str, Any] = {
        "timeout_s": timeout,
        "cwd": workdir,
        "user": user,
        "env": variables,
        "request_id": request_id,
    }
    with Client.find(sandbox) as client:
        if detach:
            started = client.ask("exec", command=list(command), detach=True, **options)
            click.echo(json.dumps(started) if as_json else started["exec"])
            return
        if tty:
            options["env"] = {"TERM": os.environ.get("TERM", "xterm"), **variables}
            sys.exit(client.on_terminal(command, options))
        result = client.exec(command, options, stdin=sys.stdin.fileno() if use_stdin else None, quiet=as_json)
    if as_json:
        click.echo(json.dumps(result_as_json(result), indent=2, default=str))
    sys.exit(exit_code(result))


@box.command()
@click.option("-u", "--user", help="User name, or uid[:gid].")
@click.argument("sandbox")
def shell(user: str | None, sandbox: str) -> None:
    """An interactive shell in a sandbox that --detach has left, on a terminal of its own that has the size of yours."""
    from proctor.cli._boxclient import Client

    with Client.find(sandbox) as client:
        sys.exit(client.shell(user))


@box.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(as_json: bool) -> None:
    """List the living sandboxes of this machine's user, from the journals of their Edges."""
    from proctor.cli._boxd import living

    rows = living()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    lines = [("SANDBOX", "STATE", "IMAGE", "SINCE", "OWNER", "LABELS")]
    lines += [
        (
            row["sandbox"],
            row["state"],
            row["image"] or "-",
            row["since"],
            f"pid {row['owner']}" if row["owner"] else "waiting" if row["lives"] else "dead",
            ",".join(f"{name}={value}" for name, value in row["labels"].items()) or "-",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@box.command()
@click.option("--all", "everything", is_flag=True, help="All that --detach has left, and what dead Edges have.")
@click.argument("sandboxes", nargs=-1)
def rm(everything: bool, sandboxes: tuple[str, ...]) -> None:
    """End sandboxes that --detach has left."""
    from proctor.cli._boxclient import Client
    from proctor.cli._boxd import living, sweep_now
    from proctor.common import ConfigError

    if not sandboxes and not everything:
        raise ConfigError("no sandbox given", field="sandboxes", remedy="proctor box rm ID, or --all")
    sweep_now()
    wanted = [row["sandbox"] for row in living() if row["detached"]] if everything else list(sandboxes)
    for name in wanted:
        with Client.find(name) as client:
            client.close_sandbox()
        click.echo(name)


def _spec(**options: Any) -> SandboxSpec:
    """The spec that the options of `run` describe."""
    from proctor.sandbox.contract import Lifecycle, Resources, SandboxSpec, Tier

    return SandboxSpec(
        image=options["image"],
        runtime=options["runtime"],
        min_tier=None if options["min_tier"] is None else Tier(options["min_tier"]),
        self_test=options["self_test"],
        resources=Resources(
            cpus=options["cpus"], memory_mb=options["memory"], pids=options["pids"], disk_mb=options["disk"]
        ),
        lifecycle=Lifecycle(ttl_s=options["ttl"], idle_timeout_s=options["idle"], pause_after_s=options["pause_after"]),
        network=policy_of(options["network"], options["allow"], options["allow_internal"]),
        mounts=tuple(_mount(text) for text in options["volumes"]),
        env=_pairs(options["env"], "env"),
        workdir=options["workdir"],
        user=options["user"],
        labels=_pairs(options["labels"], "label"),
    )


def _mount(text: str) -> Any:
    from proctor.common import ConfigError
    from proctor.sandbox.contract import Mount

    parts = text.split(":")
    if len(parts) == 3 and parts[2] != "ro":
        raise ConfigError(f"{text!r}: mounts are read-only", field="volume", remedy="write HOST:TARGET:ro")
    if len(parts) not in (2, 3) or not parts[0] or not parts[1].startswith("/"):
        raise ConfigError(f"{text!r} is not HOST:TARGET:ro", field="volume")
    source = Path(os.path.abspath(parts[0]))
    if not source.exists():
        raise ConfigError(f"{source} does not exist", field="volume")
    return Mount(source, parts[1])


def _pairs(texts: tuple[str, ...], field: str) -> dict[str, str]:
    from proctor.common import ConfigError

    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{text!r} is not NAME=VALUE", field=field)
        pairs[name] = value
    return pairs


box.add_command(_boxnet.net)
box.add_command(_boxnet.expose)
box.add_command(_boxnet.connect)
for _command in _boxlive.COMMANDS:
    box.add_command(_command)
