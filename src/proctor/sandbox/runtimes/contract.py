"""The seam between an Edge and the runtimes that run its sandboxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from proctor.sandbox.contract import EndReason, Image, Layer, Resources, SandboxSpec, Stats, Tier
    from proctor.sandbox.native.channel import GuestChannel


@dataclass(frozen=True, slots=True)
class Order:
    """One guest to be started: incarnation `number` of the sandbox `box_id`."""

    box_id: str
    number: int
    spec: SandboxSpec
    image: Image
    stack: tuple[Layer, ...]
    """What is below the private upper, lowest first."""
    paths: tuple[Path | int, ...]
    """The same layers as paths, or as open directories (frozen uppers)."""
    on_disk: Callable[[], None]
    """To be called when the upper needs the machine's disk although it was admitted with one in memory; may refuse."""
    durable_until_ms: int | None = None
    """None: tied to the Edge. Otherwise it outlives it, until this time of CLOCK_BOOTTIME at most (0: no end)."""
    first_exec_id: int = 1
    """Above the ids of all commands of earlier incarnations, where those are remembered."""

    @property
    def name(self) -> str:
        """A name of this incarnation, unique on the machine."""
        return f"{self.box_id}-{self.number}"


class Incarnation(Protocol):
    """One life of a sandbox's processes, from launch to the last counter, whatever runs them."""

    @property
    def number(self) -> int: ...
    @property
    def channel(self) -> GuestChannel: ...
    @property
    def driver(self) -> str:
        """Where the upper lives: `memory`, `loop`, or the runtime's own word for its disk."""
        ...

    @property
    def mechanisms(self) -> Mapping[str, str]:
        """What enforces each limit, for the receipt."""
        ...

    @property
    def slot(self) -> str:
        """The runtime's name for it, unique within the Edge."""
        ...

    @property
    def pid(self) -> int | None:
        """A process of the machine that is there as long as it is, for watching from outside."""
        ...

    @property
    def place(self) -> Path | None:
        """Where the upper is on the machine, if it has a path there that outlives it."""
        ...

    def stats(self) -> Stats:
        """The kernel's counters. Raises FileNotFoundError or ProcessLookupError when they are gone."""
        ...

    def limit_that_ended_it(self) -> EndReason | None:
        """By the kernel's own count: the limit for which a guest is gone that nobody has killed. None: no limit."""
        ...

    async def open_upper(self) -> int:
        """A new descriptor of a directory that holds what was changed, as an overlay's upper."""
        ...

    async def freeze(self) -> tuple[int, int]:
        """Kill everything; two descriptors of what was changed: the directory, and what keeps its file system alive."""
        ...

    async def pause(self) -> int:
        """Stop every process and give back what memory can be; the bytes given back. Raises InfraError."""
        ...

    async def resume(self) -> None:
        """Let every process go on."""
        ...

    async def kill(self) -> None:
        """Kill the guest and every process. Returns when they are gone."""
        ...

    def last_words(self) -> str:
        """What it said of its own failure, if it can say anything."""
        ...

    def close_counters(self) -> None:
        """The last counters have been read."""
        ...

    def remove_now(self) -> bool:
        """Remove what is left of an ended one, if that can be done at once. Blocking; False: `remove` has to."""
        ...

    async def remove(self) -> None:
        """Remove what is left of an ended one, waiting for what is not quite dead."""
        ...

    def descriptors(self) -> tuple[int, ...]:
        """What is to be closed when all else is gone."""
        ...


class RuntimeDriver(Protocol):
    """Starts guests for one Edge. Made by `registry`, started once, closed after all of its sandboxes."""

    @property
    def tier(self) -> Tier:
        """What it achieves on this machine. Known once it has started."""
        ...

    @property
    def kernel(self) -> str:
        """What answers the sandboxes' system calls. Known once it has started."""
        ...

    async def start(self) -> None:
        """Get ready, and remove what dead Edges of the same home left with this runtime.

        Raises RefusedError or LaunchError when the machine does not allow it; then nothing is left.
        """
        ...

    def disk_driver(self, resources: Resources) -> str:
        """Where the upper of a sandbox with these resources will live; refuses what cannot be honoured."""
        ...

    async def launch(self, order: Order) -> Incarnation:
        """Start a guest. Raises LaunchError; then nothing of it is left."""
        ...

    async def sweep(self, known: frozenset[str]) -> list[str]:
        """Remove what nobody owns and name it; `known`: the slots of sandboxes that live or are being ended."""
        ...

    async def close(self) -> None:
        """End what the runtime itself runs. Idempotent."""
        ...

    def leftovers(self) -> bool:
        """After `close`: whether something could not be removed, which the next sweep has to do."""
        ...
