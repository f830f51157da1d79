"""One heap of deadlines for all sandboxes of an Edge, and one task that waits for the earliest.

Nothing polls: the task sleeps until the earliest deadline or until an earlier one is added.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

Callback = Callable[[], Awaitable[float | None]]


@dataclass(order=True, slots=True)
class Timer:
    """One deadline. A cancelled one stays in the heap, without its callback, until it is due or the heap is rebuilt."""

    deadline: float
    order: int
    callback: Callback | None = field(compare=False)


class Timers:
    """Deadlines on anyio's clock (`anyio.current_time()`)."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._order = itertools.count()
        self._cancelled = 0
        self._earlier = anyio.Event()

    def at(self, deadline: float, callback: Callback) -> Timer:
        """Run `callback` at `deadline`. If it returns a time, it is run again then, under the same Timer."""
        timer = Timer(deadline, next(self._order), callback)
        self._push(timer)
        return timer

    def cancel(self, timer: Timer) -> None:
        """Never run it (again). Cancelling twice is fine."""
        if timer.callback is None:
            return
        timer.callback = None
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self._heap):
            self._heap = [one for one in self._heap if one.callback is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    async def run(self) -> None:
        """Serve deadlines until cancelled. Callbacks run one after another and should only start work."""
        while True:
            self._earlier = anyio.Event()
            wait = self._heap[0].deadline - anyio.current_time() if self._heap else float("inf")
            if wait > 0:
                with anyio.move_on_after(wait):
                    await self._earlier.wait()
                continue
            timer = heapq.heappop(self._heap)
            if timer.callback is None:
                self._cancelled = max(self._cancelled - 1, 0)
                continue
            again = await timer.callback()
            if again is not None and timer.callback is not None:
                timer.deadline = again
                self._push(timer)

    def _push(self, timer: Timer) -> None:
        first = not self._heap or timer < self._heap[0]
        heapq.heappush(self._heap, timer)
        if first:
            self._earlier.set()
