"""One life of a sandbox's processes in a slot of the launcher: guest, groups and upper layer."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from proctor.common import InfraError
from proctor.sandbox.contract import EndReason, ExecResult, Stats
from proctor.sandbox.layers import usage
from proctor.sandbox.native import pidfd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proctor.sandbox.disk import Driver
    from proctor.sandbox.native.cgroup import GroupStats, SlotGroup
    from proctor.sandbox.native.channel import GuestChannel
    from proctor.sandbox.native.launcher import Launched
    from proctor.sandbox.runtimes.programs import ErrorLog

_KILL_DEADLINE_S = 10.0
_FULL_BYTES = 4096


class _Baseline(NamedTuple):
    oom_kills: int
    pids_refused: int


class Counters:
    """The two event counters that tell a limit from a failure, read often, so their files are kept open.

    Serves the guest channel as its `Attribution`.
    """

    def __init__(self, group: SlotGroup, upper: int) -> None:
        memory, pids = group.directory("memory"), group.directory("pids")
        assert memory is not None
        assert pids is not None
        name = "memory.events" if group.layout.version == 2 else "memory.oom_control"
        self._upper = upper
        self._last = _Baseline(0, 0)
        self._oom = os.open(f"{memory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._pids = os.open(f"{pids}/pids.events", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self._oom)
            raise

    def close(self) -> None:
        """Close the files. Reading afterwards gives zeros."""
        for descriptor in (self._oom, self._pids):
            if descriptor >= 0:
                os.close(descriptor)
        self._oom = self._pids = self._upper = -1

    def before(self) -> object:
        """The counters when a command starts."""
        self._last = self.read()
        return self._last

    def recall(self, baseline: tuple[int, ...]) -> object:
        """A baseline that an earlier Edge took."""
        return _Baseline(*baseline)

    def after(self, baseline: object, result: ExecResult) -> EndReason | None:
        """Which limit a failed command ran into while it ran, by the kernel's own count; None when into none."""
        assert isinstance(baseline, _Baseline)
        now = self._last = self.read()
        if now.oom_kills > baseline.oom_kills:
            return EndReason.OOM
        if now.pids_refused > baseline.pids_refused:
            return EndReason.PIDS
        return EndReason.DISK if self.disk_full() else None

    def read(self) -> _Baseline:
        """Both counters now."""
        if self._oom < 0:
            return _Baseline(0, 0)
        return _Baseline(_value(self._oom, b"oom_kill "), _value(self._pids, b"max "))

    def looked(self) -> _Baseline:
        """The counters when a command last started or failed."""
        return self._last

    def oom_since_last_look(self) -> bool:
        """Whether the kernel killed for memory since a command last started or failed: the only witness there is of why
        process 1 is gone."""
        return self.read().oom_kills > self._last.oom_kills

    def disk_full(self) -> bool:
        """Whether the upper has no room left for one more page or one more file."""
        if self._upper < 0:
            return False
        info = os.fstatvfs(self._upper)
        return info.f_bavail * info.f_frsize < _FULL_BYTES or info.f_favail == 0


def _value(descriptor: int, key: bytes) -> int:
    try:
        data = os.pread(descriptor, 1024, 0)
    except OSError as error:
        if error.errno == errno.ENODEV:  # the group was removed
            return 0
        raise
    for line in data.splitlines():
        if line.startswith(key):
            return int(line[len(key) :])
    return 0


