"""Processes: what is killed, what is counted, what is out of reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from proctor.sandbox.conformance.checks import Subject, expect, expect_ok
from proctor.sandbox.contract import EndReason, SandboxLost

if TYPE_CHECKING:
    from proctor.sandbox.box import Box

_SLEEPERS = (
    'n=0; for f in /proc/[0-9]*/comm; do read c < $f && [ "$c" = sleep ] && n=$((n+1)); done 2>/dev/null; echo $n'
)

_STORM = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


async def _sleepers(box: Box) -> int:
    return int(expect_ok(await box.exec(_SLEEPERS)).text)


async def _wait_for_sleepers(box: Box, count: int) -> None:
    """A process that was just forked is not a sleeper yet."""
    with anyio.move_on_after(20):
        while await _sleepers(box) != count:  # noqa: ASYNC110 - it announces itself in no other way
            await anyio.sleep(0.05)
        return
    expect(False, f"{count} processes sleep", await _sleepers(box))


async def kill_depth(subject: Subject) -> None:
    """A time-out kills every descendant: sessions of their own, double forks, other users, traps."""
    tree = """
        trap '' TERM HUP INT
        setsid sh -c 'trap "" TERM HUP; setsid sleep 1000 & sleep 1000' &
        (sleep 1000 &)
        (setsid sh -c 'setsid sleep 1000 &' &)
        echo planted
        sleep 1000
    """
    async with subject.box() as box:
        result = await box.exec(tree, timeout_s=1.0)
        expect(result.timed_out and result.text == "planted\n", "it times out", result)
        expect(await _sleepers(box) == 0, "nobody is left", await _sleepers(box))


async def no_escape_by_limits(subject: Subject) -> None:
    """A process that changes its resource limits does not get out of its command."""
    flee = """
        (ulimit -c 0; ulimit -c unlimited; exec sleep 1000) 2>/dev/null &
        (ulimit -H -c 0; ulimit -S -c 0; exec sleep 1000) 2>/dev/null &
        (ulimit -x 7; ulimit -H -x 5; exec sleep 1000) 2>/dev/null &
        (ulimit -n 100; ulimit -f 100; exec sleep 1000) &
        sleep 1000
    """
    async with subject.box() as box:
        result = await box.exec(["bash", "-c", flee], timeout_s=1.0)
        expect(result.timed_out, "it times out", result)
        expect(await _sleepers(box) == 0, "nobody is left", await _sleepers(box))


async def leftovers_are_killed(subject: Subject) -> None:
    """What a command leaves behind is killed and counted, even where it holds the output open."""
    async with subject.box() as box:
        result = await box.exec("sleep 1000 & sleep 1000 & echo done", timeout_s=60)
        expect(result.exit_code == 0 and not result.timed_out, "it ends with its main process", result)
        expect(result.leftover == 2, "both are counted", result.leftover)
        expect(await _sleepers(box) == 0, "both are killed", await _sleepers(box))


async def kept_ones_live_on(subject: Subject) -> None:
    """With `keep` what a command leaves behind lives on, until everything is killed."""
    async with subject.box() as box:
        result = await box.exec("sleep 1000 & echo started", keep=True, timeout_s=60)
        expect(result.text == "started\n" and result.exit_code == 0, "it returns", result)
        await _wait_for_sleepers(box, 1)
        expect(await box.kill_all() == 0, "kill_all leaves nobody")
        expect(await _sleepers(box) == 0, "the service is gone", await _sleepers(box))


async def fork_storm(subject: Subject) -> None:
    """A command that forks as fast as it can is killed to the last process, or the sandbox with it, as declared."""
    async with subject.box(resources={"memory_mb": 512}) as box:
        try:
            result = await box.exec(["python3", "-c", _STORM], timeout_s=1.0)
        except SandboxLost as lost:
            expect(subject.can.over_pids == "sandbox", "a storm ends only its command", lost)
            expect(lost.reason in (EndReason.PIDS, EndReason.OOM), "the reason is a limit", lost)
            return
        expect(result.timed_out, "it times out", result)
        names = expect_ok(await box.exec("cat /proc/[0-9]*/comm")).text
        expect("python3" not in names, "nobody is left", names)


async def guest_out_of_reach(subject: Subject) -> None:
    """Root inside cannot kill, stop, trace or read process 1, nor speak in its place."""
    attack = """
        for s in KILL STOP TERM ABRT; do kill -$s 1; done
        head -c 10 /proc/1/mem; cat /proc/1/environ | tr '\\0' ' '
        for f in /proc/1/fd/* /proc/1/task/*/fd/*; do printf 'junkjunkjunkjunk' > $f; timeout 0.1 head -c 1 < $f; done
        kill -KILL -1
    """
    async with subject.box() as box:
        with anyio.fail_after(30):
            await box.exec(f"({attack}) </dev/null >/dev/null 2>&1", timeout_s=10)
        service = await box.start("read line; echo $line")
        opened = await box.exec("for f in /proc/1/fd/*; do test -e $f && (exec 3< $f) && echo $f; done 2>/dev/null")
        expect(opened.text == "", "nobody can open what process 1 holds open", opened.text)
        await service.kill()
        result = await box.exec("echo still here; tr '\\0' ' ' < /proc/1/cmdline")
        expect(result.text.startswith("still here"), "the sandbox lives and answers", result)
        expect("/" not in result.text, "process 1 does not say where it comes from", result.text)


async def kill_one(subject: Subject) -> None:
    """One command can be killed from outside, with its descendants, while others run."""
    async with subject.box() as box:
        other = await box.start("sleep 1000")
        victim = await box.start("sleep 1000 & sleep 1000")
        await _wait_for_sleepers(box, 3)
        await victim.kill()
        result = await victim.wait()
        expect(result.signal == 9, "it was killed", result)
        expect(await _sleepers(box) == 1, "the other one lives", await _sleepers(box))
        await other.kill()


CHECKS = (
    kill_depth,
    no_escape_by_limits,
    leftovers_are_killed,
    kept_ones_live_on,
    fork_storm,
    guest_out_of_reach,
    kill_one,
)
