"""The heap of deadlines: order, repetition, cancellation, and no growth."""

from __future__ import annotations

import anyio
import pytest

from proctor.sandbox._timers import Timers

pytestmark = pytest.mark.anyio


async def test_deadlines_run_in_order_and_an_earlier_one_interrupts_the_wait() -> None:
    timers, seen = Timers(), []

    def note(name: str):  # type: ignore[no-untyped-def]
        async def callback() -> None:
            seen.append(name)

        return callback

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        now = anyio.current_time()
        timers.at(now + 60, note("never"))
        timers.at(now + 0.05, note("second"))
        await anyio.sleep(0.01)
        timers.at(now + 0.02, note("first"))
        await anyio.sleep(0.1)
        assert seen == ["first", "second"]
        tasks.cancel_scope.cancel()


async def test_a_callback_that_returns_a_time_runs_again() -> None:
    timers, count = Timers(), 0

    async def tick() -> float | None:
        nonlocal count
        count += 1
        return anyio.current_time() + 0.01 if count < 3 else None

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        timers.at(anyio.current_time(), tick)
        await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()
    assert count == 3


async def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Timers()

    async def never() -> None:
        raise AssertionError("cancelled")

    for _ in range(10_000):
        timers.cancel(timers.at(anyio.current_time() + 3600, never))
    assert len(timers) < 200
