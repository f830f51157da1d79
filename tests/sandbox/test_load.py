"""Many sandboxes at once: all work, and nothing is left of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox import Edge, Policy, Resources, SandboxLost

from .edges import gauges, small

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox, pytest.mark.slow]

TINY = Resources(cpus=0.2, memory_mb=32, disk_mb=8, disk_inodes=500, pids=16)
CROWD = Policy(cpu_overcommit=1000)


async def test_two_hundred_alive_at_the_same_time_leave_nothing(tmp_path: Path) -> None:
    before = gauges(tmp_path)
    async with Edge(tmp_path, policy=CROWD) as edge:
        everybody, here = anyio.Event(), 0

        async def life(number: int) -> None:
            nonlocal here
            driver = "loop" if number % 20 == 0 else "memory"
            resources = Resources(cpus=0.2, memory_mb=32, disk_mb=8, disk_inodes=500, pids=16, disk_driver=driver)  # type: ignore[arg-type]
            async with await edge.create(small(resources=resources)) as box:
                assert (await box.exec(["echo", str(number)])).text == f"{number}\n"
                here += 1
                if here == 200:
                    everybody.set()
                await everybody.wait()
                await box.exec("setsid sleep 1000 &", keep=True)

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                for number in range(200):
                    tasks.start_soon(life, number)
    assert gauges(tmp_path) == before


async def test_fifty_killed_at_random_leave_nothing(tmp_path: Path) -> None:
    before = gauges(tmp_path)
    dice = random.Random(11)
    async with Edge(tmp_path, policy=CROWD) as edge, anyio.create_task_group() as tasks:

        async def life() -> None:
            # The end comes from a cancelled caller, from a lost guest, or in the middle of a change.
            how = dice.choice(["cancel", "guest", "change"])
            with anyio.move_on_after(dice.uniform(0.01, 0.3)):
                try:
                    async with await edge.create(small(resources=TINY)) as box:
                        process = await box.start("while :; do echo x > /tmp/x; done")
                        if how == "guest":
                            await anyio.sleep(dice.uniform(0, 0.1))
                            assert box._live is not None
                            box._live.channel.close()
                        if how == "change":
                            await box.snapshot()
                            await box.fork(2)
                        await process.wait()
                except SandboxLost:
                    return

        for _ in range(50):
            tasks.start_soon(life)
    assert gauges(tmp_path) == before
