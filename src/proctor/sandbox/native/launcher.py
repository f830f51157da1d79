"""The Edge's handle on the launcher process: start it once, ask it for sandboxes, end it.

The launcher is a child with one SOCK_SEQPACKET socket. Any number of launches may be in flight; whichever of their
tasks waits first reads the socket for all of them, so there is no background task to own or to forget.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from proctor.common import InfraError
from proctor.sandbox.contract import LaunchError
from proctor.sandbox.native import doorbell
from proctor.sandbox.native.cgroup import CgroupLayout
from proctor.sandbox.native.idslices import RANGES_PER_EDGE, IdSlice
from proctor.sandbox.native.pidfd import has_ended
from proctor.sandbox.native.plan import (
    REPLY_MAX,
    Held,
    LauncherSetup,
    LaunchReply,
    Plan,
    decode_held,
    decode_reply,
    encode_adopt,
    encode_plan,
    encode_setup,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BINARY = Path(__file__).resolve().parent.parent / "_bin" / "proctor-init"

_IN_FLIGHT = 64
"""Launches that are asked for at once: with more, the last ones would wait longer than a launch may take."""
_MAX_FDS = 16
_END_S = 5.0
_KNOCK_AGAIN_S = 0.02
_SPARE = 4

_REMEDIES = {
    "layer-idmap": "the layers' file system cannot be id-mapped; keep images on ext4, xfs or btrfs",
    "upper-idmap": "a disk in memory needs Linux 6.3; use the loop driver",
    "upper-loop": "loop devices are missing or used up; use the memory driver or load the loop module",
    "proc": "this machine hides parts of /proc, as an unprivileged container does; run on the machine itself",
    "slot-clone": "user namespaces or cgroup2 are not usable here; see proctor doctor",
    "id-ranges": "as many sandboxes as this Edge has id ranges are alive",
    "limit-memory": "the limit is below what an empty sandbox needs",
    "receive": "this process has no file descriptors left; raise its limit (ulimit -n), or run fewer sandboxes",
    "attach-proc": "the image has something else than a directory at /proc",
    "attach-dev": "the image has something else than a directory at /dev",
    "attach-sys": "the image has something else than a directory at /sys",
}
"""What to do about a step that fails for a known reason."""


class StepError(LaunchError):
    """A launch failed at `step` with the kernel's `errno`; nothing of it is left."""

    def __init__(self, message: str, *, step: str, errno: int) -> None:
        self.step = step
        self.errno = errno
        super().__init__(message, remedy=_REMEDIES.get(step))


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """How to start a launcher. `edge` names its cgroup directories; one launcher per name."""

    edge: str
    pool: int = 8
    """Launch slots kept ready. Each is an idle process with its namespaces (about a megabyte of kernel memory)."""
    start_timeout_s: float = 10.0
    launch_timeout_s: float = 30.0
    binary: Path = BINARY
    uid_start: int | None = None
    """First unprivileged id of this Edge's sandboxes; None: a slice that no other Edge has (`idslices`)."""
    uid_ranges: int = RANGES_PER_EDGE
    folder: Path | None = None
    """The Edge's directory: then the launcher outlives the Edge and is found again there (`doorbell`)."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A sandbox whose guest is about to say HELLO. The receiver owns the three descriptors and closes them; closing the
    channel ends the sandbox."""

    slot: str
    pid: int
    pidfd: int
    channel: socket.socket
    upper_fd: int
    """A directory with `upper/` and `work/`, as stored (ids not mapped); `/proc/self/fd/N` is its path."""
    uid_base: int
    timings_us: dict[str, int]
    facts: dict[str, str]

    def close(self) -> None:
        """Close all three descriptors."""
        self.channel.close()
        os.close(self.pidfd)
        os.close(self.upper_fd)


@dataclass(slots=True)
class _Pending:
    event: anyio.Event = field(default_factory=anyio.Event)
    reply: LaunchReply | None = None
    fds: list[int] = field(default_factory=list)


