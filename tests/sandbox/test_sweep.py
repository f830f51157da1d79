"""Sudden death: the process is killed at each step of start, create, close and stop; the next start leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.sandbox import Edge, sweep
from proctor.sandbox._faults import POINTS
from proctor.sandbox.native.cgroup import CgroupLayout
from proctor.sandbox.sweep import home_tag

from .edges import gauges, loops, small, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

# Two lives, one of them with its disk in an image file, a snapshot, a fork and processes that would rather stay.
_LIFE = """
import anyio, sys
from pathlib import Path
from proctor.sandbox import Edge, Lifecycle, Resources, SandboxSpec

async def main():
    async with Edge(Path(sys.argv[1]), pool_size=2) as edge:
        small = dict(cpus=0.5, memory_mb=64, disk_mb=16, disk_inodes=2000, pids=32)
        for driver in ("loop", "memory"):
            spec = SandboxSpec(resources=Resources(disk_driver=driver, **small))
            async with await edge.create(spec) as box:
                await box.exec("setsid sleep 1000 & trap '' TERM HUP INT; sleep 1000 &", keep=True)
                await box.exec("echo x > /root/x")
                (child,) = await box.fork()
                await child.close()
            while edge.boxes:
                await anyio.sleep(0.01)
    print("survived")

anyio.run(main)
"""


def run_life(home: Path, fault: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _LIFE, str(home)],
        env={**os.environ, "PROCTOR_FAULT": fault},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def kill_after(script: str, home: Path, delay_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", script, str(home)])
    time.sleep(delay_s)
    process.kill()
    process.wait()


def processes_in_groups(home: Path) -> list[int]:
    """Processes of Edges of this home, by the kernel's books."""
    layout = CgroupLayout.detect()
    pids: list[int] = []
    for edge in layout.edges():
        if edge.startswith(home_tag(home)):
            for directory in layout.edge_directories(edge):
                for path in directory.rglob("cgroup.procs"):
                    pids += [int(line) for line in path.read_text().split()]
    return pids


async def test_without_a_fault_the_life_is_whole(tmp_path: Path) -> None:
    done = run_life(tmp_path, "")
    assert (done.stdout, done.returncode) == ("survived\n", 0), done.stderr
    assert gauges(tmp_path).groups == 0


@pytest.mark.parametrize("fault", POINTS)
async def test_a_death_at_any_step_leaves_nothing_after_the_next_start(tmp_path: Path, fault: str) -> None:
    done = run_life(tmp_path, fault)
    assert done.returncode == -signal.SIGKILL, f"{fault} was never reached: {done.stderr}"
    # Without any help of ours, the kernel ends every process of a dead Edge.
    await until(lambda: not processes_in_groups(tmp_path))
    async with Edge(tmp_path, pool_size=1) as edge:
        assert [path.name for path in sweep.edges(tmp_path)] == [edge.id]
        async with await edge.create(small()) as box:
            assert (await box.exec(["true"])).ok
    assert gauges(tmp_path).groups == 0
    assert [path.name for path in (tmp_path / "edges").iterdir()] == ["lock"]
    await until(lambda: not loops(tmp_path))


async def test_a_living_edge_is_left_alone(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1) as one:
        box = await one.create(small())
        async with Edge(tmp_path, pool_size=1):
            pass
        assert (await box.exec(["true"])).ok


async def test_the_periodic_sweep_cleans_up_after_another_edge(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, sweep_interval_s=0.1) as edge:
        await anyio.to_thread.run_sync(run_life, tmp_path, "create:after-created")
        await until(lambda: [path.name for path in sweep.edges(tmp_path)] == [edge.id])


async def test_groups_without_a_directory_are_removed(tmp_path: Path) -> None:
    layout = CgroupLayout.detect()
    for directory in layout.edge_directories(f"{home_tag(tmp_path)}-deadbeef"):
        (directory / "s1").mkdir(parents=True)
    async with Edge(tmp_path, pool_size=1):
        assert f"{home_tag(tmp_path)}-deadbeef" not in layout.edges()


async def test_old_empty_groups_of_a_home_that_is_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = CgroupLayout.detect()
    async with Edge(tmp_path / "alive", pool_size=1) as other:
        for directory in layout.edge_directories("zzzz-deadbeef"):
            (directory / "s1").mkdir(parents=True)
        async with Edge(tmp_path / "one", pool_size=1):
            assert "zzzz-deadbeef" in layout.edges(), "too young to be forgotten"
        monkeypatch.setattr("proctor.sandbox.sweep._FORGOTTEN_AFTER_S", 0.0)
        # Only the question is asked: with no patience at all, an Edge that somebody is just starting would be hit.
        forgotten = sweep._forgotten(layout, home_tag(tmp_path / "one") + "-")
        assert "zzzz-deadbeef" in forgotten
        assert other.id not in forgotten
        await layout.remove_edge("zzzz-deadbeef")


async def test_a_random_death_under_load_leaves_nothing(tmp_path: Path) -> None:
    script = _LIFE.replace('for driver in ("loop", "memory"):', 'for driver in ("loop", "memory") * 50:')
    for delay_s in (0.35, 0.5, 0.7, 0.9):
        kill_after(script, tmp_path, delay_s)
    await until(lambda: not processes_in_groups(tmp_path))
    async with Edge(tmp_path, pool_size=1):
        pass
    assert gauges(tmp_path).groups == 0
    await until(lambda: not loops(tmp_path))
