"""Sandboxes that outlive their command line: a small background Edge with a socket (its clients: `_boxclient`).

`proctor box run --detach` forks twice; the grandchild opens an Edge, makes the sandbox, and serves requests on
`<edge directory>/control.sock` (mode 0600, below a 0700 directory) until its last sandbox has ended. The sandbox is
durable: if that process dies, the next command about it starts another, which takes its place. A request is one JSON
line; answers are JSON lines, the last of which has `result` or `error`. Bytes travel as base64.
"""

from __future__ import annotations

import base64
import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import click
from anyio import BrokenResourceError, ClosedResourceError, EndOfStream, IncompleteRead

from proctor.common import ConfigError, ExitCode, InfraError, ProctorError, RefusedError, state_dir
from proctor.sandbox.contract import EndReason
from proctor.sandbox.native.doorbell import is_home, reachable

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox import Edge, Sandbox
    from proctor.sandbox.contract import SandboxSpec

SOCKET = "control.sock"
_LINE_MAX = 16 << 20


# --- the background Edge ----------------------------------------------------------------------------------------------


def start_detached(spec: SandboxSpec, command: tuple[str, ...], extras: dict[str, Any]) -> str:
    """Make a sandbox that is owned by a background process; returns its id once it lives (and `command` runs).

    It outlives that process where it can. `extras`: what else `Edge.create` shall get (secrets, faults, a log of the
    network).
    """
    if (obstacle := mortal_because(spec, extras)) is None:
        spec = replace(spec, lifecycle=replace(spec.lifecycle, durable=True))
    else:
        click.echo(f"note: this sandbox ends with its background process: {obstacle}", err=True)
    return str(_in_background(_Duty(spec=spec, command=command, extras=extras))["sandbox"])


def mortal_because(spec: SandboxSpec, extras: dict[str, Any]) -> str | None:
    """Why such a sandbox cannot be durable and ends with its background process; None when it can."""
    from proctor.sandbox._plans import check_durable

    wanted = replace(spec, lifecycle=replace(spec.lifecycle, durable=True))
    objects = {name: extras.get(name) for name in ("services", "secrets", "faults")}
    try:
        check_durable(wanted, durable_edge=True, objects=objects)
    except RefusedError as refusal:
        return refusal.message
    return None


def revive(edge_id: str) -> None:
    """Start a background process for the sandboxes of an Edge that has died."""
    _in_background(_Duty(edge_id=edge_id))


@dataclass(frozen=True, slots=True)
class _Duty:
    """What a background process is for: a new sandbox, or those of an Edge that has died."""

    spec: SandboxSpec | None = None
    command: tuple[str, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)
    edge_id: str | None = None


def _in_background(duty: _Duty) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _become_daemon(writer, duty)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        answer = json.loads(pipe.read() or b'{"error": "the background process ended at once", "exit_code": 6}')
    if "error" in answer:
        raise_again(answer)
    return dict(answer)


def _become_daemon(writer: int, duty: _Duty) -> None:
    """In the first child: fork again, let go of terminal and streams, serve. Never returns."""
    code = int(ExitCode.OK)
    try:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        import anyio

        anyio.run(_serve, writer, duty)
    except BaseException as error:  # noqa: BLE001, RUF100 - the last frame of this process
        _answer(writer, _failure(error))
        code = int(ExitCode.INFRA)
    finally:
        os._exit(code)


async def _serve(writer: int, duty: _Duty) -> None:
    import anyio

    from proctor.sandbox import Edge

    async with Edge(pool_size=1, durable=True, adopt=duty.edge_id) as edge:
        made = await edge.create(duty.spec, **duty.extras) if duty.spec is not None else None
        with reachable(edge.home / "edges" / edge.id) as folder:
            listener = await anyio.create_unix_listener(f"{folder}/{SOCKET}", mode=0o600)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(_end_on_signal, tasks.cancel_scope)
            if made is not None and duty.command:
                tasks.start_soon(_run_main, made, duty.command)
            tasks.start_soon(listener.serve, lambda stream: _Session(edge, stream).serve())
            _answer(writer, {"sandbox": made.id if made is not None else None})
            os.close(writer)
            while edge.boxes:
                # Every end of a sandbox, by request, ttl or accident, shows here.
                await edge.wait_change()
            tasks.cancel_scope.cancel()


async def _end_on_signal(scope: Any) -> None:
    import anyio

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for _ in signals:
            scope.cancel()
            return


async def _run_main(made: Sandbox, command: tuple[str, ...]) -> None:
    """The command given with --detach. The sandbox stays when it ends, and the command when we do."""
    with suppress(ProctorError):
        await (await made.start(command, keep=True)).wait()


