"""Sandboxes that outlive their command line: a small background Edge with a socket, and its clients.

`proctor box run --detach` forks twice; the grandchild opens an Edge, makes the sandbox, and serves requests on
`<edge directory>/control.sock` (mode 0600, below a 0700 directory) until its last sandbox has ended. A request is one
JSON line; answers are JSON lines, the last of which has `result` or `error`. Bytes travel as base64.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import sys
import termios
import tty
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from anyio import BrokenResourceError, ClosedResourceError, EndOfStream, IncompleteRead

from proctor.common import ConfigError, ExitCode, InfraError, ProctorError, RefusedError, state_dir
from proctor.sandbox.contract import EndReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from proctor.sandbox import Edge, Sandbox
    from proctor.sandbox.contract import ExecResult, SandboxSpec

SOCKET = "control.sock"
_START_TIMEOUT_S = 60.0
_LINE_MAX = 16 << 20
_SHELL = ["/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -i || exec sh -i"]


# --- the background Edge ----------------------------------------------------------------------------------------------


def start_detached(spec: SandboxSpec, command: tuple[str, ...], extras: dict[str, Any]) -> str:
    """Make a sandbox that is owned by a background process; returns its id once it lives (and `command` runs).

    `extras`: what else `Edge.create` shall get (secrets, faults, a log of the network)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _become_daemon(writer, spec, command, extras)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        answer = json.loads(pipe.read() or b'{"error": "the background process ended at once", "exit_code": 6}')
    if "error" in answer:
        raise _error(answer)
    return str(answer["sandbox"])


def _become_daemon(writer: int, spec: SandboxSpec, command: tuple[str, ...], extras: dict[str, Any]) -> None:
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

        anyio.run(_serve, writer, spec, command, extras)
    except BaseException as error:  # noqa: BLE001, RUF100 - the last frame of this process
        _answer(writer, _failure(error))
        code = int(ExitCode.INFRA)
    finally:
        os._exit(code)


async def _serve(writer: int, spec: SandboxSpec, command: tuple[str, ...], extras: dict[str, Any]) -> None:
    import anyio

    from proctor.sandbox import Edge

    async with Edge(pool_size=1) as edge:
        made = await edge.create(spec, **extras)
        with _reachable(edge.home / "edges" / edge.id) as folder:
            listener = await anyio.create_unix_listener(f"{folder}/{SOCKET}", mode=0o600)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(_end_on_signal, tasks.cancel_scope)
            if command:
                tasks.start_soon(_run_main, made, command)
            tasks.start_soon(listener.serve, lambda stream: _Session(edge, stream).serve())
            _answer(writer, {"sandbox": made.id})
            os.close(writer)
            while edge.boxes:
                # Every end of a sandbox, by request, ttl or accident, shows here.
                await edge.wait_change()
            tasks.cancel_scope.cancel()


