"""One sandbox as its caller holds it: `proctor.sandbox.Sandbox`, whatever its runtime.

A sandbox outlives its processes: `reset` and `snapshot` end one *incarnation* (guest, groups, upper layer) and start
the next on the same handle. What a call needs is asked of the Edge, which owns everything that has to be cleaned up.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Self

import anyio
from anyio.lowlevel import checkpoint

from proctor.common import ConfigError, InfraError, ProctorError, RefusedError
from proctor.sandbox import layers as layer_tools
from proctor.sandbox._boxnet import NetworkedBox
from proctor.sandbox._boxpause import PausableBox
from proctor.sandbox._boxprocess import BoxProcess, DurableRunner
from proctor.sandbox._environment import TERMINAL, default_environment, default_user
from proctor.sandbox._faults import point
from proctor.sandbox.contract import (
    CommandInfo,
    DiffEntry,
    EndReason,
    ExecResult,
    FileError,
    FileStat,
    Image,
    LaunchError,
    Layer,
    OnOutput,
    OutputLimit,
    Process,
    Receipt,
    SandboxLost,
    SandboxSpec,
    Stats,
)
from proctor.sandbox.journal import State, now
from proctor.sandbox.native.plan import STACK_MAX
from proctor.sandbox.receipts import Evident, History

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from proctor.sandbox._durable import Commands
    from proctor.sandbox._timers import Timer
    from proctor.sandbox.contract import Sandbox
    from proctor.sandbox.edge import Edge
    from proctor.sandbox.native.channel import GuestChannel
    from proctor.sandbox.net.boundary import Boundary
    from proctor.sandbox.runtimes.contract import Incarnation, RuntimeDriver

    Action = Callable[[], Awaitable[None]]

_END_DEADLINE_S = 30.0


class Box(PausableBox, NetworkedBox):
    """A live sandbox. Made by `Edge.create`; also an async context manager that closes itself."""

    def __init__(
        self,
        edge: Edge,
        box_id: str,
        spec: SandboxSpec,
        image: Image,
        stack: tuple[Layer, ...],
        runtime: RuntimeDriver,
        boundary: Boundary | None = None,
    ) -> None:
        self.id = box_id
        self.spec = spec
        self.image = image
        self._edge = edge
        self._base = stack
        self._stack = stack
        self._live: Incarnation | None = None
        self._user = default_user(spec, image)
        self._environment = default_environment(spec, image)
        self._workdir = spec.workdir or image.workdir or "/"
        self._history = History(box_id, spec, image, created_at=now(), tier=runtime.tier, kernel=runtime.kernel)
        self._begin_network(boundary)
        self._begin_pausing()
        # Held while the sandbox changes its incarnation or ends.
        self._change = anyio.Lock(fast_acquire=True)
        self._reason: EndReason | None = None
        self._detail = ""
        self._ended = anyio.Event()
        self._timers: builtins.list[Timer] = []
        self._commands: Commands | None = None
        """Those of a durable sandbox, which survive this object."""
        self._ends_ms = 0
        self._request: str | None = None
        self._running = 0
        self._last_use = anyio.current_time()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def host_pid(self) -> int | None:
        """The guest's process id on this machine, for watching a sandbox from outside; None while there is none."""
        return self._live.pid if self._live is not None else None

    # --- commands ---------------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        limit: OutputLimit = OutputLimit(),  # noqa: B008, RUF100 - frozen value
        report_fd: int | None = None,
        keep: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """Run a command to its end (see the contract)."""
        meters = self._edge.meters
        async with self._use() as guest:
            self._history.execs += 1
            with meters.command.timed():
                result = await self._runner(guest, request_id).exec(
                    command,
                    env={**self._environment, **env} if env else self._environment,
                    cwd=cwd or self._workdir,
                    user=self._user if user is None else user,
                    stdin=stdin,
                    timeout_s=timeout_s,
                    on_output=on_output,
                    limit=limit,
                    report_fd=report_fd,
                    keep=keep,
                )
            if result.reason is not None:
                meters.command_reasons[str(result.reason)] += 1
            return result

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        keep: bool = False,
        pty: tuple[int, int] | None = None,
        request_id: str | None = None,
    ) -> Process:
        """Start a command and return at once (see the contract)."""
        async with self._use() as guest:
            self._history.execs += 1
            process = await self._runner(guest, request_id).start(
                command,
                env={**({} if pty is None else TERMINAL), **self._environment, **(env or {})},
                cwd=cwd or self._workdir,
                user=self._user if user is None else user,
                keep=keep,
                pty=pty,
            )
        return BoxProcess(self, guest, process)

    def _runner(self, guest: Incarnation, request_id: str | None) -> GuestChannel | DurableRunner:
        """What runs a command: the guest's channel, or the memory of a durable sandbox above it."""
        if self._commands is not None:
            return DurableRunner(self._commands, guest.channel, request_id)
        if request_id is not None:
            raise RefusedError(
                "only a durable sandbox remembers its commands", field="request_id", remedy="lifecycle.durable"
            )
        return guest.channel

    async def commands(self) -> builtins.list[CommandInfo]:
        """The commands of a durable sandbox that run or are remembered, oldest first."""
        async with self._use(active=False) as guest:
            return self._remembered().infos(guest.channel)

    async def attach(self, exec_id: int) -> BoxProcess:
        """A command of a durable sandbox again, whoever started it; `output(since)` reads from any offset."""
        async with self._use(active=False) as guest:
            return BoxProcess(self, guest, self._remembered().process(exec_id, guest.channel))

    def _remembered(self) -> Commands:
        if self._commands is None:
            raise RefusedError(
                "only a durable sandbox remembers its commands", field="lifecycle.durable", remedy="make it durable"
            )
        return self._commands

    # --- files ------------------------------------------------------------------------------------------------------

    async def read(self, path: str, *, max_bytes: int | None = None, user: str | None = None) -> bytes:
        """The content of a file."""
        async with self._use() as guest:
            return await guest.channel.read(self._absolute(path), max_bytes=max_bytes, user=user)

    async def write(self, path: str, data: bytes, *, mode: int | None = 0o644, user: str | None = None) -> None:
        """Write a whole file, creating parents."""
        async with self._use() as guest:
            await guest.channel.write(self._absolute(path), data, mode=mode, user=user)

    async def list(self, path: str) -> builtins.list[FileStat]:
        """The entries of a directory."""
        async with self._use() as guest:
            return await guest.channel.list(self._absolute(path))

    async def stat(self, path: str) -> FileStat:
        """Metadata without following a final symbolic link."""
        async with self._use() as guest:
            return await guest.channel.stat(self._absolute(path))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or a directory with `recursive`."""
        async with self._use() as guest:
            await guest.channel.remove(self._absolute(path), recursive=recursive)

    async def mkdir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> None:
        """Make a directory and its parents."""
        async with self._use() as guest:
            await guest.channel.mkdir(self._absolute(path), mode=mode, user=user)

    async def upload(self, source: Path, target: str, *, user: str | None = None) -> None:
        """Copy a file, a directory's content, or a tar's content in (see the contract)."""
        from proctor.sandbox._transfer import upload

        async with self._use() as guest:
            await upload(guest.channel, source, self._absolute(target), user)

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or a directory out; links are kept as links."""
        from proctor.sandbox._transfer import download

        async with self._use() as guest:
            await download(guest.channel, self._absolute(path), target)

    def _absolute(self, path: str) -> str:
        if not path or "\0" in path:
            raise ConfigError(f"{path!r} is not a path", field="path")
        return path if path.startswith("/") else f"{self._workdir.rstrip('/')}/{path}"

    # --- processes and disk -----------------------------------------------------------------------------------------

    async def kill_all(self) -> int:
        """Kill every process except the guest; returns 0, or raises when some cannot be killed."""
        async with self._use() as guest:
            remaining = await guest.channel.kill_all()
        if remaining:
            raise InfraError(
                f"sandbox {self.id}: {remaining} processes survive SIGKILL",
                remedy="state D means that the kernel holds them; close the sandbox",
            )
        return 0

    async def diff(self) -> builtins.list[DiffEntry]:
        """What was added, changed and deleted since creation or the last snapshot.

        Read from outside while the sandbox lives; stop its processes first (`kill_all`) for one moment's truth.
        """
        async with self._upper() as (upper, stack):
            entries = await anyio.to_thread.run_sync(layer_tools.diff, upper, stack)
        return [entry for entry in entries if not self._is_mount_point(entry)]

    def _is_mount_point(self, entry: DiffEntry) -> bool:
        """True for the empty places that the launcher makes to mount on: they are not the candidate's doing."""
        if entry.change != "added" or entry.size:
            return False
        return any(target == entry.path or target.startswith(entry.path + "/") for target in self._targets())

    def _targets(self) -> tuple[str, ...]:
        mounts = (*self.image.mounts, *self.spec.mounts)
        return ("/proc", "/dev", "/sys", *(mount.target.rstrip("/") for mount in mounts))

    async def export_diff(self, target: Path) -> None:
        """Write the upper layer as `target` (tar.zst with OCI whiteouts)."""
        async with self._upper() as (upper, _):
            await anyio.to_thread.run_sync(layer_tools.export, upper, target)

    @asynccontextmanager
    async def _upper(self) -> AsyncIterator[tuple[int, tuple[Layer, ...]]]:
        """The upper directory under a descriptor of our own, which no `close` or `reset` can pull away."""
        async with self._use() as guest:
            upper = await guest.open_upper()
            try:
                yield upper, self._stack
            finally:
                os.close(upper)

    async def snapshot(self) -> Layer:
        """Freeze the upper into one more layer, kept until the Edge ends or `Edge.drop`; go on above it."""
        async with self._changing():
            layer, retire = await self._freeze(kept=True)
            if failures := await _together(self._begin_incarnation, retire):
                raise failures[0]
        return layer

    async def fork(self, count: int = 1) -> builtins.list[Sandbox]:
        """Start `count` sandboxes on this one's frozen disk. Processes are not carried, and this one's are killed.

        Room for all of them is found first: if there is none, nothing has happened.
        """
        if count < 1:
            raise ConfigError("must be at least 1", field="count")
        reserved: builtins.list[str] = []
        try:
            while len(reserved) < count:
                reserved.append(await self._edge._reserve(self.spec))
            async with self._changing():
                _, retire = await self._freeze(kept=False)
                return await self._multiply(reserved, retire)
        finally:
            for box_id in reserved:
                self._edge._release(box_id)

    async def _multiply(self, reserved: builtins.list[str], retire: Action) -> builtins.list[Sandbox]:
        """Launch this sandbox again and the reserved ones beside it, at the same time, on the present stack."""
        made: dict[str, Box] = {}

        async def open_one(box_id: str) -> None:
            made[box_id] = await self._edge._open(box_id, self.spec, self.image, stack, self._twin)

        wanted, stack = tuple(reserved), self._stack
        reserved.clear()  # from here on their room is the sandboxes' own
        opens = (partial(open_one, box_id) for box_id in wanted)
        if failures := await _together(self._begin_incarnation, *opens, retire):
            for box in made.values():
                await box.close()
            raise failures[0]
        return [made[box_id] for box_id in wanted]

    async def _freeze(self, *, kept: bool) -> tuple[Layer, Action]:
        """Kill the present incarnation and put its upper on the stack, for the next one to begin above.

        Also returns what is still to be done with it, which the next launch need not wait for.
        """
        live = self._live
        assert live is not None
        if len(self._stack) >= STACK_MAX:
            raise RefusedError(f"a stack holds at most {STACK_MAX} layers", field="layers", remedy="reset it first")
        for below in self._stack:
            if below.handle is not None:  # those of an earlier Edge ended with it: refuse before anything is killed
                self._edge._frozen.stacked(below)
        self._live, self._paused = None, False
        try:
            upper, mount = await self._edge._kill(live, live.freeze)
        except BaseException:
            self._retire(live)
            raise
        place = live.place
        size_bytes = None if place is None else live.stats().disk_bytes
        layer = self._edge._frozen.add(
            upper, mount, kept=kept, in_memory=live.driver == "memory", place=place, size_bytes=size_bytes
        )
        self._edge._frozen.use((layer,))
        self._stack = (*self._stack, layer)

        async def retire() -> None:
            self._retire(live)

        return layer, retire

    async def reset(self) -> None:
        """Drop every process and every change since creation."""
        async with self._changing():
            surplus = self._stack[len(self._base) :]
            self._stack = self._base
            # The next guest starts while the last one dies: they share nothing.
            if failures := await _together(self._end_incarnation, self._begin_incarnation):
                await self._end_incarnation()
                raise failures[0]
            self._edge._burial.discard(self._edge._frozen.release(surplus))

    # --- facts ------------------------------------------------------------------------------------------------------

    async def stats(self) -> Stats:
        """Current and peak use, from the kernel's counters of the present incarnation."""
        async with self._use(active=False) as guest:
            return guest.stats()

    async def receipt(self) -> Receipt:
        """What this sandbox really is, or was."""
        await checkpoint()
        live = self._live
        return self._history.receipt(self._stack, live.stats() if live is not None else None)

    @property
    def ended(self) -> EndReason | None:
        """Why it ended; None while it lives."""
        return self._reason

    async def close(self, reason: EndReason = EndReason.CLOSED) -> Receipt:
        """End the sandbox: when this returns, its processes are gone. Closing twice gives the first end's receipt."""
        with self._edge.meters.close.timed():
            await self._end(reason)
        return self._history.receipt(self._stack, None)

    # --- life -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _use(self, *, active: bool = True) -> AsyncIterator[Incarnation]:
        """The present incarnation for one call; a guest that is lost meanwhile becomes the sandbox's end."""
        guest = self._live
        if guest is None:
            async with self._change:
                guest = self._live
        if guest is None or self._reason is not None:
            raise self._gone()
        async with self._busy(guest, active=active):
            yield guest

    @asynccontextmanager
    async def _busy(self, guest: Incarnation, *, active: bool = True) -> AsyncIterator[None]:
        """Counts as use for the idle clock, and says why a call was cut off."""
        self._running += active
        self._edge.meters.commands += active
        try:
            if active and self._paused:
                await self._wake(guest)
            yield
        except SandboxLost as lost:
            raise await self._explain(guest, lost) from lost
        finally:
            if active:
                self._running -= 1
                self._last_use = anyio.current_time()

    async def _explain(self, guest: Incarnation, lost: SandboxLost) -> SandboxLost:
        """Why a call was cut off: the sandbox's own end, once that is known, or a change of incarnation."""
        if lost.reason is EndReason.EDGE_LOST:
            return lost  # it lives on without us
        if self._reason is None and guest is not self._live:
            return SandboxLost(f"sandbox {self.id} was reset or frozen meanwhile", reason=EndReason.KILLED)
        with anyio.move_on_after(_END_DEADLINE_S):
            await self._ended.wait()
        return self._gone() if self._reason is not None else lost

    def _gone(self) -> SandboxLost:
        reason = self._reason or EndReason.EDGE_LOST
        detail = f": {self._detail}" if self._detail else ""
        return SandboxLost(f"sandbox {self.id} has ended ({reason}){detail}", reason=reason)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """A change of incarnation: alone, not to be cancelled in the middle, and the end of the sandbox if it fails."""
        async with self._change:
            if self._live is None or self._reason is not None:
                raise self._gone()
            with anyio.CancelScope(shield=True), self._edge._burial.launching():
                try:
                    yield
                except BaseException as error:
                    if self._live is None:
                        self._reason, self._detail = EndReason.LAUNCH, str(error)
                        await self._finish()
                    raise
        await checkpoint()

    async def _begin(self) -> None:
        """The first incarnation. Whatever goes wrong, nothing of it is left."""
        with anyio.CancelScope(shield=True):
            try:
                await self._begin_incarnation()
            except BaseException as error:
                self._reason, self._detail = EndReason.LAUNCH, str(error)
                await self._finish()
                raise

    async def _begin_incarnation(self) -> None:
        self._history.incarnation += 1
        live = await self._edge._launch(self, self._history.incarnation, self._stack)
        self._live = live
        self._history.mechanisms = live.mechanisms
        if self.spec.self_test:
            await self._test_isolation(live)  # before a later Edge could take it over untested
        if self._commands is not None:
            self._edge._estate.note_live(self)
            point("create:after-live")
        if live.channel.lost is not None:
            # It was lost before it was ours to notice.
            await self._end_incarnation()
            raise LaunchError(f"{self.id}: the guest ended at once: {live.channel.lost.message}")
        self._carry(live)
        if self.spec.workdir is not None:
            try:
                await live.channel.mkdir(self.spec.workdir)
            except FileError:
                # Above layers that a sandbox wrote, something else may be there; its commands will say so.
                if len(self._stack) <= len(self.image.layers):
                    raise
        self._last_use = anyio.current_time()
        self._wind_pause()

    async def _test_isolation(self, live: Incarnation) -> None:
        """Fails closed: what is not known to be isolated is not handed out."""
        from proctor.sandbox.selftest.short import self_test

        try:
            self._history.self_test = await self_test(live.channel, self.spec, live.pid)
        except BaseException:
            await self._end_incarnation()
            raise

    def leave(self) -> bool:
        """Leave a durable sandbox to the next Edge; False when it is ending or has ended."""
        live = self._live
        if live is None or self._reason is not None or self._commands is None:
            return False
        self._live = None
        live.channel.detach()
        live.close_counters()
        self._edge._burial.discard(live.descriptors())
        self._commands.close()
        point("leave:after-channel")
        return True

    async def _end_incarnation(self) -> None:
        live, self._live, self._paused = self._live, None, False
        if live is not None:
            try:
                await self._edge._kill(live, live.kill)
            finally:
                self._retire(live)

    def _retire(self, live: Incarnation) -> None:
        if isinstance(live, Evident):
            with suppress(FileNotFoundError, ProcessLookupError):  # a launcher that died took its groups along
                self._history.evidence = live.evidence()
        last = self._edge._retire(live)
        if last is not None:
            self._history.peaks.add(last)

    async def _end(self, reason: EndReason, detail: str = "") -> None:
        """End for `reason`, unless it has ended (or is ending) for another."""
        with anyio.CancelScope(shield=True):
            if self._reason is None:
                self._reason, self._detail = reason, detail
                async with self._change:
                    await self._finish()
            await self._ended.wait()

    async def _finish(self) -> None:
        assert self._reason is not None
        self._edge._note(self.id, State.CLOSING, reason=self._reason, detail=self._detail)
        try:
            await self._end_incarnation()
        finally:
            self._history.end_reason = self._reason
            self._history.end_detail = self._detail
            self._history.ended_at = now()
            await self._end_network()
            if self._commands is not None:
                self._commands.close()
            self._edge._forget(self)
            self._ended.set()

    # --- clocks (called by the Edge's timers) -----------------------------------------------------------------------

    async def _ttl_due(self) -> float | None:
        self._edge._spawn_end(self, EndReason.TTL, f"older than {self.spec.lifecycle.ttl_s:g} s")
        return None

    async def _idle_due(self) -> float | None:
        limit = self.spec.lifecycle.idle_timeout_s
        assert limit is not None
        if self._reason is not None:
            return None
        at = anyio.current_time()
        due = self._last_use + limit
        if self._running:
            return at + limit
        if due > at:
            return due
        self._edge._spawn_end(self, EndReason.IDLE, f"not used for {limit:g} s")
        return None


async def _together(*actions: Action) -> list[Exception]:
    """Run all at the same time, each to its end; returns the failures of those that failed."""
    failures: list[Exception] = []

    async def attempt(action: Action) -> None:
        try:
            await action()
        except (ProctorError, OSError) as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for action in actions:
            tasks.start_soon(attempt, action)
    return failures
