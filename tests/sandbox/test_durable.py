"""Durable sandboxes: whenever their Edge dies, they go on, and the next one has all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import ConfigError, RefusedError
from proctor.sandbox import Edge, EndReason, Lifecycle, OutputLimit, SandboxLost, SandboxSpec, sweep
from proctor.sandbox._faults import DURABLE_POINTS, POINTS
from proctor.sandbox.journal import State
from proctor.sandbox.journal_reader import fold, read
from proctor.sandbox.native.launcher import _left_behind, reap_left_behind

from .edges import gauges, loops, small, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from proctor.sandbox.box import Box

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

COUNT = 40
COUNTING = f"i=0; while [ $i -lt {COUNT} ]; do echo $i; echo e$i >&2; i=$((i+1)); sleep 0.01; done; exit 4"

# One that makes a durable and a tied sandbox and lets a command count, until it dies or is told to leave.
_LIFE = """
import anyio, sys
from pathlib import Path
from proctor.sandbox import Edge, Lifecycle, Resources, SandboxSpec

small = Resources(cpus=0.5, memory_mb=64, disk_mb=16, disk_inodes=2000, pids=32, disk_driver=sys.argv[3])
durable = SandboxSpec(resources=small, lifecycle=Lifecycle(ttl_s=120, durable=True))

async def main():
    async with Edge(Path(sys.argv[1]), pool_size=1, durable=True) as edge:
        await edge.create(SandboxSpec(resources=small))
        box = await edge.create(durable, request_id="box")
        await box.exec("echo kept >> /root/kept", request_id="write")
        await box.exec("sleep 1000 &", keep=True)
        process = await box.start(sys.argv[2], request_id="count")
        print("ready", flush=True)
        async for _ in process.output():
            pass
        await box.exec("cat", stdin=b"x" * 400_000)
    print("left", flush=True)

