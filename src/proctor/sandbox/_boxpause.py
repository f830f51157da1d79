"""Pausing a sandbox: it keeps its disk and its processes, gets no CPU, and gives back what memory it can.

Nobody has to know that a sandbox is paused: whatever needs its guest makes it go on first. Its `ttl_s` goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import anyio
from anyio.lowlevel import checkpoint

from proctor.common import RefusedError

if TYPE_CHECKING:
    from proctor.sandbox._timers import Timer
    from proctor.sandbox.box import Box
    from proctor.sandbox.contract import EndReason, SandboxLost, SandboxSpec
    from proctor.sandbox.edge import Edge
    from proctor.sandbox.runtimes.contract import Incarnation


class PausableBox:
    """What `Box` has for pausing. All of it runs in one thread, so what happens between two awaits is atomic."""

    id: str
    spec: SandboxSpec
    _edge: Edge
    _live: Incarnation | None
    _change: anyio.Lock
    _reason: EndReason | None
    _running: int
    _last_use: float

    def _begin_pausing(self) -> None:
        self._paused = False
        self._pause_timer: Timer | None = None

    @property
    def paused(self) -> bool:
        """Whether its processes stand still."""
        return self._paused

    async def pause(self) -> int:
        """Stop every process, and give reclaimable memory back; returns how many bytes. Pausing twice is fine.

        What it has in memory alone (its own variables, a disk in memory) stays there. Raises RefusedError while a call
        is under way, since that would wait for ever.
        """
        await checkpoint()
        async with self._change:
            live = self._live
            if live is None or self._reason is not None:
                raise self._gone()
            if self._paused:
                return 0
            if self._running:
                raise RefusedError(
                    f"sandbox {self.id} is in use ({self._running} calls under way)",
                    field="pause",
                    remedy="wait for them; what `start` left running does not count",
                )
            # From here on a call finds it paused, and waits for `_change` to make it go on.
            self._paused = True
            with anyio.CancelScope(shield=True):
                try:
                    freed = await live.pause()
                except BaseException:
                    await live.resume()
                    self._paused = False
                    raise
            self._edge.meters.pauses += 1
            return freed

    async def resume(self) -> None:
        """Let the processes go on. Any call that needs the sandbox does this by itself; doing it twice is fine."""
        await checkpoint()
        async with self._change:
            if self._live is None or self._reason is not None:
                raise self._gone()
            self._last_use = anyio.current_time()
            await self._thaw(self._live)

    async def _thaw(self, live: Incarnation) -> None:
        """Of the present incarnation, for whoever holds `_change`."""
        if not self._paused:
            return
        await live.resume()
        self._paused = False
        self._wind_pause()

    async def _wake(self, guest: Incarnation) -> None:
        """For a call: see that `guest` runs. The call counts as one under way already, so nobody pauses it again."""
        async with self._change:
            if guest is self._live and self._reason is None:
                await self._thaw(guest)

    # --- the idle clock ---------------------------------------------------------------------------------------------

    def _wind_pause(self) -> None:
        """Start the clock of `pause_after_s`; one that is paused has none."""
        limit_s = self.spec.lifecycle.pause_after_s
        if limit_s is None or self._reason is not None:
            return
        if self._pause_timer is not None:
            self._edge._timers.cancel(self._pause_timer)
        self._pause_timer = self._edge._timers.at(anyio.current_time() + limit_s, self._pause_due)

    async def _pause_due(self) -> float | None:
        limit_s = self.spec.lifecycle.pause_after_s
        assert limit_s is not None
        if self._reason is not None or self._paused:
            return None
        at, due = anyio.current_time(), self._last_use + limit_s
        if self._running or self._change.locked():
            return at + limit_s
        if due > at:
            return due
        self._edge._tasks.start_soon(self._edge._pause_logged, cast("Box", self))
        return at + limit_s  # should it be in use by then

    def _gone(self) -> SandboxLost:
        raise NotImplementedError
