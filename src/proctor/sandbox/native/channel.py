"""The host's end of the guest protocol (docs/design/guest-protocol.md): commands and files over one socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from proctor.sandbox.contract import EndReason, ExecResult, FileStat, OnOutput, OutputLimit, Process, SandboxLost

if TYPE_CHECKING:
    import socket


class Attribution(Protocol):
    """How the Edge tells OOM and PIDS from failure: it reads the sandbox's counters before and after a command."""

    def before(self) -> object:
        """Called when a command starts; whatever it returns is given back to `after`."""
        ...

    def after(self, baseline: object, result: ExecResult) -> EndReason | None:
        """Called when a command ended otherwise than with exit code 0; names what decided, or None."""
        ...


class GuestChannel:
    """One guest behind a connected stream socket, which the channel owns from now on.

    `await task_group.start(channel.run)` reads HELLO and then frames until `close()`; everything else may be called
    by any task meanwhile. When the guest is gone, or breaks its protocol, every waiter gets `SandboxLost`.
    """

    def __init__(self, sock: socket.socket, *, attribution: Attribution | None = None) -> None: ...

    async def run(self, *, task_status: object = None) -> None: ...

    @property
    def lost(self) -> SandboxLost | None: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        limit: OutputLimit = OutputLimit(),  # noqa: B008 - frozen value
        report_fd: int | None = None,
        keep: bool = False,
    ) -> ExecResult: ...

    async def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        user: str | None = None,
        keep: bool = False,
    ) -> Process: ...

    async def read(self, path: str, *, max_bytes: int | None = None, user: str | None = None) -> bytes: ...
    async def write(self, path: str, data: bytes, *, mode: int = 0o644, user: str | None = None) -> None: ...
    async def list(self, path: str, *, user: str | None = None) -> list[FileStat]: ...
    async def stat(self, path: str, *, user: str | None = None) -> FileStat: ...
    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None: ...
    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None: ...

    async def unpack(self, target: str, tree: Iterable[bytes], *, user: str | None = None) -> None:
        """Extract a tree stream (see native/tree.py) below the directory `target`, which is made if absent."""
        ...

    def pack(self, path: str, *, user: str | None = None) -> AsyncIterator[bytes]:
        """The tree stream of a file or directory, in chunks."""
        ...

    async def kill_all(self, *, deadline_s: float = 10.0) -> int:
        """Kill every process but the guest; returns how many remain."""
        ...

    async def ping(self) -> float:
        """Seconds of one round trip."""
        ...

    def close(self) -> None: ...
