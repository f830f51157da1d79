"""`disk_driver = "auto"` on a kernel that cannot id-map a tmpfs: its answer is forced."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from proctor.common import RefusedError
from proctor.sandbox import Edge, Resources, SandboxSpec, disk
from proctor.sandbox._admission import Machine
from proctor.sandbox.contract import LaunchError
from proctor.sandbox.native.launcher import Launched, Launcher, StepError
from proctor.sandbox.native.plan import LoopUpper, MemoryUpper, Plan

from .edges import SMALL, small, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kinds of disk that were tried, on a kernel before 6.3."""
    kinds: list[type] = []
    launch = Launcher.launch

    async def launch_before_6_3(self: Launcher, plan: Plan) -> Launched:
        kinds.append(type(plan.upper))
        if isinstance(plan.upper, MemoryUpper):
            raise StepError("forced", step="upper-idmap", errno=errno.EINVAL)
        return await launch(self, plan)

    monkeypatch.setattr(Launcher, "launch", launch_before_6_3)
    return kinds


async def test_auto_becomes_loop_after_one_try_and_the_receipt_says_why(tmp_path: Path, tried: list[type]) -> None:
    async with Edge(tmp_path, pool_size=2) as edge:
        async with await edge.create(small()) as first, await edge.create(small()) as second:
            assert (await first.exec("echo x > /root/x")).ok
            assert tried == [MemoryUpper, LoopUpper, LoopUpper]
            receipt = await second.receipt()
            assert receipt.limit_mechanisms["disk"] == f"ext4 image of 16 MB ({disk.NO_MEMORY_REASON})"
            (fork,) = await first.fork()
            assert (await fork.exec("cat /root/x")).text == "x\n"
            await fork.close()
        await until(lambda: not edge.boxes)
        assert not list((edge.home / "edges" / edge.id / "disks").iterdir())


async def test_a_disk_in_memory_that_was_asked_for_is_refused_not_replaced(tmp_path: Path, tried: list[type]) -> None:
    spec = SandboxSpec(resources=replace(SMALL, disk_driver="memory"))
    async with Edge(tmp_path, pool_size=1) as edge:
        with pytest.raises(LaunchError) as error:
            await edge.create(spec)
        assert "loop driver" in (error.value.remedy or "")
        assert tried == [MemoryUpper]


async def test_other_failures_of_a_launch_decide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Launcher, plan: Plan) -> Launched:
        raise StepError("forced", step="upper-idmap", errno=errno.ENOMEM)

    async with Edge(tmp_path, pool_size=1) as edge:
        with monkeypatch.context() as patch:
            patch.setattr(Launcher, "launch", fail)
            with pytest.raises(LaunchError):
                await edge.create(small())
        async with await edge.create(small()) as box:
            assert "tmpfs" in (await box.receipt()).limit_mechanisms["disk"]


async def test_an_image_has_to_find_room_on_the_disk(
    tmp_path: Path, tried: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Edge(tmp_path, pool_size=1) as edge:
        full = replace(Machine.read(tmp_path), disk_free_mb=1030)
        monkeypatch.setattr(Machine, "read", lambda home: full)
        with pytest.raises(RefusedError) as error:
            await edge.create(small())
        assert error.value.field == "resources.disk_mb"
        await until(lambda: not edge.boxes)
        assert not edge._ledger.held


def test_a_disk_too_small_for_an_image_is_refused_without_naming_the_memory_driver() -> None:
    with pytest.raises(RefusedError) as error:
        disk.choose(Resources(disk_mb=4), memory_works=False)
    assert disk.NO_MEMORY_REASON in (error.value.remedy or "")
