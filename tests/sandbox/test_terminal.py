"""Commands with a terminal: what a person at a keyboard would expect, and what a candidate may try with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox import Edge, SandboxError

from .edges import small

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from proctor.sandbox.box import Box
    from proctor.sandbox.contract import Process

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


@pytest.fixture(scope="module")
async def box(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    async with Edge(tmp_path_factory.mktemp("home"), pool_size=1) as edge, await edge.create(small()) as box:
        yield box


async def shown_until(process: Process, text: bytes) -> bytes:
    """Read the terminal until `text` has been shown."""
    shown = b""
    with anyio.fail_after(10):
        async for _, data in process.output():
            shown += data
            if text in shown:
                return shown
    raise AssertionError(f"{text!r} was never shown: {shown!r}")


async def test_it_is_the_controlling_terminal_of_its_user_and_has_the_size_asked_for(box: Box) -> None:
    look = "test -t 0 -a -t 1 -a -t 2 && stty size && echo $TERM && stat -c '%U %a' $(tty) && echo typed > /dev/tty"
    process = await box.start(look, pty=(132, 43), user="nobody")
    result = await process.wait()
    assert result.stdout.data == b"43 132\r\nxterm\r\nnobody 620\r\ntyped\r\n"
    assert result.ok
    assert result.stderr.total == 0


async def test_a_new_size_is_told(box: Box) -> None:
    process = await box.start("trap 'stty size' WINCH; echo ready; while :; do sleep 0.01; done", pty=(80, 24))
    await shown_until(process, b"ready")
    await process.resize(100, 50)
    await shown_until(process, b"50 100")
    await process.kill()
    await process.resize(10, 10)  # one that has ended: nothing to do


async def test_ctrl_c_reaches_the_program_in_front_and_ctrl_d_is_the_end_of_input(box: Box) -> None:
    process = await box.start(["sh"], pty=(80, 24))
    await process.write_stdin(b"sleep 1000\n")
    await anyio.sleep(0.1)
    await process.write_stdin(b"\x03echo on$((1))\n")
    await shown_until(process, b"on1")
    await process.close_stdin()
    with anyio.fail_after(10):
        assert (await process.wait()).exit_code is not None


async def test_input_that_comes_before_the_terminal_is_not_lost(box: Box) -> None:
    for _ in range(20):
        process = await box.start("read line; echo got-$line", pty=(80, 24))
        await process.write_stdin(b"early\n")
        assert b"got-early" in (await process.wait()).stdout.data


async def test_nothing_of_a_long_output_is_lost_and_a_reader_that_pauses_pauses_it(box: Box) -> None:
    process = await box.start("seq 1 60000; exit 3", pty=(80, 24))
    await anyio.sleep(0.2)
    shown = b"".join([data async for _, data in process.output()])
    assert shown == b"".join(b"%d\r\n" % number for number in range(1, 60001))
    assert (await process.wait()).exit_code == 3


async def test_what_others_hold_of_a_terminal_does_not_keep_its_exec_open(box: Box) -> None:
    process = await box.start("tty > /tmp/name; echo ready; sleep 0.3; echo last; exit 5", pty=(80, 24))
    await shown_until(process, b"ready")
    holder = await box.start("exec 9<>$(cat /tmp/name); sleep 1000")
    with anyio.fail_after(5):
        result = await process.wait()
    assert (result.exit_code, result.stdout.data.endswith(b"last\r\n")) == (5, True)
    await holder.kill()


async def test_a_background_job_on_a_terminal_is_killed_or_kept_like_any_other(box: Box) -> None:
    job = "trap '' HUP; (trap '' HUP; sleep 1000) & echo up"
    assert (await (await box.start(job, pty=(80, 24))).wait()).leftover == 1
    kept = await box.start(job, pty=(80, 24), keep=True)
    assert (await kept.wait()).leftover == 0
    assert (await box.exec(["pgrep", "-x", "sleep"])).ok
    await kept.kill()
    assert not (await box.exec(["pgrep", "-x", "sleep"])).ok


async def test_terminals_are_given_back(box: Box) -> None:
    for _ in range(10):
        await (await box.start(["true"], pty=(80, 24))).wait()
    assert await box.list("/dev/pts") == [await box.stat("/dev/pts/ptmx")]


@pytest.mark.parametrize("size", [(0, 24), (80, 0), (80, 65536), (-1, 5)])
async def test_a_size_that_no_terminal_has_is_refused_by_name(box: Box, size: tuple[int, int]) -> None:
    with pytest.raises(SandboxError, match="pty: a terminal of"):
        await box.start(["true"], pty=size)


async def test_resizing_what_has_no_terminal_is_refused(box: Box) -> None:
    process = await box.start(["cat"])
    with pytest.raises(SandboxError, match="has no terminal"):
        await process.resize(80, 24)
    await process.close_stdin()
    assert (await process.wait()).ok


async def test_a_command_that_cannot_be_run_on_a_terminal_says_so(box: Box) -> None:
    result = await (await box.start(["/no/such"], pty=(80, 24))).wait()
    assert result.exit_code == 127
    assert b"No such file" in result.stderr.data


HOARD = """
import os, time
held = []
try:
    while True:
        held.append(os.openpty())
except OSError as error:
    print(len(held), error.errno, flush=True)
time.sleep(1000)
"""


async def test_one_sandbox_cannot_use_up_the_machines_terminals(tmp_path: Path) -> None:
    async with (
        Edge(tmp_path, pool_size=2) as edge,
        await edge.create(small()) as box,
        await edge.create(small()) as other,
    ):
        hoarder = await box.start(["python3", "-c", HOARD])
        assert await shown_until(hoarder, b"\n") == b"128 28\n"
        result = await (await box.start(["true"], pty=(80, 24))).wait()
        assert (result.exit_code, result.reason) == (126, None)
        assert b"terminal: No space left" in result.stderr.data
        assert (await (await other.start(["true"], pty=(80, 24))).wait()).ok
        assert await box.kill_all() == 0
        assert (await (await box.start(["true"], pty=(80, 24))).wait()).ok
