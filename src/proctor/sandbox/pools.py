"""Warm pools: sandboxes that are ready before somebody asks.

A pool has a spec and three numbers. When fewer than `low` are ready, it makes more until `high` are (a closed loop:
what is being made counts). `cap` bounds what exists of it altogether: ready, in the making, and handed out; the pool
makes none beyond. A sandbox that was handed out never comes back. Ready ones hold the machine's room as any other, and
give way when somebody waits.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from proctor.common import ConfigError, ProctorError, RefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from proctor.sandbox.box import Box
    from proctor.sandbox.contract import SandboxSpec
    from proctor.sandbox.edge import Edge

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What is kept ready: `Edge(pools=[PoolSpec(spec, low=2, high=8, cap=32)])`."""

    spec: SandboxSpec
    low: int
    high: int
    cap: int

    def check(self) -> None:
        """Raise ConfigError or RefusedError, naming the field."""
        if not 0 < self.low <= self.high <= self.cap:
            raise ConfigError(
                f"0 < low <= high <= cap does not hold for {self.low}, {self.high}, {self.cap}",
                field="pools",
                remedy="for example low=2, high=8, cap=32",
            )
        if self.spec.lifecycle.durable:
            raise RefusedError("a pool ends with its Edge", field="lifecycle.durable", remedy="keep tied ones ready")


@dataclass(slots=True)
class Level:
    """How full a pool is. A pure value: `missing` is the whole control law."""

    ready: int = 0
    making: int = 0
    taken: int = 0
    """Handed out and still alive."""
    filling: bool = False
    """Between `low` and `high` on the way up; on the way down nothing is made."""

    def missing(self, spec: PoolSpec) -> int:
        """How many are to be begun now."""
        present = self.ready + self.making
        if present < spec.low:
            self.filling = True
        if present >= spec.high:
            self.filling = False
        if not self.filling:
            return 0
        return max(min(spec.high - present, spec.cap - present - self.taken), 0)


@dataclass(slots=True)
class Backoff:
    """How long to leave a machine alone that could not make one."""

    failures: int = 0
    until: float = 0.0

    def failed(self, now: float) -> float:
        """One more failure in a row; returns the pause, seconds."""
        pause = min(_FIRST_PAUSE_S * 2.0**self.failures, _LONGEST_PAUSE_S)
        self.failures = min(self.failures + 1, 10)
        self.until = max(self.until, now + pause)
        return pause

    def worked(self) -> None:
        """Begin anew."""
        self.failures = 0


class Pool:
    """The ready sandboxes of one spec."""

    def __init__(self, edge: Edge, spec: PoolSpec) -> None:
        spec.check()
        self.spec = spec
        self.level = Level()
        self.hits = self.misses = 0
        self._edge = edge
        self._ready: list[Box] = []
        self._taken: set[Box] = set()
        self._beside = 0
        self._waiting = 0
        self._made = anyio.Event()
        self._backoff = Backoff()
        self._stir = anyio.Event()

    def as_json(self) -> dict[str, int]:
        """For the metrics."""
        level = self.level
        return {
            "ready": level.ready,
            "making": level.making,
            "taken": level.taken,
            "low": self.spec.low,
            "high": self.spec.high,
            "cap": self.spec.cap,
            "hits": self.hits,
            "misses": self.misses,
        }

    def __contains__(self, box: object) -> bool:
        return box in self._ready

    async def take(self) -> Box | None:
        """A ready one for its first and only user, if need be once it is made; None when all are spoken for."""
        while self._ready or self.level.making > self._waiting:
            if not self._ready:
                await self._wait_made()
                continue
            box = self._ready.pop(0)
            self._taken.add(box)
            self._count()
            if box.ended is not None or await self._is_stale(box) or box.ended is not None:
                self._edge._tasks.start_soon(box.close)
                continue
            self.hits += 1
            return box
        self.misses += 1
        return None

    async def _wait_made(self) -> None:
        self._waiting += 1
        try:
            await self._made.wait()
        finally:
            self._waiting -= 1

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[Callable[[Box], None]]:
        """While one is made for somebody because none was ready. It counts from the start until it ends."""
        self._beside += 1
        self._count()
        try:
            yield self._taken.add
        finally:
            self._beside -= 1
            self._count()

    def forget(self, box: Box) -> None:
        """`box` has ended, whosever it was."""
        self._taken.discard(box)
        if box in self._ready:
            self._ready.remove(box)
        self._count()

    def give_way(self) -> int:
        """Somebody waits for room: end what is ready, and make none for a while. Returns how many."""
        given, self._ready = self._ready, []
        self._backoff.failed(anyio.current_time())
        for box in given:
            self._edge._tasks.start_soon(box.close)
        self._count()
        return len(given)

    async def _is_stale(self, box: Box) -> bool:
        """Whether its image means something else by now."""
        try:
            return (await self._edge._images.resolve(self.spec.spec.image)).digest != box.image.digest
        except ProctorError:
            return True

    def _count(self) -> None:
        self.level.ready, self.level.taken = len(self._ready), len(self._taken) + self._beside
        self._stir.set()

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the level until cancelled."""
        while True:
            self._stir = anyio.Event()
            wait = self._backoff.until - anyio.current_time()
            if wait > 0:
                await anyio.sleep(wait)
                continue
            for _ in range(self.level.missing(self.spec)):
                self.level.making += 1
                self._edge._tasks.start_soon(self._make)
            await self._stir.wait()

    async def _make(self) -> None:
        try:
            box = await self._edge._create_ready(self.spec.spec)
        except (ProctorError, OSError) as error:
            pause = self._backoff.failed(anyio.current_time())
            log.info("a pool waits %g s: %s", pause, error)
        else:
            self._backoff.worked()
            if box.ended is None:
                self._ready.append(box)
        finally:
            self.level.making -= 1
            self._count()
            self._made.set()
            self._made = anyio.Event()


@dataclass(slots=True)
class Pools:
    """Those of one Edge."""

    all: list[Pool] = field(default_factory=list)

    def of(self, spec: SandboxSpec) -> Pool | None:
        """The pool of exactly this spec."""
        return next((pool for pool in self.all if pool.spec.spec == spec), None)

    def give_way(self) -> int:
        """Somebody waits for room. Returns how many ready ones are ended for it."""
        return sum(pool.give_way() for pool in self.all)

    def forget(self, box: Box) -> None:
        """`box` has ended."""
        for pool in self.all:
            if box.spec == pool.spec.spec:
                pool.forget(box)

    def handed_out(self, boxes: Iterable[Box]) -> tuple[Box, ...]:
        """Without those that are nobody's yet."""
        return tuple(box for box in boxes if not any(box in pool for pool in self.all))
