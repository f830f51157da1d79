"""Each hardening step left out, and the self-test seeing it: a step that nothing misses is not tested by anything."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox import Edge
from proctor.sandbox.contract import LaunchError
from proctor.sandbox.native.launcher import BINARY
from proctor.sandbox.selftest import resources
from proctor.sandbox.selftest.run import hall_of

from .edges import small
from .weakened import steps, weak_binary, weaken

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from proctor.sandbox.selftest.checks import Hall, Verdict

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

__all__ = ["weak_binary", "weaken"]

SEEN_BY = {
    "id-map": 1,
    "bounding-set": 2,
    "no-new-privs": 3,
    "root-nosuid": 3,
    "root-nodev": 3,
    "seccomp": 4,
    "guest-ids": 5,
    "network-namespace": 6,
    "ipc-namespace": 6,
    "uts-namespace": 6,
    "cgroup-namespace": 6,
    "private": 7,
    "old-root": 7,
    "bind-readonly": 7,
    "proc-mask": 8,
    "proc-readonly": 8,
    "sys-empty": 9,
    "dev-readonly": 10,
    "descriptors": 12,
    "affinity": 19,
    "core-limit": 46,
}
"""The steps that the short form sees, and the item that is red without them."""


SEEN_UNDER_LOAD: dict[str, Callable[[Hall], Awaitable[Verdict]]] = {
    "memory-limit": resources.memory_bomb,
    "pids-limit": resources.fork_bomb,
    "cpu-limit": resources.cpu_time,
    "shm-size": resources.shared_memory,
    "disk-size": resources.disk_bytes,
    "disk-inodes": resources.disk_inodes,
}
"""The steps that only a load sees, and the check that is red without them."""


def test_every_step_is_missed_by_something() -> None:
    assert steps() == {*SEEN_BY, *SEEN_UNDER_LOAD}


@pytest.mark.parametrize("step", SEEN_BY)
async def test_the_self_test_misses_it_and_there_is_no_sandbox(
    weaken: Callable[[str], None], tmp_path: Path, step: str
) -> None:
    weaken(step)
    async with Edge(tmp_path, pool_size=1) as edge:
        with pytest.raises(LaunchError, match="the self-test is red") as caught:
            await edge.create(small(self_test=True))
        assert all(box.ended and box.host_pid is None for box in edge.boxes)
    assert SEEN_BY[step] in [int(number) for number in re.findall(r"(\d+) \(", caught.value.message)]


@pytest.mark.parametrize("step", SEEN_UNDER_LOAD)
async def test_a_load_gets_through(weaken: Callable[[str], None], tmp_path: Path, step: str) -> None:
    weaken(step)
    async with Edge(tmp_path, pool_size=1) as edge:
        verdict = await SEEN_UNDER_LOAD[step](hall_of(edge, "native", "host"))
    assert verdict.status == "red", verdict


async def test_the_same_build_with_every_step_is_green(weaken: Callable[[str], None], tmp_path: Path) -> None:
    weaken("nothing")
    async with Edge(tmp_path, pool_size=1) as edge, await edge.create(small(self_test=True)) as box:
        receipt = await box.receipt()
    assert receipt.self_test["red"] == 0
    assert receipt.self_test["green"] > 15


def test_what_is_shipped_knows_of_no_step() -> None:
    shipped = BINARY.read_bytes()
    assert b"memory-limit" not in shipped
    assert b"bounding-set" not in shipped