@contextmanager
def _reachable(folder: Path) -> Iterator[str]:
    """A short name for a directory: the address of a Unix socket holds 108 bytes, a path may be longer."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


async def _end_on_signal(scope: Any) -> None:
    import anyio

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async for _ in signals:
            scope.cancel()
            return


async def _run_main(made: Sandbox, command: tuple[str, ...]) -> None:
    """The command given with --detach. The sandbox stays when it ends."""
    with suppress(ProctorError):
        await made.exec(command, keep=True)


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
                with suppress(*_GONE):
                    await self._send(_failure(error))

    async def _send(self, message: dict[str, Any]) -> None:
        await self._stream.send(json.dumps(message, default=str).encode() + b"\n")

    async def _handle(self, request: dict[str, Any], lines: Any) -> None:
        made = next((box for box in self._edge.boxes if box.id == request["sandbox"]), None)
        if made is None:
            raise RefusedError(f"sandbox {request['sandbox']} has ended", field="sandbox")
        if request["op"] == "close":
            await self._send({"result": asdict(await made.close())})
        elif request["op"] == "exec":
            await self._exec(made, request, lines)
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
        )
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
        except _GONE:
            with anyio.CancelScope(shield=True), suppress(ProctorError):
                await process.kill()
            scope.cancel()
        except ProctorError:
            return  # the command has ended; its result tells


_GONE = (IncompleteRead, EndOfStream, BrokenResourceError, ClosedResourceError)
"""What a stream raises when the other side is gone."""


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ProctorError):
        return {"error": error.message, "field": error.field, "remedy": error.remedy, "exit_code": int(error.exit_code)}
    return {"error": f"{type(error).__name__}: {error}", "exit_code": int(ExitCode.INFRA)}


def _answer(writer: int, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the parent may have gone, or have its answer already
        os.write(writer, json.dumps(message).encode())


def _error(answer: dict[str, Any]) -> ProctorError:
    kinds: dict[int, type[ProctorError]] = {
        ExitCode.BAD_INPUT: ConfigError,
        ExitCode.REFUSED: RefusedError,
        ExitCode.INFRA: InfraError,
    }
    kind = kinds.get(answer.get("exit_code", 1), ProctorError)
    return kind(answer["error"], field=answer.get("field"), remedy=answer.get("remedy"))


# --- what can be known without asking ---------------------------------------------------------------------------------


def living(home: Path | None = None) -> list[dict[str, Any]]:
    """Sandboxes that have not ended, by the journals below `home`; `owner` is a process id, or 0 for a dead Edge."""
    from proctor.sandbox import journal_reader, sweep

    rows = []
    for path in sweep.edges(home or state_dir()):
        if not (path / "journal.jsonl").exists():
            continue
        owner = sweep.owner(path) or 0
        for name, record in journal_reader.fold(journal_reader.read(path / "journal.jsonl")).items():
            rows.append(
                {
                    "sandbox": name,
                    "state": record.state.value,
                    "image": record.image,
                    "since": record.at,
                    "owner": owner,
                    "pid": record.pid,
                    "detached": owner != 0 and (path / SOCKET).exists(),
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


# --- the client -------------------------------------------------------------------------------------------------------


class Client:
    """A connection to the background Edge that owns a sandbox; one request."""

    def __init__(self, sandbox: str, folder: Path) -> None:
        self.sandbox = sandbox
        self._pending = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _reachable(folder) as short:
                self._socket.connect(f"{short}/{SOCKET}")
        except OSError as error:
            self._socket.close()
            raise InfraError(f"cannot reach the Edge of {sandbox}: {error.strerror}") from error

    @classmethod
    def find(cls, sandbox: str) -> Self:
        """The client for a sandbox by its id, or by a part of it that is unique."""
        rows = living()
        found = [row for row in rows if row["sandbox"] == sandbox] or [row for row in rows if sandbox in row["sandbox"]]
        if not found:
            raise ConfigError(f"no living sandbox {sandbox!r}", field="sandbox", remedy="see proctor box ls")
        if len(found) > 1:
            raise ConfigError(f"{sandbox!r} fits {len(found)} sandboxes", field="sandbox", remedy="give more of its id")
        row = found[0]
        if not row["detached"]:
            raise RefusedError(
                f"{row['sandbox']} belongs to process {row['owner']}",
                field="sandbox",
                remedy="only sandboxes of --detach can be used from outside",
            )
        edge_id = row["sandbox"].rpartition("-")[0]
        return cls(row["sandbox"], state_dir() / "edges" / edge_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def close_sandbox(self) -> dict[str, Any]:
        """End the sandbox; returns its receipt."""
        self._send({"op": "close", "sandbox": self.sandbox})
        return dict(self._converse(None, None))

    def ask(self, op: str, *, stdin: int | None = None, on_output: Any = None, **fields: Any) -> dict[str, Any]:
        """A request with a result; output that comes before it goes to `on_output`, standard input to the request."""
        self._send({"op": op, "sandbox": self.sandbox, **fields})
        return self._converse(stdin, on_output)

    def stream(self, op: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """A request that is answered until one side leaves."""
        self._send({"op": op, "sandbox": self.sandbox, **fields})
        while True:
            for message in self._receive():
                if "error" in message:
                    raise _error(message)
                yield message

    def exec(self, command: Sequence[str], options: dict[str, Any], *, stdin: int | None, quiet: bool) -> ExecResult:
        """Run a command; its output goes to ours as it comes, or into the result with `quiet`."""
        from proctor.cli.box import write_through

        kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._send({"op": "exec", "sandbox": self.sandbox, "command": list(command), **options})
        answer = self._converse(
            stdin, lambda name, data: kept[name].extend(data) if quiet else write_through(name, data)
        )
        return _result(answer, kept)

    def shell(self, user: str | None) -> int:
        """An interactive shell on our terminal; returns its exit code."""
        from proctor.cli.box import write_through

        env = {"TERM": os.environ.get("TERM", "dumb"), "PS1": "sandbox:\\w# "}
        interactive = sys.stdin.isatty()
        request = {"op": "exec", "sandbox": self.sandbox, "command": _SHELL, "env": env, "user": user}
        self._send(request | {"pty": _terminal_size()} if interactive else request | {"command": ["/bin/sh"]})
        with ExitStack() as stack:
            resized = stack.enter_context(_own_terminal()) if interactive else None
            answer = self._converse(sys.stdin.fileno(), write_through, resized)
        from proctor.cli.box import exit_code

        return exit_code(_result(answer, {"stdout": bytearray(), "stderr": bytearray()}))

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _converse(self, stdin: int | None, on_output: Any, resized: int | None = None) -> dict[str, Any]:
        """Pass input on and output out until the result comes. `resized`: readable when our terminal has a new size."""
        if stdin is None:
            self._end_input()
        while True:
            # A regular file is always ready, which is what select says of it too.
            watched = [one for one in (self._socket, stdin, resized) if one is not None]
            readable, _, _ = select.select(watched, [], [])
            if resized is not None and resized in readable:
                os.read(resized, 512)
                self._send({"resize": _terminal_size()})
            if stdin is not None and stdin in readable:
                data = os.read(stdin, 1 << 16)
                if data:
                    self._send({"stdin": base64.b64encode(data).decode()})
                else:
                    stdin = None
                    self._end_input()
            if self._socket in readable:
                for message in self._receive():
                    if "error" in message:
                        raise _error(message)
                    if "result" in message:
                        return dict(message["result"])
                    on_output(message["stream"], base64.b64decode(message["data"]))

    def _receive(self) -> Iterator[dict[str, Any]]:
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise InfraError(f"the Edge of {self.sandbox} ended meanwhile", remedy="see proctor box ls")
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def _end_input(self) -> None:
        with suppress(OSError):  # it may have its answer ready and the connection closed
            self._send({"eof": True})


def _result(answer: dict[str, Any], kept: dict[str, bytearray]) -> ExecResult:
    from proctor.sandbox.contract import ExecResult, Output

    reason = answer.pop("reason")
    answer["argv"] = tuple(answer["argv"])
    return ExecResult(
        **answer,
        reason=EndReason(reason) if reason else None,
        stdout=Output(bytes(kept["stdout"])),
        stderr=Output(bytes(kept["stderr"])),
    )


def _terminal_size() -> tuple[int, int]:
    columns, rows = os.get_terminal_size(sys.stdin.fileno())
    return columns or 80, rows or 24  # a serial line says 0


@contextmanager
def _own_terminal() -> Iterator[int]:
    """Our terminal passes every key on as it is, until the end; what is yielded is readable when its size changes."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def changed(*_: object) -> None:
        with suppress(BlockingIOError):  # full of news that has not been read yet
            os.write(writer, b"!")

    handler = signal.signal(signal.SIGWINCH, changed)
    try:
        tty.setraw(descriptor)
        yield reader
    finally:
        signal.signal(signal.SIGWINCH, handler)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        os.close(reader)
        os.close(writer)
