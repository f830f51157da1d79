"""Trees and streams without measure: every operation ends, memory stays bounded, and nothing is left."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import ProctorError
from proctor.sandbox import Edge, EndReason, Lifecycle, OutputLimit, Resources

from .edges import gauges, small

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox, pytest.mark.slow]

DEEP = """
import os, sys
os.chdir("/root")
for number in range(int(sys.argv[1])):
    os.mkdir("d")
    os.chdir("d")
open("bottom", "w").write("here")
"""
MANY = """
import os, sys
for number in range(int(sys.argv[1])):
    if number % 1000 == 0:
        os.mkdir(f"/root/{number}")
        os.chdir(f"/root/{number}")
    os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY))
"""


def peak_mb() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def spooled(home: Path) -> int:
    return sum(path.stat().st_size for path in home.glob("edges/*/boxes/*/out/*"))


@pytest.mark.parametrize(
    ("levels", "export"), [(2000, False), pytest.param(10_000, True, marks=pytest.mark.heavy)], ids=["2k", "10k"]
)
async def test_ten_thousand_levels_of_directories(tmp_path: Path, levels: int, export: bool) -> None:
    roomy = Resources(cpus=1, memory_mb=256, disk_mb=128, disk_inodes=30_000, pids=32)
    before = gauges(tmp_path)
    async with Edge(tmp_path, pool_size=1) as edge, await edge.create(small(resources=roomy)) as box:
        made = await box.exec(["python3", "-c", DEEP, str(levels)], timeout_s=60)
        assert made.ok, made.error_text
        with anyio.fail_after(600):
            entries = await box.diff()
            assert len(entries) == levels + 1
            assert entries[-1].path.endswith("/d/bottom")
            if export:  # a tar names each entry by its whole path: a hundred million bytes of names
                await box.export_diff(tmp_path / "diff.tar.zst")
                # What cannot be had is refused by name: a path of the host holds 4,096 bytes.
                with suppress(ProctorError):
                    await box.download("/root", tmp_path / "copy")
            layer = await box.snapshot()
            assert (await box.exec("test -d /root/d/d/d")).ok
            await box.remove("/root/d", recursive=True)
            assert (await box.exec("ls /root")).text == ""
            await box.reset()
            await edge.drop(layer)
            assert await box.diff() == []
    assert gauges(tmp_path).groups == before.groups
    assert gauges(tmp_path).descriptors == before.descriptors


@pytest.mark.parametrize(
    "count", [pytest.param(3_000, id="3k"), pytest.param(1_000_000, id="million", marks=pytest.mark.heavy)]
)
async def test_a_great_many_small_files(tmp_path: Path, count: int) -> None:
    inodes = count + count // 500 + 1000
    roomy = Resources(cpus=2, memory_mb=3000, disk_mb=2500, disk_inodes=inodes, pids=32)
    before = gauges(tmp_path)
    async with Edge(tmp_path, pool_size=1) as edge, await edge.create(small(resources=roomy)) as box:
        made = await box.exec(["python3", "-c", MANY, str(count)], timeout_s=900)
        assert made.ok, made.error_text
        assert (await box.stats()).disk_inodes >= count
        entries = await box.diff()
        assert sum(entry.kind == "file" for entry in entries) == count
        del entries
        await box.export_diff(tmp_path / "diff.tar.zst")
        with anyio.fail_after(60):
            await box.reset()  # a dropped disk costs the same whatever was in it
        assert await box.diff() == []
        full = await box.exec(["python3", "-c", MANY, str(count * 2)], timeout_s=900)
        assert full.reason is EndReason.DISK, "the cap on files is a cap"
    assert gauges(tmp_path).groups == before.groups
    assert gauges(tmp_path).descriptors == before.descriptors


@pytest.mark.parametrize(
    "seconds", [pytest.param(2.0, id="2s"), pytest.param(60.0, id="minute", marks=pytest.mark.heavy)]
)
async def test_yes_without_end_costs_its_limit_and_no_more(tmp_path: Path, seconds: float) -> None:
    limit = OutputLimit(1 << 16, 1 << 16)
    async with Edge(tmp_path, pool_size=1) as edge, await edge.create(small()) as box:
        await box.exec("yes", timeout_s=0.3, limit=limit)
        before = peak_mb()
        result = await box.exec("yes", timeout_s=seconds, limit=limit)
        assert result.reason is EndReason.EXEC_TIMEOUT
        assert result.stdout.total > 50_000_000
        assert len(result.stdout.head) == len(result.stdout.tail) == 1 << 16
        assert result.stdout.head == b"y\n" * (1 << 15)
        assert peak_mb() - before < 32
        assert (await box.exec("echo fine")).text == "fine\n"


async def test_yes_in_a_durable_sandbox_costs_its_limit_of_disk(tmp_path: Path) -> None:
    limit = OutputLimit(1 << 16, 1 << 16)
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(small(lifecycle=Lifecycle(ttl_s=60, durable=True)))
        result = await box.exec("yes", timeout_s=1.0, limit=limit)
        assert result.stdout.total > 5_000_000
        assert spooled(tmp_path) <= 3 * (1 << 16)
        await box.close()
