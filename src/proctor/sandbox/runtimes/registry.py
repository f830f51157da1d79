"""Which runtimes there are, and those that one Edge has started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from proctor.common import ProctorError
from proctor.sandbox.runtimes.capabilities import capabilities_of
from proctor.sandbox.runtimes.docker.runtime import DockerRuntime
from proctor.sandbox.runtimes.native import Durability, NativeRuntime
from proctor.sandbox.runtimes.runsc import RunscRuntime

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox.runtimes.contract import RuntimeDriver


_BUILT_ON = {"runsc": ("native",)}


class Runtimes:
    """The runtimes of one Edge, each started when it is first asked for."""

    def __init__(self, edge_id: str, home: Path, *, pool_size: int, durable: Durability = "tied") -> None:
        self._edge_id = edge_id
        self.native = NativeRuntime(edge_id, home, pool_size=pool_size, durable=durable)
        self._drivers: dict[str, RuntimeDriver] = {
            "native": self.native,
            "runsc": RunscRuntime(self.native, home),
            "docker": DockerRuntime(edge_id, home),
        }
        self._started: dict[str, RuntimeDriver] = {}
        self._starting = anyio.Lock()

    @property
    def started(self) -> tuple[RuntimeDriver, ...]:
        """Those that are in use."""
        return tuple(self._started.values())

    async def get(self, name: str) -> RuntimeDriver:
        """The runtime called `name`, ready to launch. Raises RefusedError or LaunchError where it does not work."""
        driver = self._started.get(name)
        return driver if driver is not None else await self._start(name)

    async def _start(self, name: str) -> RuntimeDriver:
        async with self._starting:
            if name in self._started:
                return self._started[name]
            driver = self._drivers[capabilities_of(name).runtime]
            for one in (*_BUILT_ON.get(name, ()), name):
                if one not in self._started:
                    await self._drivers[one].start()
                    self._started[one] = self._drivers[one]
            return driver

    async def close(self) -> None:
        """End all that were started; every one is tried, the first failure is raised."""
        failure: ProctorError | None = None
        for driver in reversed(self.started):
            try:
                await driver.close()
            except ProctorError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def leftovers(self) -> bool:
        """After `close`: whether something is left for the next sweep."""
        return any([driver.leftovers() for driver in self.started])