class _Process:
    """The launcher's process: our child, or (`child` None) that of an earlier Edge."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.child = child

    def alive(self) -> bool:
        """Whether it still runs."""
        return not has_ended(self._pidfd)

    def kill(self) -> None:
        """SIGKILL; gone is fine."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def ended(self) -> None:
        """Wait for its end, and reap it if it is ours to reap."""
        if self._pidfd >= 0:
            await anyio.wait_readable(self._pidfd)
        if self.child is not None:
            self.child.wait()
        else:
            self._reap()

    def _reap(self) -> None:
        """An earlier Edge may have been one of this very process."""
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Launcher:
    """One launcher process. Make it with `start`; `close` ends it and everything it made."""

    def __init__(
        self, config: LauncherConfig, layout: CgroupLayout, process: _Process | None, sock: socket.socket
    ) -> None:
        self.config = config
        self.layout = layout
        self.held: list[Held] = []
        """What it had kept when we came to it (`reconnect`)."""
        self._process = process
        self._socket = sock
        self._pending: dict[int, _Pending] = {}
        self._next_request = 1
        self._reading = False
        self._sending = anyio.Lock(fast_acquire=True)
        self._room = anyio.Semaphore(_IN_FLIGHT, fast_acquire=True)
        self._ids: IdSlice | None = None
        self._unified_fd = -1
        self._lost: str | None = None
        self._spare: list[int] = []
        self._keep_spare()

    @classmethod
    async def start(cls, config: LauncherConfig, layout: CgroupLayout | None = None) -> Launcher:
        """Start the process and wait until it can launch. Raises LaunchError when the machine does not allow it."""
        if not config.binary.exists():
            raise LaunchError(f"{config.binary.name} is not built", remedy="run scripts/build-c")
        reap_left_behind()
        layout = layout or CgroupLayout.detect()
        trees = layout.prepare(config.edge)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = _spawn(config.binary.absolute(), theirs, outlives=config.folder is not None)
            except OSError as error:
                ours.close()
                await layout.remove_edge(config.edge)
                raise LaunchError(f"cannot execute {config.binary.name}: {error.strerror}") from error
        ours.setblocking(False)
        launcher = cls(config, layout, _Process(process.pid, process), ours)
        # A launcher that outlives its Edge would keep ids whose lock is gone, so it has those of its name.
        ids = launcher._ids = IdSlice.take(config.edge) if config.folder is None else IdSlice.by_name(config.edge)
        setup = LauncherSetup(
            edge=config.edge,
            cgroups=trees,
            pool=config.pool,
            uid_start=config.uid_start if config.uid_start is not None else ids.uid_start,
            uid_ranges=config.uid_ranges,
            guest_uid=ids.guest_uid,
            durable=config.folder is not None,
        )
        try:
            with anyio.fail_after(config.start_timeout_s), _doorbell(config.folder) as descriptors:
                await launcher._handshake(encode_setup(setup), descriptors)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await launcher.close()
            if isinstance(error, TimeoutError):
                raise LaunchError(f"the launcher was not ready after {config.start_timeout_s:g} s") from error
            raise
        return launcher

    @classmethod
    async def reconnect(cls, config: LauncherConfig, layout: CgroupLayout) -> Launcher:
        """Come back to the launcher that an earlier Edge of `config.folder` has left. Raises LaunchError."""
        assert config.folder is not None
        launcher = None
        try:
            with anyio.fail_after(config.start_timeout_s):
                while launcher is None:
                    launcher = await cls._try_reconnect(config, layout, config.folder)
                    if launcher is None:  # it has not noticed yet that its last Edge is gone
                        await anyio.sleep(_KNOCK_AGAIN_S)
        except TimeoutError as error:
            raise LaunchError(f"the launcher of {config.edge} did not answer") from error
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot come back to the launcher of {config.edge}: {error}") from error
        return launcher

    @classmethod
    async def _try_reconnect(cls, config: LauncherConfig, layout: CgroupLayout, folder: Path) -> Launcher | None:
        launcher = cls(config, layout, None, doorbell.knock(folder))
        try:
            await launcher._handshake()
            while True:
                await anyio.wait_readable(launcher._socket)
                held = decode_held(launcher._socket.recv(REPLY_MAX))
                if not held.slot:
                    launcher._process = _Process(held.pid)
                    return launcher
                launcher.held.append(held)
        except LaunchError:
            launcher.detach()
            return None
        except BaseException:
            launcher.detach()
            raise

    def detach(self) -> None:
        """Let go of a launcher that outlives us. Launches that are still waiting get a LaunchError."""
        self._lose("detached")
        if self._process is not None and self._process.child is not None:
            _left_behind.append(self._process.child)
        # Closing is not enough: a forked copy of this process may hold a copy of the socket.
        with suppress(OSError):  # the launcher may be gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._close()

    async def launch(self, plan: Plan) -> Launched:
        """Make one sandbox. Raises LaunchError with the step and the kernel's error; then nothing of it is left."""
        async with self._room:
            return await self._ask(plan.name, lambda request: encode_plan(plan, request), plan.descriptors)

    async def adopt(self, slot: str) -> Launched:
        """A sandbox that an earlier Edge has left, with a new channel. Raises LaunchError; then it goes on without."""
        return await self._ask(slot, lambda request: encode_adopt(slot, request), (), is_new=False)

    async def _ask(
        self, name: str, encode: Callable[[int], bytes], descriptors: tuple[int, ...], *, is_new: bool = True
    ) -> Launched:
        if self._lost is not None:
            raise LaunchError(f"the launcher is gone: {self._lost}", remedy="start a new Edge")
        request = self._next_request
        self._next_request += 1
        pending = self._pending[request] = _Pending()
        try:
            with anyio.fail_after(self.config.launch_timeout_s):
                await self._send(encode(request), descriptors)
                reply = await self._reply(pending)
        except TimeoutError as error:
            await self._abandon(request, pending, is_new=is_new)
            raise LaunchError(f"{name}: no answer in {self.config.launch_timeout_s:g} s") from error
        except BaseException:
            await self._abandon(request, pending, is_new=is_new)
            raise
        if reply.errno:
            if reply.slot:
                with anyio.CancelScope(shield=True), self._spared():
                    await self.layout.slot(self.config.edge, reply.slot).destroy()
            message = f"{name}: {reply.step}: {os.strerror(reply.errno)}"
            raise StepError(message, step=reply.step, errno=reply.errno)
        return _launched(reply, pending.fds)

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Cleaning up needs descriptors, too, also when there are none left: these were kept for it."""
        _close_all(self._spare)
        self._spare = []
        try:
            yield
        finally:
            self._keep_spare()

    def _keep_spare(self) -> None:
        with suppress(OSError):
            while len(self._spare) < _SPARE:
                self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    @property
    def lost(self) -> str | None:
        """Why the process can launch no more, or None while it can."""
        return self._lost

    async def close(self) -> None:
        """End the launcher, its pool and every sandbox it made, and remove their cgroups. Idempotent.

        Launches that are still waiting get a LaunchError.
        """
        self._lose("closed")
        # The process ends itself, in good order, when its socket does. Not closed yet: a task may be waiting on it.
        with suppress(OSError):  # the process may be gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            with anyio.move_on_after(_END_S):
                await self._ended()
            if self._process is not None and self._process.alive():
                self._process.kill()
                await self._ended()
            await self.layout.remove_edge(self.config.edge)
        finally:
            self._socket.close()
            self._close()

    def _close(self) -> None:
        if self._ids is not None:
            self._ids.close()
        _close_all(self._spare)
        self._spare = []
        if self._process is not None:
            self._process.close()
        if self._unified_fd >= 0:
            os.close(self._unified_fd)
            self._unified_fd = -1

    async def _ended(self) -> None:
        """Wait for the process to end, and reap it."""
        if self._process is not None:
            await self._process.ended()

    async def _handshake(self, setup: bytes | None = None, descriptors: tuple[int, ...] = ()) -> None:
        try:
            if setup is not None:
                await self._send(setup, descriptors)
            await anyio.wait_readable(self._socket)
            data, fds, _, _ = socket.recv_fds(self._socket, REPLY_MAX, _MAX_FDS)
        except (ConnectionResetError, LaunchError):  # it ended with our message unread
            data, fds = b"", []
        reply = decode_reply(data) if data else None
        if not data or reply is not None:
            for fd in fds:
                os.close(fd)
            reason = f"{reply.step}: {os.strerror(reply.errno)}" if reply else "it ended at once"
            raise LaunchError(f"the launcher cannot start: {reason}", remedy="see proctor doctor")
        (self._unified_fd,) = fds
        if self.layout.unified is None:
            # The tree is mounted for the launcher alone; its directory for this Edge is two levels below the root.
            self.layout = self.layout.with_unified(Path(f"/proc/self/fd/{self._unified_fd}/../.."))

    async def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        # One at a time: only one task may wait for the socket, and requests keep their order.
        async with self._sending:
            while True:
                try:
                    socket.send_fds(self._socket, [data], list(fds))
                    return
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
                except OSError as error:
                    self._lose(f"send: {os.strerror(error.errno or errno.EIO)}")
                    raise LaunchError("the launcher is gone", remedy="start a new Edge") from error

    async def _reply(self, pending: _Pending) -> LaunchReply:
        """Wait for `pending` to be answered; the first waiter reads for all, and hands the role on when it is done."""
        while pending.reply is None:
            if self._lost is not None:
                raise LaunchError(f"the launcher is gone: {self._lost}", remedy="start a new Edge")
            if self._reading:
                pending.event = anyio.Event()
                await pending.event.wait()
                continue
            self._reading = True
            try:
                while pending.reply is None and self._lost is None:
                    await anyio.wait_readable(self._socket)
                    self._receive_all()
            finally:
                self._reading = False
                for other in self._pending.values():
                    if other.reply is None and other is not pending:
                        other.event.set()
                        break
        return pending.reply

    def _receive_all(self) -> None:
        """Take every message that is there; wake whom it belongs to; close what belongs to nobody any more."""
        while self._lost is None:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, REPLY_MAX, _MAX_FDS)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"receive: {error.strerror}")
                return
            if not data:
                self._lose("it ended")
                return
            try:
                reply = decode_reply(data)
            except ValueError as error:
                _close_all(fds)
                self._lose(f"it sent {error}")
                return
            pending = self._pending.pop(reply.request, None) if reply else None
            if reply is None or pending is None:
                _close_all(fds)
                continue
            if reply.errno == 0 and len(fds) != 3:  # the kernel drops what this process has no room for
                _close_all(fds)
                fds, reply = [], replace(reply, errno=errno.EMFILE, step="receive")
            pending.reply, pending.fds = reply, fds
            pending.event.set()

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        for pending in self._pending.values():
            pending.event.set()

    async def _abandon(self, request: int, pending: _Pending, *, is_new: bool) -> None:
        """The caller gave up. Its sandbox, if there will be one, is ended, unless it was there before."""
        self._pending.pop(request, None)
        if pending.reply is not None:
            _close_all(pending.fds)
            if is_new and pending.reply.slot:
                with anyio.CancelScope(shield=True):
                    await self.layout.slot(self.config.edge, pending.reply.slot).destroy()
            return
        orphan = self._pending[request] = _Pending()
        with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
            try:
                reply = await self._reply(orphan)
            except InfraError:
                return
            finally:
                self._pending.pop(request, None)
            _close_all(orphan.fds)
            if is_new and reply.slot:
                await self.layout.slot(self.config.edge, reply.slot).destroy()


@contextmanager
def _doorbell(folder: Path | None) -> Iterator[tuple[int, ...]]:
    """What a launcher needs to be found again, for the length of a message; nothing for a tied one."""
    if folder is None:
        yield ()
        return
    bell, lock = doorbell.hang(folder)
    try:
        yield (bell.fileno(), lock)
    finally:
        bell.close()
        os.close(lock)


def _spawn(binary: Path, sock: socket.socket, *, outlives: bool) -> subprocess.Popen[bytes]:
    """Not asyncio's subprocess: the launcher has no pipes, and its end is seen as the end of its socket.

    One that outlives us keeps nothing of ours: whoever reads our stderr must see its end when we end.
    """
    return subprocess.Popen(
        [str(binary), "launcher", str(sock.fileno())],
        pass_fds=(sock.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if outlives else None,
        cwd="/",
        env={},
    )


def _launched(reply: LaunchReply, fds: list[int]) -> Launched:
    pidfd, channel, upper = fds
    sock = socket.socket(fileno=channel)
    sock.setblocking(False)
    return Launched(reply.slot, reply.pid, pidfd, sock, upper, reply.uid_base, reply.timings_us, reply.facts)


_left_behind: list[subprocess.Popen[bytes]] = []
"""Children of this process that outlive their Edge; each is reaped once it has ended."""


def reap_left_behind() -> None:
    """Reap launchers that were left and have ended since."""
    _left_behind[:] = [child for child in _left_behind if child.poll() is None]


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
