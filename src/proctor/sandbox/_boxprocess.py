"""A running command as its sandbox's caller holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from proctor.common import RefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from proctor.sandbox._durable import Commands
    from proctor.sandbox._spool import Piece
    from proctor.sandbox.box import Box
    from proctor.sandbox.contract import ExecResult, Process
    from proctor.sandbox.native.channel import GuestChannel
    from proctor.sandbox.runtimes.contract import Incarnation


class BoxProcess:
    """A running command of a sandbox. While somebody reads from it, writes to it or waits for it, it is in use."""

    def __init__(self, box: Box, guest: Incarnation, process: Process) -> None:
        self._box = box
        self._guest = guest
        self._process = process
        self.exec_id = process.exec_id

    async def output(self, since: int = 0) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        """Chunks as they arrive, from the offset `since` of each stream; not reading them stops a command that is not
        durable (back-pressure)."""
        async with self._box._busy(self._guest):
            async for chunk in self._process.output(since):
                yield chunk

    async def pieces(self, since: int = 0, *, follow: bool = True) -> AsyncIterator[tuple[Any, Piece]]:
        """As `output` of a durable sandbox's command, with offsets; without `follow` it ends with what there is now."""
        from proctor.sandbox._durable import DurableProcess

        if not isinstance(self._process, DurableProcess):
            raise RefusedError("only output of a durable sandbox is kept", field="since", remedy="lifecycle.durable")
        async with self._box._busy(self._guest, active=follow):
            async for chunk in self._process.pieces(since, follow=follow):
                yield chunk

    async def write_stdin(self, data: bytes) -> None:
        """Give bytes to the command's standard input."""
        async with self._box._busy(self._guest):
            await self._process.write_stdin(data)

    async def close_stdin(self) -> None:
        """End the command's standard input."""
        async with self._box._busy(self._guest):
            await self._process.close_stdin()

    async def resize(self, columns: int, rows: int) -> None:
        """Give the command's terminal another size."""
        async with self._box._busy(self._guest):
            await self._process.resize(columns, rows)

    async def kill(self) -> None:
        """Kill the command and every descendant, wherever it went."""
        async with self._box._busy(self._guest):
            await self._process.kill()

    async def wait(self) -> ExecResult:
        """Wait for the end of the command."""
        async with self._box._busy(self._guest):
            return await self._process.wait()


class DurableRunner:
    """Runs one command of a durable sandbox."""

    def __init__(self, commands: Commands, channel: GuestChannel, request_id: str | None) -> None:
        self._commands = commands
        self._channel = channel
        self._request_id = request_id

    async def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        """Run it to its end, once for each request id."""
        return await self._commands.exec(self._channel, command, request_id=self._request_id, **options)

    async def start(self, command: str | Sequence[str], **options: Any) -> Process:
        """Start it, once for each request id."""
        return await self._commands.start(self._channel, command, request_id=self._request_id, **options)
