"""Starting and ending: what is left when something dies, on purpose or not, at any moment."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import ConfigError
from proctor.sandbox.contract import LaunchError
from proctor.sandbox.native.cgroup import CgroupLayout
from proctor.sandbox.native.launcher import Launcher, LauncherConfig
from proctor.sandbox.native.plan import Bind, Limits, encode_plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.sandbox.native.plan import Plan

    from .conftest import MakeRoom

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


def processes(edge: str) -> list[int]:
    """Host pids of all processes in the groups of `edge`."""
    layout = CgroupLayout.detect()
    found: set[int] = set()
    for directory in layout.edge_directories(edge):
        for folder, _, _ in os.walk(directory):
            with suppress(FileNotFoundError):
                found.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
    return sorted(found)


async def wait_gone(pids: list[int]) -> None:
    with anyio.fail_after(10):
        while any(_alive(pid) for pid in pids):  # noqa: ASYNC110 - the kernel sends no event to a stranger
            await anyio.sleep(0.01)


def _alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture
async def own(init_binary: Path) -> AsyncIterator[Launcher]:
    """A launcher that a test may break."""
    launcher = await Launcher.start(LauncherConfig(edge=f"life-{os.getpid()}", pool=3, binary=init_binary))
    yield launcher
    await launcher.close()


async def test_close_leaves_no_process_and_no_directory(base_plan: Plan, init_binary: Path) -> None:
    launcher = await Launcher.start(LauncherConfig(edge=f"close-{os.getpid()}", pool=3, binary=init_binary))
    launched = [await launcher.launch(base_plan) for _ in range(3)]
    pids = processes(launcher.config.edge)
    assert set(pids) >= {sandbox.pid for sandbox in launched}
    await launcher.close()
    assert [pid for pid in pids if _alive(pid)] == []
    assert not any(directory.exists() for directory in launcher.layout.edge_directories(launcher.config.edge))
    for sandbox in launched:
        sandbox.close()


async def test_no_zombies_are_left_for_others_to_reap(base_plan: Plan, init_binary: Path) -> None:
    launcher = await Launcher.start(LauncherConfig(edge=f"zombie-{os.getpid()}", pool=3, binary=init_binary))
    (await launcher.launch(base_plan)).close()
    await anyio.sleep(0.1)
    pids = processes(launcher.config.edge)
    await launcher.close()
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []  # noqa: ASYNC240


async def test_a_machine_without_a_cgroup2_mount(base_plan: Plan, init_binary: Path) -> None:
    layout = CgroupLayout.detect()
    if layout.version != 1:
        pytest.skip("this machine has cgroup2 alone")
    config = LauncherConfig(edge=f"pure-{os.getpid()}", pool=2, binary=init_binary)
    launcher = await Launcher.start(config, replace(layout, unified=None))
    sandbox = await launcher.launch(base_plan)
    group = launcher.layout.slot(config.edge, sandbox.slot)
    assert group.populated()
    group.kill()
    await group.wait_empty()
    assert group.stats().pids == 0
    await group.remove()
    sandbox.close()
    await launcher.close()
    assert config.edge not in layout.edges()


async def test_no_sandbox_shares_the_edges_session_and_terminal(own: Launcher, base_plan: Plan) -> None:
    sandbox = await own.launch(base_plan)
    assert os.getsid(sandbox.pid) != os.getsid(0)
    assert os.getpgid(sandbox.pid) != os.getpgid(0)
    sandbox.close()


async def test_closing_the_channel_ends_the_sandbox(own: Launcher, base_plan: Plan) -> None:
    sandbox = await own.launch(base_plan)
    sandbox.channel.close()
    with anyio.fail_after(5):
        await anyio.wait_readable(sandbox.pidfd)
    os.close(sandbox.pidfd)
    os.close(sandbox.upper_fd)


async def test_launches_that_wait_end_when_the_launcher_is_closed(base_plan: Plan, init_binary: Path) -> None:
    launcher = await Launcher.start(LauncherConfig(edge=f"wait-{os.getpid()}", pool=3, binary=init_binary))
    await anyio.sleep(0.2)
    for name in launcher.layout.slots(launcher.config.edge):
        launcher.layout.slot(launcher.config.edge, name).freeze()
    errors = []

    async def one() -> None:
        try:
            await launcher.launch(base_plan)
        except LaunchError as error:
            errors.append(error)

    with anyio.fail_after(8):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
            await anyio.sleep(0.1)
            await launcher.close()
    assert ["closed" in error.message for error in errors] == [True] * 3


async def test_killing_the_launcher_kills_everything(own: Launcher, base_plan: Plan) -> None:
    sandbox = await own.launch(base_plan)
    pids = processes(own.config.edge)
    os.kill(own._process.pid, signal.SIGKILL)
    await wait_gone(pids)
    with pytest.raises(LaunchError, match="launcher is gone"):
        await own.launch(base_plan)
    sandbox.close()


async def test_killing_the_stocker_kills_everything(own: Launcher, base_plan: Plan) -> None:
    sandbox = await own.launch(base_plan)
    pids = processes(own.config.edge)
    os.kill(_stocker(own), signal.SIGKILL)
    await wait_gone(pids)
    with pytest.raises(LaunchError, match="launcher is gone"):
        await own.launch(base_plan)
    sandbox.close()


async def test_killing_a_pooled_slot_does_no_harm(own: Launcher, base_plan: Plan) -> None:
    await anyio.sleep(0.2)
    for pid in processes(own.config.edge):
        os.kill(pid, signal.SIGKILL)
    await anyio.sleep(0.1)
    sandbox = await own.launch(base_plan)
    assert _alive(sandbox.pid)
    sandbox.close()


@pytest.mark.slow
async def test_a_slot_that_hangs_is_given_up_and_killed(own: Launcher, base_plan: Plan) -> None:
    await anyio.sleep(0.2)
    names = own.layout.slots(own.config.edge)
    pids = processes(own.config.edge)
    for name in names:
        own.layout.slot(own.config.edge, name).freeze()
    with pytest.raises(LaunchError, match="slot-deadline"):
        await own.launch(base_plan)
    for name in names[1:]:
        own.layout.slot(own.config.edge, name).thaw()
    assert len([pid for pid in pids if _alive(pid)]) == len(pids) - 1
    (await own.launch(base_plan)).close()


_EDGE = """
    import os, sys, time
    import anyio
    from pathlib import Path
    from proctor.sandbox.native import seccomp
    from proctor.sandbox.native.launcher import Launcher, LauncherConfig
    from proctor.sandbox.native.plan import Bind, Limits, MemoryUpper, Plan

    async def main():
        launcher = await Launcher.start(LauncherConfig(edge=sys.argv[1], pool=3, binary=Path(sys.argv[3])))
        copy = os.fork() if {forked} else 0
        if {forked} and copy == 0:  # a copy of the Edge that holds its descriptors
            time.sleep(30)
            os._exit(0)
        plan = Plan("x", (Path(sys.argv[2]),), MemoryUpper(1 << 20, 100), Limits(64 << 20, 10), seccomp.program(),
                    binds=(Bind(Path("/usr"), "/usr"),))
        made = [await launcher.launch(plan) for _ in range(2)]
        os.write(1, b"ready %d" % copy)
        await anyio.sleep(30)

    anyio.run(main)
