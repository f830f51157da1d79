"""What ended incarnations leave, removed in the background: groups, descriptors, and with them disks.

Everything is handed over at once and stays counted (its slot as owned, its sandbox as living, its room as taken) until
it is really gone. Several endings are buried together, which costs less than each for itself.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from proctor.common import InfraError
from proctor.sandbox._faults import point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from proctor.sandbox.box import Box
    from proctor.sandbox.runtimes.contract import Incarnation

log = logging.getLogger(__name__)

_PAUSE_S = 0.005
_DELAY_S = 0.02


@dataclass(frozen=True, slots=True)
class Waste:
    """Something to bury: an ended incarnation, descriptors, an ended sandbox."""

    incarnation: Incarnation | None = None
    descriptors: tuple[int, ...] = ()
    box: Box | None = None


class Burial:
    """The undertaker of one Edge. `run` is its task; `finish` ends it once all is buried."""

    def __init__(self, *, buried: Callable[[Box], None], urgent: Callable[[], bool]) -> None:
        """`buried` is told of each sandbox of which nothing is left; `urgent`: whether somebody waits for room."""
        self.slots: set[str] = set()
        """Slots of incarnations that are ending or not buried yet."""
        self._tell = buried
        self._urgent = urgent
        self._waste_in, self._waste = anyio.create_memory_object_stream[Waste](float("inf"))
        self._launches = 0
        self._hurry = anyio.Event()
        self._ending = False
        self._unburied = 0
        self._done = anyio.Event()

    @property
    def busy(self) -> bool:
        """Whether something is waiting to be buried, or is being buried."""
        return self._unburied > 0

    def put(self, waste: Waste) -> None:
        """Bury this soon."""
        self._waste_in.send_nowait(waste)
        self._unburied += 1

    def discard(self, descriptors: Iterable[int]) -> None:
        """Close descriptors: the last one of a file system frees all of it, which may take long."""
        self.put(Waste(descriptors=tuple(descriptors)))

    @contextmanager
    def launching(self) -> Iterator[None]:
        """While this is open somebody waits for a launch, and burials are put off for a moment."""
        self._launches += 1
        try:
            yield
        finally:
            self._launches -= 1
            if not self._launches:
                self._hurry.set()

    def hurry(self) -> None:
        """Somebody needs the room of what is to be buried."""
        self._hurry.set()

    async def finish(self) -> None:
        """Bury what is left; nothing can be put any more."""
        self._ending = True
        self._hurry.set()
        self._waste_in.close()
        await self._done.wait()

    async def run(self) -> None:
        """Bury until `finish`."""
        with self._waste:
            async for first in self._waste:
                await self._wait_lull()
                batch = [first]
                while self._waste.statistics().current_buffer_used:
                    batch.append(self._waste.receive_nowait())
                await self._bury(batch)
                self._unburied -= len(batch)
        self._done.set()

    async def _wait_lull(self) -> None:
        """Burials take locks of the kernel that launches need: let the launches go first, for a moment."""
        if self._ending or self._urgent():
            return
        await anyio.sleep(_PAUSE_S)
        if self._launches:
            self._hurry = anyio.Event()
            with anyio.move_on_after(_DELAY_S):
                await self._hurry.wait()

    async def _bury(self, batch: list[Waste]) -> None:
        ended = [waste.incarnation for waste in batch if waste.incarnation is not None]
        descriptors = [descriptor for waste in batch for descriptor in waste.descriptors]
        descriptors += [descriptor for incarnation in ended for descriptor in incarnation.descriptors()]
        if ended or descriptors:
            for incarnation in await anyio.to_thread.run_sync(_remove, ended, descriptors):
                await _remove_busy(incarnation)
        self.slots.difference_update(incarnation.slot for incarnation in ended)
        for waste in batch:
            if waste.box is not None:
                self._tell(waste.box)


def _remove(ended: list[Incarnation], descriptors: list[int]) -> list[Incarnation]:
    """Remove what ended incarnations leave; returns those for which that takes longer. Close descriptors. Blocking."""
    busy = []
    for incarnation in ended:
        if not incarnation.remove_now():
            busy.append(incarnation)
        point("close:after-cgroup")
    for descriptor in descriptors:
        os.close(descriptor)
    return busy


async def _remove_busy(incarnation: Incarnation) -> None:
    """What a dying process was still in."""
    try:
        await incarnation.remove()
    except InfraError as error:
        log.warning("%s (the sweep will try again)", error.line())
