"""One life of a container, as the Edge sees it (`runtimes.contract.Incarnation`)."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio

from proctor.common import InfraError
from proctor.sandbox._incarnation import stats_of
from proctor.sandbox.contract import EndReason, SandboxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from proctor.sandbox._incarnation import Counters
    from proctor.sandbox.contract import Stats
    from proctor.sandbox.native.channel import GuestChannel
    from proctor.sandbox.runtimes.docker.attach import AttachedChannel
    from proctor.sandbox.runtimes.docker.engine import Engine
    from proctor.sandbox.runtimes.docker.group import EngineGroup

_KILL_DEADLINE_S = 15.0
_WATCH_S = 1.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Container:
    """A container that runs a guest."""

    number: int
    slot: str
    """The container's name."""
    pid: int
    pidfd: int
    upper: Path
    """Where the engine keeps what was changed, an overlay's upper directory."""
    engine: Engine
    attached: AttachedChannel
    group: EngineGroup
    counters: Counters
    mechanisms: Mapping[str, str]
    disk_bytes: int
    """More than that on its disk ends it."""
    on_freeze: Callable[[Container], Awaitable[None]]
    driver: str = "engine"
    frozen: bool = False
    paused: bool = False
    _over_disk: bool = False
    _oom_killed: bool = False
    _used: int = 0
    _last: Stats | None = field(default=None)

    @property
    def channel(self) -> GuestChannel:
        """The channel to the guest."""
        return self.attached

    @property
    def place(self) -> Path:
        """The engine's own directory of changes."""
        return self.upper

    def stats(self) -> Stats:
        """The kernel's counters; after the end, the last ones."""
        try:
            found = stats_of(self.group.stats(self.counters.read()), self._used, 0)
        except (FileNotFoundError, ProcessLookupError):
            if self._last is None:
                raise
            return self._last
        self._last = found
        return found

    def limit_that_ended_it(self) -> EndReason | None:
        """The limit for which the guest is gone: the disk, as watched, or memory, by the kernel's or engine's word."""
        if self._over_disk:
            return EndReason.DISK
        return EndReason.OOM if self._oom_killed or self.counters.oom_since_last_look() else None

    async def open_upper(self) -> int:
        """The engine's own directory of changes."""
        try:
            return os.open(self.upper, _DIRECTORY)
        except OSError as error:
            raise SandboxError(f"cannot read the disk of {self.slot}: {error.strerror}") from error

    async def pause(self) -> int:
        """Have the engine stop every process. It takes no memory back."""
        await self.engine.call("POST", f"/containers/{self.slot}/pause")
        self.paused = True
        return 0

    async def resume(self) -> None:
        """Have the engine let every process go on."""
        await self.engine.call("POST", f"/containers/{self.slot}/unpause", fine=(404, 409))
        self.paused = False

    async def freeze(self) -> tuple[int, int]:
        """Kill everything; the container stays, stopped, as long as its disk is needed."""
        upper = await self.open_upper()
        try:
            await self.kill()
            self.frozen = True
            await self.on_freeze(self)
            return upper, os.dup(upper)
        except BaseException:
            os.close(upper)
            raise

    async def kill(self) -> None:
        """Kill process 1 and with it, by the rule of pid namespaces, every process. Returns when they are gone."""
        self._remember()
        self.attached.close()
        if self.paused:  # the freezer of cgroup v1 keeps what it has stopped from dying
            await self.resume()
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        with anyio.move_on_after(_KILL_DEADLINE_S) as scope:
            await anyio.wait_readable(self.pidfd)
        if scope.cancelled_caught:
            raise InfraError(f"{self.slot}: the guest survives SIGKILL for {_KILL_DEADLINE_S:g} s")
        await self.engine.call("POST", f"/containers/{self.slot}/wait", fine=(404,))

    def last_words(self) -> str:
        """What the guest wrote to its standard error."""
        return self.attached.said()

    def close_counters(self) -> None:
        """The last counters have been read."""
        self.counters.close()

    def remove_now(self) -> bool:
        """The engine removes a container in its own time."""
        return False

    async def remove(self) -> None:
        """Remove the container, unless its disk is a layer now."""
        if not self.frozen:
            await self.engine.remove(self.slot)

    def descriptors(self) -> tuple[int, ...]:
        """The pidfd."""
        return (self.pidfd,)

    # --- beside the channel -----------------------------------------------------------------------------------------

    async def watch_disk(self) -> None:
        """End the sandbox when it holds more than it may: the engine has no limit that every machine can enforce."""
        while True:
            self._used = await anyio.to_thread.run_sync(_usage, self.upper)
            self._remember()
            if self._used > self.disk_bytes:
                self._over_disk = True
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                return
            await anyio.sleep(_WATCH_S)

    async def look_back(self) -> None:
        """After the end: whether the kernel killed for memory, which the engine remembers."""
        found = await self.engine.call("GET", f"/containers/{self.slot}/json", fine=(404,))
        self._oom_killed = bool(found and found["State"].get("OOMKilled"))

    def _remember(self) -> None:
        try:
            self._last = replace(self.stats(), disk_bytes=self._used)
        except (FileNotFoundError, ProcessLookupError):
            return


def _usage(root: Path) -> int:
    """Bytes that the files below `root` take. Blocking."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total
