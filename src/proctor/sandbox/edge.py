"""The Edge: it owns the sandboxes of one machine (or of one process on it).

It admits by what is really free, journals before it acts, keeps the clocks, and sweeps what nobody owns. Use it as an
async context manager; leaving it ends every sandbox it made.

    async with Edge() as edge:
        async with await edge.create(SandboxSpec()) as box: …
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from proctor.common import InfraError, ProctorError, RefusedError, state_dir
from proctor.sandbox import sweep
from proctor.sandbox._admission import Demand, Ledger, Machine, Policy, raise_descriptor_limit
from proctor.sandbox._burial import Burial, Waste
from proctor.sandbox._carry import carried
from proctor.sandbox._faults import point
from proctor.sandbox._frozen import FrozenLayers
from proctor.sandbox._images import ImageCache
from proctor.sandbox._meters import Meters
from proctor.sandbox._names import NameLayers
from proctor.sandbox._plans import check, check_durable
from proctor.sandbox._services import Services, Started
from proctor.sandbox._timers import Timers
from proctor.sandbox.box import Box
from proctor.sandbox.contract import (
    EndReason,
    GuestProtocolError,
    Image,
    LaunchError,
    Layer,
    SandboxLost,
    SandboxSpec,
    Stats,
)
from proctor.sandbox.journal import Journal, State
from proctor.sandbox.native import doorbell
from proctor.sandbox.pools import Pool, Pools
from proctor.sandbox.runtimes.capabilities import achieved
from proctor.sandbox.runtimes.contract import Order
from proctor.sandbox.runtimes.registry import Runtimes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from anyio.abc import TaskStatus

    from proctor.sandbox._carry import Carry
    from proctor.sandbox.contract import Resources, Runtime
    from proctor.sandbox.images import ImageStore
    from proctor.sandbox.net.dialer import Dialer
    from proctor.sandbox.net.events import OnNetwork
    from proctor.sandbox.net.faults import FaultProfile
    from proctor.sandbox.net.secrets import Secret
    from proctor.sandbox.net.services import Service
    from proctor.sandbox.pools import PoolSpec
    from proctor.sandbox.runtimes.contract import Incarnation, RuntimeDriver
    from proctor.sandbox.runtimes.native import Durability

log = logging.getLogger(__name__)

Ended = TypeVar("Ended")

_HELLO_SLACK_S = 1.0
_MACHINE_RECHECK_S = 1.0
_ENDS_AT_ONCE = 32
_MACHINE_FRESH_S = 0.1
_IDS_PER_GENERATION = 1_000_000_000
"""Sandboxes that one Edge can make before one that takes its place makes the first: names are never used twice."""
_current: ContextVar[Edge | None] = ContextVar("proctor_edge", default=None)


class Edge:
    """Owner of sandboxes. `home` keeps its journal and disk images (default: Proctor's state directory)."""

    def __init__(
        self,
        home: Path | None = None,
        *,
        pool_size: int = 8,
        policy: Policy = Policy(),  # noqa: B008, RUF100 - frozen value
        queue_deadline_s: float = 600.0,
        sweep_interval_s: float = 30.0,
        images: ImageStore | None = None,
        durable: bool = False,
        adopt: str | None = None,
        pools: Sequence[PoolSpec] = (),
    ) -> None:
        """`pool_size`: launch slots kept ready. `queue_deadline_s`: how long a create may wait for room.

        `durable`: sandboxes with `lifecycle.durable` outlive this Edge, however it ends. If an earlier Edge of the same
        home has left some, this one takes its place, name and sandboxes (one such Edge, or the one called `adopt`;
        `boxes` has them). `pools`: sandboxes that are ready before somebody asks for one of exactly that spec.
        """
        self.home = (home or state_dir()).absolute()
        self._pool_size = pool_size
        self._queue_deadline_s = queue_deadline_s
        self._sweep_interval_s = sweep_interval_s
        self._images = ImageCache(images)
        self._ledger = Ledger(policy)
        self._boxes: dict[str, Box] = {}
        self._names = NameLayers(self.home)
        self._dialer: Dialer | None = None
        self._pools = Pools([Pool(self, spec) for spec in pools])
        self._count = 0
        self._durable = durable
        self._adopt_only = adopt
        self._left = False
        self._requests: dict[str, anyio.Event | Box] = {}
        self.meters = Meters()
        self._token: Token[Edge | None] | None = None

    # --- start and stop ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        raise_descriptor_limit()
        self._queue = anyio.Lock(fast_acquire=True)
        self._freed = anyio.Event()
        self._changed = anyio.Event()
        self._machine_read_at = float("-inf")
        self._timers = Timers()
        self._burial = Burial(buried=self._buried, urgent=self._queue.locked)
        async with AsyncExitStack() as stack:
            self._directory = self._find_directory()
            self.id = self._directory.id
            stack.push_async_callback(self._leave)
            point("start:after-lock")
            self._journal = Journal(self._directory.path / "journal.jsonl")
            stack.callback(self._journal.close)
            durable: Durability = "adopting" if self._directory.adopted else "durable" if self._durable else "tied"
            self._runtimes = Runtimes(self.id, self.home, pool_size=self._pool_size, durable=durable)
            stack.push_async_callback(self._stop_runtimes)
            await self._start_native(durable)
            point("start:after-launcher")
            self._frozen = FrozenLayers(self.id)
            stack.callback(self._images.close)
            services = await stack.enter_async_context(Services())
            self._tasks = services.tasks
            stack.push_async_callback(self._end_all)
            for service in (self._timers.run, self._burial.run, self._sweep):
                self._tasks.start_soon(service)
            if self._directory.adopted:
                await self._adopt()
            for pool in self._pools.all:
                check(pool.spec.spec)
                self._tasks.start_soon(pool.run)
            self._token = _current.set(self)
            self._resources = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        if self._token is not None:
            # Left in another context than it was entered in (a fixture, say): there is nothing to set back then.
            with suppress(ValueError):
                _current.reset(self._token)
            self._token = None
        return await self._resources.__aexit__(*error)

    async def _end_all(self) -> None:
        """End every sandbox and every service; nothing is left but the launcher."""
        # In turns: with thousands at the same moment, the deadline of each would be that of all.
        turns = anyio.Semaphore(_ENDS_AT_ONCE)
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as ends:
                for box in list(self._boxes.values()):
                    if box.spec.lifecycle.durable and box.leave():
                        self._left = self._runtimes.native.leaving = True
                        ends.start_soon(box._end_network)
                    else:
                        ends.start_soon(self._end_in_turn, box, turns)
            self._burial.discard(self._frozen.close())
            await self._burial.finish()

    async def _start_native(self, durable: Durability) -> None:
        """Ahead of the first sandbox, so that its pool is filled.

        Where it cannot work, other runtimes may; whoever asks for it is told why it does not.
        """
        try:
            await self._runtimes.get("native")
        except (RefusedError, LaunchError) as error:
            if durable != "tied":
                raise
            log.warning("no native sandboxes here: %s", error.line())

    async def _end_in_turn(self, box: Box, turns: anyio.Semaphore) -> None:
        async with turns:
            await self._end_logged(box, EndReason.CLOSED, "the Edge ended")

    async def _stop_runtimes(self) -> None:
        point("stop:before-launcher")
        with anyio.CancelScope(shield=True):
            await self._runtimes.close()

    async def _leave(self) -> None:
        point("stop:before-directory")
        if self._left or self._runtimes.leftovers():
            self._directory.release()  # the next sweep finishes what could not be finished
        else:
            self._directory.remove()

    # --- durable ----------------------------------------------------------------------------------------------------

    def _find_directory(self) -> sweep.EdgeDirectory:
        """A new directory, or that of an Edge which has left durable sandboxes."""
        if self._durable:
            from proctor.sandbox import adoption

            if (found := adoption.take_over(self.home, self._adopt_only)) is not None:
                self._estate = adoption.Estate(found.path)
                return found
        made = sweep.EdgeDirectory.create(self.home)
        if self._durable:
            self._estate = adoption.Estate(made.path)
        return made

    async def _adopt(self) -> None:
        from proctor.sandbox import adoption, journal_reader

        self._count = self._directory.next_generation() * _IDS_PER_GENERATION
        self._journal.resume()
        await adoption.adopt(
            self, self._runtimes.native.held, journal_reader.fold(journal_reader.read(self._journal.path))
        )

    async def _take_over(self, box: Box, incarnation: Incarnation) -> None:
        """Serve the guest of an earlier Edge from now on. Raises SandboxLost; then the guest is to be killed."""
        from proctor.sandbox import adoption

        resources = box.spec.resources
        self._images.hold(box._stack)
        self._ledger.held[box.id] = Demand.of(resources, on_disk=incarnation.driver != "memory")
        self._boxes[box.id] = box
        box._live = incarnation
        try:
            with anyio.fail_after(incarnation.channel.hello_s + _HELLO_SLACK_S):
                await self._tasks.start(self._serve, box, incarnation)
        except BaseException as error:
            box._live = None
            self._boxes.pop(box.id, None)
            self._release(box.id)
            incarnation.close_counters()
            self._burial.discard(incarnation.descriptors())
            if isinstance(error, TimeoutError):
                raise SandboxLost("no answer", reason=EndReason.GUEST_LOST) from error
            raise
        box._carry(incarnation)
        assert box._commands is not None
        box._commands.settle()
        for command in box._commands.running():
            self._tasks.start_soon(box._commands.watch, command)
        if box._request is not None:
            self._requests[box._request] = box
        self.meters.adopted += 1
        self._wind_up(box, (box._ends_ms - adoption.boot_ms()) / 1000 if box._ends_ms else None)

    def _wind_up(self, box: Box, ttl_s: float | None) -> None:
        """Start a sandbox's clocks."""
        at, idle_s = anyio.current_time(), box.spec.lifecycle.idle_timeout_s
        if ttl_s is not None:
            box._timers.append(self._timers.at(at + ttl_s, box._ttl_due))
        if idle_s is not None:
            box._timers.append(self._timers.at(at + idle_s, box._idle_due))
        box._wind_pause()

    # --- what callers use -------------------------------------------------------------------------------------------

    async def create(
        self,
        spec: SandboxSpec | None = None,
        *,
        deadline_s: float | None = None,
        on_admitted: Callable[[], None] | None = None,
        services: Mapping[str, Service] | None = None,
        secrets: Mapping[str, Secret] | None = None,
        faults: FaultProfile | None = None,
        on_network: OnNetwork | None = None,
        request_id: str | None = None,
    ) -> Box:
        """Make a sandbox; it waits for room up to `deadline_s` (default: the Edge's). Close it, or use `async with`.

        `on_admitted` is called between the wait for room and the launch.
        `services` answer names (whatever the policy says); `secrets` are tokens inside, variables by these names, and
        values at their hosts; `faults` break connections on purpose; `on_network` gets every event (docs/network.md).
        They are kept over reset and fork. With a `request_id`, asking again gives the sandbox that the first call
        made, as long as it lives (a durable one also from a later Edge).
        Raises RefusedError when the machine cannot honour the spec or had no room in time, ImageError, LaunchError.
        """
        if self._token is None:
            raise InfraError("the Edge is not open", remedy="use it in an `async with`")
        spec = spec or SandboxSpec()
        check(spec)
        pool = self._pools.of(spec) if not (services or secrets or faults or on_network or request_id) else None
        if pool is not None:
            return await self._from_pool(pool, deadline_s, on_admitted)
        carry = carried(spec, services, secrets, faults, on_network, self._get_dialer)
        objects = {"services": services, "secrets": secrets, "faults": faults}
        check_durable(spec, durable_edge=self._durable, objects=objects)
        if request_id is None:
            return await self._create(spec, deadline_s, on_admitted, carry, None)
        while isinstance(known := self._requests.get(request_id), anyio.Event):
            await known.wait()
        if known is not None and known.ended is None:
            return known
        answered = self._requests[request_id] = anyio.Event()
        try:
            box = self._requests[request_id] = await self._create(spec, deadline_s, on_admitted, carry, request_id)
        except BaseException:
            del self._requests[request_id]
            raise
        finally:
            answered.set()
        return box

    async def _from_pool(self, pool: Pool, deadline_s: float | None, on_admitted: Callable[[], None] | None) -> Box:
        """One that is ready, whose clocks begin now; else one more that counts among the pool's."""
        box = await pool.take()
        if box is None:
            async with pool.beside() as count:
                carry = carried(pool.spec.spec, None, None, None, None, self._get_dialer)
                box = await self._create(pool.spec.spec, deadline_s, on_admitted, carry, None)
                count(box)
            return box
        box._last_use = anyio.current_time()
        self._wind_up(box, box.spec.lifecycle.ttl_s)
        try:
            if on_admitted is not None:
                on_admitted()
        except BaseException:
            self._spawn_end(box, EndReason.CLOSED, "not admitted")
            raise
        return box

    async def _create_ready(self, spec: SandboxSpec) -> Box:
        """For a pool: it takes room that is there now, or none, and its clocks do not run yet."""
        carry = carried(spec, None, None, None, None, self._get_dialer)
        return await self._create(spec, None, None, carry, None, for_pool=True)

    async def _create(
        self,
        spec: SandboxSpec,
        deadline_s: float | None,
        on_admitted: Callable[[], None] | None,
        carry: Carry | None,
        request_id: str | None,
        *,
        for_pool: bool = False,
    ) -> Box:
        self.meters.creating += 1
        try:
            image = await self._images.resolve(spec.image)
            stack = (*image.layers, *spec.layers)
            self._images.hold(stack)
            box_id = await self._reserve(spec, deadline_s, for_pool=for_pool)
            try:
                if on_admitted is not None:
                    on_admitted()
            except BaseException:
                self._release(box_id)
                raise
            return await self._open(box_id, spec, image, stack, carry, request_id, for_pool=for_pool)
        except ProctorError as error:
            self.meters.failures[f"{type(error).__name__}:{error.field or '-'}"] += 1
            raise
        except OSError as error:
            self.meters.failures[f"OSError:{error.errno}"] += 1
            raise InfraError(
                f"the machine refused: {error.strerror}", field=error.filename, remedy="see proctor doctor"
            ) from error
        finally:
            self.meters.creating -= 1

    async def ready(self, runtime: Runtime) -> RuntimeDriver:
        """Start a runtime before a sandbox needs it. Raises RefusedError or LaunchError where it cannot work."""
        return await self._runtimes.get(runtime)

    @property
    def burying(self) -> bool:
        """Whether something of ended sandboxes is still there."""
        return self._burial.busy

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The living sandboxes, but for those that are ready in a pool."""
        return self._pools.handed_out(self._boxes.values())

    async def snapshot(self) -> dict[str, Any]:
        """The numbers of this moment, as JSON values; `metrics.exposition` shows them to Prometheus."""
        from proctor.sandbox._snapshot import take

        return await take(self)

    async def metrics(self) -> bytes:
        """The numbers of this moment in Prometheus' text format."""
        from proctor.sandbox.metrics import exposition

        return exposition([await self.snapshot()])

    async def wait_change(self) -> None:
        """Wait until a sandbox has ended and nothing of it is left."""
        await self._changed.wait()

    async def drop(self, layer: Layer) -> None:
        """Free a layer that `snapshot` made, once no sandbox uses it any more. Unknown layers are ignored."""
        self._burial.discard(self._frozen.drop(layer))

    def _get_dialer(self) -> Dialer:
        """One for all sandboxes: its threads for slow names are bounded for the whole Edge."""
        if self._dialer is None:
            from proctor.sandbox.net.dialer import Dialer

            self._dialer = Dialer()
        return self._dialer

    async def _reserve(self, spec: SandboxSpec, deadline_s: float | None = None, *, for_pool: bool = False) -> str:
        """Wait for room; returns the id of the sandbox that may now be opened."""
        self._count += 1
        box_id = f"{self.id}-{self._count}"
        runtime = await self._runtimes.get(spec.runtime)
        achieved(spec, runtime.tier)
        driver = runtime.disk_driver(spec.resources)
        with self.meters.admission.timed():
            demand = Demand.of(spec.resources, on_disk=driver != "memory")
            if for_pool:
                self._admit_now(box_id, demand)
            else:
                await self._admit(box_id, demand, deadline_s)
        return box_id

    async def _open(
        self,
        box_id: str,
        spec: SandboxSpec,
        image: Image,
        stack: tuple[Layer, ...],
        carry: Carry | None,
        request_id: str | None = None,
        *,
        for_pool: bool = False,
    ) -> Box:
        """Start a sandbox that has room. If it fails, the room is free again."""
        try:
            self._frozen.use(stack)
        except BaseException:
            self._release(box_id)
            raise
        boundary = carry(box_id, self._tasks.start_soon) if carry is not None else None
        box = Box(self, box_id, spec, image, stack, await self._runtimes.get(spec.runtime), boundary)
        box._request = request_id
        if spec.lifecycle.durable:
            try:
                box._commands = self._estate.open_box(box, request_id)
                self._images.lease(box_id, stack, self._directory.path / doorbell.LOCK)
            except BaseException:
                self._burial.discard(self._frozen.release(stack))
                self._release(box_id)
                raise
            point("create:after-record")
        self._boxes[box_id] = box
        with self.meters.launch.timed():
            await box._begin()
        self.meters.created += 1
        if not for_pool:
            self._wind_up(box, spec.lifecycle.ttl_s)
        return box

    # --- admission --------------------------------------------------------------------------------------------------

    async def _admit(self, box_id: str, demand: Demand, deadline_s: float | None) -> None:
        """Wait, first come first served, until `demand` fits; refuse at once what never can."""
        machine = self._machine()
        refusal = self._ledger.impossible(demand, machine)
        if refusal is not None and refusal.field == "resources.disk_mb" and await self._evict_layers(demand):
            machine = self._machine(fresh=True)
            refusal = self._ledger.impossible(demand, machine)
        if refusal is not None:
            raise refusal
        wait = self._queue_deadline_s if deadline_s is None else deadline_s
        obstacle: tuple[str, str] | None = ("edge", "others wait before it")
        with anyio.move_on_after(wait):
            async with self._queue:
                while True:
                    self._ledger.frozen_mb = self._frozen.memory_mb()
                    obstacle = self._ledger.obstacle(demand, machine)
                    if obstacle is None:
                        self._ledger.held[box_id] = demand
                        return
                    if obstacle[0] == "resources.disk_mb" and await self._evict_layers(demand):
                        machine = self._machine(fresh=True)
                        continue
                    self._freed = anyio.Event()
                    self._pools.give_way()
                    self._burial.hurry()  # what has ended and is not buried yet holds room
                    # Promises change by our own doing; the machine's free memory and disk change by that of others,
                    # which nothing announces.
                    with anyio.move_on_after(_MACHINE_RECHECK_S):
                        await self._freed.wait()
                    self._ledger.disk_used_mb = self._disk_used_mb()
                    machine = self._machine()
        assert obstacle is not None
        raise RefusedError(
            f"no room within {wait:g} s: {obstacle[1]}",
            field=obstacle[0],
            remedy="ask for less, run fewer at a time, or wait longer",
        )

    def _admit_now(self, box_id: str, demand: Demand) -> None:
        """For a pool, which never waits, and takes nothing that somebody waits for."""
        obstacle = self._ledger.obstacle(demand, self._machine())
        if obstacle is None and self._queue.locked():
            obstacle = ("edge", "others wait before it")
        if obstacle is not None:
            raise RefusedError(f"no room for a ready sandbox: {obstacle[1]}", field=obstacle[0])
        self._ledger.held[box_id] = demand

    async def _evict_layers(self, demand: Demand) -> bool:
        """The disk is short: make room in the layer cache, if it is on that disk. False when nothing could go."""
        wanted = demand.disk_mb + self._ledger.held.disk_mb - self._ledger.disk_used_mb
        wanted += self._ledger.policy.disk_headroom_mb
        freed = await anyio.to_thread.run_sync(self._images.make_room, wanted << 20, self.home)
        if freed:
            log.warning("the disk was short: evicted %d MB of layers that were used longest ago", freed >> 20)
        return freed > 0

    def _machine(self, *, fresh: bool = False) -> Machine:
        """The machine's facts, read again when they are older than a moment."""
        at = anyio.current_time()
        if fresh or at - self._machine_read_at > _MACHINE_FRESH_S:
            self._machine_facts = Machine.read(self.home)
            self._machine_read_at = at
        return self._machine_facts

    def _release(self, box_id: str) -> None:
        self._ledger.held.drop(box_id)
        self._freed.set()

    def _disk_used_mb(self) -> int:
        lives = (box._live for box in self._boxes.values())
        return sum(live.stats().disk_bytes for live in lives if live is not None and live.driver != "memory") >> 20

    # --- incarnations -----------------------------------------------------------------------------------------------

    async def _launch(self, box: Box, number: int, stack: tuple[Layer, ...]) -> Incarnation:
        """Start a guest for `box`. Raises LaunchError; then nothing of it is left."""
        runtime = await self._runtimes.get(box.spec.runtime)
        order = Order(
            box.id,
            number,
            box.spec,
            box.image,
            stack,
            self._paths(box, stack),
            lambda: self._promise_disk(box.id, box.spec.resources),
            durable_until_ms=box._ends_ms if box._commands is not None else None,
            first_exec_id=box._commands.next_id if box._commands is not None else 1,
        )
        with self._burial.launching():
            self._journal.write(
                box.id, State.INTENT, incarnation=number, image=box.image.ref, labels=dict(box.spec.labels) or None
            )
            point("create:after-intent")
            incarnation = await runtime.launch(order)
            point("create:after-launch")
            return await self._greet(box, incarnation)

    def _promise_disk(self, box_id: str, resources: Resources) -> None:
        """A sandbox that was admitted with its disk in memory must have it on the machine's disk."""
        demand = Demand.of(resources, on_disk=True)
        self._ledger.held.drop(box_id)
        obstacle = self._ledger.obstacle(demand, self._machine())
        self._ledger.held[box_id] = demand
        if obstacle is not None:
            raise RefusedError(f"no room for a disk image: {obstacle[1]}", field=obstacle[0], remedy="free disk space")

    async def _greet(self, box: Box, incarnation: Incarnation) -> Incarnation:
        """Wait for the guest's HELLO and write CREATED."""
        try:
            with anyio.fail_after(incarnation.channel.hello_s + _HELLO_SLACK_S):
                await self._tasks.start(self._serve, box, incarnation)
            point("create:after-hello")
            self._journal.write(
                box.id,
                State.CREATED,
                incarnation=incarnation.number,
                slot=incarnation.slot,
                pid=incarnation.pid,
                image=box.image.ref,
            )
        except BaseException as error:
            words = incarnation.last_words()
            with anyio.CancelScope(shield=True):
                try:
                    await self._kill(incarnation, incarnation.kill)
                finally:
                    self._retire(incarnation)
            if isinstance(error, TimeoutError):
                raise LaunchError(f"{box.id}: the guest did not answer in time") from error
            if isinstance(error, SandboxLost):
                raise LaunchError(f"{box.id}: the guest ended at once: {words or error.message}") from error
            raise
        point("create:after-created")
        return incarnation

    async def _serve(self, box: Box, incarnation: Incarnation, *, task_status: TaskStatus[None]) -> None:
        """Run the channel of one incarnation; its end, if nobody asked for it, is the sandbox's."""
        status = Started(task_status)
        detail = "the guest's channel ended"
        try:
            await incarnation.channel.run(task_status=status)
        except (SandboxLost, GuestProtocolError) as error:
            if not status.done:
                raise
            detail = error.message
        if box._live is incarnation and box.ended is None:
            lost = incarnation.channel.lost
            # A limit explains a guest that is gone, not one that does not answer or lies.
            limit = incarnation.limit_that_ended_it() if incarnation.channel.hung_up else None
            reason = limit or EndReason.GUEST_LOST
            detail = lost.message if lost is not None else detail
            self._spawn_end(box, reason, detail)

    async def _kill(self, incarnation: Incarnation, how: Callable[[], Awaitable[Ended]]) -> Ended:
        """Kill an incarnation (`how`: its `kill` or `freeze`); whether that worked or not, `_retire` it next."""
        point("close:after-closing")
        self._burial.slots.add(incarnation.slot)
        ended = await how()
        point("close:after-kill")
        return ended

    def _retire(self, incarnation: Incarnation) -> Stats | None:
        """Take the last counters of a killed incarnation (None: they are gone). The rest goes in the background."""
        try:
            return incarnation.stats()
        except (FileNotFoundError, ProcessLookupError):
            return None  # a launcher that died took its groups along
        finally:
            incarnation.close_counters()
            self._burial.put(Waste(incarnation=incarnation))

    def _forget(self, box: Box) -> None:
        """The sandbox has ended: once what it held is really gone, its room is free again."""
        for timer in (*box._timers, box._pause_timer):
            if timer is not None:
                self._timers.cancel(timer)
        self._pools.forget(box)
        freed = self._frozen.release(box._stack)
        self._burial.put(Waste(descriptors=tuple(freed), box=box))

    def _paths(self, box: Box, stack: tuple[Layer, ...]) -> tuple[Path | int, ...]:
        paths = tuple(self._frozen.stacked(layer) for layer in stack)
        if box._boundary is None:
            return paths
        folder = self._directory.path / "trust" / box.id
        return self._names.around(paths, len(box.image.layers), box._trust(folder, paths))

    # --- services ---------------------------------------------------------------------------------------------------

    def _spawn_end(self, box: Box, reason: EndReason, detail: str) -> None:
        """End a sandbox from inside the Edge, without waiting for it."""
        self._tasks.start_soon(self._end_logged, box, reason, detail)

    async def _pause_logged(self, box: Box) -> None:
        with suppress(SandboxLost, RefusedError):  # ended, or in use again
            try:
                await box.pause()
            except (InfraError, OSError) as error:
                log.warning("pausing %s: %s", box.id, error)

    async def _end_logged(self, box: Box, reason: EndReason, detail: str) -> None:
        try:
            await box._end(reason, detail)
        except (ProctorError, OSError) as error:
            log.warning("the end of %s: %s", box.id, error)

    def _buried(self, box: Box) -> None:
        """Nothing of an ended sandbox is left."""
        point("close:after-upper")
        self._note(box.id, State.CLOSED, reason=box.ended)
        self.meters.ends[str(box.ended)] += 1
        box._forget_trust()
        if box._commands is not None:
            self._estate.remove(box.id)
            self._images.release(box.id)
        if box._request is not None and self._requests.get(box._request) is box:
            del self._requests[box._request]
        point("close:after-closed")
        self._boxes.pop(box.id, None)
        self._release(box.id)
        self._changed.set()
        self._changed = anyio.Event()

    def _note(self, box_id: str, state: State, **fields: Any) -> None:
        """Journal an end. It happens whether or not it can be written down; a later sweep finds nothing to do."""
        try:
            self._journal.write(box_id, state, **fields)
        except InfraError as error:
            log.warning("%s", error.line())

    async def _sweep(self) -> None:
        """Every `sweep_interval_s`: dead Edges, slots of ours that nobody owns, and the journal to the disk."""
        while True:
            await anyio.sleep(self._sweep_interval_s)
            try:
                lives = [box._live for box in self._boxes.values()]
                known = frozenset({live.slot for live in lives if live is not None} | self._burial.slots)
                for runtime in self._runtimes.started:
                    for slot in await runtime.sweep(known):
                        log.warning("removed slot %s, which nobody owned", slot)
                await anyio.to_thread.run_sync(self._journal.flush)
            except (InfraError, OSError) as error:
                log.warning("sweep: %s (will be tried again)", error)


@asynccontextmanager
async def create(spec: SandboxSpec | None = None, *, edge: Edge | None = None, **options: Any) -> AsyncIterator[Box]:
    """A sandbox for the length of an `async with`: on `edge`, else on the Edge that is open here, else on its own.
    `options` are those of `Edge.create`."""
    edge = edge or _current.get()
    if edge is not None:
        async with await edge.create(spec, **options) as box:
            yield box
        return
    async with Edge(pool_size=1) as own, await own.create(spec, **options) as box:
        yield box
