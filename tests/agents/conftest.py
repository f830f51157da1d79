"""A directory that stands in for a sandbox where no isolation is needed: real processes, real files."""

# ruff: noqa: ASYNC230, ASYNC240 - a stand-in for tests: its files are tiny

from __future__ import annotations

import os
import shutil
import signal
import stat
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from proctor.sandbox.contract import EndReason, ExecResult, FileError, FileStat, Image, Output, OutputLimit, SandboxSpec
from proctor.tasks.model import AgentLimits, Carry, Environment, Task, Verifier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proctor.agents.contract import Step


class DirectoryBox:
    """The part of the Sandbox contract that harnesses use, over a temporary directory (no isolation)."""

    def __init__(self, root: Path) -> None:
        self.id = "dir-1"
        self.root = root
        self.spec = SandboxSpec(workdir=str(root))
        self.image = Image(ref="directory", digest="sha256:0", layers=())

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        limit: OutputLimit = OutputLimit(),  # noqa: B008 - frozen value
        keep: bool = False,
        **_: Any,
    ) -> ExecResult:
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        start = time.monotonic()
        process = await anyio.open_process(
            argv, cwd=cwd, env={**os.environ, **(env or {})}, start_new_session=True, stdin=-1
        )
        output: dict[str, bytes] = {"stdout": b"", "stderr": b""}

        async def collect(name: str, stream: Any) -> None:
            async for chunk in stream:
                output[name] += chunk

        async def feed() -> None:
            assert process.stdin is not None
            if stdin:
                with suppress(anyio.BrokenResourceError):  # it need not read what it is given
                    await process.stdin.send(stdin)
            await process.stdin.aclose()

        timed_out = False
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(collect, "stdout", process.stdout)
                group.start_soon(collect, "stderr", process.stderr)
                group.start_soon(feed)
                with anyio.move_on_after(timeout_s) as scope:
                    await process.wait()
                if timed_out := scope.cancelled_caught:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
                elif keep:
                    await anyio.sleep(0.01)
                    group.cancel_scope.cancel()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                with anyio.CancelScope(shield=True):
                    await process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                with anyio.CancelScope(shield=True):
                    await stream.aclose()
        code = process.returncode
        return ExecResult(
            argv=tuple(argv),
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=_captured(output["stdout"], limit),
            stderr=_captured(output["stderr"], limit),
            timed_out=timed_out,
            reason=EndReason.EXEC_TIMEOUT if timed_out else None,
            duration_s=time.monotonic() - start,
        )

    async def read(self, path: str, *, max_bytes: int | None = None, user: str | None = None) -> bytes:
        with _inside_errors(path), Path(path).open("rb") as file:
            return file.read(-1 if max_bytes is None else max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int | None = 0o644, user: str | None = None) -> None:
        with _inside_errors(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)

    async def list(self, path: str) -> list[FileStat]:
        with _inside_errors(path):
            return [_stat(Path(path, name)) for name in sorted(os.listdir(path))]

    async def stat(self, path: str) -> FileStat:
        with _inside_errors(path):
            return _stat(Path(path))

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        with _inside_errors(path):
            Path(path).mkdir(mode)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        with _inside_errors(path):
            shutil.rmtree(path) if recursive else Path(path).unlink()

    async def upload(self, source: Path, target: str, *, user: str | None = None) -> None:
        with _inside_errors(target):
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


class _inside_errors:
    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise FileError(error.strerror or str(error), errno=error.errno or 0, path=self.path) from error


def _captured(data: bytes, limit: OutputLimit) -> Output:
    if len(data) <= limit.head_bytes + limit.tail_bytes:
        return Output(data)
    return Output(data[: limit.head_bytes], len(data) - limit.head_bytes - limit.tail_bytes, data[-limit.tail_bytes :])


def _stat(path: Path) -> FileStat:
    info = path.lstat()
    kind = "dir" if stat.S_ISDIR(info.st_mode) else "link" if stat.S_ISLNK(info.st_mode) else "file"
    return FileStat(path.name, kind, info.st_size, info.st_mode & 0o7777, info.st_uid, info.st_gid, info.st_mtime)


class ListRecorder:
    """Keeps the steps of a trial in a list."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.lines: list[str] = []
        self.kept: dict[str, bytes] = {}

    def step(self, step: Step) -> None:
        self.steps.append(step)

    def log(self, line: str) -> None:
        self.lines.append(line)

    def keep(self, name: str, data: bytes) -> None:
        self.kept[name] = data

    @property
    def agent_steps(self) -> list[Step]:
        return [step for step in self.steps if step.source == "agent"]


@pytest.fixture
def box(tmp_path: Path) -> DirectoryBox:
    """An empty working directory with processes."""
    root = tmp_path / "work"
    root.mkdir()
    return DirectoryBox(root)


@pytest.fixture
def recorder() -> ListRecorder:
    """Where the steps go."""
    return ListRecorder()


@pytest.fixture
def limits() -> AgentLimits:
    """Limits that no test meets by accident."""
    return AgentLimits(total_s=30.0, tool_call_s=10.0, steps=30)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """A task without a solution; `replace` what a test needs."""
    return Task(
        name="org/add-a-file",
        path=tmp_path,
        digest="sha256:0",
        instruction="Create hello.txt with the text hello.",
        environment=Environment(image="host"),
        verifier=Verifier(kind="reward"),
        carry=Carry(kind="filesystem"),
        solution=None,
    )


@pytest.fixture
def with_changes() -> Any:
    """`dataclasses.replace`, for tasks and limits."""
    return replace
