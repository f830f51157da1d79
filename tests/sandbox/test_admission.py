"""Admission: sums of promises against what the machine has, and refusals that name the field."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.sandbox._admission import Demand, Ledger, Machine, Policy

MACHINE = Machine(
    cpus=2, memory_mb=8192, memory_available_mb=6000, disk_free_mb=10_000, pids=30_000, descriptors=100_000
)
SMALL = Demand(cpus=1.0, memory_mb=512, disk_mb=0, pids=100)


def test_the_real_machine_can_be_read() -> None:
    machine = Machine.read(Path("/"))
    assert machine.cpus >= 1
    assert machine.memory_mb > machine.memory_available_mb > 0


def test_an_empty_machine_takes_a_small_sandbox() -> None:
    assert Ledger(Policy()).obstacle(SMALL, MACHINE) is None


@pytest.mark.parametrize(
    ("demand", "field"),
    [
        (Demand(cpus=64, memory_mb=512, disk_mb=0, pids=100), "resources.cpus"),
        (Demand(cpus=1, memory_mb=20_000, disk_mb=0, pids=100), "resources.memory_mb"),
        (Demand(cpus=1, memory_mb=512, disk_mb=9_500, pids=100), "resources.disk_mb"),
        (Demand(cpus=1, memory_mb=512, disk_mb=0, pids=29_000), "resources.pids"),
    ],
)
def test_what_never_fits_is_refused_by_its_field(demand: Demand, field: str) -> None:
    refusal = Ledger(Policy()).impossible(demand, MACHINE)
    assert refusal is not None
    assert refusal.field == field
    assert refusal.line().startswith(f"{field}: does not fit on this machine: ")


def test_a_machine_short_of_memory_now_is_not_impossible() -> None:
    short = Machine(2, 8192, 100, 10_000, 30_000, 100_000)
    ledger = Ledger(Policy())
    assert ledger.impossible(SMALL, short) is None
    obstacle = ledger.obstacle(SMALL, short)
    assert obstacle is not None
    assert obstacle[1] == "100 MB of memory available, 512 kept free"


def test_sums_of_promises_are_those_of_what_is_held() -> None:
    ledger = Ledger(Policy())
    for index, cpus in enumerate((0.1, 0.2, 0.7)):
        ledger.held[str(index)] = Demand(cpus, 100, 10, 5)
    ledger.held["1"] = Demand(0.3, 50, 0, 1)
    ledger.held.drop("unknown")
    held = ledger.held
    assert (round(held.cpus, 9), held.memory_mb, held.disk_mb, held.pids) == (1.1, 250, 20, 11)
    for index in range(3):
        held.drop(str(index))
    assert (held.cpus, held.memory_mb, held.disk_mb, held.pids) == (0.0, 0, 0, 0)


def test_used_disk_is_not_counted_twice() -> None:
    ledger = Ledger(Policy())
    ledger.held["a"] = Demand(1, 512, 5_000, 100)
    machine = Machine(2, 8192, 6000, 6_000, 30_000, 100_000)  # 4,000 of the 5,000 promised are used already
    wanted = Demand(1, 512, 3_000, 100)
    assert ledger.obstacle(wanted, machine) is not None
    ledger.disk_used_mb = 4_000
    assert ledger.obstacle(wanted, machine) is None


@given(st.lists(st.builds(Demand, st.floats(0.1, 8), st.integers(1, 4096), st.integers(0, 2000), st.integers(1, 4096))))
def test_promises_never_exceed_the_policy(demands: list[Demand]) -> None:
    policy = Policy()
    ledger = Ledger(policy)
    for index, demand in enumerate(demands):
        if ledger.obstacle(demand, MACHINE) is None:
            ledger.held[str(index)] = demand
    held = ledger.held.values()
    assert sum(one.memory_mb for one in held) <= MACHINE.memory_mb * policy.memory_overcommit
    assert sum(one.cpus for one in held) <= MACHINE.cpus * policy.cpu_overcommit
    assert sum(one.disk_mb for one in held) <= MACHINE.disk_free_mb - policy.disk_headroom_mb
    assert sum(one.pids for one in held) <= MACHINE.pids * policy.pids_share
