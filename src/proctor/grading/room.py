"""The clean room: a new sandbox on the clean image that no candidate ever acted in; without a network, unless the run
allows the one that the task's verifier asks for."""

from __future__ import annotations

import tarfile
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from proctor.grading.channel import TOOLKIT, toolkit_files
from proctor.grading.diffing import LINK
from proctor.sandbox.contract import FileError, Lifecycle, Resources, SandboxSpec
from proctor.sandbox.net import NetworkPolicy
from proctor.tasks.network import online_env

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from proctor.grading.deliverable import Change, FileState
    from proctor.sandbox.contract import ExecResult, Image, Layer, Sandbox
    from proctor.sandbox.edge import Edge
    from proctor.sandbox.net import OnNetwork
    from proctor.tasks.model import Task

TESTER = "tester"
_TESTER_ID = 60_123
_GRACE_S = 300.0
_NOT_STARTED = 126


@dataclass(slots=True)
class Rooms:
    """Opens the rooms of one grade and keeps count and receipts of them."""

    task: Task
    image: Image
    edge: Edge
    network: NetworkPolicy | None = None
    on_network: OnNetwork | None = None
    opened: int = 0
    receipts: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def workdir(self) -> str:
        """Where the task works, as an absolute path."""
        return self.task.environment.workdir or self.image.workdir or "/"

    @asynccontextmanager
    async def open(
        self, *, layers: Sequence[Layer] = (), env: Mapping[str, str] | None = None
    ) -> AsyncIterator[Sandbox]:
        """A fresh room: the image (which has the task's own files already), and `layers` above it."""
        environment = self.task.environment
        spec = SandboxSpec(
            image=self.image,
            layers=tuple(layers),
            resources=Resources(
                cpus=environment.cpus, memory_mb=environment.memory_mb, disk_mb=environment.storage_mb, pids=1024
            ),
            lifecycle=Lifecycle(ttl_s=self._ttl_s()),
            network="none" if self.network is None else NetworkPolicy(),
            workdir=self.workdir,
            env={**self._online(), **environment.env, **(env or {})},
            hostname="room",
            labels={"proctor.purpose": "grading", "proctor.task": self.task.name},
        )
        box = await self.edge.create(spec, on_network=self.on_network)
        self.opened += 1
        try:
            if self.network is not None:
                await box.set_network(self.network, phase="grading")
            yield box
        finally:
            # Also when cancelled: closing is what frees the machine.
            with anyio.CancelScope(shield=True):
                self.receipts.append(_plain(await box.close()))

    def _online(self) -> dict[str, str]:
        return online_env(self.image.env) if self.network is not None else {}

    def _ttl_s(self) -> float:
        verifier = self.task.verifier
        tests = verifier.tests.timeout_s if verifier.tests is not None else 0.0
        return max(verifier.timeout_s, tests) * 2 + _GRACE_S


def _plain(receipt: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {key: value for key, value in asdict(receipt).items() if value is not None}


class RoomBroken(Exception):
    """The work left a room in which the verifier cannot be started or its files cannot be placed. Whoever made it so
    does not thereby leave the denominator; a task that is itself like that is found out by its oracle."""


def check_started(result: ExecResult) -> None:
    """Raise RoomBroken when a command did not start for a reason that lies in the room's disk: its working directory
    or its accounts."""
    if result.exit_code == _NOT_STARTED and result.error_text.startswith(("proctor: chdir:", "proctor: user:")):
        raise RoomBroken(f"the verifier cannot be started: {result.error_text.strip().removeprefix('proctor: ')}")


async def place_toolkit(box: Sandbox) -> None:
    """Write the runners into a directory of root's; nothing carried can have been there (it is written last)."""
    await discard(box, TOOLKIT)
    for name, data in toolkit_files().items():
        await box.write(f"{TOOLKIT}/{name}", data, mode=0o444)


async def make_tester(box: Sandbox) -> str:
    """The unprivileged account that test processes run as; returns its name."""
    passwd = (await box.read("/etc/passwd")).decode("utf-8", "surrogateescape")
    line = f"{TESTER}:x:{_TESTER_ID}:{_TESTER_ID}:tests:/home/{TESTER}:/bin/sh\n"
    if not passwd.startswith(line):
        # First, and the only one of its name: with `system = true` the work may bring accounts of its own.
        others = [other for other in passwd.splitlines(keepends=True) if not other.startswith(f"{TESTER}:")]
        await box.write("/etc/passwd", (line + "".join(others)).encode("utf-8", "surrogateescape"))
    # A directory is made with the rights of whoever asks, and only root may make one here.
    await box.mkdir(f"/home/{TESTER}", mode=0o777)
    return TESTER


async def discard(box: Sandbox, path: str) -> None:
    """Remove a path and everything below it, if it is there."""
    try:
        await box.remove(path, recursive=True)
    except FileError as error:
        if error.errno != 2:
            raise


async def place_states(box: Sandbox, root: str, states: Mapping[str, FileState | None]) -> None:
    """Bring paths (relative to `root`) to exact states: first what has to go, then one upload of what comes."""
    archive = BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, state in states.items():
            await discard(box, f"{root}/{path}")
            if state is None:
                continue
            member = tarfile.TarInfo(path)
            if state.mode == LINK:
                member.type, member.linkname = tarfile.SYMTYPE, state.data.decode("utf-8", "surrogateescape")
                tar.addfile(member)
            else:
                member.mode, member.size = state.mode, len(state.data)
                tar.addfile(member, BytesIO(state.data))
    if all(state is None for state in states.values()):
        return
    with tempfile.TemporaryDirectory(prefix="proctor-place-") as folder:
        source = Path(folder, "states.tar")
        await anyio.to_thread.run_sync(source.write_bytes, archive.getvalue())
        await box.upload(source, root or "/")


async def place_changes(box: Sandbox, root: str, changes: Sequence[Change]) -> None:
    """Bring collected changes into the room exactly as they were."""
    await place_states(box, root, {change.path: change.after for change in changes})
