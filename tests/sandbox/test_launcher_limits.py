"""Every limit is exceeded on purpose: it must hold, and the counters must say what happened."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox.contract import LaunchError
from proctor.sandbox.native.plan import Limits, LoopUpper, MemoryUpper

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeRoom, Room

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

MB = 1 << 20

_FILL_BYTES = """
written = 0
try:
    with open("/tmp/big", "wb", buffering=0) as file:
        while written < 1 << 30: written += file.write(b"x" * (1 << 20))
except OSError as error: print(error.errno, written >> 20)
else: print("no limit")
"""

_FILL_INODES = """
import os
made = 0
try:
    os.mkdir("/tmp/many")
    while made < 1_000_000:
        os.close(os.open(f"/tmp/many/{made}", os.O_CREAT | os.O_WRONLY)); made += 1
except OSError as error: print(error.errno, made)
else: print("no limit")
"""


@pytest.fixture
def loop_image(tmp_path: Path) -> Path:
    """An ext4 image of 32 MB with 2,000 inodes."""
    image = tmp_path / "upper.img"
    with image.open("wb") as file:
        file.truncate(32 * MB)
    command = ["mkfs.ext4", "-q", "-F", "-m", "0", "-N", "2000", "-O", "^has_journal", str(image)]
    subprocess.run(command, check=True, capture_output=True)
    return image


async def test_memory_bomb_kills_the_bomb_and_is_counted(make_room: MakeRoom) -> None:
    async with make_room(limits=Limits(64 * MB, 64, 100_000)) as room:
        result = await room.python("x = []\nwhile True: x.append(bytes(1 << 20))")
        assert result.signal == 9
        assert room.group.stats().oom_kills == 1
        assert (room.group.stats().memory_peak_bytes or 0) <= 64 * MB
        assert (await room.sh("echo alive")).text == "alive\n"


async def test_shared_memory_and_disk_in_memory_are_charged(make_room: MakeRoom) -> None:
    async with make_room(
        limits=Limits(128 * MB, 64, 100_000), upper=MemoryUpper(64 * MB, 1000), shm_bytes=32 * MB
    ) as room:
        before = room.group.stats().memory_bytes
        await room.sh("head -c 20M /dev/zero > /dev/shm/x; head -c 20M /dev/zero > /tmp/x")
        # A little of what was counted before may have been freed meanwhile.
        assert room.group.stats().memory_bytes - before >= 38 * MB


async def test_shared_memory_is_capped(make_room: MakeRoom) -> None:
    async with make_room(shm_bytes=8 * MB) as room:
        result = await room.sh("head -c 9M /dev/zero > /dev/shm/x; stat -c %s /dev/shm/x")
        assert result.text.strip() == str(8 * MB)


async def test_system_v_memory_goes_with_its_processes(make_room: MakeRoom) -> None:
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0, 32 << 20, 0o1600)
ctypes.memset(libc.shmat(segment, None, 0), 1, 32 << 20)
made = 0
while libc.msgget(0, 0o1600) >= 0: made += 1
print(made)
"""
    async with make_room() as room:
        before = room.group.stats().memory_bytes
        assert (await room.python(program)).text == "128\n"
        stats = room.group.stats()
        assert (stats.memory_peak_bytes or stats.memory_bytes) > before + 32 * MB
        assert stats.memory_bytes < before + 16 * MB


async def test_fork_bomb_is_bounded_and_counted(make_room: MakeRoom) -> None:
    bomb = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        children += 1
