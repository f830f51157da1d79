"""One command as the host sees it: which frames may still come, what they mean, and the result they add up to."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal, Protocol

import anyio

from proctor.common import InfraError
from proctor.sandbox.contract import (
    EndReason,
    ExecResult,
    GuestProtocolError,
    Output,
    OutputLimit,
    SandboxError,
    SandboxLost,
)
from proctor.sandbox.native.capture import Capture
from proctor.sandbox.native.frames import (
    EXITED,
    PAYLOAD_MAX,
    REPORT,
    STDERR,
    STDIN,
    STDOUT,
    U32,
    WINDOW,
    Frame,
    FrameType,
    RequestError,
    frame,
    terminal_size,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from proctor.sandbox.native.resume import Resumption

REPORT_MAX = 16 << 20
_CREDIT_STEP = WINDOW // 2
# Steps that depend on nothing the candidate can change: when one fails, the machinery did.
_INFRA_STEPS = frozenset(
    {"pipe", "cgroup", "setsid", "descriptors", "oom_score_adj", "limits", "capset", "bounding", "ambient"}
    | {"setgroups", "dumpable", "seccomp", "signals", "table", "builtin", "priority"}
)
_NAMES: dict[int, Literal["stdout", "stderr"]] = {STDOUT: "stdout", STDERR: "stderr"}


class Attribution(Protocol):
    """How the Edge tells OOM and PIDS from failure: it reads the sandbox's counters before and after a command."""

    def before(self) -> object:
        """Called when a command starts; whatever it returns is given back to `after`."""
        ...

    def recall(self, baseline: tuple[int, ...]) -> object:
        """What `before` returned, from how it was written down."""
        ...

    def after(self, baseline: object, result: ExecResult) -> EndReason | None:
        """Called when a command ended otherwise than with exit code 0; names what decided, or None."""
        ...


def again(error: SandboxLost) -> SandboxLost:
    """The same error as an object of its own: each waiter's copy gathers a traceback of its own."""
    copy = SandboxLost(error.message, reason=error.reason, remedy=error.remedy)
    copy.__cause__ = error.__cause__
    return copy


