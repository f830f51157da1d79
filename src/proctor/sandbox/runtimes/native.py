"""Runtime `native`: our own launcher makes namespaces, overlay root, limits and filter (docs/design/launcher.md)."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Literal

import anyio

from proctor.sandbox import disk, sweep
from proctor.sandbox._faults import point
from proctor.sandbox._incarnation import Counters, SlotIncarnation
from proctor.sandbox._plans import make_plan, mechanisms_of
from proctor.sandbox.contract import LaunchError, Tier
from proctor.sandbox.native.cgroup import CgroupLayout
from proctor.sandbox.native.channel import GuestChannel
from proctor.sandbox.native.launcher import Launched, Launcher, LauncherConfig, StepError
from proctor.sandbox.receipts import kernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proctor.sandbox._durable import Commands
    from proctor.sandbox.adoption import LiveRecord
    from proctor.sandbox.contract import Resources
    from proctor.sandbox.native.plan import Held, Plan
    from proctor.sandbox.runtimes.contract import Order

log = logging.getLogger(__name__)


Durability = Literal["tied", "durable", "adopting"]
"""Whether the launcher ends with its Edge; `adopting`: an earlier Edge has left one that lives."""


_REMEDIES = {
    errno.EMFILE: "this process has no file descriptors left; raise its limit (ulimit -n), or run fewer sandboxes",
    errno.ENFILE: "this machine has no file descriptors left; see fs.file-max",
}


class NativeRuntime:
    """The launcher of one Edge, and what its sandboxes need of the machine."""

    def __init__(self, edge_id: str, home: Path, *, pool_size: int, durable: Durability = "tied") -> None:
        """`home`: where disk images and their templates are; `pool_size`: launch slots kept ready."""
        self._edge_id = edge_id
        self._home = home
        self._pool_size = pool_size
        self._durable = durable
        self.launcher_starts = 0
        self.leaving = False
        """Sandboxes live on: `close` is to leave them to another Edge."""
        self._memory_works = True  # until a launch shows otherwise
        self._templates = disk.Templates(home / "disks")
        self._replacing = anyio.Lock()
        self._launcher: Launcher | None = None

    @property
    def directory(self) -> Path:
        """Where the Edge keeps what ends with it."""
        return self._home / "edges" / self._edge_id

    @property
    def tier(self) -> Tier:
        """A user namespace with ids of its own, always."""
        return Tier.NAMESPACES_USERNS

    @property
    def kernel(self) -> str:
        """The machine's own."""
        return kernel()

    async def start(self) -> None:
        """Start the launcher, then remove what dead Edges of this home left."""
        if self._durable == "adopting":
            await self._find_launcher()
        else:
            await self._start_launcher()
        try:
            # Not before: where cgroup2 is mounted nowhere, only the launcher's layout can see all groups.
            await sweep.sweep_dead(self._home, self.layout)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    async def _start_launcher(self) -> Launcher:
        self.launcher_starts += 1
        return self._use(await Launcher.start(self._config(), CgroupLayout.detect()))

    async def _find_launcher(self) -> None:
        """Come back to the launcher of an earlier Edge; if it has died meanwhile, its sandboxes have too."""
        try:
            self._use(await Launcher.reconnect(self._config(), CgroupLayout.detect()))
        except LaunchError as error:
            log.warning("%s: starting another", error)
            await CgroupLayout.detect().remove_edge(self._edge_id)
            await self._start_launcher()

    def _config(self) -> LauncherConfig:
        folder = self._home / "edges" / self._edge_id if self._durable != "tied" else None
        return LauncherConfig(edge=self._edge_id, pool=self._pool_size, folder=folder)

    def _use(self, launcher: Launcher) -> Launcher:
        self._launcher = launcher
        self.layout = launcher.layout
        self._watch = sweep.SlotWatch(self._edge_id, self.layout)
        return launcher

    async def close(self) -> None:
        """End the launcher."""
        if self._launcher is None:
            return
        if self.leaving:
            self._launcher.detach()
        else:
            await self._launcher.close()

    # --- what an earlier Edge has left ------------------------------------------------------------------------------

    @property
    def held(self) -> list[Held]:
        """The sandboxes that the launcher has kept for us."""
        return self._launcher.held if self._launcher is not None else []

    async def adopt(self, held: Held, live: LiveRecord, commands: Commands) -> SlotIncarnation:
        """A guest that is there already, on a channel of ours. Raises LaunchError; then it goes on without us."""
        assert self._launcher is not None
        launched = await self._launcher.adopt(held.slot)
        try:
            group = self.layout.slot(self._edge_id, held.slot)
            group.thaw()  # an Edge that died may have paused it
            counters = Counters(group, launched.upper_fd)
            counters.before()
            channel = GuestChannel(launched.channel, attribution=counters, revive=commands.revive)
        except BaseException:
            launched.close()
            raise
        driver: disk.Driver = "memory" if live.driver == "memory" else "loop"
        return SlotIncarnation(live.incarnation, launched, group, channel, counters, driver, live.mechanisms)

    async def destroy(self, slot: str) -> None:
        """End what is in a slot that is nobody's, and remove its groups."""
        await self.layout.slot(self._edge_id, slot).destroy()

    def oom_kills(self, slot: str) -> int:
        """How often the kernel has killed for memory in a slot."""
        try:
            return self.layout.slot(self._edge_id, slot).stats().oom_kills
        except FileNotFoundError:
            return 0

    def pool(self, known: frozenset[str]) -> tuple[int, int]:
        """Launch slots that are ready, and how many are wanted; `known`: slots that are in use."""
        ready = set(self.layout.slots(self._edge_id)) - known if self._launcher is not None else ()
        return len(ready), self._pool_size

    def leftovers(self) -> bool:
        """Whether groups could not be removed."""
        return bool(self.layout.slots(self._edge_id))

    def disk_driver(self, resources: Resources) -> disk.Driver:
        """Memory or loop, as far as is known of this kernel."""
        return disk.choose(resources, memory_works=self._memory_works)

    async def sweep(self, known: frozenset[str]) -> list[str]:
        """Dead Edges, and slots of this one that nobody owns."""
        await sweep.sweep_dead(self._home, self.layout)
        return await self._watch.sweep(known)

    # --- launching --------------------------------------------------------------------------------------------------

    async def launch(self, order: Order, adapt: Callable[[Plan], Plan] = lambda plan: plan) -> SlotIncarnation:
        """Start a guest in a slot of the launcher. `adapt` turns its plan into that of a runtime built on this one."""
        resources = order.spec.resources
        driver = self.disk_driver(resources)
        try:
            return await self._launch_on(driver, order, adapt)
        except StepError as error:
            refused = error.step == "upper-idmap" and error.errno == errno.EINVAL
            if not refused or driver != "memory" or resources.disk_driver != "auto":
                raise
            self._memory_works = False
            driver = self.disk_driver(resources)
            order.on_disk()
            return await self._launch_on(driver, order, adapt)

    async def _launch_on(self, driver: disk.Driver, order: Order, adapt: Callable[[Plan], Plan]) -> SlotIncarnation:
        image_file = self.directory / "disks" / f"{order.name}.img" if driver == "loop" else None
        try:
            if image_file is not None:
                resources = order.spec.resources
                await anyio.to_thread.run_sync(
                    self._templates.make, image_file, resources.disk_mb, resources.disk_inodes
                )
                point("create:after-disk")
            until = order.durable_until_ms
            plan = make_plan(order.name, order.spec, order.image, order.paths, image_file, durable_until_ms=until)
            launched = await self._ask_launcher(adapt(plan))
        finally:
            # Attached or not, the image needs no name any more.
            if image_file is not None:
                image_file.unlink(missing_ok=True)
        try:
            return self._incarnation(order, launched, driver)
        except BaseException as error:
            launched.close()  # which ends a guest that is tied
            if order.durable_until_ms is not None:
                with anyio.CancelScope(shield=True):
                    await self.destroy(launched.slot)
            if isinstance(error, OSError):
                raise LaunchError(f"{order.name}: {error.strerror}", remedy=_REMEDIES.get(error.errno or 0)) from error
            raise

    async def _ask_launcher(self, plan: Plan) -> Launched:
        """Launch; a launcher that has died (its sandboxes with it) is replaced once."""
        launcher = self._launcher
        assert launcher is not None
        try:
            return await launcher.launch(plan)
        except LaunchError:
            if launcher.lost is None:
                raise
        async with self._replacing:
            if self._launcher is launcher:
                log.warning("the launcher is gone (%s): starting another", launcher.lost)
                await launcher.close()
                await self._start_launcher()
        assert self._launcher is not None
        return await self._launcher.launch(plan)

    def _incarnation(self, order: Order, launched: Launched, driver: disk.Driver) -> SlotIncarnation:
        group = self.layout.slot(self._edge_id, launched.slot)
        counters = Counters(group, launched.upper_fd)
        channel = GuestChannel(launched.channel, attribution=counters, first_id=order.first_exec_id)
        mechanisms = mechanisms_of(self.layout, order.spec.resources, driver, launched, memory_works=self._memory_works)
        return SlotIncarnation(order.number, launched, group, channel, counters, driver, mechanisms)