@dataclass(slots=True)
class SlotIncarnation:
    """A running guest and what the Edge holds for it (`runtimes.contract.Incarnation`)."""

    number: int
    launched: Launched
    group: SlotGroup
    channel: GuestChannel
    counters: Counters
    driver: Driver
    mechanisms: Mapping[str, str]
    dies_of_pids: bool = False
    """Whether a refused process ends the guest. Native ones go on: there it is a command's own misfortune."""
    log: ErrorLog | None = None
    """What a program in the slot writes when it fails; a native guest has none."""
    ended_before: bool = False
    """Its guest was dead before anybody of ours killed it."""

    @property
    def slot(self) -> str:
        """The launcher's name for it."""
        return self.launched.slot

    @property
    def place(self) -> None:
        """It has no name anywhere."""
        return None

    @property
    def pid(self) -> int:
        """The guest's process id on the machine."""
        return self.launched.pid

    async def open_upper(self) -> int:
        """A new descriptor of the upper directory itself."""
        return self._upper()

    def _upper(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open("upper", flags, dir_fd=self.launched.upper_fd)

    def stats(self) -> Stats:
        """The kernel's counters, and the use of the upper."""
        group = self.group.stats(self.counters.read())
        disk_bytes, disk_inodes = usage(self.launched.upper_fd)
        return stats_of(group, disk_bytes, disk_inodes)

    def limit_that_ended_it(self) -> EndReason | None:
        """The limit for which a guest is gone that nobody has killed, by the kernel's own count."""
        if self.counters.oom_since_last_look():
            return EndReason.OOM
        return EndReason.PIDS if self.dies_of_pids and self.counters.read().pids_refused else None

    def last_words(self) -> str:
        """The last line of the program in the slot."""
        return self.log.last_line() if self.log is not None else ""

    def evidence(self) -> dict[str, Any]:
        """What the kernel says about the end: of the guest, and of the limits that a command had met since it was last
        looked. To be asked when the guest is dead and the counters are not closed yet."""
        counts, ended = self.counters.read(), pidfd.ending(self.launched.pidfd)
        return {
            "guest_gone_first": self.ended_before,
            "guest_exit_code": ended.exit_code,
            "guest_signal": ended.signal,
            "oom_kills": counts.oom_kills,
            "oom_kills_unexplained": counts.oom_kills - self.counters.looked().oom_kills,
            "pids_refused": counts.pids_refused,
            "disk_full": self.counters.disk_full(),
        }

    def close_counters(self) -> None:
        """The last counters have been read."""
        self.counters.close()

    async def pause(self) -> int:
        """Stop every process, and have the kernel take back the memory that it can; how much that was, bytes."""
        await self.group.pause()
        return await anyio.to_thread.run_sync(self.group.reclaim)

    async def resume(self) -> None:
        """Let every process go on."""
        self.group.thaw()

    async def freeze(self) -> tuple[int, int]:
        """Kill everything; the upper, and the descriptor that its file system was made with."""
        upper, mount = self._upper(), os.dup(self.launched.upper_fd)
        try:
            await self.kill()
        except BaseException:
            os.close(upper)
            os.close(mount)
            raise
        return upper, mount

    def remove_now(self) -> bool:
        """Remove the control groups, if no process is in them any more, as is mostly so. Blocking."""
        try:
            self.group.remove_empty()
        except OSError:
            return False
        return True

    async def remove(self) -> None:
        """Remove control groups that a dying process was still in."""
        await self.group.remove()

    async def kill(self) -> None:
        """Kill the guest and with it, by the rule of pid namespaces, every process. Returns when they are gone."""
        self.ended_before = self.ended_before or self.channel.hung_up or pidfd.has_ended(self.launched.pidfd)
        self.channel.close()
        try:
            signal.pidfd_send_signal(self.launched.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        with anyio.move_on_after(_KILL_DEADLINE_S) as scope:
            # A process is reported as ended only after all others of its pid namespace are.
            await anyio.wait_readable(self.launched.pidfd)
        if scope.cancelled_caught:
            raise InfraError(
                f"{self.launched.slot}: the guest survives SIGKILL for {_KILL_DEADLINE_S:g} s",
                remedy="a process in state D holds it; look at the kernel log",
            )

    def descriptors(self) -> tuple[int, ...]:
        """What is to be closed once the groups are gone: pidfd, the upper's file system, the log."""
        descriptors = (self.launched.pidfd, self.launched.upper_fd)
        return descriptors if self.log is None else (*descriptors, self.log.descriptor)


def stats_of(group: GroupStats, disk_bytes: int, disk_inodes: int) -> Stats:
    """Counters of groups and the use of a disk, as the contract has them."""
    return Stats(
        memory_bytes=group.memory_bytes,
        memory_peak_bytes=group.memory_peak_bytes,
        cpu_s=group.cpu_s,
        pids=group.pids,
        pids_peak=group.pids_peak,
        disk_bytes=disk_bytes,
        disk_inodes=disk_inodes,
        oom_kills=group.oom_kills,
        pids_refused=group.pids_refused,
    )