anyio.run(main)
"""


def durable(**life: object) -> SandboxSpec:
    return small(lifecycle=Lifecycle(**{"ttl_s": 120, "durable": True, **life}))  # type: ignore[arg-type]


def run(script: str, *arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PROCTOR_FAULT": fault},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def begin(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments])


def live(home: Path, fault: str = "", driver: str = "memory") -> subprocess.CompletedProcess[str]:
    return run(_LIFE, str(home), COUNTING, driver, fault=fault)


def launchers(home: Path) -> list[Path]:
    return sweep.orphans(home)


@pytest.fixture(autouse=True)
async def reaped(tmp_path: Path) -> AsyncIterator[None]:
    """Launchers that outlived an Edge of this very process are its children: other tests count those."""
    yield
    await until(lambda: not launchers(tmp_path))
    await until(lambda: reap_left_behind() or not _left_behind)


async def the_count(edge: Edge) -> Box:
    """The sandbox and its whole count, whoever it was that began either."""
    box = await edge.create(durable(), request_id="box")
    process = await box.start(COUNTING, request_id="count")
    with anyio.fail_after(20):
        result = await process.wait()
    assert result.exit_code == 4
    assert result.stdout.data == b"".join(b"%d\n" % number for number in range(COUNT))
    assert result.stderr.data == b"".join(b"e%d\n" % number for number in range(COUNT))
    return box


async def clean(home: Path) -> None:
    """Nothing is left of any Edge of this home."""
    await until(lambda: not launchers(home))
    async with Edge(home, pool_size=1):
        pass
    assert gauges(home).groups == 0
    assert [path.name for path in (home / "edges").iterdir()] == ["lock"]
    await until(lambda: not loops(home))


# Which of the steps comes after the sandbox is whole: from then on it must live.
_BEFORE = {
    "start:after-lock",
    "start:after-launcher",
    "create:after-intent",
    "create:after-disk",
    "create:after-launch",
}
_BEFORE |= {"create:after-hello", "create:after-created", "create:after-record", "create:after-live"}


# The others are those of tied sandboxes (test_sweep) with a durable one beside them.
_TELLING = {"create:after-launch", "create:after-created", "close:after-kill", "stop:before-launcher", *DURABLE_POINTS}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if fault in _TELLING else [pytest.mark.heavy])
        for fault in (*POINTS, *DURABLE_POINTS)
    ],
)
async def test_a_death_at_any_step_loses_nothing_and_leaves_nothing(tmp_path: Path, fault: str) -> None:
    driver = "loop" if fault in ("create:after-disk", "close:after-upper") else "memory"
    if fault.startswith("adopt:"):
        assert live(tmp_path, "exec:after-spool", driver).returncode == -signal.SIGKILL
    done = live(tmp_path, fault, driver)
    assert done.returncode == -signal.SIGKILL, f"{fault} was never reached: {done.stdout} {done.stderr}"
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        adopted = {box.id for box in edge.boxes}
        assert all(box.spec.lifecycle.durable for box in edge.boxes), "what was tied ended with its Edge"
        box = await the_count(edge)
        if fault not in _BEFORE:
            assert box.id in adopted
            await box.exec("echo kept >> /root/kept", request_id="write")
            assert await box.read("/root/kept") == b"kept\n", "once, and not lost"
        await box.close()
    await clean(tmp_path)


async def test_an_edge_that_leaves_in_order_leaves_its_durable_sandboxes(tmp_path: Path) -> None:
    done = live(tmp_path)
    assert done.stdout == "ready\nleft\n", done.stderr
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        assert (await box.exec(["cat", "/root/kept"])).text == "kept\n"
        assert (await box.exec(["pgrep", "-x", "sleep"])).ok, "what was left in the background goes on"
        commands = await box.commands()
        assert [command.exit_code for command in commands if command.request_id == "count"] == [4]
        (background,) = [command for command in commands if command.background]
        await (await box.attach(background.exec_id)).kill()
        assert not (await box.exec(["pgrep", "-x", "sleep"])).ok
        receipt = await box.close()
        assert receipt.execs >= 6
        await until(lambda: not edge.boxes)
    await clean(tmp_path)


async def test_output_can_be_read_from_any_offset_and_what_was_not_kept_is_passed_over(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(durable())
        process = await box.start("seq 1 20000")
        await process.wait()
        whole = b"".join(b"%d\n" % number for number in range(1, 20001))
        for since in (0, 1, 77_777, len(whole) - 1, len(whole), len(whole) + 5):
            got = b"".join([data async for _, data in process.output(since)])
            assert got == whole[since:]
        result = await box.exec("seq 1 20000", limit=OutputLimit(1000, 1000), request_id="cut")
        assert (result.stdout.head, result.stdout.tail) == (whole[:1000], whole[-1000:])
        command = (await box.commands())[-1]
        shown = b"".join([data async for _, data in (await box.attach(command.exec_id)).output()])
        assert shown.startswith(whole[:1000])
        assert shown.endswith(whole[-1000:])
        assert len(shown) < 20_000
        await box.close()


async def test_a_request_id_is_one_command_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(durable())
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(lambda: box.exec("echo x >> /root/x; sleep 0.2", request_id="once"))
        assert await box.read("/root/x") == b"x\n"
        with pytest.raises(RefusedError, match="another command"):
            await box.exec("echo other", request_id="once")
        await box.close()
        one, two = [await edge.create(durable(), request_id="same") for _ in range(2)]
        assert one is two
        await one.close()
        await until(lambda: one not in edge.boxes)
        three = await edge.create(durable(), request_id="same")
        assert three is not one, "one that has ended is made again"
        await three.close()


async def test_what_only_a_durable_sandbox_can_do_is_refused_elsewhere_by_name(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1) as edge:
        with pytest.raises(RefusedError, match=r"lifecycle\.durable: this Edge ends"):
            await edge.create(durable())
        box = await edge.create(small())
        with pytest.raises(RefusedError, match="request_id"):
            await box.exec(["true"], request_id="x")
        with pytest.raises(RefusedError, match=r"lifecycle\.durable"):
            await box.commands()
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(durable())
        with pytest.raises(ConfigError, match="no command 99"):
            await box.attach(99)
        await box.close()


async def test_a_carried_network_is_carried_again_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    from proctor.sandbox import SandboxSpec
    from proctor.sandbox.net import NetworkPolicy, Rule, Service

    policy = NetworkPolicy("allow", (Rule("nowhere.invalid", ports=(80,)),))
    look = "python3 -c \"import socket; print(socket.gethostbyname('nowhere.invalid'))\""
    spec = SandboxSpec(resources=durable().resources, lifecycle=durable().lifecycle, network=policy)
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        with pytest.raises(RefusedError, match="services are of this process"):
            await edge.create(spec, services={"x.test": Service.stream(lambda stream: stream.aclose())})
        box = await edge.create(spec)
        before = (await box.exec(look)).text
        assert before.startswith("127.")
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        assert box.network[0] == policy
        assert (await box.exec(look)).text.startswith("127.")
        assert [event.name for event in box.network_events if event.name] == ["nowhere.invalid"] * len(
            box.network_events
        )
        await box.close()


_THIEF = """
import socket, sys, threading, time
def steal(kind):
    while not gone:
        sock = socket.socket(socket.AF_INET, kind)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.53", 53))
            if kind == socket.SOCK_STREAM:
                sock.listen()
            stolen.append(sock)
            print("stolen", kind, flush=True)
        except OSError:
            sock.close()
            time.sleep(0.001)
