"""`proctor box ps`, `logs`, `attach`, `stats` and `metrics`: what goes on in sandboxes that --detach has left."""

from __future__ import annotations

import base64
import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proctor.sandbox import Edge
    from proctor.sandbox.box import Box

    Send = Callable[[dict[str, Any]], Awaitable[None]]

OPERATIONS = ("ps", "attach", "stats", "metrics", "pause", "resume")
_COMMAND_WIDTH = 60


# --- in the background Edge -------------------------------------------------------------------------------------------


async def answer(edge: Edge, made: Box, request: dict[str, Any], send: Send, lines: Any) -> None:
    """One request of a client."""
    if request["op"] == "ps":
        await send({"result": {"commands": [asdict(one) for one in await made.commands()]}})
    elif request["op"] == "stats":
        await send({"result": asdict(await made.stats())})
    elif request["op"] == "pause":
        await send({"result": {"paused": True, "freed_bytes": await made.pause()}})
    elif request["op"] == "resume":
        await made.resume()
        await send({"result": {"paused": False}})
    elif request["op"] == "metrics":
        await send({"result": await edge.snapshot()})
    else:
        await _attach(made, request, send, lines)


async def _attach(made: Box, request: dict[str, Any], send: Send, lines: Any) -> None:
    """Output from an offset on, then as it comes; input and sizes meanwhile. Whoever leaves, leaves it running."""
    import anyio

    process = await made.attach(request["exec"])
    if request.get("pty"):
        with suppress(Exception):  # one without a terminal has no size
            await process.resize(*request["pty"])
    async with anyio.create_task_group() as tasks:
        if request["follow"]:
            tasks.start_soon(_feed, process, lines, tasks.cancel_scope)
        async for stream, piece in process.pieces(request["since"], follow=request["follow"]):
            data = base64.b64encode(piece.data).decode()
            await send({"stream": stream, "data": data, "offset": piece.offset})
        result: dict[str, Any] = {}
        if request["follow"]:
            result = asdict(await process.wait())
            for name in ("stdout", "stderr", "report"):
                result.pop(name)  # sent already, as it came
        await send({"result": result})
        tasks.cancel_scope.cancel()


async def _feed(process: Any, lines: Any, scope: Any) -> None:
    from proctor.cli._boxd import GONE
    from proctor.common import ProctorError

    try:
        while True:
            message = json.loads(await lines.receive_until(b"\n", 16 << 20))
            if message.get("resize"):
                await process.resize(*message["resize"])
            elif "stdin" in message:
                await process.write_stdin(base64.b64decode(message["stdin"]))
            elif message.get("eof") and message.get("given"):
                await process.close_stdin()
    except GONE:
        scope.cancel()
    except ProctorError:
        return  # the command has ended; its result tells


# --- the commands -----------------------------------------------------------------------------------------------------


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("sandbox")
def ps(as_json: bool, sandbox: str) -> None:
    """List the commands of a sandbox: running, in the background, and ended ones that are remembered."""
    from proctor.cli._boxclient import Client

    with Client.find(sandbox) as client:
        commands = client.ask("ps")["commands"]
    if as_json:
        click.echo(json.dumps(commands, indent=2))
        return
    click.echo(f"{'EXEC':>5}  {'STATE':<14}  {'STARTED':<24}  {'STDOUT':>10}  {'STDERR':>10}  COMMAND")
    for one in commands:
        click.echo(
            f"{one['exec_id']:>5}  {_state(one):<14}  {one['started_at']:<24}  {one['stdout_bytes']:>10,}  "
            f"{one['stderr_bytes']:>10,}  {_shortened(' '.join(one['argv']))}"
        )


def _state(command: dict[str, Any]) -> str:
    if command["running"]:
        return "running (tty)" if command["pty"] else "running"
    if command["background"]:
        return "background"
    if command["reason"]:
        return str(command["reason"])
    return f"signal {command['signal']}" if command["signal"] else f"exit {command['exit_code']}"


def _shortened(text: str) -> str:
    text = text.encode("utf-8", "replace").decode().replace("\n", " ")
    return text if len(text) <= _COMMAND_WIDTH else text[: _COMMAND_WIDTH - 1] + "…"


@click.command()
@click.option("--since", type=click.IntRange(0), default=0, show_default=True, help="Offset to begin at, bytes.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the command ends.")
@click.option("--json", "as_json", is_flag=True, help="Print each piece as a JSON line, with its offset.")
@click.argument("sandbox")
@click.argument("exec_id", metavar="EXEC", type=click.IntRange(1))
def logs(since: int, follow: bool, as_json: bool, sandbox: str, exec_id: int) -> None:
    """Show what a command has written, from any offset of its streams; what was not kept is passed over."""
    from proctor.cli._boxclient import Client

    with Client.find(sandbox) as client:
        for message in client.stream("attach", exec=exec_id, since=since, follow=follow):
            if "result" in message:
                return
            data = base64.b64decode(message["data"])
            if as_json:
                shown = {
                    "stream": message["stream"],
                    "offset": message["offset"],
                    "text": data.decode("utf-8", "replace"),
                }
                click.echo(json.dumps(shown))
            else:
                target = (sys.stdout if message["stream"] == "stdout" else sys.stderr).buffer
                target.write(data)
                target.flush()


