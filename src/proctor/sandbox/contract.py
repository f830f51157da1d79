"""The contract of the exam room: what a caller states, what a sandbox is, how things end.

Every backend honours exactly this. Values are frozen dataclasses; bytes are bytes; times are seconds;
sizes carry their unit in the name. Whatever a machine cannot honour is refused with the field's name.
"""

from __future__ import annotations

import builtins  # noqa: TC003 - resolved at run time by whoever builds a schema of these types
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - the same
from typing import TYPE_CHECKING, Any, Literal, Protocol

from proctor.common import ExitCode, InfraError, ProctorError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from proctor.sandbox.native.streams import CarriedStream
    from proctor.sandbox.net.events import NetworkEvent
    from proctor.sandbox.net.policy import NetworkPolicy

Backend = Literal["container"]
Runtime = Literal["native", "runsc", "docker"]
DiskDriver = Literal["auto", "memory", "loop"]


class EndReason(StrEnum):
    """Why a sandbox ended. A closed list: every end has exactly one."""

    CLOSED = "CLOSED"
    KILLED = "KILLED"
    OOM = "OOM"
    DISK = "DISK"
    PIDS = "PIDS"
    TTL = "TTL"
    IDLE = "IDLE"
    EXEC_TIMEOUT = "EXEC_TIMEOUT"
    GUEST_LOST = "GUEST_LOST"
    EDGE_LOST = "EDGE_LOST"
    IMAGE = "IMAGE"
    NET_DENIED = "NET_DENIED"
    LAUNCH = "LAUNCH"


class Tier(StrEnum):
    """How far a sandbox is from the machine, in order: what a receipt says was achieved, and a spec may demand."""

    PROCESS = "process"
    """A process of the machine: nothing is isolated."""
    NAMESPACES = "namespaces"
    """Namespaces and a filter, but root inside has the id of the machine's root."""
    NAMESPACES_USERNS = "namespaces-userns"
    """The same with ids of its own: root inside is nobody outside. One bug of the kernel away from it."""
    GVISOR = "gvisor"
    """System calls are answered by gVisor, not by the machine's kernel."""
    MICROVM = "microvm"
    """A kernel of its own in a small virtual machine."""
    FULLVM = "fullvm"
    """A whole virtual machine."""

    @property
    def rank(self) -> int:
        """Its place in the order; a higher one isolates more."""
        return list(Tier).index(self)