class Exec:
    """The state of one exec id. Synchronous: the channel feeds it frames and it answers through `send`."""

    def __init__(
        self,
        exec_id: int,
        argv: tuple[str, ...],
        send: Callable[[bytes], None],
        *,
        subs: frozenset[int],
        resumption: Resumption | None = None,
    ) -> None:
        self.exec_id = exec_id
        self.argv = argv
        self.started_at = time.monotonic()
        self.ended_at = self.started_at
        self.done = anyio.Event()
        self.running = anyio.Event()
        self.lost: SandboxLost | None = None
        self.failure: tuple[int, str] | None = None
        self.exited: tuple[int, int, int, int, int, int] | None = None
        self.at_process_limit = False
        """Whether no further process could have been started when it ended, where only the guest can know."""
        self.killed_by: EndReason | None = None
        self.on_data: Callable[[int, bytes], bool] | None = None
        """Takes a chunk; True when it is consumed at once, so that the guest may send more."""
        self.on_end: Callable[[], None] | None = None
        self.on_credit: Callable[[], None] | None = None
        self.stdin_credit = WINDOW
        self.stdin_open = True
        """False when the command no longer reads its input."""
        self._stdin_ended = False
        self.send = self._send = send
        self.subs = subs
        self._open = set(subs)
        self._windows = dict.fromkeys(subs, WINDOW)
        self._consumed = dict.fromkeys(subs, 0)
        self.settled = True
        """False while a durable command's end could not be written down: the guest then keeps it."""
        if resumption is not None:
            self.stdin_credit = resumption.stdin_window
            self.stdin_open = resumption.input_open
            if resumption.started:
                self.running.set()

    # -- frames ------------------------------------------------------------------------------------------------------

    def receive(self, received: Frame) -> bool:
        """Take one frame; True when it was the last. Raises GuestProtocolError for one that cannot be true."""
        kind = received.type
        if kind == FrameType.DATA:
            self._receive_data(received.sub, received.payload)
        elif kind == FrameType.CREDIT and received.sub == STDIN and len(received.payload) == 4:
            self.stdin_credit += U32.unpack(received.payload)[0]
            if self.stdin_credit > WINDOW:
                raise self._lie("granted more input than its window")
            if self.on_credit:
                self.on_credit()
        elif kind == FrameType.EOF and not received.payload:
            self._receive_eof(received.sub)
        elif kind == FrameType.STARTED and not self.running.is_set() and not self.exited:
            self.running.set()
        elif kind == FrameType.EXITED and not self.exited and len(received.payload) == EXITED.size and received.sub < 2:
            self.exited = EXITED.unpack(received.payload)
            self.at_process_limit = received.sub == 1
        elif kind == FrameType.FAILED and not self.exited and 4 < len(received.payload) <= 64:
            step = received.payload[4:].decode("ascii", "replace")
            self._finish(failure=(U32.unpack(received.payload[:4])[0], step))
            return True
        elif kind == FrameType.CLOSED and self.exited and not self._open and len(received.payload) == 4:
            self._finish()
            return True
        else:
            raise self._lie(f"sent a frame of type {kind} (sub {received.sub}) out of turn")
        return False

    def lose(self, error: SandboxLost) -> None:
        """The guest is gone: whoever waits gets `error`."""
        self.lost = error
        self._finish()

    def _finish(self, failure: tuple[int, str] | None = None) -> None:
        self.failure = failure
        self.ended_at = time.monotonic()
        self.stdin_open = False
        self._open.clear()
        self.running.set()
        self.done.set()
        if self.on_credit:
            self.on_credit()
        if self.on_end:
            self.on_end()

    def _receive_data(self, sub: int, payload: bytes) -> None:
        if sub not in self._open or not payload or len(payload) > self._windows[sub]:
            raise self._lie(f"sent output beyond its window or after its end (sub {sub})")
        self._windows[sub] -= len(payload)
        if self.on_data is None or self.on_data(sub, payload):
            self.consumed(sub, len(payload))

    def _receive_eof(self, sub: int) -> None:
        if sub == STDIN and self.stdin_open:
            self.stdin_open = False
            if self.on_credit:
                self.on_credit()
        elif sub != STDIN and sub in self._open:
            self._open.discard(sub)
        else:
            raise self._lie(f"ended a stream that had ended (sub {sub})")

    def _lie(self, what: str) -> GuestProtocolError:
        return GuestProtocolError(f"the guest {what}, exec {self.exec_id}")

    # -- what the host sends -----------------------------------------------------------------------------------------

    def consumed(self, sub: int, count: int) -> None:
        """`count` bytes of an output stream were taken: give credit for them, in big steps."""
        if sub not in self._open:
            return
        self._consumed[sub] += count
        if self._consumed[sub] >= _CREDIT_STEP:
            grant, self._consumed[sub] = self._consumed[sub], 0
            self._windows[sub] += grant
            self._send(frame(FrameType.CREDIT, self.exec_id, sub, U32.pack(grant)))

    def push_stdin(self, data: memoryview) -> int:
        """Send as much of `data` as there is credit for; returns how much that was."""
        if self._stdin_ended:
            raise SandboxError("the command's input was closed already", field="stdin")
        sent = 0
        while sent < len(data) and self.stdin_credit and self.stdin_open:
            size = min(len(data) - sent, self.stdin_credit, PAYLOAD_MAX)
            self._send(frame(FrameType.DATA, self.exec_id, STDIN, bytes(data[sent : sent + size])))
            self.stdin_credit -= size
            sent += size
        return sent

    def end_stdin(self) -> None:
        """Tell the command that its input has ended. Telling it twice is fine."""
        if self.stdin_open and not self._stdin_ended:
            self._stdin_ended = True
            self._send(frame(FrameType.EOF, self.exec_id, STDIN))

    def kill(self, reason: EndReason) -> None:
        """Kill the whole group; the first reason stands."""
        if not self.done.is_set():
            self.killed_by = self.killed_by or reason
            self._send(frame(FrameType.KILL, self.exec_id, 0, U32.pack(0)))

    # -- the result --------------------------------------------------------------------------------------------------

    def result(self, stdout: Output, stderr: Output, report: bytes = b"", report_dropped: int = 0) -> ExecResult:
        """What became of it; raises what made it impossible to know."""
        if self.lost:
            raise again(self.lost)
        duration = self.ended_at - self.started_at
        if self.failure:
            return failed_result(self.argv, *self.failure, duration_s=duration, reason=self.killed_by)
        assert self.exited is not None
        code, signal, user_us, system_us, max_rss_kb, leftover = self.exited
        killed = self.killed_by if signal or self.killed_by is EndReason.EXEC_TIMEOUT else None
        if killed is None and self.at_process_limit and (code or signal):
            killed = EndReason.PIDS
        return ExecResult(
            argv=self.argv,
            exit_code=None if signal else code,
            signal=signal or None,
            stdout=stdout,
            stderr=stderr,
            timed_out=killed is EndReason.EXEC_TIMEOUT,
            reason=killed,
            duration_s=duration,
            cpu_s=(user_us + system_us) / 1e6,
            max_rss_kb=max_rss_kb,
            leftover=leftover,
            report=report,
            report_dropped=report_dropped,
        )


