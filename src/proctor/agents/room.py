"""The sandbox as a harness sees it: every call bounded in time, and noted by the host with its own clock."""

from __future__ import annotations

import errno
import hashlib
import io
import posixpath
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio

from proctor.agents.faults import HANG_S, cut, not_made, refused
from proctor.common import ConfigError, InfraError, canonical_json
from proctor.sandbox.contract import EndReason, ExecResult, FileError, FileStat, Output, OutputLimit, SandboxLost

if TYPE_CHECKING:
    from proctor.agents.faults import Fault, ToolFaults
    from proctor.agents.limits import LimitGuard
    from proctor.sandbox.contract import Sandbox

MAX_FILE_BYTES = 16 << 20
"""The largest file that a harness may read through the host; bigger ones are read in parts by a command."""

MAX_UPLOAD_BYTES = 256 << 20
"""The most that a harness may copy into its sandbox in one call."""

_MAX_ARGUMENT_BYTES = 32 << 10
"""A longer command goes in by standard input: the kernel and the guest protocol bound what one argument may hold."""

_FROM_STDIN = 'script=$(cat); exec </dev/null; eval "$script"'

_CLEAN_UP_S = 10.0
_KILL_GRACE_S = 15.0
"""How long after its own time-out an exec may take to come back before the sandbox counts as lost."""

HIDDEN = "[redacted]"
_T = TypeVar("_T")


RoomCall = Literal["bash", "run", "read", "write", "list", "upload", "remove"]


@dataclass(frozen=True, slots=True)
class Given:
    """What a call was given beyond its subject, so that it can be made again: `data` is the content of a file that is
    written, the standard input of a command, or a tar of what is uploaded."""

    argv: tuple[str, ...] = ()
    cwd: str | None = None
    user: str | None = None
    env: Mapping[str, str] | None = None
    data: bytes | None = None

    def without(self, secret: str) -> Given:
        """The same with `secret` covered wherever it occurs."""
        return Given(
            tuple(covered(part, secret) for part in self.argv),
            self.cwd,
            self.user,
            None if self.env is None else {name: covered(value, secret) for name, value in self.env.items()},
            None if self.data is None else covered_bytes(self.data, secret),
        )


