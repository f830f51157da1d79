"""Runtime `docker`: containers of a Docker Engine on this machine."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from proctor.common import InfraError, RefusedError
from proctor.sandbox import sweep
from proctor.sandbox._incarnation import Counters
from proctor.sandbox._plans import make_plan
from proctor.sandbox.contract import LaunchError, Tier
from proctor.sandbox.receipts import kernel
from proctor.sandbox.runtimes.docker.attach import AttachedChannel
from proctor.sandbox.runtimes.docker.engine import Engine, EngineError, socket_path
from proctor.sandbox.runtimes.docker.group import EngineGroup
from proctor.sandbox.runtimes.docker.images import StackImages
from proctor.sandbox.runtimes.docker.incarnation import Container
from proctor.sandbox.runtimes.docker.profile import container

if TYPE_CHECKING:
    from proctor.sandbox.contract import Resources
    from proctor.sandbox.runtimes.contract import Order

_EDGE, _HOME = "dev.proctor.edge", "dev.proctor.home"
_HELLO_S: Final = 30.0
_REMEDY: Final = "start a Docker Engine with storage driver overlay2 on this machine, or set DOCKER_HOST=unix:///path"


class DockerRuntime:
    """The containers of one Edge."""

    def __init__(self, edge_id: str, home: Path) -> None:
        self._edge_id = edge_id
        self._home = home
        self._tag = sweep.home_tag(home)
        self._engine: Engine | None = None
        self._version = ""
        self._tier = Tier.NAMESPACES
        self._launching: set[str] = set()
        self._frozen: dict[str, Path] = {}

    @property
    def tier(self) -> Tier:
        """Namespaces; with ids of their own where the engine gives containers a user namespace."""
        return self._tier

    @property
    def kernel(self) -> str:
        """The machine's own, under the engine."""
        return f"{kernel()}, Docker {self._version}"

    @property
    def engine(self) -> Engine:
        """The engine, once it has started."""
        assert self._engine is not None
        return self._engine

    async def start(self) -> None:
        """Find the engine, see whether it is one that we can use, remove what dead Edges of this home left in it."""
        self._engine = Engine(socket_path())
        try:
            info = await self._look()
            self._version = f"{info['ServerVersion']} ({info['Driver']})"
            room = self._home / "edges" / self._edge_id / "docker"
            room.mkdir(mode=0o700, exist_ok=True)
            self._images = StackImages(self.engine, f"proctor-{self._tag}", room)
            await self._sweep_dead()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._engine.aclose()
                self._engine = None
            raise

    async def _look(self) -> Any:
        try:
            info = await self.engine.call("GET", "/info")
        except InfraError as error:
            raise RefusedError(error.message, field="runtime", remedy=_REMEDY) from error
        if info.get("Driver") != "overlay2":
            raise RefusedError(
                f"the engine keeps its images with {info.get('Driver')}, not overlay2", field="runtime", remedy=_REMEDY
            )
        if any("userns" in option or "rootless" in option for option in info.get("SecurityOptions") or ()):
            raise RefusedError(
                "the engine shifts user ids (userns-remap or rootless), so disks would have wrong owners",
                field="runtime",
                remedy="use native, or an engine without it",
            )
        if not os.access(info["DockerRootDir"], os.R_OK | os.X_OK):
            raise RefusedError(
                f"the engine's disk at {info['DockerRootDir']} cannot be read", field="runtime", remedy="run as root"
            )
        return info

    def disk_driver(self, resources: Resources) -> str:
        """The engine's own, on the machine's disk."""
        return "engine"

    # --- launching --------------------------------------------------------------------------------------------------

    async def launch(self, order: Order) -> Container:
        """Make a container, attach, start it."""
        name = f"proctor-{order.name}"
        self._launching.add(name)
        try:
            return await self._launch(order, name)
        except BaseException as error:
            with anyio.CancelScope(shield=True), suppress(InfraError):
                await self._remove(name)
            if isinstance(error, EngineError):
                raise LaunchError(f"{order.name}: {error.message}") from error
            raise
        finally:
            self._launching.discard(name)

    async def _launch(self, order: Order, name: str) -> Container:
        image = await self._images.get(order.paths)
        plan = make_plan(order.name, order.spec, order.image, order.paths, None)
        body = container(order.spec, plan, image, {_EDGE: self._edge_id, _HOME: self._tag})
        await self.engine.call("POST", "/containers/create", body=body, query={"name": name})
        attached = await self.engine.attach(name)
        try:
            await self.engine.call("POST", f"/containers/{name}/start")
            facts = await self.engine.call("GET", f"/containers/{name}/json")
            return self._container(order, name, facts, attached)
        except BaseException:
            attached.close()
            raise

    def _container(self, order: Order, name: str, facts: Any, attached: Any) -> Container:
        pid = facts["State"]["Pid"]
        if not pid:
            raise LaunchError(f"container {name} ended at once: {facts['State'].get('Error') or 'no reason given'}")
        group = EngineGroup.of(pid, name)
        pidfd = os.pidfd_open(pid)
        try:
            counters = Counters(group, -1)
        except BaseException:
            os.close(pidfd)
            raise
        resources = order.spec.resources
        channel = AttachedChannel(attached, attribution=counters)
        channel.hello_s = _HELLO_S
        made = Container(
            number=order.number,
            slot=name,
            pid=pid,
            pidfd=pidfd,
            upper=Path(facts["GraphDriver"]["Data"]["UpperDir"]),
            engine=self.engine,
            attached=channel,
            group=group,
            counters=counters,
            mechanisms=_mechanisms(group, resources, self._version),
            disk_bytes=resources.disk_mb << 20,
            on_freeze=lambda frozen: self._keep(order, frozen),
        )
        channel.beside.append(made.watch_disk)
        channel.after = made.look_back
        return made

    # --- frozen disks -----------------------------------------------------------------------------------------------

    async def _keep(self, order: Order, frozen: Container) -> None:
        """What a container changed becomes an image for the next ones, and a layer while somebody holds it open."""
        await self._images.commit(order.paths, frozen.upper, frozen.slot, frozen.slot)
        self._frozen[frozen.slot] = frozen.upper

    async def _drop_unused(self) -> None:
        """Remove frozen disks that nobody holds open any more."""
        held = await anyio.to_thread.run_sync(_open_directories)
        for name, upper in list(self._frozen.items()):
            if str(upper) not in held:
                await self._remove(name)
                await self._images.forget(name)
                del self._frozen[name]

    # --- cleaning up ------------------------------------------------------------------------------------------------

    async def sweep(self, known: frozenset[str]) -> list[str]:
        """Containers of dead Edges, and of this one that nobody owns."""
        await self._drop_unused()
        await self._sweep_dead()
        gone = []
        for name in await self._names(f"{_EDGE}={self._edge_id}"):
            if name not in known and name not in self._frozen and name not in self._launching:
                await self._remove(name)
                gone.append(name)
        return gone

    async def _sweep_dead(self) -> None:
        for one in await self._containers(f"{_HOME}={self._tag}"):
            edge = one["Labels"].get(_EDGE, "")
            if edge != self._edge_id and sweep.owner(self._home / "edges" / edge) is None:
                name = one["Names"][0].lstrip("/")
                await self._remove(name)
                await self._images.forget(name)

    async def close(self) -> None:
        """Remove every container and every image that was made while the Edge lived."""
        if self._engine is None:
            return
        try:
            for name in await self._names(f"{_EDGE}={self._edge_id}"):
                await self._remove(name)
                if name in self._frozen:
                    await self._images.forget(name)
            await self._images.close()
        finally:
            await self._engine.aclose()
            self._engine = None
            shutil.rmtree(self._home / "edges" / self._edge_id / "docker", ignore_errors=True)

    def leftovers(self) -> bool:
        """What could not be removed is found by its label, whatever becomes of the Edge's directory."""
        return False

    async def _containers(self, label: str) -> list[Any]:
        filters = f'{{"label":["{label}"]}}'
        found = await self.engine.call("GET", "/containers/json", query={"all": "1", "filters": filters})
        return list(found or ())

    async def _names(self, label: str) -> list[str]:
        return [one["Names"][0].lstrip("/") for one in await self._containers(label)]

    async def _remove(self, name: str) -> None:
        await self.engine.remove(name)


def _mechanisms(group: EngineGroup, resources: Resources, version: str) -> dict[str, str]:
    cgroup = f"cgroup v{group.layout.version}, made by the engine"
    return {
        "memory": cgroup,
        "cpus": cgroup,
        "pids": cgroup,
        "disk": f"watched: more than {resources.disk_mb} MB ends the sandbox",
        "disk_inodes": "none",
        "docker": version,
    }


def _open_directories() -> frozenset[str]:
    """Targets of this process's descriptors. Blocking."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return frozenset(found)
