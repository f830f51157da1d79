"""The room of a trial that is done again up to a point: what was seen then is seen again, and from there on it is live.

Restored *by replay*, every call is really made and compared, so the sandbox comes to the state it had; restored *by
snapshot*, the state is there already and calls are answered from the record without being made.
"""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from proctor.agents.room import Given, RoomEvent, covered, covered_bytes
from proctor.common import RefusedError, digest_bytes
from proctor.runs.clock import now_iso
from proctor.runs.record import exec_line
from proctor.runs.replay.compare import Level, compare
from proctor.runs.replay.recorded import read_input
from proctor.sandbox.contract import EndReason, ExecResult, FileError, FileStat, Output

if TYPE_CHECKING:
    import builtins
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from proctor.agents.contract import Room
    from proctor.agents.room import BoundedRoom
    from proctor.runs.formats import ExecLine, StreamLine
    from proctor.sandbox.contract import OutputLimit

_HEAD_BYTES = 1 << 20


class PlaybackRoom:
    """A Room before the real one. `lines` are the recorded calls up to the point, `source` the parent's record.

    With `execute` they are made again. `then_see`, if given, is what the first call after them is answered, whatever
    it gave: a tool result that was changed. `secrets` are covered here as they are in a record. Raises RefusedError
    when the harness does something else than it did, or when a call comes out differently: the state at the point
    cannot be had then.
    """

    def __init__(
        self,
        room: BoundedRoom,
        lines: Sequence[ExecLine],
        source: Path,
        *,
        execute: bool,
        then_see: bytes | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        self.sandbox = room.sandbox
        self.workdir = room.workdir
        self._room = room
        self._pending = deque(lines)
        self._source = source
        self._execute = execute
        self._then_see = then_see
        self._secrets = secrets

    async def bash(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """See `Room.bash`."""
        line = await self._take("bash", command)
        if line is None:
            return self._changed(await self._room.bash(command, timeout_s=timeout_s))
        if not self._execute:
            return self._recorded(line)
        return self._same(line, await self._room.bash(command, timeout_s=timeout_s))

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        limit: OutputLimit | None = None,
        secret: str | None = None,
    ) -> ExecResult:
        """See `Room.run`."""
        line = await self._take("run", " ".join(argv))
        if line is not None and not self._execute:
            return self._recorded(line)
        result = await self._room.run(argv, env=env, stdin=stdin, limit=limit, secret=secret)
        return self._changed(result) if line is None else self._same(line, result)

    async def read(self, path: str) -> bytes:
        """See `Room.read`."""
        line = await self._take("read", self._room.absolute(path))
        if line is None:
            data = await self._room.read(path)
            changed, self._then_see = self._then_see, None
            return data if changed is None else changed
        if self._execute:
            data = await self._room.read(path)
            seen = data
            for secret in self._secrets:
                seen = covered_bytes(seen, secret)
            if digest_bytes(seen) != line.digest:
                raise _cannot(line, "what is read")
            return data
        self._answer(line)
        return read_input(self._source, line.digest or "")

    async def write(self, path: str, data: bytes) -> None:
        """See `Room.write`."""
        line = await self._take("write", self._room.absolute(path))
        if line is None or self._execute:
            await self._room.write(path, data)
        else:
            self._answer(line)

    async def list(self, path: str) -> builtins.list[FileStat]:
        """See `Room.list`."""
        line = await self._take("list", self._room.absolute(path))
        if line is None or self._execute:
            return await self._room.list(path)
        self._answer(line)
        rows = json.loads(read_input(self._source, line.digest or ""))
        return [FileStat(name, kind, size, mode, uid, gid, 0.0, target)
                for name, kind, size, mode, uid, gid, target in rows]  # fmt: skip

    async def upload(self, source: Path, target: str) -> None:
        """See `Room.upload`."""
        line = await self._take("upload", self._room.absolute(target))
        if line is None or self._execute:
            await self._room.upload(source, target)
        else:
            self._answer(line)

    async def remove(self, path: str) -> None:
        """See `Room.remove`."""
        line = await self._take("remove", self._room.absolute(path))
        if line is None or self._execute:
            await self._room.remove(path)
        else:
            self._answer(line)

    async def _take(self, kind: str, subject: str) -> ExecLine | None:
        """The recorded call that this one is; calls of one step may have come in another order. What the host changed
        before it (the parent was a branch itself) is changed first."""
        for secret in self._secrets:
            subject = covered(subject, secret)
        while self._pending and self._pending[0].by_host:
            line = self._pending.popleft()
            if self._execute:
                await self.sandbox.write(line.subject, read_input(self._source, line.input or ""), mode=None)
        if not self._pending:
            return None
        for line in self._pending:
            if (line.kind, line.subject) == (kind, subject):
                self._pending.remove(line)
                return line
        expected = self._pending[0]
        raise RefusedError(
            f"the state cannot be restored: the agent's next call is {kind} {subject[:80]!r} where the record has "
            f"{expected.kind} {expected.subject[:80]!r} (call {expected.seq})",
            field="--from",
        )

    def _recorded(self, line: ExecLine) -> ExecResult:
        self._answer(line)
        return result_of(line)

    def _answer(self, line: ExecLine) -> None:
        """Note the call as answered from the record; raise what it raised then."""
        data = read_input(self._source, line.input) if line.input is not None else None
        given = Given(tuple(line.argv or ()), line.cwd, line.user, line.env, data)
        result = result_of(line) if line.kind in ("bash", "run") and line.error is None else None
        event = RoomEvent(line.kind, line.subject, now_iso(), 0.0, line.limit_s or 0.0, result)  # type: ignore[arg-type]
        facts: dict[str, Any] = {
            "size_bytes": line.size_bytes,
            "digest": line.digest,
            "error": line.error,
            "injected": line.injected,
        }
        self._room.report(replace(event, given=given, replayed=True, **facts))
        if line.error is not None:
            raise _error(line)

    def _same(self, line: ExecLine, result: ExecResult) -> ExecResult:
        """What the harness is to see: what it saw then, provided that the call really came out so."""
        event = RoomEvent(line.kind, line.subject, line.started_at, 0.0, 0.0, result)  # type: ignore[arg-type]
        for secret in self._secrets:
            event = event.without(secret)
        level, found = compare(line, exec_line(event, line.seq))
        if level is Level.DIFFERENT and found is not None:
            raise _cannot(line, found.part)
        return result_of(line)

    def _changed(self, result: ExecResult) -> ExecResult:
        if self._then_see is None:
            return result
        shown, self._then_see = self._then_see, None
        return ExecResult(result.argv, 0, None, Output(shown), Output(), False, None, result.duration_s)


def _cannot(line: ExecLine, part: str) -> RefusedError:
    return RefusedError(
        f"the state cannot be restored: call {line.seq} came out differently in {part}",
        field="--from",
        remedy="see proctor replay --actions, or run with --record-snapshots",
    )


def result_of(line: ExecLine) -> ExecResult:
    """The result of a command as the record has it."""
    return ExecResult(
        argv=tuple(line.argv or ()),
        exit_code=line.exit_code,
        signal=line.signal,
        stdout=_output(line.stdout),
        stderr=_output(line.stderr),
        timed_out=line.timed_out,
        reason=EndReason(line.reason) if line.reason else None,
        duration_s=line.duration_s,
        leftover=line.leftover,
    )


def _output(stream: StreamLine | None) -> Output:
    import base64

    if stream is None:
        return Output()
    kept = stream.text.encode() if stream.text is not None else base64.b64decode(stream.base64 or "")
    if not stream.dropped:
        return Output(kept)
    return Output(kept[:_HEAD_BYTES], stream.dropped, kept[_HEAD_BYTES:])


def _error(line: ExecLine) -> Exception:
    """The error that a recorded line tells, as far as a harness can tell them apart."""
    kind, _, message = (line.error or "").partition(": ")
    if kind == "TimeoutError":
        return TimeoutError(message)
    code = next((number for number in errno.errorcode if os.strerror(number) in message), errno.EIO)
    return FileError(message.partition(": ")[2] or message, errno=code, path=line.subject)


def _as_room(room: PlaybackRoom) -> Room:
    """For the type checker: a PlaybackRoom is a Room."""
    return room
