"""The host's end of the guest protocol (docs/design/guest-protocol.md): commands over one socket.

Everything a guest sends is checked: a frame that cannot be true ends the sandbox. Memory is bounded by what callers
asked to keep, because the guest may send no more than the windows we granted.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from proctor.sandbox.contract import (
    EndReason,
    ExecResult,
    GuestProtocolError,
    OnOutput,
    OutputLimit,
    SandboxError,
    SandboxLost,
)
from proctor.sandbox.native import resume
from proctor.sandbox.native.carried import Carrier
from proctor.sandbox.native.execs import Attribution, Collector, Exec, GuestProcess, again, failed_result
from proctor.sandbox.native.frames import (
    GUEST_ID,
    NETWORK_TYPES,
    REPORT,
    STDERR,
    STDOUT,
    U32,
    VERSION,
    ExecFlag,
    Frame,
    FrameReader,
    FrameType,
    HelloFlag,
    RequestError,
    exec_frames,
    exec_request,
    frame,
    terminal_size,
)
from proctor.sandbox.native.guestfiles import GuestFiles

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from anyio.abc import TaskStatus

    from proctor.sandbox.native.resume import Resumption

__all__ = ["Attribution", "GuestChannel", "GuestProcess"]

_HELLO_S = 10.0
_KILL_S = 30.0
_QUEUE_S = 60.0
_UNSENT_MAX = 64 << 20
_FRAMES_AT_ONCE = 256
# The guest's table holds 128: commands cannot crowd out file operations.
COMMANDS_MAX = 112
OPERATIONS_MAX = 16
KEPT_MAX = 256


class GuestChannel(GuestFiles, Carrier):
    """One guest behind a connected stream socket, which the channel owns from now on.

    `await task_group.start(channel.run)` reads HELLO and then frames until `close()`; everything else may be called
    by any task meanwhile. When the guest is gone, or breaks its protocol, every waiter gets `SandboxLost`.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        attribution: Attribution | None = None,
        revive: Callable[[GuestChannel, Exec, Resumption], None] | None = None,
        first_id: int = 1,
    ) -> None:
        """`revive`: the guest was there before; its commands are given to this as it names them. `first_id`: of the
        commands of a guest that is new."""
        sock.setblocking(False)
        super().__init__()
        self.attribution = attribution
        self.guest_version: int | None = None
        self.hello_s = _HELLO_S
        """How long `run` waits for the guest's HELLO."""
        self.has_cgroup = False
        self.durable = False
        """The guest outlives this channel."""
        self.hung_up = False
        """The guest has closed its end: its process is gone, or going."""
        self.detached = False
        """We have left the guest to the next host."""
        self._revive = revive
        self._socket = sock
        self._reader = FrameReader()
        self._digesting = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._ids = itertools.count(first_id)
        self._execs: dict[int, Exec] = {}
        self._kept: dict[int, anyio.Event] = {}
        self._slots: dict[int, anyio.Semaphore] = {}
        self._commands = anyio.Semaphore(COMMANDS_MAX, fast_acquire=True)
        self._operations = anyio.Semaphore(OPERATIONS_MAX, fast_acquire=True)
        self._pongs: deque[tuple[bytes, anyio.Event]] = deque()
        self._killed: tuple[anyio.Event, list[int]] | None = None
        self._kill_lock = anyio.Lock()
        self._hello = anyio.Event()
        self._ended = anyio.Event()
        self._lost: SandboxLost | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until the guest or `close()` ends it. Raises only when the guest never said HELLO."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)
        try:
            with anyio.move_on_after(self.hello_s):
                await self._hello.wait()
            if not self._hello.is_set():
                self._lose("the guest did not say hello in time")
            if self._lost:
                raise again(self._lost)
            task_status.started()
            await self._serve_network(self._ended)
        finally:
            self._lose("the channel was closed")

    @property
    def lost(self) -> SandboxLost | None:
        """Why the channel has ended, or None while it lives."""
        return self._lost

    async def wait_lost(self) -> SandboxLost:
        """Wait for the end of the guest or of the channel."""
        await self._ended.wait()
        assert self._lost is not None
        return self._lost

    def close(self) -> None:
        """End the channel; unless it is durable, the guest kills everything when it sees that. Every waiter gets
        SandboxLost."""
        self._lose("the channel was closed")

    def detach(self) -> None:
        """Leave a durable guest to the next host. Every waiter gets SandboxLost."""
        self.detached = True
        self._lose("the Edge has ended; the sandbox has not", EndReason.EDGE_LOST)

    def has_kept(self, exec_id: int) -> bool:
        """Whether something that the command left behind lives on."""
        return exec_id in self._kept

    def _lose(self, message: str, reason: EndReason = EndReason.GUEST_LOST, cause: Exception | None = None) -> None:
        if self._lost:
            return
        self._lost = SandboxLost(message, reason=reason)
        self._lost.__cause__ = cause
        if self._loop:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._unsent.clear()
        for state in list(self._execs.values()):
            state.lose(self._lost)
            self._release(state.exec_id)
        self._lose_network(self._lost)
        for gone in self._kept.values():
            gone.set()
        for _, answered in self._pongs:
            answered.set()
        if self._killed:
            self._killed[0].set()
        self._hello.set()
        self._ended.set()

    # -- frames in and out -------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(self._reader.space())
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        if count == 0:
            self.hung_up = True
            self._lose("the guest has ended")
            return
        self._reader.took(count)
        self._digest()

    def _digest(self) -> None:
        """Take what was read, some frames at a time: other sandboxes share the loop with a flood of tiny ones."""
        if self._lost:
            return
        try:
            for received in itertools.islice(self._reader.frames(), _FRAMES_AT_ONCE):
                self._receive(received)
                if self._lost:
                    return
        except GuestProtocolError as error:
            self._lose(f"the guest broke its protocol: {error.message}", cause=error)
            return
        assert self._loop is not None
        if self._reader.has_frame():
            self._loop.remove_reader(self._socket.fileno())
            self._digesting = True
            self._loop.call_soon(self._digest)
        elif self._digesting:
            self._digesting = False
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _receive(self, received: Frame) -> None:
        if received.stream & GUEST_ID or received.type in NETWORK_TYPES:
            self._receive_network(received)
        elif state := self._execs.get(received.stream):
            if state.receive(received):
                self._close_exec(state, received)
        elif received.stream in self._kept and received.type == FrameType.GONE and not received.payload:
            self._kept.pop(received.stream).set()
        elif received.stream == 0:
            self._receive_control(received)
        elif received.type == FrameType.RESUME and self._revive and self.durable and not self._hello.is_set():
            self._resume(received, self._revive)
        else:
            raise GuestProtocolError(f"the guest sent a frame of type {received.type} for an unknown exec")

    def _resume(self, received: Frame, revive: Callable[[GuestChannel, Exec, Resumption], None]) -> None:
        """A command of an earlier host, or what one has left behind."""
        if not received.payload:
            if len(self._kept) == KEPT_MAX or received.stream in self._kept:
                raise GuestProtocolError("the guest named more than it can have kept")
            self._kept[received.stream] = anyio.Event()
            return
        if len(self._execs) == COMMANDS_MAX + OPERATIONS_MAX:
            raise GuestProtocolError("the guest named more commands than it can have")
        facts = resume.parse(received.payload)
        state = Exec(received.stream, (), self._send, subs=facts.subs, resumption=facts)
        self._execs[received.stream] = state
        for slots in (self._commands, self._operations):
            with suppress(anyio.WouldBlock):
                slots.acquire_nowait()
                self._slots[received.stream] = slots
                break
        revive(self, state, facts)

    def _receive_control(self, received: Frame) -> None:
        kind, payload = received.type, received.payload
        if kind == FrameType.HELLO and not self._hello.is_set() and len(payload) == 8:
            self.guest_version = U32.unpack(payload[:4])[0]
            flags = HelloFlag(U32.unpack(payload[4:])[0] & sum(HelloFlag))
            self.has_cgroup = HelloFlag.GROUPS in flags
            self.durable = HelloFlag.DURABLE in flags
            if self.guest_version != VERSION:
                raise GuestProtocolError(f"the guest speaks version {self.guest_version}, not {VERSION}")
            if (HelloFlag.RESUMED in flags) != (self._revive is not None):
                raise GuestProtocolError("the guest is not the one that was expected")
            if self._revive is None:
                self._hello.set()
        elif kind == FrameType.RESUMED and self._revive and not self._hello.is_set() and len(payload) == 4:
            self._ids = itertools.count(U32.unpack(payload)[0] + 1)
            self._hello.set()
        elif kind == FrameType.PONG and self._pongs and payload == self._pongs[0][0]:
            self._pongs.popleft()[1].set()
        elif kind == FrameType.KILLED and self._killed and len(payload) == 4 and not self._killed[0].is_set():
            self._killed[1].append(U32.unpack(payload)[0])
            self._killed[0].set()
        else:
            raise GuestProtocolError(f"the guest sent a frame of type {kind} out of turn")

    def _close_exec(self, state: Exec, received: Frame) -> None:
        del self._execs[state.exec_id]
        if received.type == FrameType.CLOSED and U32.unpack(received.payload)[0]:
            self._kept.setdefault(state.exec_id, anyio.Event())
        if self.durable and state.settled:
            self._send(frame(FrameType.DONE, state.exec_id))
        self._release(state.exec_id)

    def _release(self, exec_id: int) -> None:
        if slots := self._slots.pop(exec_id, None):
            slots.release()

    def _send(self, data: bytes, payload: bytes | memoryview = b"") -> None:
        """Send a frame, or the header of one and its payload, which is copied only if it cannot be sent at once."""
        if self._lost:
            return
        sent = 0
        if not self._unsent:
            try:
                sent = self._socket.sendmsg((data, payload)) if payload else self._socket.send(data)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._fail_later(f"the guest's channel failed: {error.strerror}", error)
                return
            if sent == len(data) + len(payload):
                return
            assert self._loop is not None
            self._loop.add_writer(self._socket.fileno(), self._writable)
        rest = memoryview(data)[sent:] if not payload else memoryview(b"".join((data, payload)))[sent:]
        self._unsent.append(rest)
        self._unsent_bytes += len(rest)
        if self._unsent_bytes > _UNSENT_MAX:
            self._fail_later("the guest does not read what it asked for")

    def _fail(self, error: OSError) -> None:
        """The kernel says that the other end is gone, with something unread."""
        self.hung_up = True
        self._lose(f"the guest's channel failed: {error.strerror}", cause=error)

    def _fail_later(self, message: str, cause: Exception | None = None) -> None:
        # Not at once: the caller is in the middle of changing the state that losing the guest takes apart.
        assert self._loop is not None
        self.hung_up = self.hung_up or isinstance(cause, OSError)
        self._loop.call_soon(lambda: self._lose(message, cause=cause))

    def _writable(self) -> None:
        try:
            while self._unsent:
                count = self._socket.send(self._unsent[0])
                self._unsent_bytes -= count
                if count < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][count:]
                    return
                self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        assert self._loop is not None
        self._loop.remove_writer(self._socket.fileno())
        self._drained()

    # -- commands ----------------------------------------------------------------------------------------------------

    async def begin(
        self, request: bytes, argv: tuple[str, ...], subs: frozenset[int], prepare: Callable[[Exec], None]
    ) -> Exec:
        """Start a command whose frames are somebody else's business: `prepare` is called just before it is sent."""
        return await self._open_exec(request, argv, subs, self._commands, prepare)

    async def _open_exec(
        self,
        request: bytes,
        argv: tuple[str, ...],
        subs: frozenset[int],
        slots: anyio.Semaphore,
        prepare: Callable[[Exec], None] | None = None,
    ) -> Exec:
        """Wait for a free slot, then send the request."""
        try:
            slots.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.move_on_after(_QUEUE_S) as scope:
                await slots.acquire()
            if scope.cancelled_caught:
                raise SandboxError(
                    "too many commands at once in this sandbox",
                    field="exec",
                    remedy=f"at most {COMMANDS_MAX} run side by side",
                ) from None
        if self._lost:
            slots.release()
            raise again(self._lost)
        state = Exec(next(self._ids), argv, self._send, subs=subs)
        try:
            if prepare is not None:
                prepare(state)
        except BaseException:
            slots.release()
            raise
        self._execs[state.exec_id] = state
        self._slots[state.exec_id] = slots
        self._send(exec_frames(state.exec_id, request))
        return state

    async def _finish_exec(
        self, state: Exec, timeout_s: float | None, reason: EndReason = EndReason.EXEC_TIMEOUT
    ) -> None:
        """Wait for the end; after `timeout_s` kill the group. Cancellation kills it too."""
        try:
            if timeout_s is None:
                await state.done.wait()
                return
            # The event is asked, not the scope: a loop that was busy past the deadline may find both true at once.
            with anyio.move_on_after(timeout_s):
                await state.done.wait()
            if state.done.is_set():
                return
            state.kill(reason)
            with anyio.move_on_after(_KILL_S):
                await state.done.wait()
            if not state.done.is_set():
                self._lose("the guest could not kill a command")
        except anyio.get_cancelled_exc_class():
            state.on_data = None
            state.kill(EndReason.KILLED)
            raise

    def attribute(self, baseline: object, result: ExecResult) -> ExecResult:
        """The result with the limit that decided it, if one did since `baseline` was read."""
        if self.attribution is None or result.exit_code == 0 or result.reason is not None:
            return result
        reason = self.attribution.after(baseline, result)
        return replace(result, reason=reason) if reason else result

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
        login_env: bool = True,
    ) -> ExecResult:
        """Run a command to its end (contract.Sandbox.exec). `env` is its whole environment; with `login_env` the guest
        adds HOME, USER and LOGNAME from the sandbox's own /etc/passwd where `env` lacks them."""
        argv = argv_of(command)
        flags = flags_of(stdin=stdin is not None, keep=keep, login_env=login_env)
        try:
            request = exec_request(argv, env=env, cwd=cwd, user=user, flags=flags, report_fd=report_fd)
        except RequestError as error:
            return unsendable(argv, error)
        subs = {STDOUT, STDERR, REPORT} if report_fd is not None else {STDOUT, STDERR}
        baseline = self.attribution.before() if self.attribution else None
        state = await self._open_exec(request, argv, frozenset(subs), self._commands)
        collector = Collector(state, limit, on_output)
        if stdin is not None:
            feed(state, memoryview(stdin))
        await self._finish_exec(state, timeout_s)
        return self.attribute(baseline, collector.result())

    async def start(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        user: str | None = None,
        keep: bool = False,
        login_env: bool = True,
        limit: OutputLimit = OutputLimit(),  # noqa: B008 - frozen value
        pty: tuple[int, int] | None = None,
    ) -> GuestProcess:
        """Start a command with its stdin connected and return when its program runs (contract.Sandbox.start).

        A command that cannot be run is not an error here: `wait()` returns its result.
        """
        argv = argv_of(command)
        try:
            if pty is not None:
                terminal_size(*pty)
        except RequestError as error:
            raise SandboxError(str(error), field="pty") from error
        try:
            request = exec_request(
                argv,
                env=env,
                cwd=cwd,
                user=user,
                flags=flags_of(stdin=True, keep=keep, login_env=login_env) | ExecFlag.STARTED,
                terminal=pty,
            )
        except RequestError as error:
            raise SandboxError(str(error), field="command") from error
        baseline = self.attribution.before() if self.attribution else None
        state = await self._open_exec(
            request, argv, frozenset({STDOUT, STDERR} if pty is None else {STDOUT}), self._commands
        )
        process = GuestProcess(state, lambda result: self.attribute(baseline, result), limit, self.kill_kept)
        try:
            await process.wait_started()
        except anyio.get_cancelled_exc_class():
            state.on_data = None
            state.kill(EndReason.KILLED)
            raise
        return process

    # -- file operations (GuestFiles) --------------------------------------------------------------------------------

    async def _open_operation(self, request: bytes, argv: tuple[str, ...], subs: frozenset[int]) -> Exec:
        return await self._open_exec(request, argv, subs, self._operations)

    async def _run_operation(
        self, state: Exec, stdin: bytes | None, limit: OutputLimit, timeout_s: float
    ) -> ExecResult:
        collector = Collector(state, limit, None)
        if stdin is not None:
            feed(state, memoryview(stdin))
        await self._finish_exec(state, timeout_s)
        return collector.result()

    def _operation_process(self, state: Exec, limit: OutputLimit) -> GuestProcess:
        return GuestProcess(state, lambda result: result, limit, self.kill_kept)

    # -- the whole sandbox -------------------------------------------------------------------------------------------

    async def kill_kept(self, exec_id: int, *, deadline_s: float = _KILL_S) -> None:
        """Kill what an exec with `keep` left behind, and wait until it is gone."""
        if gone := self._kept.get(exec_id):
            self._send(frame(FrameType.KILL, exec_id, 0, U32.pack(0)))
            with anyio.move_on_after(deadline_s):
                await gone.wait()
            if not gone.is_set():
                self._lose("the guest could not kill a background command")
        if self._lost:
            raise again(self._lost)

    async def kill_all(self, *, deadline_s: float = 30.0) -> int:
        """Kill every process but the guest; returns how many remain (0 unless the kernel itself is stuck)."""
        async with self._kill_lock:
            if self._lost:
                raise again(self._lost)
            for state in self._execs.values():
                state.killed_by = state.killed_by or EndReason.KILLED
            self._killed = (anyio.Event(), [])
            self._send(frame(FrameType.KILLALL))
            answered, counts = self._killed
            with anyio.move_on_after(deadline_s):
                await answered.wait()
            if not answered.is_set():
                self._lose("the guest did not answer a request to kill everything")
            self._killed = None
            if self._lost:
                raise again(self._lost)
            return counts[0]

    async def ping(self) -> float:
        """Seconds of one round trip through the guest's loop."""
        if self._lost:
            raise again(self._lost)
        sent_at = time.perf_counter()
        token, answered = time.perf_counter_ns().to_bytes(8, "little"), anyio.Event()
        self._pongs.append((token, answered))
        self._send(frame(FrameType.PING, 0, 0, token))
        with anyio.move_on_after(_KILL_S):
            await answered.wait()
        if not answered.is_set():
            self._lose("the guest did not answer a ping")
        if self._lost:
            raise again(self._lost)
        return time.perf_counter() - sent_at


def argv_of(command: str | Sequence[str]) -> tuple[str, ...]:
    argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
    if not argv:
        raise SandboxError("an empty command", field="command")
    return argv


def flags_of(*, stdin: bool, keep: bool, login_env: bool) -> ExecFlag:
    flags = ExecFlag.STDIN if stdin else ExecFlag.NONE
    flags |= ExecFlag.KEEP if keep else ExecFlag.NONE
    return flags | (ExecFlag.LOGIN_ENV if login_env else ExecFlag.NONE)


def unsendable(argv: tuple[str, ...], error: RequestError) -> ExecResult:
    """A command that has no form on the wire could not be executed either: a result, as a shell would have it."""
    result = failed_result(argv, 7, "request")
    return replace(result, stderr=replace(result.stderr, head=f"proctor: {error}\n".encode("utf-8", "replace")))


def feed(state: Exec, data: memoryview) -> None:
    """Send all of `data` as credit comes, then the end, without a task."""
    rest = data

    def push() -> None:
        nonlocal rest
        rest = rest[state.push_stdin(rest) :]
        if not rest:
            state.end_stdin()
            state.on_credit = None

    state.on_credit = push
    push()
