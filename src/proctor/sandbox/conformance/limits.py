"""Limits: each is exceeded, and has to hold and to be named."""

from __future__ import annotations

import anyio

from proctor.sandbox.conformance.checks import Subject, expect, expect_ok
from proctor.sandbox.contract import EndReason, ExecResult, SandboxLost


async def memory(subject: Subject) -> None:
    """More memory than allowed ends the command or the sandbox, as declared, with reason OOM."""
    hog: ExecResult | None = None
    reason: EndReason | None = None
    async with subject.box(resources={"memory_mb": 128, "disk_mb": 16}) as box:
        try:
            hog = await box.exec(["dd", "if=/dev/zero", "of=/dev/null", "bs=600M", "count=1"], timeout_s=60)
            reason = hog.reason
        except SandboxLost as lost:
            reason = lost.reason
        expect(reason is EndReason.OOM, "the reason is OOM", hog or reason)
        if subject.can.over_memory == "command":
            expect_ok(await box.exec("true"))
            expect((await box.stats()).oom_kills > 0, "the kernel has counted it")
        else:
            expect(box.ended is EndReason.OOM, "the sandbox has ended with it", box.ended)


async def processes(subject: Subject) -> None:
    """More processes than allowed are refused, with reason PIDS, and the sandbox goes on."""
    many = "i=0; while [ $i -lt 100 ]; do sleep 1000 & i=$((i+1)); done; echo all"
    async with subject.box(resources={"pids": 24}) as box:
        result = await box.exec(many, timeout_s=60)
        expect("all" not in result.text, "not all were started", result)
        expect(result.reason is EndReason.PIDS, "the reason is PIDS", result)
        most = 24 if subject.can.over_pids == "command" else 48
        expect(10 <= result.leftover <= most, "as many as allowed were", result.leftover)
        expect_ok(await box.exec("true"))


async def disk_bytes(subject: Subject) -> None:
    """More bytes on the private disk than allowed are refused, with reason DISK."""
    fill = "dd if=/dev/zero of=/srv/big bs=1M count=100 2>&1 && sync && sleep 30"
    await _overfill(subject, fill, {"disk_mb": 16})


async def disk_inodes(subject: Subject) -> None:
    """More files on the private disk than allowed are refused, with reason DISK."""
    subject.needs(subject.can.disk_inodes, "limit of files")
    fill = "cd /srv; i=0; while [ $i -lt 2000 ]; do : > f$i || exit 1; i=$((i+1)); done"
    await _overfill(subject, fill, {"disk_inodes": 400})


async def _overfill(subject: Subject, fill: str, resources: dict[str, int]) -> None:
    async with subject.box(resources=resources) as box:
        if subject.can.disk_limit == "kernel":
            result = await box.exec(fill, timeout_s=60)
            expect(result.exit_code not in (0, None), "the write fails", result)
            expect(result.reason is EndReason.DISK, "the reason is DISK", result)
            stats = await box.stats()
            expect(stats.disk_bytes <= (resources.get("disk_mb", 32) << 20), "no more was written", stats.disk_bytes)
            expect_ok(await box.exec("rm -rf /srv/* && echo x > /srv/small"))
            return
        try:
            result = await box.exec(fill, timeout_s=60)
            expect(result.reason is EndReason.DISK, "the reason is DISK", result)
        except SandboxLost as lost:
            expect(lost.reason is EndReason.DISK, "the reason is DISK", lost)
        expect(box.ended is EndReason.DISK, "the sandbox has ended with it", box.ended)


async def shared_memory(subject: Subject) -> None:
    """/dev/shm is not a way around the limit of memory."""
    async with subject.box(resources={"memory_mb": 128, "disk_mb": 16}) as box:
        try:
            result = await box.exec("head -c 300M /dev/zero > /dev/shm/big", timeout_s=60)
        except SandboxLost as lost:
            expect(lost.reason is EndReason.OOM, "the reason is OOM", lost)
            return
        expect(result.exit_code != 0, "it does not fit", result)


async def cpu(subject: Subject) -> None:
    """CPU time is limited and counted."""
    async with subject.box(resources={"cpus": 0.25}) as box:
        before = (await box.stats()).cpu_s
        start = anyio.current_time()
        await box.exec("while :; do :; done", timeout_s=1.0)
        used, elapsed = (await box.stats()).cpu_s - before, anyio.current_time() - start
        expect(used > 0.05, "the kernel counts it", used)
        # Bandwidth comes in periods of 100 ms: one more than elapsed may have begun.
        expect(used <= 0.25 * elapsed + 0.25, "and no more than a quarter of a core", (used, elapsed))


CHECKS = (memory, processes, disk_bytes, disk_inodes, shared_memory, cpu)