@dataclass(frozen=True, slots=True)
class Resources:
    """Hard limits. Exceeding one is reported by name, never as an ordinary failure."""

    cpus: float = 1.0
    """CPU bandwidth in cores."""
    memory_mb: int = 1024
    """Memory of all processes, and of the disk when its driver is `memory`."""
    disk_mb: int = 1024
    """Bytes that the private upper layer may hold."""
    disk_inodes: int = 200_000
    """Files that the private upper layer may hold."""
    pids: int = 512
    """Processes and threads, the guest not counted."""
    disk_driver: DiskDriver = "auto"
    """`memory`: a size-capped tmpfs, charged to `memory_mb`; `loop`: an ext4 image file of that size;
    `auto`: memory when disk_mb <= memory_mb, else loop."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """How long a sandbox may live; the Edge enforces both clocks."""

    ttl_s: float | None = 3600.0
    idle_timeout_s: float | None = None
    pause_after_s: float | None = None
    """Pause it when it has not been used for so long; the next use makes it go on. The other clocks go on."""
    durable: bool = False
    """It outlives its Edge (which must be durable too), and the next one takes it over. Without an Edge `ttl_s`
    holds on; `idle_timeout_s` begins anew."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory or file shown inside, read-only (never a way to write to the host)."""

    source: Path
    target: str
    empty: bool = False
    """The source is an empty directory and nothing else: any will do, and none is better, since a mount names it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One read-only layer. Stored ones have a digest and a path in the layer store; a frozen upper that
    has not been stored lives only as long as its Edge and is known by `handle`."""

    path: Path
    digest: str | None = None
    handle: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """An ordered stack of read-only layers (lowest first) and the defaults to run with.

    `mounts` is used by the `host` image only: read-only views of the machine itself.
    """

    ref: str
    digest: str
    layers: tuple[Layer, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    mounts: tuple[Mount, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a caller needs. `image` is a reference (`host`, `debian:bookworm`, `sha256:…`) or an Image.

    `layers` are stacked above the image's own (toolkits, a frozen upper); `env` is merged over the image's.
    `network` is `none` (loopback only) or a `NetworkPolicy` (what it names is carried, everything else is refused; see
    `proctor.sandbox.net`). `open` shares the machine's network; it is meant for image builds, has to be asked for by
    that word, and marks the receipt. Less isolation than `min_tier` is refused. With `self_test` the short form of the
    isolation self-test runs in every incarnation before it is used; where an item is red there is no sandbox.
    """

    image: str | Image = "host"
    layers: tuple[Layer, ...] = ()
    mounts: tuple[Mount, ...] = ()
    backend: Backend = "container"
    runtime: Runtime = "native"
    min_tier: Tier | None = None
    self_test: bool = False
    resources: Resources = Resources()
    lifecycle: Lifecycle = Lifecycle()
    network: Literal["none", "open"] | NetworkPolicy = "none"
    user: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    hostname: str = "sandbox"
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """How much of a stream is kept on the host: the first `head` and the last `tail` bytes."""

    head_bytes: int = 1 << 20
    tail_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Output:
    """One captured stream: its head, the count of bytes dropped after the head, and its tail."""

    head: bytes = b""
    dropped: int = 0
    tail: bytes = b""

    @property
    def data(self) -> bytes:
        """Head and tail; with a one-line marker between them when something was dropped."""
        if not self.dropped:
            return self.head + self.tail
        return self.head + f"\n[… {self.dropped} bytes dropped …]\n".encode() + self.tail

    @property
    def total(self) -> int:
        """Bytes that the command wrote."""
        return len(self.head) + self.dropped + len(self.tail)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What became of a command. A non-zero exit is a result, not an exception.

    Exactly one of `exit_code` and `signal` is set, unless the guest was lost (then neither).
    `reason` is set when something other than the command itself decided: EXEC_TIMEOUT, OOM, PIDS, DISK,
    GUEST_LOST, KILLED. `leftover` counts the processes that were still alive in the command's group when
    its main process ended, and were killed.
    """

    argv: tuple[str, ...]
    exit_code: int | None
    signal: int | None
    stdout: Output
    stderr: Output
    timed_out: bool
    reason: EndReason | None
    duration_s: float
    cpu_s: float | None = None
    max_rss_kb: int | None = None
    leftover: int = 0
    report: bytes = b""
    report_dropped: int = 0

    @property
    def ok(self) -> bool:
        """True when the command exited with 0 and nothing else decided."""
        return self.exit_code == 0 and self.reason is None

    @property
    def text(self) -> str:
        """Standard output as text (undecodable bytes replaced)."""
        return self.stdout.data.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Standard error as text (undecodable bytes replaced)."""
        return self.stderr.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class FileStat:
    """One file as seen inside. `name` is a str with surrogateescape for undecodable bytes."""

    name: str
    kind: Literal["file", "dir", "link", "fifo", "socket", "char", "block"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """One path that the private upper layer adds, changes or deletes (absolute inside the sandbox)."""

    path: str
    change: Literal["added", "modified", "deleted"]
    kind: Literal["file", "dir", "link", "fifo", "socket", "char", "block"]
    size: int = 0
    mode: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Current and peak use, from the kernel's own counters."""

    memory_bytes: int
    memory_peak_bytes: int | None
    cpu_s: float
    pids: int
    pids_peak: int | None
    disk_bytes: int
    disk_inodes: int
    oom_kills: int
    pids_refused: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a sandbox really was. Everything in it was observed by the host, nothing by the guest."""

    sandbox_id: str
    runtime: str
    tier: Tier
    kernel: str
    image_ref: str
    image_digest: str
    layer_digests: tuple[str, ...]
    limits: Mapping[str, Any]
    limit_mechanisms: Mapping[str, str]
    network: str
    created_at: str
    ended_at: str | None
    end_reason: EndReason | None
    end_detail: str
    peaks: Mapping[str, Any]
    execs: int
    incarnation: int
    end_evidence: Mapping[str, Any] = field(default_factory=dict)
    """What the kernel says about the end: how process 1 ended, and whether before the Edge ended it, kills for
    memory (and those that no command's result accounts for), processes refused, whether the disk was full. Empty
    while it lives."""
    labels: Mapping[str, str] = field(default_factory=dict)
    network_decisions: Mapping[str, Any] = field(default_factory=dict)
    """Of a carried network: the policy's digest and version, services, and totals of what was let through, refused and
    why. Empty without one."""
    self_test: Mapping[str, Any] = field(default_factory=dict)
    """Of a sandbox that asked for it: the version of the checklist, and how many checks were green or did not apply."""


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """One line of `ps`: a command that runs, or that has ended and is remembered."""

    exec_id: int
    argv: tuple[str, ...]
    started_at: str
    running: bool
    background: bool
    """It has ended and left something behind that lives on."""
    exit_code: int | None
    signal: int | None
    reason: EndReason | None
    stdout_bytes: int
    stderr_bytes: int
    request_id: str | None
    pty: bool


OnOutput = Callable[[Literal["stdout", "stderr"], bytes], None]


class Process(Protocol):
    """A running command. Leaving it unwaited is fine: it ends with the sandbox."""

    exec_id: int

    def output(self, since: int = 0) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        """Chunks as they arrive. Not reading them stops the command (back-pressure), unless it is durable: then output
        is kept on the disk within its limit, and `since` is the offset in each stream to begin at."""
        ...

    async def write_stdin(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None:
        """End the input. On a terminal the end is a character (usually Ctrl-D), which a program may take otherwise."""
        ...

    async def resize(self, columns: int, rows: int) -> None:
        """Give the terminal of a command that was started with `pty` another size."""
        ...

    async def kill(self) -> None:
        """Kill the command and every descendant, wherever it went."""
        ...

    async def wait(self) -> ExecResult: ...


class Sandbox(Protocol):
    """A live sandbox. All methods are coroutines; `proctor.sandbox.sync` has a blocking face."""

    id: str
    spec: SandboxSpec
    image: Image

    async def exec(
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
        """Run a command to its end. Text is given to `/bin/sh -c`; a sequence is executed as it is.

        `user` is a name or `uid[:gid]` looked up inside. After `timeout_s` all descendants are killed and
        the output so far is returned with `timed_out`. With `report_fd` the command inherits a pipe at
        that descriptor number whose bytes come back as `report` (capped at 16 MiB): the verdict channel.
        When the main process ends, everything it left behind is killed, so an exec has an end. With `keep`
        (an agent's shell tool, a service) what it left behind lives on and the call still returns when the
        main process has ended, with the output so far, even if a background job holds the streams open; a
        time-out kills the whole group all the same. In a durable sandbox a `request_id` names the command: asking
        again with it, also of a later Edge, gives the result of the first time.
        """
        ...

    async def start(
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
        """Start a command and return at once.

        With `keep`, what the main process leaves behind lives on until the sandbox ends (the way a shell's `&` behaves
        in Docker exec). With `pty` the command gets a terminal of (columns, rows): its controlling one, its input, and
        all of its output (`stdout`); TERM is `xterm` unless `env` says otherwise.
        """
        ...

    async def commands(self) -> builtins.list[CommandInfo]:
        """The commands of a durable sandbox that run or are remembered, oldest first."""
        ...

    async def attach(self, exec_id: int) -> Process:
        """A command of a durable sandbox again, whoever started it; `output(since)` reads from any offset."""
        ...

    async def read(self, path: str, *, max_bytes: int | None = None, user: str | None = None) -> bytes:
        """The content of a regular file, at most its first `max_bytes`, with the rights of `user`."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int | None = 0o644, user: str | None = None) -> None:
        """Write a whole file, creating parents. `mode` None keeps that of a file that exists (else 0644)."""
        ...

    async def list(self, path: str) -> list[FileStat]: ...
    async def stat(self, path: str) -> FileStat:
        """Metadata without following a final symbolic link."""
        ...

    async def remove(self, path: str, *, recursive: bool = False) -> None: ...
    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None: ...
    async def upload(self, source: Path, target: str, *, user: str | None = None) -> None:
        """Copy a file, a directory's content, or a tar archive's content (`.tar`, `.tar.gz`, `.tar.zst`)."""
        ...

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or a directory out; links are kept as links and never followed."""
        ...

    async def kill_all(self) -> int:
        """Freeze, kill every process except the guest, and return how many remain (0, or it raises)."""
        ...

    async def diff(self) -> builtins.list[DiffEntry]: ...
    async def export_diff(self, target: Path) -> None:
        """Write the upper layer as `target` (tar.zst, OCI whiteouts for deletions)."""
        ...

    async def snapshot(self) -> Layer:
        """Freeze the upper into one more read-only layer. Processes are killed; the sandbox goes on with a
        fresh upper on the longer stack."""
        ...

    async def fork(self, count: int = 1) -> builtins.list[Sandbox]: ...
    async def reset(self) -> None:
        """Drop every process and every change since creation."""
        ...

    async def pause(self) -> int:
        """Stop every process and give back memory; returns how many bytes. Whatever needs the guest makes it go on.

        `ttl_s` and `idle_timeout_s` go on. Raises RefusedError while a call is under way.
        """
        ...

    async def resume(self) -> None:
        """Let a paused sandbox go on before anything is asked of it."""
        ...

    @property
    def paused(self) -> bool:
        """Whether its processes stand still."""
        ...

    @property
    def network(self) -> tuple[NetworkPolicy, int]:
        """The policy in force and its version."""
        ...

    async def set_network(self, policy: NetworkPolicy, expect: int | None = None, *, phase: str | None = None) -> int:
        """Replace the policy of a carried network as a whole, if its version is still `expect`; returns the new one.
        What the new policy forbids is cut. `phase` names what begins, in the records."""
        ...

    @property
    def network_events(self) -> tuple[NetworkEvent, ...]:
        """The last thousand look-ups, connections and requests."""
        ...

    def connect(self, port: int, *, timeout_s: float = 10.0) -> AbstractAsyncContextManager[CarriedStream]:
        """A connection to a server inside that listens on `port` of its loopback."""
        ...

    def expose(self, port: int, host_port: int = 0) -> AbstractAsyncContextManager[tuple[str, int]]:
        """Listen on the host's loopback for a server inside on `port`; gives the address."""
        ...

    async def stats(self) -> Stats: ...
    async def receipt(self) -> Receipt: ...
    async def close(self, reason: EndReason = EndReason.CLOSED) -> Receipt: ...


class SandboxError(ProctorError):
    """Base of errors about sandboxes."""


class SandboxLost(InfraError):
    """The sandbox ended under the caller's feet; `reason` says why."""

    def __init__(self, message: str, *, reason: EndReason, remedy: str | None = None) -> None:
        self.reason = reason
        super().__init__(message, remedy=remedy)


class LaunchError(InfraError):
    """A sandbox could not be made; the message names the step and the kernel's error."""


class FileError(SandboxError):
    """A file operation failed inside; `errno` is the guest's."""

    def __init__(self, message: str, *, errno: int, path: str) -> None:
        self.errno = errno
        self.path = path
        super().__init__(message, field=path)


class ImageError(SandboxError):
    """An image is missing, malformed or hostile."""

    exit_code = ExitCode.BAD_INPUT


class GuestProtocolError(InfraError):
    """The guest broke its protocol; the sandbox is ended."""