@click.command()
@click.option("--since", type=click.IntRange(0), default=0, show_default=True, help="Offset to begin at, bytes.")
@click.option("-i", "--stdin", "use_stdin", is_flag=True, help="Give standard input also when it is no terminal.")
@click.argument("sandbox")
@click.argument("exec_id", metavar="EXEC", type=click.IntRange(1))
def attach(since: int, use_stdin: bool, sandbox: str, exec_id: int) -> None:
    """Come to a running command: its output, your keyboard, its exit code. Ctrl-] leaves it running."""
    from proctor.cli._boxclient import Client, Left

    with Client.find(sandbox) as client:
        try:
            code = client.attach(exec_id, since, use_stdin=use_stdin or sys.stdin.isatty())
        except Left:
            click.echo(f"\nproctor: left; it runs on (proctor box attach {sandbox} {exec_id})", err=True)
            return
    sys.exit(code)


@click.command()
@click.option("--watch", is_flag=True, help="Once a second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("sandbox")
def stats(watch: bool, as_json: bool, sandbox: str) -> None:
    """Show what a sandbox uses, by the kernel's counters."""
    before: tuple[float, float] | None = None
    while True:
        now, found = time.monotonic(), _ask(sandbox, "stats")
        if as_json:
            click.echo(json.dumps(found))
        else:
            if before is None:
                click.echo("    CPU    CPU, s       MEMORY         PEAK  PIDS         DISK    FILES  OOM")
            busy = "-" if before is None else f"{100 * (found['cpu_s'] - before[1]) / max(now - before[0], 1e-6):.0f} %"
            click.echo(
                f"{busy:>7}  {found['cpu_s']:>8.2f}  {_mb(found['memory_bytes'])}  {_mb(found['memory_peak_bytes'])}  "
                f"{found['pids']:>4}  {_mb(found['disk_bytes'])}  {found['disk_inodes']:>7}  {found['oom_kills']:>3}"
            )
        if not watch:
            return
        before = now, found["cpu_s"]
        time.sleep(1.0)


def _mb(size: int | None) -> str:
    return f"{'-':>11}" if size is None else f"{size / 1e6:>8,.1f} MB"


def _ask(sandbox: str, op: str) -> dict[str, Any]:
    from proctor.cli._boxclient import Client

    with Client.find(sandbox) as client:
        return client.ask(op)


@click.command()
@click.option("--serve", "port", type=click.IntRange(0, 65535), help="Answer on this port of the loopback.")
def metrics(port: int | None) -> None:
    """Print the numbers of all background Edges as Prometheus reads them, or serve them at /metrics."""
    if port is None:
        sys.stdout.buffer.write(_page())
        return
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from proctor.sandbox.metrics import CONTENT_TYPE

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802, RUF100 - the library's name
            found = self.path.partition("?")[0] == "/metrics"
            page = _page() if found else b"the numbers are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: Any) -> None:
            """Scrapes are no news."""

    with ThreadingHTTPServer(("127.0.0.1", port), Page) as server:
        click.echo(f"http://127.0.0.1:{server.server_address[1]}/metrics", err=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _page() -> bytes:
    """One snapshot of each Edge that a socket leads to."""
    from proctor.cli._boxd import living
    from proctor.common import ProctorError
    from proctor.sandbox.metrics import exposition

    sandboxes: dict[int, str] = {}
    for row in living():
        if row["detached"] and row["owner"]:
            sandboxes.setdefault(row["owner"], row["sandbox"])
    snapshots = []
    for sandbox in sandboxes.values():
        with suppress(ProctorError):  # it ends just now
            snapshots.append(_ask(sandbox, "metrics"))
    return exposition(snapshots)


@click.command()
@click.argument("sandbox")
def pause(sandbox: str) -> None:
    """Stop a sandbox's processes and give memory back; whatever is asked of it makes it go on. Its --ttl goes on."""
    from proctor.cli._boxclient import Client

    with Client.find(sandbox) as client:
        freed = client.ask("pause")["freed_bytes"]
    click.echo(f"paused, {freed / 2**20:.1f} MiB given back")


@click.command()
@click.argument("sandbox")
def resume(sandbox: str) -> None:
    """Let a paused sandbox go on, before anything is asked of it."""
    from proctor.cli._boxclient import Client

    with Client.find(sandbox) as client:
        client.ask("resume")


COMMANDS = (ps, logs, attach, stats, metrics, pause, resume)
