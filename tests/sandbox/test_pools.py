"""Warm pools: the control law against a simulated clock, then the real thing."""

from __future__ import annotations

import heapq
import os
import signal
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.common import ConfigError, RefusedError
from proctor.sandbox import Edge, EndReason, Lifecycle, Policy, PoolSpec, SandboxSpec
from proctor.sandbox.pools import Backoff, Level

from .edges import SMALL, small, until

if TYPE_CHECKING:
    from pathlib import Path


@st.composite
def watermarks(draw: st.DrawFn) -> PoolSpec:
    low = draw(st.integers(1, 5))
    high = draw(st.integers(low, 10))
    return PoolSpec(SandboxSpec(), low, high, draw(st.integers(high, 20)))


events = st.lists(
    st.tuples(st.floats(0, 2), st.sampled_from(["take", "end", "lose"]), st.floats(0.001, 1), st.booleans()),
    max_size=200,
)


@settings(max_examples=300, deadline=None)
@given(watermarks(), events)
def test_the_loop_never_makes_more_than_it_may_and_always_comes_back_to_its_level(
    spec: PoolSpec, plan: list[tuple[float, str, float, bool]]
) -> None:
    """Users come, sandboxes end and get lost, making takes its time and fails, on a clock of our own."""
    level, now, due = Level(), 0.0, []  # type: ignore[var-annotated]
    takes = [(0.001, False)]

    def control() -> None:
        wanted = level.missing(spec)
        assert wanted >= 0
        if wanted:
            assert level.ready + level.making + level.taken + wanted <= spec.cap
            assert level.ready + level.making + wanted <= spec.high
        for _ in range(wanted):
            level.making += 1
            heapq.heappush(due, (now + takes[-1][0], takes[-1][1]))

    def pass_time(until_s: float) -> None:
        nonlocal now
        while due and due[0][0] <= until_s:
            now, fails = heapq.heappop(due)
            level.making -= 1
            level.ready += not fails
            control()
        now = until_s

    for wait, event, duration, fails in plan:
        takes.append((duration, fails))
        pass_time(now + wait)
        if event == "take":  # one that is ready, or one made beside the pool
            level.ready = max(level.ready - 1, 0)
            level.taken += 1
        elif event == "end":
            level.taken = max(level.taken - 1, 0)
        else:
            level.ready = max(level.ready - 1, 0)
        control()
    takes.append((0.001, False))
    for _ in range(100):
        pass_time(now + 2)
        control()
    assert level.making == 0
    room = max(spec.cap - level.taken, 0)
    assert min(spec.low, room) <= level.ready <= spec.high


def test_a_pool_that_is_between_its_marks_makes_none_on_the_way_down() -> None:
    level, spec = Level(), PoolSpec(SandboxSpec(), 2, 5, 10)
    assert level.missing(spec) == 5
    level.ready = 5
    assert level.missing(spec) == 0
    level.ready = 2
    assert level.missing(spec) == 0
    level.ready = 1
    assert level.missing(spec) == 4


def test_a_machine_that_cannot_is_left_alone_for_longer_and_longer() -> None:
    backoff = Backoff()
    pauses = [backoff.failed(0.0) for _ in range(12)]
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == backoff.until == 30.0
    backoff.worked()
    assert backoff.failed(0.0) == 0.5


@pytest.mark.parametrize("marks", [(0, 1, 1), (2, 1, 3), (1, 3, 2)])
def test_watermarks_in_the_wrong_order_are_refused(marks: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="low <= high <= cap") as caught:
        Edge(pools=[PoolSpec(small(), *marks)])
    assert caught.value.field == "pools"


def test_a_pool_of_durable_ones_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"lifecycle\.durable"):
        Edge(pools=[PoolSpec(small(lifecycle=Lifecycle(durable=True)), 1, 1, 1)])


def ready(edge: Edge) -> int:
    return edge._pools.all[0].level.ready


@pytest.mark.sandbox
@pytest.mark.anyio
async def test_a_create_gets_a_ready_one_that_nobody_has_used(tmp_path: Path) -> None:
    spec = small(lifecycle=Lifecycle(ttl_s=2))
    async with Edge(tmp_path, pools=[PoolSpec(spec, low=2, high=3, cap=5)]) as edge:
        await until(lambda: ready(edge) == 3)
        assert edge.boxes == (), "they are nobody's yet"
        warm = {box.id for box in edge._boxes.values()}
        await anyio.sleep(2.2)  # a ready one's clock does not run
        boxes = [await edge.create(spec) for _ in range(5)]
        assert {box.id for box in boxes} >= warm
        assert len({box.id for box in boxes}) == 5
        assert edge.boxes == tuple(box for box in edge._boxes.values() if box in boxes)
        for box in boxes:
            assert (await box.exec("test ! -e /root/used && touch /root/used")).ok, "never recycled"
        await anyio.sleep(0.1)
        assert ready(edge) == 0, "five are handed out, and five is the cap"
        (state,) = (await edge.snapshot())["pools"]
        assert (state["hits"] + state["misses"], state["taken"], state["making"]) == (5, 5, 0)
        assert state["hits"] >= 3
        assert b'warm_hits_total{edge="' in await edge.metrics()
        await until(lambda: all(box.ended is EndReason.TTL for box in boxes))
        await until(lambda: ready(edge) == 3)
        other = await edge.create(small())
        assert (ready(edge), other.ended) == (3, None), "another spec is another sandbox"


@pytest.mark.sandbox
@pytest.mark.anyio
async def test_ready_ones_that_die_are_replaced_and_never_handed_out(tmp_path: Path) -> None:
    async with Edge(tmp_path, pools=[PoolSpec(small(), low=1, high=2, cap=4)]) as edge:
        await until(lambda: ready(edge) == 2)
        doomed = list(edge._boxes.values())
        for box in doomed:
            assert box.host_pid
            os.kill(box.host_pid, signal.SIGKILL)
        await until(lambda: all(box.ended for box in doomed))
        async with await edge.create(small()) as box:
            assert (await box.exec("echo alive")).text == "alive\n"
        await until(lambda: ready(edge) >= 1)


@pytest.mark.sandbox
@pytest.mark.anyio
async def test_ready_ones_give_way_to_somebody_who_waits_for_room(tmp_path: Path) -> None:
    narrow = Policy(cpu_overcommit=1)
    cpus = len(os.sched_getaffinity(0))
    half = SandboxSpec(resources=SMALL, lifecycle=Lifecycle(ttl_s=60))
    async with Edge(tmp_path, policy=narrow, pools=[PoolSpec(half, low=1, high=cpus * 2, cap=cpus * 2)]) as edge:
        await until(lambda: ready(edge) == cpus * 2)
        whole = small(env={"another": "spec"})
        async with await edge.create(whole, deadline_s=20) as box:
            assert (await box.exec("echo room")).text == "room\n"
