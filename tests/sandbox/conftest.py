"""Fixtures of the exam room's lowest part: a launcher, and sandboxes made with it without an Edge."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import pytest

from proctor.sandbox.native import seccomp
from proctor.sandbox.native.channel import GuestChannel
from proctor.sandbox.native.launcher import BINARY, Launched, Launcher, LauncherConfig
from proctor.sandbox.native.plan import Bind, Limits, MemoryUpper, Plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from proctor.sandbox.contract import ExecResult
    from proctor.sandbox.native.cgroup import SlotGroup

_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C"}


@dataclass
class Room:
    """One sandbox straight from the launcher."""

    launched: Launched
    channel: GuestChannel
    group: SlotGroup

    async def sh(self, text: str, **options: Any) -> ExecResult:
        """Run a line of shell inside (with a deadline of half a minute unless told otherwise)."""
        options.setdefault("timeout_s", 30)
        return await self.channel.exec(["/bin/sh", "-c", text], env=_ENV, **options)

    async def python(self, text: str, **options: Any) -> ExecResult:
        """Run a Python program inside with the machine's interpreter."""
        options.setdefault("timeout_s", 30)
        return await self.channel.exec(["/usr/bin/python3", "-c", text], env=_ENV, **options)


class MakeRoom(Protocol):
    """`async with make_room(hostname="x", …) as room`: a sandbox with some fields of its plan changed."""

    def __call__(self, launcher: Launcher | None = None, **changes: Any) -> AbstractAsyncContextManager[Room]: ...


def plan_for(layer: Path) -> Plan:
    """A plan that shows the machine's /usr, with small limits."""
    return Plan(
        name="test",
        layers=(layer,),
        upper=MemoryUpper(64 << 20, 20_000),
        limits=Limits(256 << 20, 65, 100_000),
        seccomp=seccomp.program(),
        binds=(Bind(Path("/usr"), "/usr"),),
    )


@pytest.fixture(scope="session")
def base_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer that is just enough around the machine's /usr."""
    root = tmp_path_factory.mktemp("layer") / "base"
    for name in ("usr", "proc", "dev", "sys", "tmp", "etc", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    return root


@pytest.fixture(scope="session")
def base_plan(base_layer: Path) -> Plan:
    """The plan that rooms start from."""
    return plan_for(base_layer)


@pytest.fixture(scope="session")
def init_binary() -> Path:
    """The binary under test: `$PROCTOR_INIT` (another build, for instance with sanitizers), else the package's."""
    path = Path(os.environ.get("PROCTOR_INIT", BINARY))
    if not path.exists():
        pytest.skip("proctor-init is not built: run scripts/build-c")
    return path


@pytest.fixture(scope="module")
async def launcher(init_binary: Path) -> AsyncIterator[Launcher]:
    """One launcher for a module's tests."""
    launcher = await Launcher.start(LauncherConfig(edge=f"test-{os.getpid()}", pool=4, binary=init_binary))
    yield launcher
    await launcher.close()


@pytest.fixture
def make_room(launcher: Launcher, base_plan: Plan) -> MakeRoom:
    """Sandboxes without an Edge."""
    default = launcher

    @asynccontextmanager
    async def make(launcher: Launcher | None = None, **changes: Any) -> AsyncIterator[Room]:
        maker = launcher or default
        launched = await maker.launch(replace(base_plan, **changes))
        channel = GuestChannel(launched.channel)
        room = Room(launched, channel, maker.layout.slot(maker.config.edge, launched.slot))
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(channel.run)
                try:
                    yield room
                finally:
                    channel.close()
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                launched.close()
                await room.group.destroy()

    return make
