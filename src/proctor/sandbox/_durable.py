"""Commands of a durable sandbox: written down before they start, their output on the disk, found again by a later Edge.

`execs.jsonl` has one line when a command is about to start and one when it has ended; output is spooled (`_spool`)
before the guest is given credit for it, so what a host has not kept is still with the guest. See
docs/design/durable.md.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import anyio

from proctor.common import ConfigError, InfraError, ProctorError, RefusedError
from proctor.sandbox._execlog import EndedRecord, ExecLog, StartedRecord
from proctor.sandbox._faults import point
from proctor.sandbox._spool import Piece, Spool
from proctor.sandbox.contract import CommandInfo, EndReason, ExecResult, Output, OutputLimit, SandboxError, SandboxLost
from proctor.sandbox.native.channel import argv_of, feed, flags_of, unsendable
from proctor.sandbox.native.execs import REPORT_MAX, again
from proctor.sandbox.native.frames import (
    REPORT,
    STDERR,
    STDOUT,
    ExecFlag,
    FrameType,
    RequestError,
    exec_request,
    frame,
    terminal_size,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from proctor.sandbox.contract import OnOutput
    from proctor.sandbox.native.channel import GuestChannel
    from proctor.sandbox.native.execs import Exec
    from proctor.sandbox.native.resume import Resumption

Stream = Literal["stdout", "stderr"]
_NAMES: dict[int, Stream] = {STDOUT: "stdout", STDERR: "stderr"}
_FILES = {STDOUT: "stdout", STDERR: "stderr", REPORT: "report"}
FINISHED_MAX = 256
"""Commands that have ended and whose output and request id are remembered."""


class Command:
    """One command, whichever Edge started it."""

    def __init__(self, folder: Path, record: StartedRecord) -> None:
        self.record = record
        limit = OutputLimit(*record.limit)
        limits = {STDOUT: limit, STDERR: limit, REPORT: OutputLimit(REPORT_MAX, 0)}
        self.spools = {sub: Spool(folder, f"{record.exec}.{_FILES[sub]}", limits[sub]) for sub in record.subs}
        self.stdin = folder / f"{record.exec}.stdin"
        self.ended: EndedRecord | None = None
        self.error: Exception | None = None
        self.done = anyio.Event()
        self.state: Exec | None = None
        self.channel: GuestChannel | None = None
        self.on_output: OnOutput | None = None
        self._skip: dict[int, int] = {}
        self._news = anyio.Event()

    # --- what the guest says ----------------------------------------------------------------------------------------

    def connect(self, channel: GuestChannel, state: Exec, finish: Callable[[Command], None]) -> None:
        """The guest's frames about this command come here from now on."""
        self.channel, self.state = channel, state
        state.argv = self.record.arguments
        state.started_at = self.record.monotonic
        state.on_data = self._take
        state.on_end = lambda: finish(self)
        state.on_credit = self.wake

    def resume(self, facts: Resumption) -> None:
        """Output comes again from what was acknowledged; what is on the disk already is passed over."""
        for sub, spool in self.spools.items():
            acknowledged = facts.acknowledged[sub]
            spool.skip_to(acknowledged)
            self._skip[sub] = spool.total - acknowledged

    def _take(self, sub: int, data: bytes) -> bool:
        if passed := min(self._skip.get(sub, 0), len(data)):
            self._skip[sub] -= passed
            data = data[passed:]
        if data:
            self.spools[sub].add(data)
            point("exec:after-spool")
            if self.on_output is not None and sub in _NAMES:
                self._show(_NAMES[sub], data)
            self.wake()
        return True

    def _show(self, name: Stream, data: bytes) -> None:
        assert self.on_output is not None
        try:
            self.on_output(name, data)
        except Exception as error:
            # The caller's own code failed inside our reader: it gets its error where it waits, nobody else does.
            self.error, self.on_output = error, None
            assert self.state is not None
            self.state.kill(EndReason.KILLED)

    def wake(self) -> None:
        """Something has changed."""
        self._news.set()
        self._news = anyio.Event()

    async def news(self) -> None:
        """Wait for a change."""
        await self._news.wait()

    # --- what became of it ------------------------------------------------------------------------------------------

    def conclude(self, ended: EndedRecord | None, error: Exception | None = None) -> None:
        """It has ended, or it will never be known how."""
        self.ended, self.error = ended, self.error or error
        for spool in self.spools.values():
            spool.close()
        with suppress(FileNotFoundError):
            self.stdin.unlink()
        self.done.set()
        self.wake()

    def result(self) -> ExecResult:
        """The result with what was kept of the output; raises what made it impossible to know."""
        if self.error is not None:
            raise again(self.error) if isinstance(self.error, SandboxLost) else self.error
        assert self.ended is not None
        facts = self.ended
        stderr = self.spools[STDERR].output() if STDERR in self.spools else Output()
        if facts.message:
            stderr = Output(facts.message.encode("latin-1"))
        report = self.spools[REPORT].output() if REPORT in self.spools else Output()
        return ExecResult(
            argv=self.record.arguments,
            exit_code=facts.exit_code,
            signal=facts.signal,
            stdout=self.spools[STDOUT].output(),
            stderr=stderr,
            timed_out=facts.timed_out,
            reason=facts.reason,
            duration_s=facts.duration_s,
            cpu_s=facts.cpu_s,
            max_rss_kb=facts.max_rss_kb,
            leftover=facts.leftover,
            report=report.head,
            report_dropped=report.dropped,
        )

    def read(self, stream: Stream, since: int, most: int = 1 << 20) -> Piece:
        """What is kept of a stream at or after the offset `since`."""
        sub = STDOUT if stream == "stdout" else STDERR
        if sub not in self.spools:
            return Piece(since, b"")
        return self.spools[sub].read(since, most)

    def info(self, background: bool) -> CommandInfo:
        """The line of `ps`."""
        facts = self.ended
        return CommandInfo(
            exec_id=self.record.exec,
            argv=self.record.arguments,
            started_at=self.record.at,
            running=not self.done.is_set(),
            background=background,
            exit_code=facts.exit_code if facts else None,
            signal=facts.signal if facts else None,
            reason=facts.reason if facts else None,
            stdout_bytes=self.spools[STDOUT].total,
            stderr_bytes=self.spools[STDERR].total if STDERR in self.spools else 0,
            request_id=self.record.request,
            pty=STDERR not in self.record.subs,
        )


