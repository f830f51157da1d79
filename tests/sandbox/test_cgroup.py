"""Control groups: how they are found, read, frozen, killed and removed, in every arrangement of trees."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import InfraError, RefusedError
from proctor.sandbox.native.cgroup import CgroupLayout, GroupStats, SlotGroup
from proctor.sandbox.native.launcher import BINARY
from proctor.sandbox.native.plan import CgroupTree

CSRC = BINARY.parent.parent / "csrc"

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .conftest import MakeRoom


@pytest.fixture
def mountinfo(tmp_path: Path) -> Callable[[str], Path]:
    """Writes lines `TYPE OPTIONS PATH` as a mountinfo file; paths are below `tmp_path`."""

    def write(mounts: str) -> Path:
        lines = ["22 27 0:21 / /proc rw,relatime - proc proc rw"]
        for number, line in enumerate(mounts.strip().splitlines()):
            kind, options, path = line.split()
            lines.append(f"{30 + number} 27 0:30 / {tmp_path}{path} rw,relatime shared:1 - {kind} {kind} {options}")
            (tmp_path / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        file = tmp_path / "mountinfo"
        file.write_text("\n".join(lines) + "\n")
        return file

    return write


_V1 = """
    cgroup rw,memory /cg/memory
    cgroup rw,cpu,cpuacct /cg/cpu,cpuacct
    cgroup rw,pids /cg/pids
    cgroup rw,freezer /cg/freezer
    cgroup rw,name=systemd /cg/systemd
"""


def make_v2(root: Path, controllers: str = "cpuset cpu io memory hugetlb pids") -> None:
    """The files of a cgroup2 directory that detection and preparation look at."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "cgroup.controllers").write_text(controllers + "\n")
    (root / "cgroup.subtree_control").write_text("cpu\n")


# --- detection ------------------------------------------------------------------------------------------------------


