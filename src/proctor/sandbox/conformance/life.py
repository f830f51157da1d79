"""Life: how sandboxes end, what their receipts say, what is left of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio

from proctor.sandbox.conformance.checks import Subject, expect, expect_ok
from proctor.sandbox.contract import EndReason, Lifecycle, SandboxLost


async def closed(subject: Subject) -> None:
    """A closed sandbox says so, and its receipt says what it was."""
    async with subject.box(labels={"who": "conformance"}) as box:
        expect_ok(await box.exec("head -c 1000000 /dev/zero > /srv/file"))
        receipt = await box.close()
        expect(receipt.end_reason is EndReason.CLOSED, "the reason is CLOSED", receipt.end_reason)
        expect(receipt.tier in subject.can.tiers, "the tier is one that was declared", receipt.tier)
        expect(receipt.runtime == f"container/{subject.runtime}", "the runtime is named", receipt.runtime)
        expect(receipt.execs == 1 and receipt.labels == {"who": "conformance"}, "commands are counted", receipt)
        expect(receipt.peaks["memory_bytes"] > 0 and receipt.peaks["pids"] > 0, "peaks are known", receipt.peaks)
        expect({"memory", "pids", "cpus", "disk"} <= set(receipt.limit_mechanisms), "so is what enforced limits")
        try:
            await box.exec("true")
        except SandboxLost as lost:
            expect(lost.reason is EndReason.CLOSED, "later calls say why", lost)
        else:
            expect(False, "no command runs in a closed sandbox")


async def time_to_live(subject: Subject) -> None:
    """A sandbox ends at its time, in the middle of a command, with reason TTL."""
    await _ends(subject, Lifecycle(ttl_s=1.5), EndReason.TTL, busy=True)


async def idle(subject: Subject) -> None:
    """A sandbox that nobody uses ends with reason IDLE."""
    await _ends(subject, Lifecycle(ttl_s=300, idle_timeout_s=0.5), EndReason.IDLE, busy=False)


async def _ends(subject: Subject, lifecycle: Lifecycle, reason: EndReason, *, busy: bool) -> None:
    async with subject.box(lifecycle=lifecycle) as box:
        with anyio.fail_after(30):
            try:
                if busy:
                    await box.exec("sleep 1000")
                await box._ended.wait()
            except SandboxLost as lost:
                expect(lost.reason is reason, f"the reason is {reason}", lost)
            await box._ended.wait()
        expect((await box.receipt()).end_reason is reason, f"the receipt says {reason}", box.ended)


async def paused(subject: Subject) -> None:
    """A paused sandbox uses no CPU, goes on when it is used, and can be ended while it is paused."""
    async with subject.box() as box:
        await box.start("while :; do :; done", keep=True)
        await box.pause()
        before = (await box.stats()).cpu_s
        await anyio.sleep(0.3)
        expect((await box.stats()).cpu_s - before < 0.01, "no CPU is used")
        expect(box.paused, "looking at it does not wake it")
        expect_ok(await box.exec("true"))
        expect(not box.paused, "using it does")
        await box.pause()
        receipt = await box.close()
        expect(receipt.end_reason is EndReason.CLOSED, "it ends as any other", receipt.end_reason)


async def guest_lost(subject: Subject) -> None:
    """A sandbox whose first process is killed from outside ends with reason GUEST_LOST."""
    async with subject.box() as box:
        pid = box.host_pid
        subject.needs(pid is not None, "process that can be seen from outside")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(30):
            try:
                await box.exec("sleep 1000")
            except SandboxLost as lost:
                expect(lost.reason is EndReason.GUEST_LOST, "the reason is GUEST_LOST", lost)
            await box._ended.wait()
        expect(box.ended is EndReason.GUEST_LOST, "the sandbox has ended", box.ended)


async def nothing_is_left(subject: Subject) -> None:
    """Of sandboxes that have ended nothing is left: no process, no mount, no descriptor."""
    async with subject.box() as box:
        expect_ok(await box.exec("true"))
    await _settle(subject)
    before = _held()
    pids = []
    for _ in range(3):
        async with subject.box() as box:
            await box.exec("sleep 1000 &", keep=True)
            pids.append(box.host_pid)
            layer = await box.snapshot()
        await subject.edge.drop(layer)
    await _settle(subject)
    grown = [name for name, now, then in zip(_HELD, _held(), before, strict=True) if now > then]
    expect(not grown, f"no more {', '.join(grown)} than before", (before, _held()))
    alive = [pid for pid in pids if pid is not None and _runs(pid)]
    expect(not alive, "no process", alive)


async def _settle(subject: Subject) -> None:
    """Wait until the Edge has buried what has ended."""
    with anyio.fail_after(30):
        while subject.edge.boxes or subject.edge.burying:  # noqa: ASYNC110 - burials announce themselves to nobody
            await anyio.sleep(0.02)


def _runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


_HELD = ("descriptors", "mounts", "children")


def _held() -> tuple[int, int, int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/mountinfo").read_text().splitlines()), len(children)


CHECKS = (closed, time_to_live, idle, paused, guest_lost, nothing_is_left)
