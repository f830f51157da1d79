"""Many sandboxes alive at once in one process: what must not depend on how many there are."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox import Edge, EndReason, Policy

from .edges import gauges, small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


@pytest.fixture
def high_descriptors() -> Iterator[None]:
    """Every descriptor from now on has a number above 1,023, as with a few hundred sandboxes: select(2) ends there."""
    null = os.open(os.devnull, os.O_RDONLY)
    held = [null]
    while held[-1] < 1100:
        held.append(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, 0))
    yield
    for descriptor in held:
        os.close(descriptor)


async def test_a_whole_life_on_descriptors_above_a_thousand(tmp_path: Path, high_descriptors: None) -> None:
    async with Edge(tmp_path, pool_size=1) as edge:
        async with await edge.create(small()) as box:
            assert (await box.exec("echo high")).text == "high\n"
            process = await box.start("sleep 100", keep=True)
            await box.pause()
            await box.reset()
            (fork,) = await box.fork()
            await fork.close()
            assert process.exec_id
        assert box.ended is EndReason.CLOSED


async def test_a_burst_of_creates_all_succeed_and_leave_nothing(tmp_path: Path) -> None:
    before = gauges(tmp_path)
    generous = Policy(memory_overcommit=50, cpu_overcommit=1000)
    async with Edge(tmp_path, policy=generous) as edge:

        async def live(number: int) -> None:
            box = await edge.create(small())
            assert (await box.exec(["echo", str(number)])).text == f"{number}\n"

        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(live, number)
        assert len(edge.boxes) == 100
        assert len({box.host_pid for box in edge.boxes}) == 100
    assert gauges(tmp_path) == before