def test_v1_with_a_cgroup2_tree_beside_it(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    layout = CgroupLayout.detect(mountinfo(_V1 + "cgroup2 rw /cg/unified"))
    assert layout.version == 1
    assert layout.unified == tmp_path / "cg/unified"
    assert set(layout.controllers) == {"memory", "cpu", "cpuacct", "pids"}
    assert layout.controllers["cpuacct"] == tmp_path / "cg/cpu,cpuacct"


def test_v1_alone(mountinfo: Callable[[str], Path]) -> None:
    layout = CgroupLayout.detect(mountinfo(_V1))
    assert (layout.version, layout.unified) == (1, None)


def test_v2_alone(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    make_v2(tmp_path / "cg")
    layout = CgroupLayout.detect(mountinfo("cgroup2 rw,nsdelegate /cg"))
    assert (layout.version, layout.unified) == (2, tmp_path / "cg")


def test_v2_without_the_controllers_is_refused(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    make_v2(tmp_path / "cg", "cpuset io")
    with pytest.raises(RefusedError, match="offers only cpuset io"):
        CgroupLayout.detect(mountinfo("cgroup2 rw /cg"))


def test_v1_without_a_needed_controller_is_refused(mountinfo: Callable[[str], Path]) -> None:
    with pytest.raises(RefusedError, match="no cgroup controller for pids"):
        CgroupLayout.detect(mountinfo("cgroup rw,memory /m\ncgroup rw,cpu /c"))


def test_mount_points_with_odd_names_are_unescaped(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    file = mountinfo(_V1)
    file.write_text(file.read_text().replace("/cg/memory", "/cg/me\\040mory"))
    assert CgroupLayout.detect(file).controllers["memory"] == tmp_path / "cg/me mory"


# --- preparation ----------------------------------------------------------------------------------------------------


def test_v1_trees_are_named_once_per_mount(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    trees = CgroupLayout.detect(mountinfo(_V1 + "cgroup2 rw /cg/unified")).prepare("edge")
    assert trees == (
        CgroupTree("memory", tmp_path / "cg/memory/proctor/edge"),
        CgroupTree("cpu,cpuacct", tmp_path / "cg/cpu,cpuacct/proctor/edge"),
        CgroupTree("pids", tmp_path / "cg/pids/proctor/edge"),
        CgroupTree("unified", tmp_path / "cg/unified/proctor/edge"),
    )
    assert all(tree.path.is_dir() for tree in trees)


def test_v2_enables_controllers_down_to_the_edge(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    make_v2(tmp_path / "cg")
    for folder in ("proctor", "proctor/edge"):  # what the kernel would put into a new directory
        make_v2(tmp_path / "cg" / folder)
        (tmp_path / "cg" / folder / "cgroup.subtree_control").write_text("")
    layout = CgroupLayout.detect(mountinfo("cgroup2 rw /cg"))
    assert layout.prepare("edge") == (CgroupTree("*", tmp_path / "cg/proctor/edge"),)
    assert (tmp_path / "cg/cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "cg/proctor/edge/cgroup.subtree_control").read_text() == "+memory +cpu +pids"


def test_a_tree_that_cannot_be_written_is_refused(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    layout = CgroupLayout.detect(mountinfo(_V1))
    (tmp_path / "cg/memory/proctor").write_text("in the way")
    with pytest.raises(RefusedError, match=r"cannot use .*/cg/memory/proctor.*: Not a directory \(run as root"):
        layout.prepare("edge")


# --- numbers --------------------------------------------------------------------------------------------------------


def test_v2_numbers(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    make_v2(tmp_path / "cg")
    slot = tmp_path / "cg/proctor/edge/s1"
    slot.mkdir(parents=True)
    files = {
        "memory.current": "4096\n",
        "memory.peak": "8192\n",
        "memory.events": "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n",
        "cpu.stat": "usage_usec 1500000\nuser_usec 1\nsystem_usec 2\n",
        "pids.current": "3\n",
        "pids.peak": "9\n",
        "pids.events": "max 5\n",
    }
    for name, content in files.items():
        (slot / name).write_text(content)
    group = CgroupLayout.detect(mountinfo("cgroup2 rw /cg")).slot("edge", "s1")
    expected = GroupStats(
        memory_bytes=4096,
        memory_peak_bytes=8192,
        cpu_s=1.5,
        pids=3,
        pids_peak=9,
        oom_kills=2,
        pids_refused=5,
    )
    assert group.stats() == expected
    (slot / "memory.peak").unlink()  # before Linux 5.19
    assert group.stats().memory_peak_bytes is None


def test_v1_numbers(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    files = {
        "memory/proctor/edge/s1/memory.usage_in_bytes": "4096\n",
        "memory/proctor/edge/s1/memory.max_usage_in_bytes": "8192\n",
        "memory/proctor/edge/s1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "cpu,cpuacct/proctor/edge/s1/cpuacct.usage": "2500000000\n",
        "pids/proctor/edge/s1/pids.current": "3\n",
        "pids/proctor/edge/s1/pids.events": "max 4\n",
    }
    file = mountinfo(_V1)
    for name, content in files.items():
        path = tmp_path / "cg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    expected = GroupStats(
        memory_bytes=4096,
        memory_peak_bytes=8192,
        cpu_s=2.5,
        pids=3,
        pids_peak=None,
        oom_kills=2,
        pids_refused=4,
    )
    assert CgroupLayout.detect(file).slot("edge", "s1").stats() == expected


def test_edges_and_slots_are_listed_over_all_trees(mountinfo: Callable[[str], Path], tmp_path: Path) -> None:
    file = mountinfo(_V1 + "cgroup2 rw /cg/unified")
    for name in ("memory/proctor/one/s1", "pids/proctor/one/s2", "unified/proctor/two/s1/e1"):
        (tmp_path / "cg" / name).mkdir(parents=True)
    layout = CgroupLayout.detect(file)
    assert layout.edges() == ["one", "two"]
    assert layout.slots("one") == ["s1", "s2"]
    assert layout.slots("nobody") == []


def test_without_a_cgroup2_tree_killing_is_an_error_and_not_a_no_op(mountinfo: Callable[[str], Path]) -> None:
    with pytest.raises(InfraError, match="not known yet"):
        CgroupLayout.detect(mountinfo(_V1)).slot("edge", "s1").kill()


# --- limits, as the launcher writes them ----------------------------------------------------------------------------

_LIMIT_HARNESS = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include "cgroups.h"

/* argv: tree directory, is cgroup2, memory, quota, pids */
int main(int argc, char **argv) {
    if (argc != 6) return 2;
    struct cgroups groups = {.count = 1, .unified = -1};
    groups.trees[0].controllers = CONTROLS_MEMORY | CONTROLS_CPU | CONTROLS_PIDS | (atoi(argv[2]) ? IS_UNIFIED : 0);
    groups.trees[0].fd = open(argv[1], O_RDONLY | O_DIRECTORY);
    struct plan plan = {.memory_bytes = strtoull(argv[3], NULL, 10), .cpu_quota_us = strtoull(argv[4], NULL, 10),
                        .cpu_period_us = 100000, .pids = strtoull(argv[5], NULL, 10)};
    struct failure failure = {"", 0};
    if (cgroups_limit(&groups, "s1", &plan, &failure) < 0) printf("%s\n", failure.step);
    return 0;
}
"""


@pytest.fixture(scope="module")
def write_limits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher's code that writes limits, as a program that takes a directory of plain files for a cgroup tree."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("limits")
    (folder / "main.c").write_text(_LIMIT_HARNESS)
    sources = [folder / "main.c", CSRC / "cgroups.c", CSRC / "devices.c"]
    command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-I", CSRC, "-o", folder / "limits", *sources]
    subprocess.run(command, check=True)
    return folder / "limits"


def written(program: Path, root: Path, files: list[str], *arguments: int) -> dict[str, str] | str:
    """What the program writes into `files` of slot s1, or the step it names as failed."""
    (root / "s1").mkdir()
    for name in files:
        (root / "s1" / name).write_text("")
    command = [program, root, *map(str, arguments)]
    failed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return failed or {name: (root / "s1" / name).read_text() for name in files}


_V2_FILES = ["memory.max", "memory.swap.max", "cpu.max", "pids.max"]


def test_limits_on_v2(write_limits: Path, tmp_path: Path) -> None:
    assert written(write_limits, tmp_path, _V2_FILES, 1, 1 << 30, 150_000, 65) == {
        "memory.max": str(1 << 30),
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "pids.max": "65",
    }


def test_no_quota_on_v2(write_limits: Path, tmp_path: Path) -> None:
    found = written(write_limits, tmp_path, _V2_FILES, 1, 4096, 0, 5)
    assert isinstance(found, dict)
    assert found["cpu.max"] == "max 100000"


def test_a_v2_kernel_without_swap_accounting(write_limits: Path, tmp_path: Path) -> None:
    assert isinstance(written(write_limits, tmp_path, ["memory.max", "cpu.max", "pids.max"], 1, 4096, 0, 5), dict)


@pytest.mark.parametrize(("missing", "step"), [(0, "limit-memory"), (2, "limit-cpu"), (3, "limit-pids")])
def test_a_limit_that_cannot_be_written_is_an_error(
    write_limits: Path, tmp_path: Path, missing: int, step: str
) -> None:
    files = [name for number, name in enumerate(_V2_FILES) if number != missing]
    assert written(write_limits, tmp_path, files, 1, 4096, 1000, 5) == step


def test_limits_on_v1(write_limits: Path, tmp_path: Path) -> None:
    files = [
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "cpu.cfs_period_us",
        "cpu.cfs_quota_us",
        "pids.max",
    ]
    found = written(write_limits, tmp_path, files, 0, 1 << 30, 150_000, 65)
    assert found == dict(zip(files, [str(1 << 30), str(1 << 30), "100000", "150000", "65"], strict=True))


# --- the real thing -------------------------------------------------------------------------------------------------


@pytest.fixture
def real() -> Iterator[SlotGroup]:
    """A slot's groups on this machine, made by hand."""
    layout = CgroupLayout.detect()
    edge = f"groups-{os.getpid()}"
    for tree in layout.prepare(edge):
        (tree.path / "s1").mkdir()
    group = layout.slot(edge, "s1")
    yield group
    anyio.run(layout.remove_edge, edge)


def start_in(group: SlotGroup, command: str) -> subprocess.Popen[bytes]:
    """A shell whose processes are all in the group."""
    return subprocess.Popen(["/bin/sh", "-c", f"echo $$ > '{group.unified}/cgroup.procs'; {command}"])


async def wait_populated(group: SlotGroup, at_least: int = 1) -> None:
    with anyio.fail_after(5):
        while len((group.unified / "cgroup.procs").read_text().split()) < at_least:  # noqa: ASYNC110
            await anyio.sleep(0.005)


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_freeze_and_thaw(real: SlotGroup) -> None:
    process = start_in(real, "while :; do :; done")
    await wait_populated(real)
    real.freeze()
    with anyio.fail_after(5):
        while not real.frozen():  # noqa: ASYNC110
            await anyio.sleep(0.002)
    real.thaw()
    assert not real.frozen()
    real.kill()
    process.wait()


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_kill_takes_everything_even_while_it_forks(real: SlotGroup) -> None:
    (real.unified / "e1").mkdir()
    process = start_in(real, "for i in 1 2 3 4 5 6 7 8; do (trap '' TERM; setsid sleep 60 &) ; done; sleep 60")
    await wait_populated(real, 9)
    real.kill()
    process.wait()
    await real.wait_empty(5)
    assert not real.populated()
    await real.destroy()
    assert not real.unified.exists()
    real.kill()  # gone is fine
    await real.destroy()


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_kill_without_cgroup_kill(real: SlotGroup) -> None:
    process = start_in(real, "sleep 60 & sleep 60")
    await wait_populated(real, 3)
    real._kill_one_by_one()
    process.wait()
    await real.wait_empty(5)


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_waiting_for_the_living_names_them(real: SlotGroup) -> None:
    process = start_in(real, "exec sleep 60")
    await wait_populated(real)
    with pytest.raises(InfraError, match=rf"survive SIGKILL for 0.05 s: {process.pid} s\w+ S"):
        await real.wait_empty(0.05)
    real.kill()
    process.wait()


@pytest.mark.anyio
@pytest.mark.sandbox
async def test_groups_of_a_running_sandbox_hold_all_its_processes(make_room: MakeRoom) -> None:
    async with make_room() as room:
        await room.channel.start(["/bin/sleep", "60"], env={}, keep=True)
        with anyio.fail_after(5):
            while room.group.stats().pids < 2:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        assert room.group.populated()
        room.group.kill()
        await room.group.wait_empty()
        await room.group.remove()
        assert not room.group.unified.exists()