class _Session:
    """One client connection: one request."""

    def __init__(self, edge: Edge, stream: Any) -> None:
        self._edge = edge
        self._stream = stream

    async def serve(self) -> None:
        """Answer the request; a client that goes away ends what it asked for."""
        from anyio.streams.buffered import BufferedByteReceiveStream

        lines = BufferedByteReceiveStream(self._stream)
        async with self._stream:
            try:
                await self._handle(json.loads(await lines.receive_until(b"\n", _LINE_MAX)), lines)
            except Exception as error:  # one bad request must not end the sandboxes of this Edge
                with suppress(*GONE):
                    await self._send(_failure(error))

    async def _send(self, message: dict[str, Any]) -> None:
        await self._stream.send(json.dumps(message, default=str).encode() + b"\n")

    async def _handle(self, request: dict[str, Any], lines: Any) -> None:
        from proctor.cli import _boxlive

        made = next((box for box in self._edge.boxes if box.id == request["sandbox"]), None)
        if made is None:
            raise RefusedError(f"sandbox {request['sandbox']} has ended", field="sandbox")
        if request["op"] == "close":
            await self._send({"result": asdict(await made.close())})
        elif request["op"] == "exec":
            await self._exec(made, request, lines)
        elif request["op"] in _boxlive.OPERATIONS:
            await _boxlive.answer(self._edge, made, request, self._send, lines)
        elif request["op"] in ("net", "expose", "connect"):
            from proctor.cli import _boxnet

            await _boxnet.answer(made, request, self._send, lines)
        else:
            raise ConfigError(f"{request['op']!r} is not a request", field="op")

    async def _exec(self, made: Sandbox, request: dict[str, Any], lines: Any) -> None:
        import anyio

        process = await made.start(
            request["command"],
            cwd=request.get("cwd"),
            env=request.get("env"),
            user=request.get("user"),
            pty=tuple(request["pty"]) if request.get("pty") else None,
            request_id=request.get("request_id"),
        )
        if request.get("detach"):
            await process.close_stdin()
            await self._send({"result": {"exec": process.exec_id}})
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._feed, process, lines, tasks.cancel_scope)
            with anyio.move_on_after(request.get("timeout_s") or float("inf")) as limit:
                async for stream, data in process.output():
                    await self._send({"stream": stream, "data": base64.b64encode(data).decode()})
            if limit.cancelled_caught:
                await process.kill()
            answer = asdict(await process.wait())
            for name in ("stdout", "stderr", "report"):
                answer.pop(name)  # sent already, as it came
            if limit.cancelled_caught:
                answer |= {"timed_out": True, "reason": EndReason.EXEC_TIMEOUT}
            await self._send({"result": answer})
            tasks.cancel_scope.cancel()

    async def _feed(self, process: Any, lines: Any, scope: Any) -> None:
        """Standard input, until the client ends it; a client that is gone takes the command with it."""
        import anyio

        try:
            while True:
                message = json.loads(await lines.receive_until(b"\n", _LINE_MAX))
                if message.get("eof"):
                    await process.close_stdin()
                elif message.get("resize"):
                    await process.resize(*message["resize"])
                else:
                    await process.write_stdin(base64.b64decode(message["stdin"]))
        except GONE:
            with anyio.CancelScope(shield=True), suppress(ProctorError):
                await process.kill()
            scope.cancel()
        except ProctorError:
            return  # the command has ended; its result tells


GONE = (IncompleteRead, EndOfStream, BrokenResourceError, ClosedResourceError)
"""What a stream raises when the other side is gone."""


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ProctorError):
        return {"error": error.message, "field": error.field, "remedy": error.remedy, "exit_code": int(error.exit_code)}
    return {"error": f"{type(error).__name__}: {error}", "exit_code": int(ExitCode.INFRA)}


def _answer(writer: int, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the parent may have gone, or have its answer already
        os.write(writer, json.dumps(message).encode())


def raise_again(answer: dict[str, Any]) -> NoReturn:
    """Raise the error that a background process has answered with."""
    kinds: dict[int, type[ProctorError]] = {
        ExitCode.BAD_INPUT: ConfigError,
        ExitCode.REFUSED: RefusedError,
        ExitCode.INFRA: InfraError,
    }
    kind = kinds.get(answer.get("exit_code", 1), ProctorError)
    raise kind(answer["error"], field=answer.get("field"), remedy=answer.get("remedy"))


# --- what can be known without asking ---------------------------------------------------------------------------------


def living(home: Path | None = None) -> list[dict[str, Any]]:
    """Sandboxes that have not ended, by the journals below `home`; `owner` is a process id, or 0 for a dead Edge."""
    from proctor.sandbox import journal_reader, sweep

    rows = []
    for path in sweep.edges(home or state_dir()):
        if not (path / "journal.jsonl").exists():
            continue
        owner = sweep.owner(path) or 0
        lives = owner != 0 or is_home(path)
        for name, record in journal_reader.fold(journal_reader.read(path / "journal.jsonl")).items():
            rows.append(
                {
                    "sandbox": name,
                    "state": record.state.value,
                    "image": record.image,
                    "since": record.at,
                    "owner": owner,
                    "pid": record.pid,
                    "detached": lives and (path / SOCKET).exists(),
                    "lives": lives,
                    "labels": record.labels,
                }
            )
    return rows


def sweep_now() -> list[str]:
    """Remove what dead Edges have left."""
    import anyio

    from proctor.sandbox import sweep
    from proctor.sandbox.native.cgroup import CgroupLayout

    return anyio.run(sweep.sweep_dead, state_dir().absolute(), CgroupLayout.detect())