gone, stolen = [], []
threads = [threading.Thread(target=steal, args=[kind]) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
[thread.start() for thread in threads]
print("tries", flush=True)
sys.stdin.read()
gone.append(1)
"""


async def test_the_addresses_of_the_carried_network_are_nobody_elses_while_there_is_no_edge(tmp_path: Path) -> None:
    from proctor.sandbox.net import NetworkPolicy, Rule

    spec = replace(durable(), network=NetworkPolicy("allow", (Rule("nowhere.invalid", ports=(80,)),)))
    look = "import socket; print(socket.gethostbyname('nowhere.invalid'))"
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(spec)
        thief = await box.start(["python3", "-c", _THIEF], request_id="thief")
        assert await anext(aiter(thief.output())) == ("stdout", b"tries\n")
        await box.start("while :; do /bin/true; done", request_id="forks")
    for _ in range(5):
        await anyio.sleep(0.1)  # nobody is there, and the thief tries
        async with Edge(tmp_path, pool_size=1, durable=True) as edge:
            (box,) = edge.boxes
            assert (await box.exec(["python3", "-c", look])).text.startswith("127.")
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        thief = await box.start(["python3", "-c", _THIEF], request_id="thief")
        await thief.close_stdin()
        assert (await thief.wait()).text == "tries\n"
        await box.close()


_FORKED = """
import anyio, os, signal, sys
from pathlib import Path
from proctor.sandbox import Edge, Lifecycle, Resources, SandboxSpec

small = Resources(cpus=0.5, memory_mb=64, disk_mb=16, disk_inodes=2000, pids=32)

async def main():
    async with Edge(Path(sys.argv[1]), pool_size=1, durable=True) as edge:
        await edge.create(SandboxSpec(resources=small, lifecycle=Lifecycle(ttl_s=120, durable=True)))
        before = [box.id for box in edge.boxes]
        copy = os.fork()
        if copy == 0:
            signal.pause()
    try:
        async with Edge(Path(sys.argv[1]), pool_size=1, durable=True) as edge:
            print([box.id for box in edge.boxes] == before)
            for box in edge.boxes:
                await box.close()
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)

