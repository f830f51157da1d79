"""Pausing: no CPU, memory given back, and nobody who uses a sandbox has to know."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import ConfigError, RefusedError
from proctor.sandbox import Edge, EndReason, Lifecycle, Resources, SandboxLost

from .edges import small, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from proctor.sandbox.box import Box

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

COUNT = "while :; do echo >> /dev/shm/ticks; done"


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=2) as edge:
        yield edge


@pytest.fixture
async def box(edge: Edge) -> AsyncIterator[Box]:
    async with await edge.create(small()) as box:
        yield box


async def test_a_paused_sandbox_uses_no_cpu_and_goes_on_where_it_was(box: Box) -> None:
    await box.start(COUNT, keep=True)
    await anyio.sleep(0.2)
    await box.pause()
    assert box.paused
    before = (await box.stats()).cpu_s
    await anyio.sleep(0.3)
    assert (await box.stats()).cpu_s == before
    assert box.paused  # stats are read from outside
    first = int((await box.exec("wc -c < /dev/shm/ticks")).text)
    assert not box.paused
    await anyio.sleep(0.2)
    assert int((await box.exec("wc -c < /dev/shm/ticks")).text) > first > 0


USES: dict[str, Callable[[Box], Awaitable[object]]] = {
    "exec": lambda box: box.exec(["true"]),
    "write": lambda box: box.write("/root/x", b"x"),
    "list": lambda box: box.list("/"),
    "kill_all": lambda box: box.kill_all(),
    "diff": lambda box: box.diff(),
    "snapshot": lambda box: box.snapshot(),
    "reset": lambda box: box.reset(),
    "fork": lambda box: box.fork(),
    "resume": lambda box: box.resume(),
}


@pytest.mark.parametrize("use", USES)
async def test_any_request_makes_it_go_on(box: Box, use: str) -> None:
    await box.pause()
    with anyio.fail_after(10):
        await USES[use](box)
    assert not box.paused
    assert (await box.exec("echo on")).text == "on\n"


async def test_a_process_that_was_started_before_goes_on_when_it_is_waited_for(box: Box) -> None:
    process = await box.start("sleep 0.1; echo done")
    await box.pause()
    with anyio.fail_after(10):
        assert (await process.wait()).text == "done\n"


async def test_many_requests_at_once_and_pauses_between_them_all_get_their_answer(box: Box) -> None:
    answers: list[str] = []

    async def ask(number: int) -> None:
        await anyio.sleep(number % 7 / 500)
        answers.append((await box.exec(f"echo {number}")).text)

    async def keep_pausing() -> None:
        while True:
            try:
                await box.pause()
            except RefusedError:
                await anyio.sleep(0.001)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as outer:
            outer.start_soon(keep_pausing)
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(ask, number)
            outer.cancel_scope.cancel()
    assert sorted(int(text) for text in answers) == list(range(20))


async def test_a_sandbox_in_use_is_not_paused(box: Box) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.exec, "sleep 1")
        await anyio.sleep(0.1)
        with pytest.raises(RefusedError, match="in use") as caught:
            await box.pause()
        assert caught.value.field == "pause"
    assert not box.paused


async def test_memory_that_can_be_read_again_is_given_back(edge: Edge) -> None:
    resources = Resources(cpus=1, memory_mb=256, disk_mb=128, disk_inodes=2000, pids=32, disk_driver="loop")
    async with await edge.create(small(resources=resources)) as box:
        await box.exec("head -c 60000000 /dev/zero > /root/big; sync; cat /root/big > /dev/null")
        before = (await box.stats()).memory_bytes
        assert before > 40 << 20
        freed = await box.pause()
        assert freed > before // 2
        assert (await box.stats()).memory_bytes < before // 2
        assert (await box.exec("wc -c < /root/big")).text.strip() == "60000000"


async def test_ttl_goes_on_and_ending_a_paused_one_works(edge: Edge) -> None:
    box = await edge.create(small(lifecycle=Lifecycle(ttl_s=1)))
    await box.start("sleep 100", keep=True)
    await box.pause()
    await until(lambda: box.ended is EndReason.TTL)
    with pytest.raises(SandboxLost):
        await box.pause()
    with pytest.raises(SandboxLost):
        await box.resume()


async def test_one_that_is_not_used_is_paused_again_and_again(edge: Edge) -> None:
    async with await edge.create(small(lifecycle=Lifecycle(pause_after_s=0.2))) as box:
        for _ in range(3):
            await until(lambda: box.paused)
            assert (await box.exec("echo on")).text == "on\n"
            assert not box.paused
        await box.exec("sleep 0.5")  # in use: not paused in the middle
        await until(lambda: box.paused)
        assert (await edge.snapshot())["paused"] == 1
    with pytest.raises(ConfigError, match="above zero") as caught:
        await edge.create(small(lifecycle=Lifecycle(pause_after_s=0)))
    assert caught.value.field == "lifecycle.pause_after_s"


LEAVES_ONE_PAUSED = """
import os, signal, sys
from pathlib import Path
import anyio
from proctor.sandbox import Edge, Lifecycle, Resources, SandboxSpec

spec = SandboxSpec(
    resources=Resources(cpus=0.5, memory_mb=64, disk_mb=16, disk_inodes=2000, pids=32),
    lifecycle=Lifecycle(ttl_s=120, durable=True),
)

async def main():
    async with Edge(Path(sys.argv[1]), pool_size=1, durable=True) as edge:
        box = await edge.create(spec)
        await box.exec("echo kept > /root/kept")
        await box.pause()
        if sys.argv[2] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@pytest.mark.parametrize("how", ["leaves", "dies"])
async def test_an_edge_that_leaves_or_dies_leaves_no_sandbox_that_cannot_be_adopted(tmp_path: Path, how: str) -> None:
    await anyio.run_process([sys.executable, "-c", LEAVES_ONE_PAUSED, str(tmp_path), how], check=False)
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        assert (await box.exec("cat /root/kept")).text == "kept\n"
        await box.close()