class DurableProcess:
    """A command of a durable sandbox as its caller holds it (`contract.Process`). Readers that do not read stop
    nothing: output goes to the disk, within the command's limit."""

    def __init__(self, command: Command, channel: GuestChannel) -> None:
        self.exec_id = command.record.exec
        self._command = command
        self._channel = channel

    async def output(self, since: int = 0) -> AsyncIterator[tuple[Stream, bytes]]:
        """Chunks of both streams from the offset `since` of each, then as they arrive; what was not kept is left
        out."""
        async for stream, piece in self.pieces(since):
            yield stream, piece.data

    async def pieces(self, since: int = 0, *, follow: bool = True) -> AsyncIterator[tuple[Stream, Piece]]:
        """The same with offsets; without `follow` it ends with what there is now."""
        at: dict[Stream, int] = {"stdout": since, "stderr": since}
        while True:
            over = self._command.done.is_set()
            found = False
            for stream in at:
                piece = self._command.read(stream, at[stream])
                if piece.data:
                    at[stream], found = piece.end, True
                    yield stream, piece
            if found:
                continue
            if over or not follow:
                return
            await self._command.news()

    async def write_stdin(self, data: bytes) -> None:
        """Give bytes to the command, waiting while it does not read."""
        view = memoryview(data)
        while len(view) and not self._command.done.is_set():
            state = self._state()
            if not state.stdin_open:
                return
            view = view[state.push_stdin(view) :]
            if len(view) and state.stdin_open:
                await self._command.news()

    async def close_stdin(self) -> None:
        """End the command's input."""
        if not self._command.done.is_set():
            self._state().end_stdin()

    async def resize(self, columns: int, rows: int) -> None:
        """Give the command's terminal another size."""
        if STDERR in self._command.record.subs:
            raise SandboxError("the command has no terminal", field="pty", remedy="start it with pty=(columns, rows)")
        try:
            size = terminal_size(columns, rows)
        except RequestError as error:
            raise SandboxError(str(error), field="pty") from error
        if not self._command.done.is_set():
            self._state().send(frame(FrameType.RESIZE, self.exec_id, 0, size))

    async def kill(self) -> None:
        """Kill the command and every descendant, also what it left behind with `keep`."""
        if not self._command.done.is_set():
            self._state().kill(EndReason.KILLED)
        else:
            await self._channel.kill_kept(self.exec_id)

    async def wait(self) -> ExecResult:
        """Wait for the end of the command."""
        await self._command.done.wait()
        return self._command.result()

    def _state(self) -> Exec:
        if self._command.state is None:
            raise SandboxError("the command never started", field="exec")
        return self._command.state


