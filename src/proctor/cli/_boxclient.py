"""The client of background Edges: requests about a sandbox that --detach has left, and our terminal at one of its
commands."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from proctor.cli._boxd import SOCKET, living, raise_again, revive
from proctor.common import ConfigError, InfraError, RefusedError, state_dir
from proctor.sandbox.contract import EndReason
from proctor.sandbox.native.doorbell import reachable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from proctor.sandbox.contract import ExecResult

_SHELL = ["/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -i || exec sh -i"]
_CONNECT_S = 10.0
LEAVE = b"\x1d"
"""Ctrl-], which telnet has for it: leave an attached command running."""


class Left(Exception):
    """Somebody at the terminal has left the command, which goes on."""


class Client:
    """A connection to the background Edge that owns a sandbox; one request."""

    def __init__(self, sandbox: str, folder: Path) -> None:
        self.sandbox = sandbox
        self._pending = b""
        self._socket = _connect(folder, sandbox)

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
        if row["owner"] == 0:  # its Edge has died, it has not
            revive(edge_id)
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
                    raise_again(message)
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
        env = {"TERM": os.environ.get("TERM", "dumb"), "PS1": "sandbox:\\w# "}
        return self.on_terminal(_SHELL if sys.stdin.isatty() else ["/bin/sh"], {"env": env, "user": user})

    def on_terminal(self, command: Sequence[str], options: dict[str, Any]) -> int:
        """A command on our terminal, if we have one; returns its exit code."""
        request = {"op": "exec", "sandbox": self.sandbox, "command": list(command), **options}
        self._send(request | {"pty": _terminal_size()} if sys.stdin.isatty() else request)
        return self._at_terminal()

    def attach(self, exec_id: int, since: int, *, use_stdin: bool) -> int:
        """Come to a running command: its output from an offset on, our input, its exit code; Ctrl-] leaves it."""
        interactive = use_stdin and sys.stdin.isatty()
        request = {"op": "attach", "sandbox": self.sandbox, "exec": exec_id, "since": since, "follow": True}
        self._send(request | {"pty": _terminal_size()} if interactive else request)
        return self._at_terminal(leave=True, use_stdin=use_stdin)

    def _at_terminal(self, *, leave: bool = False, use_stdin: bool = True) -> int:
        from proctor.cli.box import exit_code, write_through

        stdin = sys.stdin.fileno() if use_stdin else None
        with ExitStack() as stack:
            resized = stack.enter_context(_own_terminal()) if use_stdin and sys.stdin.isatty() else None
            answer = self._converse(stdin, write_through, resized, leave=leave and resized is not None)
        return exit_code(_result(answer, {"stdout": bytearray(), "stderr": bytearray()}))

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _converse(
        self, stdin: int | None, on_output: Any, resized: int | None = None, *, leave: bool = False
    ) -> dict[str, Any]:
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
                if leave and LEAVE in data:
                    raise Left
                if data:
                    self._send({"stdin": base64.b64encode(data).decode()})
                else:
                    stdin = None
                    self._end_input(given=True)
            if self._socket in readable:
                for message in self._receive():
                    if "error" in message:
                        raise_again(message)
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

    def _end_input(self, *, given: bool = False) -> None:
        """No more input. `given`: there was some, so its end is one for the command, too."""
        with suppress(OSError):  # it may have its answer ready and the connection closed
            self._send({"eof": True, "given": given})


def _connect(folder: Path, sandbox: str) -> socket.socket:
    """The Edge's socket. One that is just taking its place may need a moment."""
    end = time.monotonic() + _CONNECT_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with reachable(folder) as short:
                sock.connect(f"{short}/{SOCKET}")
            return sock
        except OSError as error:
            sock.close()
            if not isinstance(error, ConnectionRefusedError | FileNotFoundError) or time.monotonic() > end:
                raise InfraError(f"cannot reach the Edge of {sandbox}: {error.strerror}") from error
            if not folder.exists():
                raise InfraError(f"the Edge of {sandbox} is gone") from error
        time.sleep(0.05)


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
