"""Every end has a reason, and the kernel's word for it: what the task did is never the machine's fault, nor the
reverse."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox import Edge, EndReason, Lifecycle, Receipt, SandboxLost
from proctor.sandbox.native import channel as channel_module

from .edges import Gauges, gauges, small, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.sandbox.box import Box

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    before = base_line(tmp_path)
    async with Edge(tmp_path, pool_size=2) as edge:
        yield edge
    assert base_line(tmp_path) == before, "descriptors, mounts, groups, loop devices, children"


def base_line(home: Path) -> Gauges:
    """Of mounts only our own: the machine is not ours alone."""
    ours = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]
    return replace(gauges(home), mounts=len(ours))


async def receipt_of(box: Box) -> Receipt:
    await until(lambda: box.ended)
    await box._ended.wait()
    return await box.receipt()


async def test_closed_in_order(edge: Edge) -> None:
    box = await edge.create(small())
    assert (await box.receipt()).end_evidence == {}, "nothing has ended yet"
    receipt = await box.close()
    assert receipt.end_reason is EndReason.CLOSED
    assert receipt.end_evidence["guest_gone_first"] is False
    assert receipt.end_evidence["oom_kills"] == 0


async def test_a_command_out_of_memory_is_the_commands_end_and_on_record(edge: Edge) -> None:
    box = await edge.create(small())
    result = await box.exec(["python3", "-c", "x = bytearray(10**9)"])
    assert (result.reason, result.signal) == (EndReason.OOM, signal.SIGKILL)
    assert (await box.exec(["true"])).ok, "the sandbox goes on"
    evidence = (await box.close()).end_evidence
    assert evidence["oom_kills"] >= 1
    assert evidence["oom_kills_unexplained"] == 0, "a command's result accounts for it"


async def test_a_guest_that_somebody_killed_is_lost_and_not_out_of_memory(edge: Edge) -> None:
    box = await edge.create(small())
    assert box.host_pid is not None
    os.kill(box.host_pid, signal.SIGKILL)
    receipt = await receipt_of(box)
    assert receipt.end_reason is EndReason.GUEST_LOST
    assert receipt.end_evidence["guest_gone_first"] is True
    assert receipt.end_evidence["guest_signal"] in ("SIGKILL", None)
    assert receipt.end_evidence["oom_kills"] == 0


async def test_processes_refused_and_a_full_disk_are_the_tasks_doing(edge: Edge) -> None:
    box = await edge.create(small())
    bomb = await box.exec("for i in $(seq 100); do sleep 1000 & done; wait", timeout_s=20)
    assert bomb.reason is EndReason.PIDS
    full = await box.exec("dd if=/dev/zero of=/root/x bs=64k")
    assert full.reason is EndReason.DISK
    assert (await box.exec("rm /root/x; echo fine > /root/y")).ok
    many = await box.exec("mkdir /root/d; cd /root/d; i=0; while : > f$i; do i=$((i+1)); done")
    assert many.reason is EndReason.DISK, "inodes, too"
    evidence = (await box.close()).end_evidence
    assert (evidence["pids_refused"] > 0, evidence["disk_full"]) == (True, True)


async def test_clocks(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    ttl = await edge.create(small(lifecycle=Lifecycle(ttl_s=0.5)))
    idle = await edge.create(small(lifecycle=Lifecycle(ttl_s=60, idle_timeout_s=0.5)))
    long = await edge.create(small(lifecycle=Lifecycle(ttl_s=60)))
    for days in (-1, 400):  # somebody sets the machine's clock: nobody lives longer or shorter for it
        now = time.time_ns() + days * 86_400 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        monkeypatch.setattr(time, "time", lambda now=now: now / 1e9)
        await anyio.sleep(0.05)
        assert (await long.exec(["true"])).ok
    assert (await receipt_of(ttl)).end_reason is EndReason.TTL
    assert (await receipt_of(idle)).end_reason is EndReason.IDLE
    assert long.ended is None
    await long.close()


async def test_a_guest_that_stops_answering_is_given_up_and_is_gone(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_KILL_S", 0.3)
    box = await edge.create(small())
    assert box.host_pid is not None
    os.kill(box.host_pid, signal.SIGSTOP)
    with pytest.raises(SandboxLost) as lost:
        await box.exec("sleep 1000", timeout_s=0.2)
    assert lost.value.reason is EndReason.GUEST_LOST
    receipt = await receipt_of(box)
    assert "could not kill" in receipt.end_detail
    assert receipt.end_evidence["guest_gone_first"] is False
    assert box.host_pid is None


async def test_a_stopped_guest_can_be_closed(edge: Edge) -> None:
    box = await edge.create(small())
    process = await box.start(["sleep", "1000"])
    assert box.host_pid is not None
    os.kill(box.host_pid, signal.SIGSTOP)
    with anyio.fail_after(5):
        assert (await box.close()).end_reason is EndReason.CLOSED
    with pytest.raises(SandboxLost):
        await process.wait()


async def test_a_stopped_launcher_makes_creates_fail_by_name_and_others_live(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await edge.create(small())
    launcher = edge._runtimes.native._launcher
    assert launcher is not None
    assert launcher._process is not None
    object.__setattr__(launcher.config, "launch_timeout_s", 0.3)
    os.kill(launcher._process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Exception, match="no answer in"):
            await edge.create(small())
        assert (await box.exec(["true"])).ok
    finally:
        os.kill(launcher._process.pid, signal.SIGCONT)
    object.__setattr__(launcher.config, "launch_timeout_s", 30.0)
    async with await edge.create(small()) as after:
        assert (await after.exec(["true"])).ok


async def test_a_launcher_that_is_killed_ends_its_sandboxes_and_is_replaced(edge: Edge) -> None:
    box = await edge.create(small())
    launcher = edge._runtimes.native._launcher
    assert launcher is not None
    assert launcher._process is not None
    os.kill(launcher._process.pid, signal.SIGKILL)
    receipt = await receipt_of(box)
    assert receipt.end_reason is EndReason.GUEST_LOST
    async with await edge.create(small()) as after:
        assert (await after.exec(["true"])).ok
    assert edge._runtimes.native.launcher_starts == 2