def failed_result(
    argv: tuple[str, ...], error: int, step: str, *, duration_s: float = 0.0, reason: EndReason | None = None
) -> ExecResult:
    """The result of a command that could not be run, as a shell would put it: 127 = not found, 126 = not executable.

    Only what depends on the sandbox's content becomes a result (a missing program, directory or user: the candidate can
    cause those at will, and it can use up memory); a step that is the machinery's own raises InfraError.
    """
    if step in _INFRA_STEPS and error != errno.ENOMEM:
        raise InfraError(f"the guest could not start a command: {step}: {os.strerror(error)}")
    what = f"{step}: {argv[0]}" if step == "exec" and argv else step
    message = f"proctor: {what}: {os.strerror(error)}\n".encode("utf-8", "surrogateescape")
    if step == "clone" and error == errno.EAGAIN:
        reason = reason or EndReason.PIDS
    if error == errno.ENOMEM:
        reason = reason or EndReason.OOM
    code = 127 if step == "exec" and error == errno.ENOENT else 126
    return ExecResult(
        argv=argv,
        exit_code=code,
        signal=None,
        stdout=Output(),
        stderr=Output(message),
        timed_out=reason is EndReason.EXEC_TIMEOUT,
        reason=reason,
        duration_s=duration_s,
    )


class Collector:
    """Captures the streams of an exec within limits and shows chunks to a callback as they come."""

    def __init__(
        self, state: Exec, limit: OutputLimit, on_output: Callable[[Literal["stdout", "stderr"], bytes], None] | None
    ) -> None:
        self._state = state
        self._captures = {STDOUT: Capture(limit), STDERR: Capture(limit), REPORT: Capture(OutputLimit(REPORT_MAX, 0))}
        self._on_output = on_output
        self.error: Exception | None = None
        state.on_data = self._take

    def _take(self, sub: int, data: bytes) -> bool:
        self._captures[sub].add(data)
        if self._on_output and sub in _NAMES:
            try:
                self._on_output(_NAMES[sub], data)
            except Exception as error:
                # The caller's own code failed inside our reader: it gets its error where it waits, nobody else does.
                self.error, self._on_output = error, None
                self._state.kill(EndReason.KILLED)
        return True

    def result(self) -> ExecResult:
        """The result with everything captured; raises the callback's error if it had one."""
        if self.error:
            raise self.error
        report = self._captures[REPORT].output()
        return self._state.result(
            self._captures[STDOUT].output(), self._captures[STDERR].output(), report.head, report.dropped
        )


