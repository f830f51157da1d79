"""The Edge's own promises: admission, clocks, journal, nothing left behind."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from proctor.common import ConfigError, InfraError, RefusedError
from proctor.sandbox import (
    Edge,
    EndReason,
    Image,
    ImageError,
    LaunchError,
    Layer,
    Lifecycle,
    Mount,
    Policy,
    Resources,
    SandboxLost,
    SandboxSpec,
    create,
)
from proctor.sandbox.journal import State
from proctor.sandbox.journal_reader import read

from .edges import SMALL, gauges, small, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with Edge(tmp_path, pool_size=2) as edge:
        yield edge


async def test_a_sandbox_lives_works_and_ends(edge: Edge) -> None:
    async with await edge.create(small()) as box:
        result = await box.exec("echo hello; exit 3")
        assert (result.text, result.exit_code, result.reason) == ("hello\n", 3, None)
    assert box.ended is EndReason.CLOSED
    receipt = await box.receipt()
    assert (receipt.tier, receipt.end_reason, receipt.execs) == ("namespaces-userns", EndReason.CLOSED, 1)


async def test_the_journal_tells_the_whole_life(edge: Edge) -> None:
    async with await edge.create(small(labels={"task": "t"})) as box:
        await box.exec(["true"])
    await until(lambda: not edge.boxes)
    states = [record.state for record in read(edge.home / "edges" / edge.id / "journal.jsonl")]
    assert states == [State.INTENT, State.CREATED, State.CLOSING, State.CLOSED]


async def test_leaving_the_edge_ends_its_sandboxes_and_leaves_nothing(tmp_path: Path) -> None:
    before = gauges(tmp_path)
    async with Edge(tmp_path, pool_size=2) as edge:
        boxes = [await edge.create(small()) for _ in range(3)]
        await boxes[0].exec("sleep 1000 & setsid sleep 1000 &", keep=True)
    assert [box.ended for box in boxes] == [EndReason.CLOSED] * 3
    assert gauges(tmp_path) == before
    assert list((tmp_path / "edges").iterdir()) == [tmp_path / "edges" / "lock"]


async def test_an_error_in_the_body_comes_out_as_it_is(tmp_path: Path) -> None:
    async def body() -> None:
        async with Edge(tmp_path, pool_size=1) as edge:
            await edge.create(small())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    assert list((tmp_path / "edges").iterdir()) == [tmp_path / "edges" / "lock"]


async def test_create_finds_the_open_edge_or_makes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Edge(tmp_path / "one", pool_size=1) as edge, create(small()) as box:
        assert box.id.startswith(edge.id)
    images = Edge()._images._open().root
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "two"))
    monkeypatch.setenv("PROCTOR_IMAGES", str(images))
    async with create(small()) as box:
        assert (await box.exec(["true"])).ok
        assert (tmp_path / "two" / "edges").is_dir()


async def test_ttl_ends_a_sandbox_even_while_it_works(edge: Edge) -> None:
    box = await edge.create(small(lifecycle=Lifecycle(ttl_s=0.3)))
    with anyio.fail_after(5), pytest.raises(SandboxLost) as lost:
        await box.exec("sleep 100")
    assert lost.value.reason is EndReason.TTL
    assert (await box.receipt()).end_reason is EndReason.TTL


async def test_idle_counts_from_the_last_use(edge: Edge) -> None:
    box = await edge.create(small(lifecycle=Lifecycle(idle_timeout_s=0.4)))
    await box.exec("sleep 0.6")  # busy is not idle
    assert box.ended is None
    for _ in range(3):
        await anyio.sleep(0.2)
        await box.exec(["true"])
    await until(lambda: box.ended)
    assert box.ended is EndReason.IDLE


async def test_an_ended_sandbox_says_why(edge: Edge) -> None:
    box = await edge.create(small())
    first = await box.close()
    assert await box.close(EndReason.KILLED) == first
    with pytest.raises(SandboxLost, match="CLOSED"):
        await box.exec(["true"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"resources": Resources(memory_mb=1 << 30)}, "resources.memory_mb"),
        ({"resources": Resources(cpus=100_000)}, "resources.cpus"),
        ({"resources": Resources(disk_mb=1 << 30, memory_mb=64)}, "resources.disk_mb"),
        ({"resources": Resources(pids=1 << 30)}, "resources.pids"),
        ({"runtime": "rkt"}, "runtime"),
        ({"backend": "fncall"}, "backend"),
        ({"network": "bridge"}, "network"),
        ({"resources": Resources(cpus=0)}, "resources.cpus"),
        ({"lifecycle": Lifecycle(ttl_s=-1)}, "lifecycle.ttl_s"),
        ({"mounts": (Mount(Path("/no/such"), "/x"),)}, "mounts"),
        ({"mounts": (Mount(Path("/usr"), "/a/../b"),)}, "mounts"),
        ({"hostname": "x" * 100}, "hostname"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_field(edge: Edge, fields: dict[str, object], field: str) -> None:
    with pytest.raises((RefusedError, ConfigError)) as refusal:
        await edge.create(SandboxSpec(**fields))  # type: ignore[arg-type]
    assert refusal.value.field == field
    await until(lambda: not edge.boxes)


async def test_an_unknown_image_is_an_image_error(edge: Edge) -> None:
    with pytest.raises(ImageError):
        await edge.create(small(image="no-such-image:latest"))
    assert not edge.boxes


async def test_waiting_for_room_has_a_deadline_and_says_what_is_missing(tmp_path: Path) -> None:
    policy = Policy(cpu_overcommit=0.001)
    tiny = Resources(cpus=0.001, memory_mb=64, disk_mb=16, disk_inodes=2000, pids=32)
    async with Edge(tmp_path, pool_size=1, policy=policy) as edge:
        for _ in os.sched_getaffinity(0):
            await edge.create(small(resources=tiny))
        with pytest.raises(RefusedError, match=r"no room within 0\.2 s") as refusal:
            await edge.create(small(resources=tiny), deadline_s=0.2)
        assert refusal.value.field == "resources.cpus"


async def test_a_waiting_create_gets_the_room_that_a_close_frees(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, policy=Policy(cpu_overcommit=0.25)) as edge:
        first = await edge.create(small())
        async with anyio.create_task_group() as tasks:

            async def second() -> None:
                async with await edge.create(small(), deadline_s=10) as box:
                    assert (await box.exec(["true"])).ok

            tasks.start_soon(second)
            await anyio.sleep(0.05)
            assert len(edge.boxes) == 1
            await first.close()


async def test_a_launch_that_fails_leaves_nothing(edge: Edge, tmp_path: Path) -> None:
    image = await edge._images.resolve("host")
    broken = Image("broken", "sha256:0", (*image.layers, Layer(tmp_path / "absent")))
    with pytest.raises(LaunchError, match="layer"):
        await edge.create(small(image=broken))
    await until(lambda: not edge.boxes)
    assert not edge._ledger.held
    async with await edge.create(small()) as box:
        assert (await box.exec(["true"])).ok


async def test_a_mount_is_seen_and_is_read_only(edge: Edge, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("content")
    async with await edge.create(small(mounts=(Mount(tmp_path / "data", "/deep/data"),))) as box:
        assert (await box.exec("cat /deep/data/file")).text == "content"
        assert not (await box.exec("echo x > /deep/data/file")).ok
        assert await box.diff() == []


async def test_a_hundred_at_once_leave_nothing(tmp_path: Path) -> None:
    before = gauges(tmp_path)
    tiny = Resources(cpus=0.1, memory_mb=32, disk_mb=8, disk_inodes=500, pids=16)

    async def life(edge: Edge) -> None:
        async with await edge.create(small(resources=tiny)) as box:
            assert (await box.exec("echo $((6*7))")).text == "42\n"

    async with Edge(tmp_path) as edge, anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(life, edge)
    assert gauges(tmp_path) == before


async def test_cancellation_at_any_point_leaves_nothing(tmp_path: Path) -> None:
    before = gauges(tmp_path)
    dice = random.Random(7)
    async with Edge(tmp_path, pool_size=4) as edge:
        for _ in range(60):
            with anyio.move_on_after(dice.uniform(0, 0.02)):
                async with await edge.create(small()) as box:
                    await box.exec("echo x > /tmp/x; sleep 0.002")
                    if dice.random() < 0.3:
                        await box.snapshot()
                    await box.reset()
        await until(lambda: not edge.boxes)
        assert not edge._ledger.held
        async with await edge.create(small()) as box:
            assert (await box.exec(["true"])).ok
    assert gauges(tmp_path) == before


async def test_the_sweep_removes_a_slot_that_nobody_owns(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1, sweep_interval_s=0.1) as edge:
        for directory in edge._runtimes.native.layout.edge_directories(edge.id):
            (directory / "stray").mkdir()
        box = await edge.create(small(resources=SMALL))
        await until(lambda: "stray" not in edge._runtimes.native.layout.slots(edge.id))
        assert (await box.exec(["true"])).ok


async def test_a_launcher_that_dies_is_replaced(edge: Edge) -> None:
    box = await edge.create(small())
    edge._runtimes.native._launcher._process.kill()
    await until(lambda: box.ended)
    assert box.ended is EndReason.GUEST_LOST
    async with await edge.create(small()) as other:
        assert (await other.exec(["true"])).ok


async def test_the_machines_network_is_there_only_when_asked_for(edge: Edge) -> None:
    async with await edge.create(small()) as box:
        assert (await box.exec("ls /sys/class/net /proc/net/dev; tail -n +3 /proc/net/dev | cut -d: -f1")).text.split()[
            -1
        ] == "lo"
    async with await edge.create(small(network="open")) as box:
        inside = await box.exec(["readlink", "/proc/self/ns/net"])
        assert inside.text.strip() == os.readlink("/proc/self/ns/net")
        assert (await box.receipt()).network == "open"


async def test_a_full_disk_refuses_creates_and_loses_nothing(edge: Edge) -> None:
    box = await edge.create(small())
    full, journal = os.open("/dev/full", os.O_WRONLY), edge._journal._descriptor
    kept = os.dup(journal)
    os.dup2(full, journal)
    with pytest.raises(InfraError, match="cannot write the journal"):
        await edge.create(small())
    assert (await box.exec(["true"])).ok
    assert (await box.close()).end_reason is EndReason.CLOSED
    await until(lambda: not edge.boxes)
    os.dup2(kept, journal)
    async with await edge.create(small()) as box:
        assert (await box.exec(["true"])).ok
    os.close(full)
    os.close(kept)


async def test_a_cancellation_from_outside_ends_everything_in_order(tmp_path: Path) -> None:
    before = gauges(tmp_path)
    for seconds in (0.0, 0.01, 0.05, 0.1, 0.2):
        with anyio.move_on_after(seconds):
            async with Edge(tmp_path, pool_size=1) as edge, anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(edge.create, small())
                async with await edge.create(small()) as box:
                    await box.exec("setsid sleep 1000 & sleep 1000")
    assert gauges(tmp_path) == before
    assert list((tmp_path / "edges").iterdir()) == [tmp_path / "edges" / "lock"]


async def test_an_edge_that_is_not_open_says_so(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="not open"):
        await Edge(tmp_path).create(small())
