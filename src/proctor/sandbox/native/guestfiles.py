"""File operations of a guest: execs whose program is part of the guest (csrc/files.c, csrc/tree.c).

They run as the requested user inside the sandbox, so they can do no more than a command could; what they report
is checked like everything else that a guest says.
"""

from __future__ import annotations

import errno as errno_names
import re
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from proctor.sandbox.contract import ExecResult, FileError, FileStat, Output, OutputLimit, SandboxError
from proctor.sandbox.native.frames import STDERR, STDOUT, ExecFlag, RequestError, exec_request
from proctor.sandbox.native.records import CHUNK, file_stats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

    from proctor.sandbox.native.execs import Exec, GuestProcess

Result = TypeVar("Result")

READ_MAX = 256 << 20
LIST_MAX = 64 << 20
_OPERATION_S = 120.0
_STALL_S = 60.0
_COMPLAINT = re.compile(rb"(\d{1,4}) [A-Z0-9]+: (.*)\n", re.DOTALL)
_MESSAGE = OutputLimit(16_384, 0)


class GuestFiles(ABC):
    """The file operations of a `GuestChannel`. Each raises FileError with the guest's errno."""

    @abstractmethod
    async def _open_operation(self, request: bytes, argv: tuple[str, ...], subs: frozenset[int]) -> Exec:
        """Start a file operation."""

    @abstractmethod
    async def _run_operation(
        self, state: Exec, stdin: bytes | None, limit: OutputLimit, timeout_s: float
    ) -> ExecResult:
        """Run one to its end."""

    @abstractmethod
    def _operation_process(self, state: Exec, limit: OutputLimit) -> GuestProcess:
        """The streams of one that was started."""

    async def read(self, path: str, *, max_bytes: int | None = None, user: str | None = None) -> bytes:
        """The content of a regular file, at most its first `max_bytes`. Without that, a file of more than 256 MiB is
        refused (EFBIG): a hostile one could be endless."""
        size = READ_MAX + 1 if max_bytes is None else max_bytes
        output = await self._operate("read", path, str(size), user=user, limit=OutputLimit(size, 0))
        if max_bytes is None and output.total > READ_MAX:
            raise FileError(f"larger than {READ_MAX} bytes", errno=errno_names.EFBIG, path=path)
        return output.head

    async def write(self, path: str, data: bytes, *, mode: int | None = 0o644, user: str | None = None) -> None:
        """Write a whole file, creating its parents; through a temporary file and a rename where the directory lets us.

        `mode` None keeps the mode of a file that exists and is 0644 for a new one. A link is followed.
        """
        text = "-" if mode is None else f"{mode:o}"
        await self._operate("write", path, text, user=user, stdin=data)

    async def write_stream(
        self, path: str, chunks: Iterable[bytes], *, mode: int | None = 0o644, user: str | None = None
    ) -> None:
        """`write` for content that need not fit in memory; `chunks` is iterated in a worker thread."""
        text = "-" if mode is None else f"{mode:o}"
        await self._operate_stream("write", path, text, chunks=chunks, user=user)

    async def list(self, path: str, *, user: str | None = None) -> list[FileStat]:
        """The entries of a directory, sorted by name."""
        output = await self._operate("list", path, user=user, limit=OutputLimit(LIST_MAX, 0))
        if output.dropped:
            raise FileError("too many entries to list", errno=errno_names.EFBIG, path=path)
        return sorted(file_stats(output.head), key=lambda entry: entry.name)

    async def stat(self, path: str, *, user: str | None = None) -> FileStat:
        """Metadata without following a final symbolic link; `name` is the path's last component."""
        output = await self._operate("stat", path, user=user)
        (found,) = file_stats(output.head)
        name = path.rstrip("/").rpartition("/")[2] or "/"
        return FileStat(name, found.kind, found.size, found.mode, found.uid, found.gid, found.mtime, found.target)

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Remove a file, a link or an empty directory; with `recursive` a directory of any depth and size."""
        await self._operate("remove", path, "1" if recursive else "0", user=user)

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        """Make a directory and its parents. One that exists is fine and keeps its mode."""
        await self._operate("mkdir", path, f"{mode:o}", user=user)

    async def unpack(self, target: str, tree: Iterable[bytes], *, user: str | None = None) -> None:
        """Extract a tree stream (native/tree.py) below the directory `target`, which is made if absent.

        `tree` is iterated in a worker thread; an error that it raises is raised here, after the guest has stopped.
        """
        await self._operate_stream("unpack", target, chunks=tree, user=user)

    async def pack(self, path: str, *, user: str | None = None) -> AsyncGenerator[bytes, None]:
        """The tree stream of a file or directory, in chunks; links are kept as links."""
        state = await self._start_operation("pack", (path,), user=user, stdin=False)
        process = self._operation_process(state, _MESSAGE)
        try:
            async with aclosing(process.stdout_batches()) as batches:
                while True:
                    try:
                        with anyio.fail_after(_STALL_S):
                            batch = await anext(batches)
                    except StopAsyncIteration:
                        break
                    yield batch
            check_operation(await process.wait(), path)
        except TimeoutError:
            raise FileError("reading made no progress", errno=errno_names.ETIMEDOUT, path=path) from None
        finally:
            await process.kill()

    async def pull(self, path: str, consume: Callable[[Iterator[bytes]], Result], *, user: str | None = None) -> Result:
        """Give the tree stream of `path` to `consume` in a worker thread (`tree_to_tar`, `tree_to_directory`)."""
        async with aclosing(self.pack(path, user=user)) as chunks:

            async def step() -> bytes | None:
                async for chunk in chunks:
                    return chunk
                return None

            def blocking() -> Iterator[bytes]:
                while (chunk := anyio.from_thread.run(step)) is not None:
                    yield chunk

            return await anyio.to_thread.run_sync(consume, blocking())

    # -- how they are run --------------------------------------------------------------------------------------------

    async def _start_operation(self, name: str, args: tuple[str, ...], *, user: str | None, stdin: bool) -> Exec:
        try:
            request = exec_request(args, user=user, builtin=name, flags=ExecFlag.STDIN if stdin else ExecFlag.NONE)
        except RequestError as error:
            raise FileError(str(error), errno=errno_names.EINVAL, path=args[0]) from error
        return await self._open_operation(request, (name, *args), frozenset({STDOUT, STDERR}))

    async def _operate(
        self, name: str, *args: str, user: str | None, stdin: bytes | None = None, limit: OutputLimit = _MESSAGE
    ) -> Output:
        state = await self._start_operation(name, args, user=user, stdin=stdin is not None)
        result = await self._run_operation(state, stdin, limit, _OPERATION_S)
        check_operation(result, args[0])
        return result.stdout

    async def _operate_stream(self, name: str, *args: str, chunks: Iterable[bytes], user: str | None) -> None:
        state = await self._start_operation(name, args, user=user, stdin=True)
        process = self._operation_process(state, _MESSAGE)
        batches = _batches(chunks)
        try:
            while process.stdin_open and (data := await anyio.to_thread.run_sync(next, batches, None)):
                with anyio.fail_after(_STALL_S):
                    await process.write_stdin(data)
            await process.close_stdin()
            with anyio.fail_after(_OPERATION_S):
                check_operation(await process.wait(), args[0])
        except TimeoutError:
            raise FileError("writing made no progress", errno=errno_names.ETIMEDOUT, path=args[0]) from None
        finally:
            await process.kill()


def _batches(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Bigger chunks: each costs a visit to a worker thread."""
    batch = bytearray()
    for chunk in chunks:
        batch += chunk
        if len(batch) >= CHUNK:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)


def check_operation(result: ExecResult, path: str) -> None:
    """Raise what a file operation complained about."""
    if result.exit_code == 0:
        return
    if result.timed_out:
        raise FileError("the operation took too long", errno=errno_names.ETIMEDOUT, path=path)
    if result.signal is not None:
        raise FileError(f"the operation was killed (signal {result.signal})", errno=errno_names.EINTR, path=path)
    message = result.stderr.head
    if found := _COMPLAINT.fullmatch(message):
        text = found[2].decode("utf-8", "replace").removeprefix(f"{path}: ")
        raise FileError(text, errno=int(found[1]), path=path)
    if result.exit_code in (126, 127):
        raise FileError(message.decode("utf-8", "replace"), errno=errno_names.EAGAIN, path=path)
    raise SandboxError(f"a file operation failed without a word (exit {result.exit_code})", field=path)