class GuestProcess:
    """A running command (contract.Process)."""

    def __init__(
        self,
        state: Exec,
        finish: Callable[[ExecResult], ExecResult],
        limit: OutputLimit,
        kill_kept: Callable[[int], Awaitable[None]],
    ) -> None:
        self.exec_id = state.exec_id
        self._state = state
        self._finish = finish
        self._kill_kept = kill_kept
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._captures = {STDOUT: Capture(limit), STDERR: Capture(limit)}
        self._readers = 0
        self._draining = False
        self._news = anyio.Event()
        state.on_data = self._take
        state.on_end = self._wake
        state.on_credit = self._wake

    def _take(self, sub: int, data: bytes) -> bool:
        if self._draining and not self._readers:
            self._captures[sub].add(data)
            return True
        self._chunks.append((sub, data))
        self._wake()
        return False

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    def _pop(self) -> tuple[int, bytes]:
        sub, data = self._chunks.popleft()
        self._captures[sub].add(data)
        self._state.consumed(sub, len(data))
        return sub, data

    async def output(self, since: int = 0) -> AsyncGenerator[tuple[Literal["stdout", "stderr"], bytes], None]:
        """Chunks as they arrive; ends with the command. Not reading them stops the command."""
        if since:
            raise SandboxError(
                "only output of a durable sandbox is kept", field="since", remedy="begin at 0, or lifecycle.durable"
            )
        self._readers += 1
        try:
            while True:
                while self._chunks:
                    sub, data = self._pop()
                    yield _NAMES[sub], data
                if self._state.done.is_set():
                    if self._state.lost:
                        raise again(self._state.lost)
                    return
                await self._news.wait()
        finally:
            self._readers -= 1
            self._drain_if_unread()

    async def stdout_batches(self) -> AsyncGenerator[bytes, None]:
        """Standard output in pieces as big as what has arrived (at most a window); anything else is captured."""
        async with aclosing(self.output()) as chunks:
            async for name, data in chunks:
                batch = [data] if name == "stdout" else []
                while self._chunks:
                    sub, more = self._pop()
                    if sub == STDOUT:
                        batch.append(more)
                if batch:
                    yield b"".join(batch)

    def _drain_if_unread(self) -> None:
        if self._draining and not self._readers:
            while self._chunks:
                self._pop()

    async def write_stdin(self, data: bytes) -> None:
        """Send `data` to the command, waiting while it does not read. A command that no longer reads gets nothing."""
        view = memoryview(data)
        while len(view):
            if self._state.lost:
                raise again(self._state.lost)
            if not self._state.stdin_open:
                return
            view = view[self._state.push_stdin(view) :]
            if len(view) and self._state.stdin_open:
                await self._news.wait()

    async def close_stdin(self) -> None:
        """End the command's input."""
        self._state.end_stdin()

    async def resize(self, columns: int, rows: int) -> None:
        """Give the command's terminal another size; whoever reads from it is told by SIGWINCH."""
        if STDERR in self._state.subs:
            raise SandboxError("the command has no terminal", field="pty", remedy="start it with pty=(columns, rows)")
        try:
            size = terminal_size(columns, rows)
        except RequestError as error:
            raise SandboxError(str(error), field="pty") from error
        if not self._state.done.is_set():
            self._state.send(frame(FrameType.RESIZE, self.exec_id, 0, size))

    async def kill(self) -> None:
        """Kill the command and every descendant, also what it left behind with `keep`. Output that nobody iterates over
        is captured from here on."""
        self._state.kill(EndReason.KILLED)
        self._draining = True
        self._drain_if_unread()
        if self._state.done.is_set() and not self._state.lost:
            await self._kill_kept(self.exec_id)

    @property
    def stdin_open(self) -> bool:
        """False when the command no longer reads its input (or has ended)."""
        return self._state.stdin_open

    async def wait_started(self) -> None:
        """Wait until the program runs or could not be run."""
        await self._state.running.wait()

    async def wait(self) -> ExecResult:
        """Wait for the end. Output that nobody iterates over is captured, so this never waits for a reader."""
        self._draining = True
        self._drain_if_unread()
        await self._state.done.wait()
        self._drain_if_unread()
        return self._finish(self._state.result(self._captures[STDOUT].output(), self._captures[STDERR].output()))