except BlockingIOError: print(children)
"""
    async with make_room(limits=Limits(256 * MB, 33, 100_000)) as room:
        result = await room.python(bomb)
        # 33 less the guest and the program itself.
        assert result.text.strip() == "31"
        stats = room.group.stats()
        assert stats.pids_refused >= 1
        assert stats.pids_peak in (33, None)
        assert (await room.sh("echo alive")).text == "alive\n"


async def test_cpu_quota_holds(make_room: MakeRoom) -> None:
    spin = "import os, time\nos.fork()\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
    async with make_room(limits=Limits(256 * MB, 64, 25_000)) as room:
        before, start = room.group.stats().cpu_s, time.monotonic()
        await room.python(spin)
        used, elapsed = room.group.stats().cpu_s - before, time.monotonic() - start
        assert used <= 0.25 * elapsed + 0.1


@pytest.mark.parametrize("forced", [False, True])
async def test_bytes_of_a_disk_in_memory_are_limited(make_room: MakeRoom, forced: bool) -> None:
    async with make_room(upper=MemoryUpper(16 * MB, 1000), force_paths=forced) as room:
        number, megabytes = (await room.python(_FILL_BYTES)).text.split()
        assert number == "28"  # ENOSPC
        assert int(megabytes) <= 16


async def test_inodes_of_a_disk_in_memory_are_limited(make_room: MakeRoom) -> None:
    async with make_room(upper=MemoryUpper(16 * MB, 1000)) as room:
        number, made = (await room.python(_FILL_INODES)).text.split()
        assert number == "28"
        assert 900 <= int(made) <= 1000


async def test_bytes_of_a_disk_on_a_loop_image_are_limited(make_room: MakeRoom, loop_image: Path) -> None:
    async with make_room(upper=LoopUpper(loop_image)) as room:
        number, megabytes = (await room.python(_FILL_BYTES)).text.split()
        assert number == "28"
        assert 16 <= int(megabytes) <= 32


async def test_inodes_of_a_disk_on_a_loop_image_are_limited(make_room: MakeRoom, loop_image: Path) -> None:
    async with make_room(upper=LoopUpper(loop_image)) as room:
        number, made = (await room.python(_FILL_INODES)).text.split()
        assert number == "28"
        assert 1500 <= int(made) <= 2100


async def test_a_loop_device_is_freed_with_its_sandbox(make_room: MakeRoom, loop_image: Path) -> None:
    async with make_room(upper=LoopUpper(loop_image)) as room:
        await room.sh("echo x > /tmp/x")
        assert str(loop_image) in _loops()
    with anyio.fail_after(5):
        while str(loop_image) in _loops():  # noqa: ASYNC110 - the kernel frees it when its last mount goes
            await anyio.sleep(0.01)


async def test_a_missing_loop_image_is_an_error_and_leaves_no_loop_device(make_room: MakeRoom, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="upper-image: No such file"):
        async with make_room(upper=LoopUpper(tmp_path / "nothing.img")):
            pass
    assert str(tmp_path) not in _loops()


async def test_a_loop_image_that_is_no_file_system_is_an_error(make_room: MakeRoom, tmp_path: Path) -> None:
    image = tmp_path / "garbage.img"
    image.write_bytes(b"\0" * MB)
    with pytest.raises(LaunchError, match="upper-mount: Invalid argument"):
        async with make_room(upper=LoopUpper(image)):
            pass


async def test_open_files_are_limited(make_room: MakeRoom) -> None:
    async with make_room() as room:
        assert (await room.sh("ulimit -n; ulimit -Hn")).text.split() == ["16384", "16384"]


async def test_the_candidate_is_preferred_when_the_machine_runs_out_of_memory(make_room: MakeRoom) -> None:
    async with make_room() as room:
        assert (await room.sh("cat /proc/1/oom_score_adj /proc/self/oom_score_adj")).text.split() == ["0", "500"]


async def test_limits_are_in_force_before_the_guest_runs(make_room: MakeRoom) -> None:
    async with make_room(limits=Limits(77 * MB, 44, 50_000)) as room:
        assert _limits(room) == (77 * MB, 44)


def _limits(room: Room) -> tuple[int, int]:
    memory, pids = room.group.directory("memory"), room.group.directory("pids")
    assert memory is not None
    assert pids is not None
    name = "memory.max" if room.group.layout.version == 2 else "memory.limit_in_bytes"
    return int((memory / name).read_text()), int((pids / "pids.max").read_text())


def _loops() -> str:
    return subprocess.run(["losetup", "-a"], check=True, capture_output=True, text=True).stdout
