"""The blocking face of the exam room, for scripts and notebooks.

    with proctor.sandbox.sync.create(SandboxSpec()) as box:
        print(box.exec("uname -a").text)

Every call runs the coroutine of the same name on an event loop in a thread of its own (anyio's blocking portal), so
behaviour, errors and limits are those of the async face. `Edge` shares one Edge among many sandboxes.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from proctor.sandbox.contract import (
    CommandInfo,
    DiffEntry,
    EndReason,
    ExecResult,
    FileStat,
    Image,
    Layer,
    OnOutput,
    OutputLimit,
    Receipt,
    SandboxSpec,
    Stats,
)

if TYPE_CHECKING:
    import builtins
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from proctor.sandbox import contract
    from proctor.sandbox.net import NetworkEvent, NetworkPolicy

T = TypeVar("T")
Chunk = tuple[Literal["stdout", "stderr"], bytes]


def _run(portal: BlockingPortal, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
    """Run a coroutine on the portal's loop; Ctrl-C here cancels it there."""
    future = portal.start_task_soon(partial(function, *args, **options))
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class Process:
    """A running command (see `proctor.sandbox.Process`)."""

    def __init__(self, portal: BlockingPortal, process: contract.Process) -> None:
        self._portal = portal
        self._process = process
        self._chunks = process.output()

    def output(self, since: int = 0) -> Iterator[Chunk]:
        """Chunks as they arrive; blocks until the next one."""
        if since:
            self._chunks = self._process.output(since)
        while True:
            try:
                yield _run(self._portal, self._chunks.__anext__)
            except StopAsyncIteration:
                return

    def write_stdin(self, data: bytes) -> None:
        """Give bytes to the command's standard input."""
        _run(self._portal, self._process.write_stdin, data)

    def close_stdin(self) -> None:
        """End the command's standard input."""
        _run(self._portal, self._process.close_stdin)

    def resize(self, columns: int, rows: int) -> None:
        """Give the command's terminal another size."""
        _run(self._portal, self._process.resize, columns, rows)

    def kill(self) -> None:
        """Kill the command and every descendant."""
        _run(self._portal, self._process.kill)

    def wait(self) -> ExecResult:
        """Block until the command has ended."""
        return _run(self._portal, self._process.wait)