class Commands:
    """The commands of one durable sandbox; `folder` is the sandbox's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "out"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._log = ExecLog(folder / "execs.jsonl")
        self._known: dict[int, Command] = {}
        self._requests: dict[str, Command] = {}
        self._baselines: dict[int, object] = {}
        for started, ended in self._log.read():
            command = self._remember(Command(self._folder, started))
            if ended is not None:
                command.conclude(ended)

    @property
    def next_id(self) -> int:
        """An exec id above all that were used."""
        return max(self._known, default=0) + 1

    @property
    def count(self) -> int:
        """Commands that are remembered."""
        return len(self._known)

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    # --- starting ---------------------------------------------------------------------------------------------------

    async def exec(
        self,
        channel: GuestChannel,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        on_output: OnOutput | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> ExecResult:
        """`GuestChannel.exec`; a `request_id` that was used for this command gives that one's result instead."""
        known = self._known_request(request_id, command)
        if known is None:
            try:
                known = await self._start(
                    channel,
                    command,
                    stdin=stdin is not None,
                    input_data=stdin,
                    timeout_s=timeout_s,
                    on_output=on_output,
                    request_id=request_id,
                    **options,
                )
            except RequestError as error:
                return unsendable(argv_of(command), error)
        elif on_output is not None and known.state is not None:
            known.on_output = on_output
        await self._finish(known)
        return known.result()

    async def start(
        self, channel: GuestChannel, command: str | Sequence[str], *, request_id: str | None = None, **options: Any
    ) -> DurableProcess:
        """`GuestChannel.start`; a `request_id` that was used for this command gives that process instead."""
        known = self._known_request(request_id, command)
        if known is None:
            try:
                known = await self._start(channel, command, stdin=True, started=True, request_id=request_id, **options)
            except RequestError as error:
                raise SandboxError(str(error), field="command") from error
        if known.state is not None:
            await known.state.running.wait()
        return DurableProcess(known, channel)

    def _known_request(self, request_id: str | None, command: str | Sequence[str]) -> Command | None:
        known = self._requests.get(request_id) if request_id is not None else None
        if known is not None and known.record.arguments != argv_of(command):
            raise RefusedError(
                f"{request_id!r} was used for another command", field="request_id", remedy="use a new id per command"
            )
        return known

    async def _start(
        self,
        channel: GuestChannel,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        input_data: bytes | None = None,
        started: bool = False,
        keep: bool = False,
        pty: tuple[int, int] | None = None,
        report_fd: int | None = None,
        limit: OutputLimit = OutputLimit(),  # noqa: B008 - frozen value
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        request_id: str | None = None,
    ) -> Command:
        argv = argv_of(command)
        flags = flags_of(stdin=stdin, keep=keep, login_env=True) | (ExecFlag.STARTED if started else ExecFlag.NONE)
        request = exec_request(argv, env=env, cwd=cwd, user=user, flags=flags, report_fd=report_fd, terminal=pty)
        subs = {STDOUT} | ({STDERR} if pty is None else set()) | ({REPORT} if report_fd is not None else set())
        made: list[Command] = []

        def prepare(state: Exec) -> None:
            now = time.monotonic()
            baseline = channel.attribution.before() if channel.attribution else None
            record = StartedRecord.of(
                exec_id=state.exec_id,
                argv=argv,
                request=request_id,
                subs=frozenset(subs),
                limit=limit,
                keep=keep,
                monotonic=now,
                deadline=None if timeout_s is None else now + timeout_s,
                baseline=baseline,
            )
            if request_id is not None and request_id in self._requests:
                raise _Meanwhile
            made.append(Command(self._folder, record))
            if input_data:
                _write(made[0].stdin, input_data)
            self._log.write(record)
            point("exec:after-record")
            self._remember(made[0])
            self._baselines[state.exec_id] = baseline
            made[0].on_output = on_output
            made[0].connect(channel, state, self._ended)

        try:
            state = await channel.begin(request, argv, frozenset(subs), prepare)
        except _Meanwhile:
            assert request_id is not None
            return self._requests[request_id]
        point("exec:after-send")
        if input_data is not None:
            feed(state, memoryview(input_data))
            wake, push = made[0].wake, state.on_credit
            state.on_credit = push or wake
        return made[0]

    async def _finish(self, command: Command) -> None:
        """Wait for the end; the time-out kills, and so does cancellation."""
        try:
            await self.watch(command)
            await command.done.wait()
        except anyio.get_cancelled_exc_class():
            command.on_output = None
            if command.state is not None:
                command.state.kill(EndReason.KILLED)
            raise

    async def watch(self, command: Command) -> None:
        """Keep a command's time-out, whichever Edge set it; returns when it is over, or can wait no longer."""
        deadline = command.record.deadline
        if deadline is None or command.state is None:
            return
        with anyio.move_on_after(max(deadline - time.monotonic(), 0)):
            await command.done.wait()
        if not command.done.is_set():
            command.state.kill(EndReason.EXEC_TIMEOUT)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _ended(self, command: Command) -> None:
        """The guest has said the last word about a command, or is gone. Called while frames are read: never raises."""
        state, channel = command.state, command.channel
        assert state is not None
        assert channel is not None
        baseline = self._baselines.pop(state.exec_id, None)
        try:
            result = channel.attribute(baseline, state.result(Output(), Output()))
        except ProctorError as error:
            if not channel.detached:  # otherwise we leave, and the command does not
                self._note(state, EndedRecord.unknown(state.exec_id, error))
            command.conclude(None, error)
            return
        ended = EndedRecord.of(state.exec_id, result)
        self._note(state, ended)
        command.conclude(ended)
        self._forget_old()

    def _note(self, state: Exec, ended: EndedRecord) -> None:
        try:
            self._log.write(ended)
            point("exec:before-done")
        except InfraError:
            state.settled = False  # the guest keeps it for a host that can

    def _remember(self, command: Command) -> Command:
        self._known[command.record.exec] = command
        if command.record.request is not None:
            self._requests[command.record.request] = command
        return command

    def _forget_old(self) -> None:
        finished = [command for command in self._known.values() if command.done.is_set()]
        if len(finished) <= FINISHED_MAX:
            return
        for command in finished[: len(finished) - FINISHED_MAX]:
            self._forget(command)
        self._log.compact({exec_id: command.ended for exec_id, command in self._known.items()}, self._records())

    def _records(self) -> list[StartedRecord]:
        return [command.record for command in self._known.values()]

    def _forget(self, command: Command) -> None:
        del self._known[command.record.exec]
        if command.record.request is not None:
            self._requests.pop(command.record.request, None)
        for spool in command.spools.values():
            spool.remove()

    # --- a later Edge -----------------------------------------------------------------------------------------------

    def revive(self, channel: GuestChannel, state: Exec, facts: Resumption) -> None:
        """A command of an earlier Edge that the guest has named."""
        command = self._known.get(state.exec_id)
        if command is None:  # a file operation whose caller is gone
            state.kill(EndReason.KILLED)
            return
        if command.ended is not None:  # its end is written down already; the guest did not hear so
            return
        if command.record.baseline is not None and channel.attribution is not None:
            self._baselines[state.exec_id] = channel.attribution.recall(command.record.baseline)
        command.connect(channel, state, self._ended)
        command.resume(facts)
        if facts.input_open and command.stdin.exists():
            feed(state, memoryview(command.stdin.read_bytes())[facts.stdin_taken :])

    def settle(self) -> None:
        """After a guest has named all it has: what it has not named never began."""
        for command in list(self._known.values()):
            if command.ended is None and command.state is None:
                error = SandboxLost("the Edge ended before the command had begun", reason=EndReason.EDGE_LOST)
                command.conclude(None, error)
                self._forget(command)

    def running(self) -> list[Command]:
        """Commands that have not ended."""
        return [command for command in self._known.values() if not command.done.is_set()]

    def infos(self, channel: GuestChannel) -> list[CommandInfo]:
        """Every command that is remembered, oldest first."""
        return [command.info(channel.has_kept(exec_id)) for exec_id, command in sorted(self._known.items())]

    def process(self, exec_id: int, channel: GuestChannel) -> DurableProcess:
        """The command with that id. Raises ConfigError when there is none, or it was forgotten."""
        command = self._known.get(exec_id)
        if command is None:
            raise ConfigError(f"there is no command {exec_id}", field="exec", remedy="see proctor box ps")
        return DurableProcess(command, channel)


class _Meanwhile(Exception):
    """The same request was started by somebody else while this one waited for a place."""


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
        os.chmod(path, 0o600)
    except OSError as error:
        raise InfraError(f"cannot write {path.name}: {error.strerror}", remedy="free disk space") from error
