"""The layer cache between its watermarks: least recently used first, never what is in use, never what is somebody's."""

from __future__ import annotations

import fcntl
import json
import os
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from proctor.cli.image import image as image_command
from proctor.common import ConfigError, RefusedError
from proctor.sandbox import Edge, Lifecycle, Policy, Resources, SandboxSpec
from proctor.sandbox.contract import Image, ImageError
from proctor.sandbox.images import ImageStore
from proctor.sandbox.images.eviction import RECENT_S, evict, leases, mark, usage

from .edges import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

SIZE = 100_000


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def make(store: ImageStore, ref: str | None, *texts: str, ago_s: float = 3600.0) -> Image:
    """An image of layers that differ by `texts`, last used so long ago."""
    with store.workspace() as workspace:
        layers = []
        for text in texts:
            root = workspace.directory("t")
            (root / "usr").mkdir()
            (root / "usr/data").write_bytes(text.encode() * (SIZE // len(text)))
            layers.append(workspace.commit(root))
        made = store.put(ref, layers)
    at = time.time() - ago_s
    os.utime(store.root / "images" / f"{made.digest.removeprefix('sha256:')}.json", (at, at))
    for layer in layers:
        os.utime(layer.path.with_name(f"{layer.path.name}.json"), (at, at))
    return made


def there(store: ImageStore) -> set[str]:
    return {ref for ref in store.references() if store.find_digest(ref)}


def everything(_: object) -> bool:
    return False


async def test_the_least_recently_used_goes_first_and_no_more_than_needed(store: ImageStore) -> None:
    for number, ago_s in enumerate((5000.0, 9000.0, 7000.0, 3000.0)):
        make(store, f"task:{number}", f"layer {number}", ago_s=ago_s)
    limit = usage(store).size_bytes - SIZE - 1
    done = evict(store, lambda now: now.size_bytes <= limit)
    assert there(store) == {"task:0", "task:3"}
    assert (done.images, done.layers) == (2, 2)
    assert (done.usage.layers, done.usage.size_bytes) == (2, usage(store).size_bytes)
    assert done.freed_bytes == pytest.approx(2 * SIZE, rel=0.2)


async def test_use_makes_an_image_young_again(store: ImageStore) -> None:
    for name in ("task:a", "task:b"):
        make(store, name, name)
    store.resolve("task:a")
    evict(store, everything)
    assert there(store) == {"task:a"}


async def test_what_is_held_leased_recent_or_somebodys_stays(store: ImageStore, tmp_path: Path) -> None:
    held, leased = make(store, "task:held", "held"), make(store, "task:leased", "leased")
    make(store, "mine:1", "mine")
    make(store, "task:recent", "recent", ago_s=RECENT_S / 2)
    make(store, "task:gone", "gone")
    lock = tmp_path / "lock"
    with store.hold(held), lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        from proctor.sandbox.images import eviction

        eviction.lease(store, "box", leased.layers, lock)
        done = evict(store, everything)
        assert there(store) == {"task:held", "task:leased", "mine:1", "task:recent"}
        assert (done.images, done.in_use) == (1, 2)
        assert store.prune(automatic=True).in_use == 2, "prune honours both as well"
    # The holder is gone, and so is whoever the lease was for: nothing of it holds any more.
    assert leases(store) == frozenset()
    assert list((store.root / "leases").iterdir()) == []


async def test_shared_layers_stay_as_long_as_one_image_needs_them(store: ImageStore) -> None:
    make(store, "task:old", "base", "old", ago_s=9000)
    make(store, "mine:kept", "base", "kept", ago_s=9500)
    make(store, "task:middle", "middle", "top", ago_s=8000)
    make(store, None, "middle", "unnamed", ago_s=7000)
    evict(store, everything)
    assert there(store) == {"mine:kept"}
    assert {path.name for path in (store.root / "layers").iterdir() if path.is_dir()} == {
        layer.path.name for layer in store.resolve("mine:kept").layers
    }


async def test_an_evicted_image_is_missing_by_name_and_can_be_made_again(store: ImageStore) -> None:
    make(store, "task:x", "x")
    evict(store, everything)
    with pytest.raises(ImageError, match="no image task:x"):
        store.resolve("task:x")
    make(store, "task:x", "x")
    assert store.resolve("task:x").layers


async def test_an_edge_in_need_of_disk_evicts_by_itself(tmp_path: Path, store: ImageStore) -> None:
    base = store.resolve("host")
    make(store, "task:old", "old")
    free_mb = usage(store).free_bytes >> 20
    # So little that only eviction could help, and it frees too little: the refusal stands, the cache is empty.
    policy = Policy(disk_headroom_mb=free_mb - 100)
    spec = SandboxSpec(image=base, resources=Resources(memory_mb=64, disk_mb=50_000, pids=16, disk_driver="loop"))
    async with Edge(tmp_path / "home", pool_size=1, images=store, policy=policy) as edge:
        with pytest.raises(RefusedError, match=r"resources\.disk_mb"):
            await edge.create(spec, deadline_s=0.1)
        assert "task:old" not in there(store)
        assert edge.meters.failures == {"RefusedError:resources.disk_mb": 1}


async def test_a_durable_sandbox_keeps_its_layers_while_it_has_no_edge(tmp_path: Path, store: ImageStore) -> None:
    base = store.resolve("host")
    extra = make(store, "task:extra", "extra")
    spec = SandboxSpec(
        image=base,
        layers=extra.layers,
        resources=Resources(memory_mb=64, disk_mb=16, pids=16),
        lifecycle=Lifecycle(ttl_s=60, durable=True),
    )
    async with Edge(tmp_path / "home", pool_size=1, images=store, durable=True) as edge:
        await edge.create(spec)
    assert evict(store, everything).in_use == 1
    assert store.prune(automatic=True).in_use >= 1
    async with Edge(tmp_path / "home", pool_size=1, images=store, durable=True) as edge:
        (box,) = edge.boxes
        assert (await box.exec(["head", "-c", "5", "/usr/data"])).exit_code == 1, "the host's /usr is mounted above it"
        assert [layer.path.is_dir() for layer in extra.layers] == [True]
        await box.close()
        await until(lambda: not edge.boxes)
    assert not list((store.root / "leases").iterdir())


@pytest.mark.parametrize(
    ("text", "size"), [("20G", 20 * 10**9), ("1.5m", 1_500_000), ("500MB", 500 * 10**6), ("7", 7), ("50%", 500)]
)
async def test_marks_are_written_as_people_write_sizes(text: str, size: int) -> None:
    assert mark(text, 1000, "high") == size


@pytest.mark.parametrize("text", ["", "many", "-1G", "0", "101%", "1X", "%", "G"])
async def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="high: "):
        mark(text, 1000, "high")


def test_the_command_says_what_it_did(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCTOR_IMAGES", str(store.root))
    for name in ("task:a", "task:b"):
        make(store, name, name)
    runner = CliRunner()
    assert "evicted 0 images" in runner.invoke(image_command, ["gc", "--high", "1G"]).output
    done = runner.invoke(image_command, ["gc", "--high", "150k", "--low", "1k", "--json"])
    assert json.loads(done.output)["images"] == 2
    refused = runner.invoke(image_command, ["gc", "--high", "1k", "--low", "2k"])
    assert isinstance(refused.exception, ConfigError)
