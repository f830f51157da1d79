"""The machine runs out of something under the Edge: what cannot be done is refused by name, nothing is lost or left."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from .edges import gauges, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

KERNEL = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])

_START = """
import anyio, errno, os, resource, sys
from pathlib import Path
from proctor.common import ProctorError, RefusedError
from proctor.sandbox import Edge, EndReason, Lifecycle, Resources, SandboxSpec

HOME = Path(sys.argv[1])
small = Resources(cpus=0.5, memory_mb=64, disk_mb=16, disk_inodes=2000, pids=32, disk_driver="memory")
tied = SandboxSpec(resources=small)
durable = SandboxSpec(resources=small, lifecycle=Lifecycle(ttl_s=60, durable=True))

async def refused_at_last(make):
    for _ in range(100):
        try:
            await make()
        except ProctorError as error:
            return error.line()
    raise AssertionError("it was never refused")

async def refused(make):
    try:
        await make()
    except ProctorError as error:
        return error.line()
    raise AssertionError("it was not refused")
"""

_FULL_DISK = """
def fill(keep=0):
    file = os.open(HOME / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while True: os.write(file, bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    os.close(file)
    with open(HOME / "filler", "rb+") as file:
        file.truncate(max(os.path.getsize(HOME / "filler") - keep, 0))

async def main():
    async with Edge(HOME, pool_size=1, durable=True) as edge:
        kept = await edge.create(durable, request_id="kept")
        await kept.exec("echo before > /root/f")
        fill()
        line = await refused(lambda: edge.create(durable))
        assert "cannot write" in line and "free disk space" in line, line
        # The last page of a file has room for a few more records; then they are torn, and refused from there on.
        async def life():
            await (await edge.create(tied)).close()
        assert "cannot write the journal" in await refused_at_last(life)
        assert "cannot write" in await refused_at_last(lambda: kept.exec("true"))
        os.unlink(HOME / "filler")
        fill(keep=65536)
        # Room to write down that it starts, none for its output: that is counted, and the command is not stopped.
        result = await kept.exec("seq 1 100000", request_id="big")
        assert result.exit_code == 0 and result.stdout.total == 588895 and result.stdout.dropped > 400000, result
        os.unlink(HOME / "filler")
        assert (await kept.exec("cat /root/f")).text == "before\\n"
        async with await edge.create(tied) as other:
            assert (await other.exec(["true"])).ok
    async with Edge(HOME, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        assert (await box.exec("cat /root/f")).text == "before\\n"
        await box.close()
    print("survived")

anyio.run(main)
"""

_NO_INODES = """
async def main():
    async with Edge(HOME, pool_size=1, durable=True) as edge:
        kept = await edge.create(durable)
        await kept.exec("echo before > /root/f")
        (HOME / "many").mkdir()
        try:
            for number in range(10**6): (HOME / "many" / str(number)).touch()
        except OSError as error:
            assert error.errno == errno.ENOSPC
        assert "cannot write" in await refused(lambda: edge.create(durable))
        # The log of commands is a file already, one for output would be new: that is counted.
        lost = await kept.exec("echo lost")
        assert (lost.exit_code, lost.stdout.dropped) == (0, 5), lost
        for path in (HOME / "many").iterdir(): path.unlink()
        assert (await kept.exec("cat /root/f")).text == "before\\n"
        await kept.close()
    print("survived")

anyio.run(main)
"""

_DESCRIPTORS = """
async def main():
    hog = []
    async with Edge(HOME, pool_size=1) as edge:
        box = await edge.create(tied)
        def eat(leave):
            try:
                while True: hog.append(os.dup(0))
            except OSError as error:
                assert error.errno == errno.EMFILE
            for _ in range(leave): os.close(hog.pop())
        for leave in range(0, 12):
            eat(leave)
            try:
                made = await edge.create(tied)
            except (ProctorError, OSError) as error:
                shown = error.line() if isinstance(error, ProctorError) else f"RAW {error!r}"
                assert not shown.startswith("RAW"), (leave, shown)
            else:
                await made.close()
            assert (await box.exec(["true"])).ok, "what lives is not touched"
            while hog: os.close(hog.pop())
            while len(edge.boxes) > 1: await anyio.sleep(0.01)
        async with await edge.create(tied) as after:
            assert (await after.exec(["true"])).ok
        # Within the limit, the Edge itself says when there are too few.
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        edge._machine_read_at = float("-inf")
        made = []
        line = ""
        while not line:
            try: made.append(await edge.create(tied, deadline_s=0.1))
            except RefusedError as error: line = error.line()
        assert "file descriptors allowed" in line, line
        for one in made: await one.close()
    print("survived")

resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
anyio.run(main)
"""

_PIDS = """
async def main():
    async with Edge(HOME, pool_size=1) as edge:
        box = await edge.create(tied)
        hog = []
        try:
            while True:
                pid = os.fork()
                if pid == 0:
                    import time; time.sleep(100); os._exit(0)
                hog.append(pid)
        except OSError as error:
            assert error.errno == errno.EAGAIN
        assert len(hog) > 50
        lines = []
        for _ in range(3):
            try: lines.append(await (await edge.create(tied)).close())
            except ProctorError as error: lines.append(error.line())
        assert any("slot-clone" in str(line) or "Resource temporarily" in str(line) for line in lines), lines
        failed = await box.exec(["true"])
        assert failed.ok or failed.reason is EndReason.PIDS, failed
        for pid in hog: os.kill(pid, 9); os.waitpid(pid, 0)
        assert (await box.exec(["true"])).ok
        async with await edge.create(tied) as after:
            assert (await after.exec(["true"])).ok
    print("survived")

Path("/proc/sys/kernel/pid_max").write_text("400")
anyio.run(main)
"""

_TIME = """
async def main():
    async with Edge(HOME, pool_size=1, durable=True) as edge:
        box = await edge.create(SandboxSpec(resources=small, lifecycle=Lifecycle(ttl_s=30, durable=True)))
        process = await box.start("sleep 0.5; echo on")
    async with Edge(HOME, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        assert (await (await box.attach(process.exec_id)).wait()).text == "on\\n"
        await box.close()
    print("survived")

anyio.run(main)
"""


def run(script: str, home: Path, *prefix: str) -> str:
    """Run a script in a process of its own; its last words, or its complaint."""
    command = [*prefix, sys.executable, "-c", _START + script, str(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
    return done.stdout or done.stderr[-3000:]


async def clean(home: Path) -> None:
    await until(lambda: gauges(home).groups == 0)


def on_small_disk(script: str, home: Path, options: str) -> str:
    home.mkdir()
    mount = f'mount -t tmpfs -o {options},mode=700 tmpfs "{home}" && exec "$@"'
    return run(script, home, "unshare", "--mount", "sh", "-c", mount, "sh")


async def test_a_full_disk_of_the_machine(tmp_path: Path) -> None:
    assert on_small_disk(_FULL_DISK, tmp_path / "home", "size=4m") == "survived\n"
    await clean(tmp_path / "home")


async def test_no_inodes_left_on_the_machines_disk(tmp_path: Path) -> None:
    assert on_small_disk(_NO_INODES, tmp_path / "home", "nr_inodes=300") == "survived\n"
    await clean(tmp_path / "home")


async def test_no_descriptors_left_in_the_process(tmp_path: Path) -> None:
    assert run(_DESCRIPTORS, tmp_path) == "survived\n"
    await clean(tmp_path)


@pytest.mark.skipif(KERNEL < (6, 14), reason="before Linux 6.14 there is one pid_max for all namespaces")
async def test_no_processes_left_on_the_machine(tmp_path: Path) -> None:
    assert run(_PIDS, tmp_path, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child") == "survived\n"
    await clean(tmp_path)


@pytest.mark.skipif(KERNEL < (5, 6), reason="Linux 5.6 has time namespaces")
async def test_a_machine_whose_clocks_have_run_for_years(tmp_path: Path) -> None:
    shifted = ["unshare", "--time", "--fork", "--monotonic", "200000000", "--boottime", "300000000"]
    assert run(_TIME, tmp_path, *shifted) == "survived\n"
    await clean(tmp_path)
