"""Everything at once, at random, for a while: nothing is mixed up and nothing is left."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox.contract import EndReason, OutputLimit
from proctor.sandbox.native.channel import COMMANDS_MAX, OPERATIONS_MAX

from .guests import ENV

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proctor.sandbox.native.channel import GuestChannel

    from .conftest import MakeRoom

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox, pytest.mark.slow]

SECONDS = 5.0
WORKERS = 8


async def exit_code(guest: GuestChannel, rng: random.Random) -> None:
    code = rng.randrange(100)
    assert (await guest.exec(f"exit {code}", env=ENV)).exit_code == code


async def output(guest: GuestChannel, rng: random.Random) -> None:
    size = rng.randrange(3_000_000)
    assert (await guest.exec(f"head -c {size} /dev/zero", env=ENV)).stdout.total == size


async def time_out(guest: GuestChannel, rng: random.Random) -> None:
    result = await guest.exec("echo a; (setsid sleep 100 &); sleep 100", env=ENV, timeout_s=rng.random() * 0.2)
    assert result.timed_out


async def cancelled(guest: GuestChannel, rng: random.Random) -> None:
    with anyio.move_on_after(rng.random() * 0.05):
        await guest.exec("yes", env=ENV)


async def echo(guest: GuestChannel, rng: random.Random) -> None:
    data = rng.randbytes(rng.randrange(1_000_000))
    result = await guest.exec(["/bin/cat"], env=ENV, stdin=data, limit=OutputLimit(1 << 20, 0))
    assert result.stdout.head == data


async def kept(guest: GuestChannel, rng: random.Random) -> None:
    result = await guest.exec("sleep 0.05 & echo kept", env=ENV, keep=True)
    assert result.text == "kept\n"


async def kept_then_killed(guest: GuestChannel, rng: random.Random) -> None:
    process = await guest.start("sleep 100 & head -c 200000 /dev/zero", env=ENV, keep=True)
    await anyio.sleep(rng.random() * 0.02)
    await process.kill()
    result = await process.wait()
    assert result.reason is EndReason.KILLED or result.exit_code == 0


async def half_read(guest: GuestChannel, rng: random.Random) -> None:
    process = await guest.start("yes", env=ENV)
    wanted, seen = rng.randrange(500_000), 0
    async for _, data in process.output():
        seen += len(data)
        if seen > wanted:
            break
    await process.kill()
    assert (await process.wait()).reason is EndReason.KILLED


async def files(guest: GuestChannel, rng: random.Random) -> None:
    path, data = f"/tmp/{rng.randrange(10**9)}", rng.randbytes(rng.randrange(100_000))
    await guest.write(path, data)
    assert await guest.read(path) == data
    await guest.remove(path)


async def half_packed(guest: GuestChannel, rng: random.Random) -> None:
    with anyio.move_on_after(rng.random() * 0.05):
        async for _ in guest.pack("/usr/share"):
            pass


async def unread_input(guest: GuestChannel, rng: random.Random) -> None:
    assert (await guest.exec("exec <&-; echo done", env=ENV, stdin=bytes(1_000_000))).ok


WORK: list[Callable[[GuestChannel, random.Random], Awaitable[None]]] = [
    exit_code, output, time_out, cancelled, echo, kept, kept_then_killed, half_read, files, half_packed, unread_input,
]  # fmt: skip


async def test_a_storm_leaves_nothing(make_room: MakeRoom) -> None:
    deadline = time.monotonic() + SECONDS

    async with make_room() as room:
        guest = room.channel

        async def worker(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < deadline:
                await rng.choice(WORK)(guest, rng)

        async with anyio.create_task_group() as tasks:
            for seed in range(WORKERS):
                tasks.start_soon(worker, seed)
        assert await guest.kill_all() == 0
        for _ in range(50):
            await guest.ping()  # what was cancelled is closed within a few turns
            if not guest._execs:
                break
            await anyio.sleep(0.02)
        assert (guest._execs, guest._kept, guest._slots) == ({}, {}, {})
        assert (guest._commands.value, guest._operations.value) == (COMMANDS_MAX, OPERATIONS_MAX)
        assert sum(entry.name.isdigit() for entry in await guest.list("/proc")) == 2
        descriptors = len(os.listdir(f"/proc/{room.launched.pid}/fd"))
        groups = sum(name.startswith("e") for name in os.listdir(room.group.unified) if "." not in name)
        assert groups <= 16
        assert descriptors <= 9 + 2 * groups