"""


async def test_kill_of_the_edge_ends_all(base_layer: Path, init_binary: Path) -> None:
    edge = f"dead-{os.getpid()}"
    program = textwrap.dedent(_EDGE.format(forked=False))
    async with await anyio.open_process(
        [sys.executable, "-c", program, edge, str(base_layer), str(init_binary)], stdout=subprocess.PIPE, stderr=None
    ) as process:
        assert process.stdout is not None
        assert (await process.stdout.receive()).startswith(b"ready")
        pids = processes(edge)
        assert len(pids) >= 2
        process.kill()
        await process.wait()
    await wait_gone(pids)
    layout = CgroupLayout.detect()
    assert edge in layout.edges()
    await layout.remove_edge(edge)
    assert edge not in layout.edges()


async def test_kill_of_the_edge_ends_all_even_when_a_copy_of_it_holds_the_socket(
    base_layer: Path, init_binary: Path
) -> None:
    edge = f"fork-{os.getpid()}"
    program = textwrap.dedent(_EDGE.format(forked=True))
    async with await anyio.open_process(
        [sys.executable, "-c", program, edge, str(base_layer), str(init_binary)], stdout=subprocess.PIPE, stderr=None
    ) as process:
        assert process.stdout is not None
        copy = int((await process.stdout.receive()).split()[1])
        try:
            pids = processes(edge)
            assert len(pids) >= 2
            process.kill()
            await wait_gone(pids)
            assert _alive(copy)
        finally:
            os.kill(copy, signal.SIGKILL)
    await CgroupLayout.detect().remove_edge(edge)


async def test_when_all_id_ranges_are_taken_a_launch_fails_at_once_and_later_succeeds(
    base_plan: Plan, init_binary: Path
) -> None:
    config = LauncherConfig(edge=f"ranges-{os.getpid()}", pool=2, binary=init_binary, uid_ranges=4)
    launcher = await Launcher.start(config)
    made = [await launcher.launch(base_plan) for _ in range(4)]
    with pytest.raises(LaunchError, match="id-ranges"):
        await launcher.launch(base_plan)
    ticks = _cpu_ticks(launcher)
    await anyio.sleep(1)
    assert _cpu_ticks(launcher) - ticks <= 5  # it waits, it does not spin
    made.pop().close()
    await anyio.sleep(0.5)
    made.append(await launcher.launch(base_plan))
    for sandbox in made:
        sandbox.close()
    await launcher.close()


async def test_nothing_runs_while_nothing_is_asked(own: Launcher) -> None:
    await anyio.sleep(0.3)
    ticks = _cpu_ticks(own)
    await anyio.sleep(1)
    assert _cpu_ticks(own) == ticks


def _cpu_ticks(launcher: Launcher) -> int:
    """CPU time of launcher and stocker in hundredths of a second."""
    total = 0
    for pid in (launcher._process.pid, _stocker(launcher)):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total


async def test_a_failed_launch_leaves_nothing(own: Launcher, base_plan: Plan) -> None:
    await anyio.sleep(0.2)
    before = len(own.layout.slots(own.config.edge))
    for _ in range(5):
        with pytest.raises(LaunchError, match="layer-open: No such file or directory"):
            await own.launch(replace(base_plan, layers=(Path("/does/not/exist"),)))
        binds = (Bind(Path("/usr"), "/usr"), Bind(Path("/etc/passwd"), "/usr/bin"))
        with pytest.raises(LaunchError, match="attach-bind"):
            await own.launch(replace(base_plan, binds=binds))
    await anyio.sleep(0.2)
    # The pool is back at its size: two to three slots.
    assert abs(len(own.layout.slots(own.config.edge)) - before) <= 2


async def test_a_limit_that_the_kernel_refuses_is_named(own: Launcher, base_plan: Plan) -> None:
    with pytest.raises(LaunchError, match="limit-cpu: Invalid argument"):
        await own.launch(replace(base_plan, limits=Limits(64 << 20, 10, cpu_quota_us=1)))


async def test_a_plan_that_cannot_be_true_is_refused_before_it_is_sent(base_plan: Plan) -> None:
    for change in ({"name": "a/b"}, {"layers": ()}, {"hostname": ""}, {"binds": (Bind(Path("/usr"), "/a/../b"),)}):
        with pytest.raises(ConfigError):
            replace(base_plan, **change)  # type: ignore[arg-type]


async def test_many_launches_at_once(own: Launcher, base_plan: Plan) -> None:
    made = []

    async def one() -> None:
        made.append(await own.launch(base_plan))

    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(one)
    assert len({sandbox.slot for sandbox in made}) == 40
    assert len({sandbox.uid_base for sandbox in made}) == 40
    for sandbox in made:
        sandbox.close()


async def test_a_cancelled_launch_leaves_nothing(own: Launcher, base_plan: Plan) -> None:
    await anyio.sleep(0.2)
    for delay in (0, 0.0002, 0.0005, 0.001, 0.002):
        with anyio.move_on_after(delay):
            (await own.launch(base_plan)).close()
    sandbox = await own.launch(base_plan)
    sandbox.close()
    await anyio.sleep(0.3)
    alive = [pid for pid in processes(own.config.edge) if _alive(pid)]
    assert len(alive) <= 4  # the pool, and perhaps the last one on its way out


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 40, 200])
async def test_a_message_cut_short_is_answered_or_ends_the_launcher_cleanly(
    own: Launcher, base_plan: Plan, cut: int
) -> None:
    own._socket.send(encode_plan(base_plan, 999)[:cut])
    with anyio.move_on_after(5):
        await anyio.wait_readable(own._socket)
        data, fds, _, _ = socket.recv_fds(own._socket, 65536, 8)
        assert fds == []
        if data:
            with suppress(LaunchError):
                (await own.launch(base_plan)).close()


async def test_a_launcher_of_another_version_is_refused(base_plan: Plan, tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(LaunchError, match="cannot start"):
        await Launcher.start(LauncherConfig(edge=f"fake-{os.getpid()}", binary=fake))


async def test_the_binary_tells_its_versions(init_binary: Path) -> None:
    result = await anyio.run_process([init_binary, "--version"])
    assert re.fullmatch(rb"proctor-init plan=1 guest=\d+\n", result.stdout)


@pytest.mark.slow
async def test_launches_cancelled_at_random_leak_nothing(base_plan: Plan, init_binary: Path) -> None:
    chance = random.Random(2024)
    config = LauncherConfig(edge=f"random-{os.getpid()}", pool=4, binary=init_binary)
    descriptors = len(os.listdir("/proc/self/fd"))
    launcher = await Launcher.start(config)

    async def some() -> None:
        for _ in range(30):
            with anyio.move_on_after(chance.expovariate(1 / 0.004)):
                sandbox = await launcher.launch(base_plan)
                if chance.random() < 0.3:
                    os.kill(sandbox.pid, signal.SIGKILL)
                sandbox.close()
            if chance.random() < 0.1:
                with suppress(LaunchError):
                    await launcher.launch(replace(base_plan, layers=(Path("/does/not/exist"),)))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(some)
    (await launcher.launch(base_plan)).close()
    pids = processes(config.edge)
    await launcher.close()
    assert [pid for pid in pids if _alive(pid)] == []
    assert config.edge not in launcher.layout.edges()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.slow
async def test_five_hundred_lives_leak_nothing(make_room: MakeRoom, launcher: Launcher) -> None:
    async with make_room():
        pass
    await anyio.sleep(0.3)
    before = _facts(launcher)
    for _ in range(500):
        async with make_room():
            pass
    await anyio.sleep(1)
    after = _facts(launcher)
    # The pool may be anywhere between half and full.
    assert {name: after[name] - before[name] for name in after if abs(after[name] - before[name]) > 4 * 3} == {}


def _stocker(launcher: Launcher) -> int:
    pid = launcher._process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _facts(launcher: Launcher) -> dict[str, int]:
    pid = launcher._process.pid
    stocker = _stocker(launcher)
    return {
        "our descriptors": len(os.listdir("/proc/self/fd")),
        "launcher descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "stocker descriptors": len(os.listdir(f"/proc/{stocker}/fd")),
        "launcher mounts": len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()),
        "stocker mounts": len(Path(f"/proc/{stocker}/mountinfo").read_text().splitlines()),
        "machine mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "slots": len(launcher.layout.slots(launcher.config.edge)),
        "processes": len(processes(launcher.config.edge)),
        "launcher pages": int(Path(f"/proc/{pid}/statm").read_text().split()[1]),
    }