@dataclass(frozen=True, slots=True)
class RoomEvent:
    """One call on the room, as the host saw it: what an execution log line is made of."""

    kind: RoomCall
    subject: str
    """The command, or the absolute path."""
    started_at: str
    duration_s: float
    limit_s: float
    result: ExecResult | None = None
    size_bytes: int | None = None
    digest: str | None = None
    error: str | None = None
    given: Given = Given()
    injected: str | None = None
    """How this call was made to go wrong on purpose (`proctor.agents.faults`); None: it was not."""
    content: bytes | None = None
    """What a file held that was read, or a directory that was listed."""
    replayed: bool = False
    """Not executed: what an earlier trial saw was given back."""
    by_host: bool = False
    """Not the agent's doing: the host changed a file at a branch."""

    def without(self, secret: str) -> RoomEvent:
        """The same with `secret` covered wherever it occurs. A digest is of what is kept, not of what is covered."""
        given = self.given.without(secret)
        content = None if self.content is None else covered_bytes(self.content, secret)
        kept = given.data if content is None else content
        is_changed = kept != (self.given.data if self.content is None else self.content)
        return replace(
            self,
            subject=covered(self.subject, secret),
            result=None if self.result is None else without(self.result, secret),
            digest=_digest(kept) if self.digest is not None and kept is not None and is_changed else self.digest,
            error=None if self.error is None else covered(self.error, secret),
            given=given,
            content=content,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values for `exec.jsonl`: sizes and digests of the output, not the output itself."""
        line: dict[str, Any] = {
            "kind": self.kind,
            "subject": self.subject,
            "started_at": self.started_at,
            "duration_s": round(self.duration_s, 6),
            "limit_s": round(self.limit_s, 3),
        }
        if self.size_bytes is not None:
            line["size_bytes"] = self.size_bytes
        if self.digest is not None:
            line["digest"] = self.digest
        if self.error is not None:
            line["error"] = self.error
        if self.injected is not None:
            line["injected"] = self.injected
        if (result := self.result) is not None:
            line |= {
                "argv": list(result.argv),
                "exit_code": result.exit_code,
                "signal": result.signal,
                "timed_out": result.timed_out,
                "reason": str(result.reason) if result.reason else None,
                "command_s": result.duration_s,
                "leftover": result.leftover,
                "stdout": _output_json(result.stdout),
                "stderr": _output_json(result.stderr),
            }
        return line


def _output_json(output: Output) -> dict[str, Any]:
    return {"bytes": output.total, "dropped": output.dropped, "digest": _digest(output.head, output.tail)}


def _digest(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return "sha256:" + hasher.hexdigest()


OnRoomEvent = Callable[[RoomEvent], None]


class BoundedRoom:
    """A Room over a real sandbox. Every call is bounded by the guard's clock and reported to `on_event`.

    `user` is the account inside that the harness acts as (None: the sandbox's own). After `close()` every
    call is refused, so nothing that a harness left running can still act.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        workdir: str,
        guard: LimitGuard,
        *,
        user: str | None = None,
        on_event: OnRoomEvent | None = None,
        faults: ToolFaults | None = None,
        seed: int = 0,
    ) -> None:
        self.sandbox = sandbox
        self.workdir = workdir
        self._guard = guard
        self._user = user
        # Commands run as the sandbox's own user by default, file operations as root; a harness has one account.
        account = user or sandbox.spec.user or sandbox.image.user
        self._file_user = None if account in ("root", "0") else account
        self._on_event = on_event
        self._shell: str | None = None
        self._closed = False
        self._faults = faults
        self._seed = seed
        self._calls = 0

    def close(self) -> None:
        """Refuse every later call."""
        self._closed = True

    def absolute(self, path: str) -> str:
        """`path` seen from the working directory, normalised."""
        return posixpath.normpath(posixpath.join(self.workdir, path))

    async def bash(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run one shell command as a tool call. See `Room.bash`."""
        limit_s = self._limit(timeout_s)
        fault = self._draw()
        if fault == "fail" or fault == "timeout":
            return await self._not_made(fault, command, limit_s)
        if self._shell is None:
            self._shell = await self._find_shell()
        script = command.encode()
        if len(script) <= _MAX_ARGUMENT_BYTES:
            return await self._exec("bash", [self._shell, "-c", command], command, limit_s, injected=fault)
        return await self._exec(
            "bash", [self._shell, "-c", _FROM_STDIN], command, limit_s, stdin=script, injected=fault
        )

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        limit: OutputLimit | None = None,
        secret: str | None = None,
    ) -> ExecResult:
        """Run a command of the harness itself, for as long as the trial lasts. See `Room.run`."""
        self._allow()
        limit_s = self._guard.remaining_s()
        return await self._exec("run", argv, " ".join(argv), limit_s, env=env, stdin=stdin, limit=limit, secret=secret)

    async def again(
        self,
        kind: Literal["bash", "run"],
        argv: Sequence[str],
        subject: str,
        limit_s: float,
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """A command as it was once recorded, to the letter: for replays."""
        self._allow()
        return await self._exec(kind, argv, subject, limit_s, env=env, stdin=stdin)

    async def read(self, path: str) -> bytes:
        """A whole file of at most MAX_FILE_BYTES."""
        target = self.absolute(path)

        async def call() -> bytes:
            data = await self.sandbox.read(target, max_bytes=MAX_FILE_BYTES + 1, user=self._file_user)
            if len(data) > MAX_FILE_BYTES:
                message = f"the file is larger than {MAX_FILE_BYTES} bytes; read it in parts with a command"
                raise FileError(message, errno=errno.EFBIG, path=target)
            return data

        return await self._file_call("read", target, call, lambda data: data)

    async def write(self, path: str, data: bytes) -> None:
        """Write a whole file, creating its parents; one that exists keeps its mode."""
        target = self.absolute(path)

        async def call() -> None:
            await self.sandbox.write(target, data, mode=None, user=self._file_user)

        await self._file_call("write", target, call, lambda _: data, data)

    async def list(self, path: str) -> list[FileStat]:
        """The entries of a directory."""
        target = self.absolute(path)
        return await self._file_call("list", target, lambda: self.sandbox.list(target), listing)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a directory of the host, or one file of it, to the directory `target`. See `Room.upload`."""
        await self.upload_packed(await anyio.to_thread.run_sync(pack, source), target)

    async def upload_packed(self, packed: bytes, target: str) -> None:
        """Copy what `pack` made to the directory `target`."""
        place = self.absolute(target)
        await self._file_call(
            "upload", place, lambda: unpack(self.sandbox, packed, place), lambda _: packed, data=packed
        )

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; also when a limit has fired. See `Room.remove`."""
        target = self.absolute(path)

        async def call() -> None:
            await self.sandbox.remove(target, recursive=True)

        await self._file_call("remove", target, call, lambda _: None, limit_s=_CLEAN_UP_S)

    def _draw(self) -> Fault | None:
        """What is to happen to the next tool call; commands of the harness itself are no tool calls."""
        if self._faults is None:
            return None
        self._calls += 1
        return self._faults.draw(self._seed, self._calls)

    async def _not_made(self, fault: Fault, command: str, limit_s: float) -> ExecResult:
        started_at, start = _now(), time.monotonic()
        if fault == "timeout":
            await anyio.sleep(min(HANG_S, limit_s))
        result = not_made(fault, ["bash", "-c", command], time.monotonic() - start)
        took = time.monotonic() - start
        given = Given(result.argv, self.workdir, self._user)
        self._report(RoomEvent("bash", command, started_at, took, limit_s, result, given=given, injected=fault))
        return result

    def _allow(self) -> None:
        if self._closed:
            raise InfraError("the harness has ended, so its room takes no more calls")
        self._guard.check()

    def _limit(self, timeout_s: float | None) -> float:
        """Seconds that one tool call may take now."""
        self._allow()
        wanted = self._guard.limits.tool_call_s if timeout_s is None else timeout_s
        return min(wanted, self._guard.limits.tool_call_s, self._guard.remaining_s())

    async def _find_shell(self) -> str:
        """bash where the image has it, else sh."""
        found = await self.sandbox.exec("command -v bash", timeout_s=self._guard.limits.tool_call_s)
        return "bash" if found.exit_code == 0 else "sh"

    async def _exec(
        self,
        kind: Literal["bash", "run"],
        argv: Sequence[str],
        subject: str,
        limit_s: float,
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        injected: Fault | None = None,
        limit: OutputLimit | None = None,
        secret: str | None = None,
    ) -> ExecResult:
        started_at, start = _now(), time.monotonic()
        given = Given(tuple(argv), self.workdir, self._user, env, stdin)
        result: ExecResult | None = None
        error: str | None = "cut before it ended"
        try:
            # The sandbox has its own clock for the command; this one is for a sandbox that does not answer at all.
            with anyio.move_on_after(limit_s + _KILL_GRACE_S):
                result = await self.sandbox.exec(
                    argv,
                    cwd=self.workdir,
                    env=env,
                    user=self._user,
                    stdin=stdin,
                    timeout_s=limit_s,
                    keep=True,
                    limit=limit or OutputLimit(),
                )
            if result is None or result.reason is EndReason.GUEST_LOST:
                reason = "did not answer after a time-out" if result is None else "ended during a command"
                raise SandboxLost(f"sandbox {self.sandbox.id} {reason}", reason=EndReason.GUEST_LOST)
            if injected == "truncate":
                result = replace(result, stdout=cut(result.stdout), stderr=cut(result.stderr))
            error = None
            return result
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            took = time.monotonic() - start
            event = RoomEvent(
                kind, subject, started_at, took, limit_s, result, error=error, given=given, injected=injected
            )
            self._report(event.without(secret) if secret else event)

    async def _file_call(
        self,
        kind: RoomCall,
        target: str,
        call: Callable[[], Awaitable[_T]],
        content: Callable[[_T], bytes | None],
        data: bytes | None = None,
        limit_s: float | None = None,
    ) -> _T:
        limit_s = self._limit(None) if limit_s is None else limit_s
        started_at, start = _now(), time.monotonic()
        size: int | None = None
        digest: str | None = None
        seen: bytes | None = None
        error: str | None = "cut before it ended"
        # What a harness brings along and takes away again is its own doing; no tool of an agent does that.
        fault = None if kind in ("upload", "remove") else self._draw()
        try:
            if fault == "timeout":
                await anyio.sleep(min(HANG_S, limit_s))
                raise TimeoutError
            if fault is not None:
                raise refused(target)
            with anyio.fail_after(limit_s):
                value = await call()
            seen = content(value)
            if seen is not None:
                size, digest = len(seen), _digest(seen)
            error = None
            return value
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            took = time.monotonic() - start
            given = Given(user=self._file_user, data=data)
            found = seen if data is None else None
            self._report(
                RoomEvent(kind, target, started_at, took, limit_s, None, size, digest, error, given, fault, found)
            )

    def report(self, event: RoomEvent) -> None:
        """Note a call that was answered without being executed."""
        self._report(event)

    def _report(self, event: RoomEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


def listing(entries: Sequence[FileStat]) -> bytes:
    """A directory's entries as bytes that are equal for equal directories; times do not count."""
    rows = [[one.name, one.kind, one.size, one.mode, one.uid, one.gid, one.target] for one in entries]
    return canonical_json(sorted(rows, key=lambda row: str(row[0])))


def pack(source: Path) -> bytes:
    """A directory's content, or one file, as a tar owned by root. Raises ConfigError when it is too large."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        names = sorted(source.rglob("*")) if source.is_dir() else [source]
        base = source if source.is_dir() else source.parent
        for path in names:
            member = tar.gettarinfo(path, str(path.relative_to(base)))
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            if member.isreg():
                with path.open("rb") as file:
                    tar.addfile(member, file)
            else:
                tar.addfile(member)
            if buffer.tell() > MAX_UPLOAD_BYTES:
                raise ConfigError(f"more than {MAX_UPLOAD_BYTES} bytes to copy into a sandbox", field=str(source))
    return buffer.getvalue()


async def unpack(sandbox: Sandbox, packed: bytes, target: str) -> None:
    """Copy what `pack` made into a sandbox."""
    with tempfile.TemporaryDirectory(prefix="proctor-upload-") as folder:
        archive = Path(folder, "upload.tar")
        await anyio.Path(archive).write_bytes(packed)
        await sandbox.upload(archive, target)


def covered(text: str, secret: str) -> str:
    """The text with `secret` covered by as many characters, so that nothing behind it moves."""
    return text.replace(secret, HIDDEN.ljust(len(secret), "*")[: len(secret)])


def covered_bytes(data: bytes, secret: str) -> bytes:
    """The same for bytes."""
    hidden = secret.encode()
    return data.replace(hidden, HIDDEN.encode().ljust(len(hidden), b"*")[: len(hidden)])


def without(result: ExecResult, secret: str) -> ExecResult:
    """The result as it is recorded: with `secret` covered in the command and its output."""

    def safe(output: Output) -> Output:
        # Together: the secret may begin in the head and end in the tail.
        whole, cut_at = covered_bytes(output.head + output.tail, secret), len(output.head)
        return Output(whole[:cut_at], output.dropped, whole[cut_at:])

    argv = tuple(covered(part, secret) for part in result.argv)
    return replace(result, argv=argv, stdout=safe(result.stdout), stderr=safe(result.stderr))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