anyio.run(main)
"""


async def test_a_forked_copy_of_the_process_does_not_keep_what_its_edge_has_left(tmp_path: Path) -> None:
    done = await anyio.to_thread.run_sync(run, _FORKED, str(tmp_path))
    assert done.stdout == "True\n", done.stderr
    await clean(tmp_path)


async def test_a_policy_that_was_narrowed_stays_narrow_for_the_next_edge(tmp_path: Path) -> None:
    from proctor.sandbox.net import NetworkPolicy, Rule

    spec = replace(durable(), network=NetworkPolicy("allow", (Rule("nowhere.invalid"),)))
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(spec)
        assert await box.set_network(NetworkPolicy(), expect=1) == 2
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        assert box.network == (NetworkPolicy(), 2)
        assert not (await box.exec("getent hosts nowhere.invalid")).ok
        assert (await box.receipt()).network == "allow"  # it once could
        await box.close()


async def test_reset_snapshot_and_fork_work_and_ids_of_commands_go_on(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=2, durable=True) as edge:
        box = await edge.create(durable())
        running = await box.start(["sleep", "1000"])
        await box.reset()
        with pytest.raises(SandboxLost):
            await running.wait()
        after = await box.start(["true"])
        assert after.exec_id > running.exec_id
        await box.write("/root/f", b"x")
        (child,) = await box.fork()
        assert await child.read("/root/f") == b"x"
        for one in (box, child):
            await one.close()  # type: ignore[attr-defined]


async def test_on_layers_that_ended_with_their_edge_a_sandbox_runs_on_and_refuses_the_rest(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(durable())
        await box.write("/root/f", b"x")
        await box.snapshot()
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        assert await box.read("/root/f") == b"x"
        with pytest.raises(RefusedError, match="not held by this Edge"):
            await box.snapshot()
        assert await box.read("/root/f") == b"x", "nothing was killed for it"
        await box.reset()
        assert (await box.exec("ls /root/f")).exit_code == 2
        await box.close()


async def test_time_limits_hold_while_nobody_is_there(tmp_path: Path) -> None:
    script = _LIFE.replace("ttl_s=120", "ttl_s=1.5").replace(
        "async for _ in process.output():", "sys.exit(0)\n        if 0:"
    )
    script = script.replace("sys.exit(0)", "import os; os.kill(os.getpid(), 9)")
    done = run(script, str(tmp_path), "sleep 1000", "memory")
    assert done.returncode == -signal.SIGKILL, done.stderr
    # Nobody comes: the launcher ends the sandbox when its time is up, and then itself.
    await until(lambda: not launchers(tmp_path), 10)
    await clean(tmp_path)


async def test_an_edge_that_comes_too_late_says_what_the_end_was(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        short, long = await edge.create(durable(ttl_s=1.0)), await edge.create(durable())
    await anyio.sleep(1.2)
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        assert [box.id for box in edge.boxes] == [long.id]
        lines = (edge.home / "edges" / edge.id / "journal.jsonl").read_text().splitlines()
        ends = {record["sandbox"]: record for record in map(json.loads, lines) if record["state"] == "CLOSING"}
        assert ends[short.id]["reason"] == "TTL"
        await edge.boxes[0].close()


async def test_a_command_whose_time_is_up_meanwhile_is_killed_by_the_next_edge(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as edge, anyio.create_task_group() as tasks:
        box = await edge.create(durable())

        async def wait() -> None:
            with pytest.raises(SandboxLost, match="the sandbox has not"):
                await box.exec("sleep 1000", timeout_s=0.7, request_id="late")

        tasks.start_soon(wait)
        await until(lambda: box._commands and box._commands.running())
        await anyio.sleep(0.2)
        assert box.leave()
        edge._boxes.clear()
        edge._left = edge._runtimes.native.leaving = True
    await anyio.sleep(0.7)
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        result = await box.exec("sleep 1000", timeout_s=0.7, request_id="late")
        assert result.timed_out
        assert result.reason is EndReason.EXEC_TIMEOUT
        await box.close()


async def test_a_launcher_that_dies_takes_all_along_and_the_journal_says_so(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(durable())
        launcher = edge._runtimes.native._launcher
        assert launcher is not None
        assert launcher._process is not None
        pid = launcher._process.pid
    journal = tmp_path / "edges" / edge.id / "journal.jsonl"
    assert fold(read(journal))[box.id].state is State.CREATED
    os.kill(pid, signal.SIGKILL)
    await clean(tmp_path)


async def test_a_living_durable_edge_is_not_taken_over(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as one:
        box = await one.create(durable())
        async with Edge(tmp_path, pool_size=1, durable=True) as two:
            assert two.id != one.id
            assert two.boxes == ()
        async with Edge(tmp_path, pool_size=1):
            pass
        assert (await box.exec(["true"])).ok
        await box.close()


async def test_nobody_else_may_knock(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(durable())
        bell = tmp_path / "edges" / edge.id / "launcher.sock"
        assert bell.stat().st_mode & 0o777 == 0o600
        script = f"""
import os, socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect({str(bell)!r})
print(len(s.recv(100)))
"""
        # Even as root: there is one Edge at a time.
        shown = run(script)
        assert shown.stdout == "0\n", shown
        assert (await box.exec(["true"])).ok
        await box.close()


async def test_a_terminal_outlives_its_edge_too(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(durable())
        process = await box.start(["sh"], pty=(80, 24), request_id="shell")
        await process.write_stdin(b"cd /tmp\n")
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        process = await box.start(["sh"], pty=(80, 24), request_id="shell")
        await process.resize(100, 30)
        await process.write_stdin(b"pwd; stty size; exit 3\n")
        result = await process.wait()
        assert b"/tmp\r\n30 100\r\n" in result.stdout.data
        assert result.exit_code == 3
        await box.close()


async def test_input_goes_on_where_the_last_edge_was_cut_off(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8000
    script = _LIFE.replace("process = await", "await box.write('/root/slow', b'sleep 1; cat')\n        process = await")
    script = script.replace('process = await box.start(sys.argv[2], request_id="count")', "pass")
    script = script.replace('print("ready", flush=True)', "")
    script = script.replace("async for _ in process.output():\n            pass", "")
    script = script.replace(
        'await box.exec("cat", stdin=b"x" * 400_000)',
        'await box.exec("sleep 0.5; cat", stdin=bytes(range(256)) * 8000, request_id="in")',
    )
    process = begin(script, str(tmp_path), COUNTING, "memory")
    await until(lambda: list(tmp_path.glob("edges/*/boxes/*/out/*.stdin")))
    await anyio.sleep(0.2)
    process.kill()
    process.wait()
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (box,) = edge.boxes
        result = await box.exec("sleep 0.5; cat", stdin=data, request_id="in", timeout_s=20)
        assert (result.exit_code, result.stdout.data[: 1 << 20] == data[: 1 << 20]) == (0, True)
        assert result.stdout.total == len(data)
        await box.close()