class Sandbox:
    """A live sandbox (see `proctor.sandbox.Sandbox`, whose methods these are, blocking)."""

    def __init__(self, portal: BlockingPortal, box: contract.Sandbox) -> None:
        self._portal = portal
        self._box = box

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self._box.id

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._box.spec

    @property
    def image(self) -> Image:
        """The image that `spec.image` resolved to."""
        return self._box.image

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        limit: OutputLimit = OutputLimit(),  # noqa: B008, RUF100 - frozen value
        report_fd: int | None = None,
        keep: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run a command to its end. `on_output` is called on the loop's thread."""
        return _run(
            self._portal,
            self._box.exec,
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            timeout_s=timeout_s,
            on_output=on_output,
            limit=limit,
            report_fd=report_fd,
            keep=keep,
            request_id=request_id,
        )

    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        keep: bool = False,
        pty: tuple[int, int] | None = None,
        request_id: str | None = None,
    ) -> Process:
        """Start a command and return at once."""
        process = _run(
            self._portal,
            self._box.start,
            command,
            cwd=cwd,
            env=env,
            user=user,
            keep=keep,
            pty=pty,
            request_id=request_id,
        )
        return Process(self._portal, process)

    def commands(self) -> builtins.list[CommandInfo]:
        """The commands of a durable sandbox that run or are remembered."""
        return _run(self._portal, self._box.commands)

    def attach(self, exec_id: int) -> Process:
        """A command of a durable sandbox again."""
        return Process(self._portal, _run(self._portal, self._box.attach, exec_id))

    def read(self, path: str, *, max_bytes: int | None = None, user: str | None = None) -> bytes:
        """The content of a file."""
        return _run(self._portal, self._box.read, path, max_bytes=max_bytes, user=user)

    def write(self, path: str, data: bytes, *, mode: int | None = 0o644, user: str | None = None) -> None:
        """Write a whole file, creating parents."""
        _run(self._portal, self._box.write, path, data, mode=mode, user=user)

    def list(self, path: str) -> builtins.list[FileStat]:
        """The entries of a directory."""
        return _run(self._portal, self._box.list, path)

    def stat(self, path: str) -> FileStat:
        """Metadata without following a final symbolic link."""
        return _run(self._portal, self._box.stat, path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or a directory."""
        _run(self._portal, self._box.remove, path, recursive=recursive)

    def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        """Make a directory and its parents."""
        _run(self._portal, self._box.mkdir, path, mode=mode, user=user)

    def upload(self, source: Path, target: str, *, user: str | None = None) -> None:
        """Copy a file, a directory's content or a tar's content in."""
        _run(self._portal, self._box.upload, source, target, user=user)

    def download(self, path: str, target: Path) -> None:
        """Copy a file or a directory out."""
        _run(self._portal, self._box.download, path, target)

    def kill_all(self) -> int:
        """Kill every process except the guest."""
        return _run(self._portal, self._box.kill_all)

    def diff(self) -> builtins.list[DiffEntry]:
        """What the sandbox added, changed and deleted."""
        return _run(self._portal, self._box.diff)

    def export_diff(self, target: Path) -> None:
        """Write the upper layer as tar.zst."""
        _run(self._portal, self._box.export_diff, target)

    def snapshot(self) -> Layer:
        """Freeze the upper into one more read-only layer."""
        return _run(self._portal, self._box.snapshot)

    def fork(self, count: int = 1) -> tuple[Sandbox, ...]:
        """Start sandboxes on this one's frozen disk; close each, or let the Edge do it."""
        return tuple(Sandbox(self._portal, box) for box in _run(self._portal, self._box.fork, count))

    def reset(self) -> None:
        """Drop every process and every change since creation."""
        _run(self._portal, self._box.reset)

    def pause(self) -> int:
        """Stop every process and give back memory; returns how many bytes."""
        return _run(self._portal, self._box.pause)

    def resume(self) -> None:
        """Let a paused sandbox go on before anything is asked of it."""
        _run(self._portal, self._box.resume)

    @property
    def paused(self) -> bool:
        """Whether its processes stand still."""
        return self._box.paused

    @property
    def network(self) -> tuple[NetworkPolicy, int]:
        """The policy in force and its version."""
        return self._box.network

    def set_network(self, policy: NetworkPolicy, expect: int | None = None, *, phase: str | None = None) -> int:
        """Replace the policy as a whole, if its version is still `expect`; returns the new one."""
        return _run(self._portal, self._box.set_network, policy, expect, phase=phase)

    @property
    def network_events(self) -> tuple[NetworkEvent, ...]:
        """The last thousand look-ups, connections and requests."""
        return self._box.network_events

    @contextmanager
    def expose(self, port: int, host_port: int = 0) -> Iterator[tuple[str, int]]:
        """Listen on the host's loopback for a server inside on `port`, for as long as the `with` lasts."""
        with self._portal.wrap_async_context_manager(self._box.expose(port, host_port)) as address:
            yield address

    @contextmanager
    def connect(self, port: int, *, timeout_s: float = 10.0) -> Iterator[socket.socket]:
        """A socket that is connected to a server inside on `port`; its operations wait `timeout_s` at most."""
        with self.expose(port) as address, socket.create_connection(address, timeout_s) as connected:
            yield connected

    def stats(self) -> Stats:
        """Current and peak use."""
        return _run(self._portal, self._box.stats)

    def receipt(self) -> Receipt:
        """What the sandbox really is."""
        return _run(self._portal, self._box.receipt)

    def close(self, reason: EndReason = EndReason.CLOSED) -> Receipt:
        """End the sandbox."""
        return _run(self._portal, self._box.close, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Edge:
    """A blocking Edge: `with Edge() as edge, edge.create(spec) as box: …`. Arguments are those of the async one."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._resources = ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        from proctor.sandbox.edge import Edge as AsyncEdge

        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            # The Edge is made on the loop's thread: its locks and events belong to that loop.
            edge = portal.call(partial(AsyncEdge, **self._options))
            self._edge: AsyncEdge = stack.enter_context(portal.wrap_async_context_manager(edge))
            self._portal = portal
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._portal = None
        self._resources.__exit__(*error)

    def create(self, spec: SandboxSpec | None = None, **options: Any) -> Sandbox:
        """Make a sandbox; it is a context manager that closes it. Options are those of the async `Edge.create`."""
        if self._portal is None:
            raise RuntimeError("the Edge is not open: use it in a `with` statement")
        return Sandbox(self._portal, _run(self._portal, partial(self._edge.create, spec or SandboxSpec(), **options)))

    @property
    def boxes(self) -> builtins.list[Sandbox]:
        """The living sandboxes, those included that an earlier durable Edge has left."""
        if self._portal is None:
            raise RuntimeError("the Edge is not open: use it in a `with` statement")
        return [Sandbox(self._portal, box) for box in self._edge.boxes]


@contextmanager
def create(spec: SandboxSpec | None = None, **options: Any) -> Iterator[Sandbox]:
    """One sandbox with an Edge of its own."""
    with Edge(pool_size=1) as edge, edge.create(spec, **options) as box:
        yield box
