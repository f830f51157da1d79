"""The numbers of an Edge are those of its life, in the format that Prometheus reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proctor.common import RefusedError
from proctor.sandbox import Edge, Resources, SandboxSpec
from proctor.sandbox._meters import BOUNDS_S, Latency
from proctor.sandbox.metrics import exposition

from .edges import small, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        assert family.documentation
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


async def test_a_life_shows_in_the_numbers(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=2) as edge:
        async with await edge.create(small()) as box:
            await box.exec("true")
            await box.exec("sleep 10", timeout_s=0.1)
            now = samples(await edge.metrics())
            assert now["proctor_sandbox_alive", edge.id] == 1
            assert now["proctor_sandbox_memory_promised_bytes", edge.id] == 64 << 20
            assert now["proctor_sandbox_commands_decided_total", edge.id, "EXEC_TIMEOUT"] == 1
            assert now["proctor_sandbox_command_seconds_count", edge.id] == 2
            assert 0.1 < now["proctor_sandbox_command_seconds_sum", edge.id] < 10
        with pytest.raises(RefusedError):
            await edge.create(SandboxSpec(resources=Resources(memory_mb=1 << 30)))
        await until(lambda: not edge.boxes)
        now = samples(await edge.metrics())
        assert now["proctor_sandbox_alive", edge.id] == 0
        assert now["proctor_sandbox_created_total", edge.id] == 1
        assert now["proctor_sandbox_ends_total", edge.id, "CLOSED"] == 1
        assert now["proctor_sandbox_create_failures_total", edge.id, "RefusedError:resources.memory_mb"] == 1
        assert now["proctor_sandbox_launch_seconds_bucket", edge.id, "+Inf"] == 1
        assert now["proctor_sandbox_close_seconds_count", edge.id] >= 1
        assert now["proctor_sandbox_launcher_starts_total", edge.id] == 1
        assert now["proctor_sandbox_layer_cache_layers", edge.id] >= 1
        await until(lambda: edge._runtimes.native.pool(frozenset())[0] == 2)
        assert samples(await edge.metrics())["proctor_sandbox_pool_ready", edge.id] == 2


async def test_many_edges_share_one_page(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=1) as one, Edge(tmp_path, pool_size=1) as two:
        page = exposition([await one.snapshot(), await two.snapshot()])
    assert page.count(b"# TYPE proctor_sandbox_alive ") == 1
    assert {key[1] for key in samples(page) if key[0] == "proctor_sandbox_alive"} == {one.id, two.id}


def test_each_duration_is_counted_at_its_bound() -> None:
    latency = Latency()
    for duration_s in (0.0, BOUNDS_S[0], BOUNDS_S[3] + 1e-9, BOUNDS_S[-1] * 2):
        latency.observe(duration_s)
    assert latency.counts[0] == 2
    assert latency.counts[4] == latency.counts[-1] == 1
    assert sum(latency.counts) == 4
