"""The full self-test of a runtime: the probe as root and as an ordinary user, and the checks that put loads on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from proctor.common import InfraError, ProctorError
from proctor.sandbox.contract import Lifecycle, Resources, SandboxSpec
from proctor.sandbox.edge import Edge
from proctor.sandbox.selftest import probing
from proctor.sandbox.selftest.checklist import ITEMS
from proctor.sandbox.selftest.checks import Hall, Line, Verdict, red

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.sandbox.contract import Runtime
    from proctor.sandbox.selftest.checklist import Item
    from proctor.sandbox.selftest.checks import LiveCheck, Status, View
    from proctor.sandbox.selftest.facts import Facts

_USERS = {"root": "0:0", "user": "65534:65534"}
_SMALL = Resources(cpus=1.0, memory_mb=256, disk_mb=32, disk_inodes=2000, pids=32)
_LIVE_S = 60.0


async def examine(runtime: Runtime = "native", *, image: str = "host") -> AsyncIterator[Line]:
    """Every item of the checklist, on sandboxes of an Edge of its own.

    Raises RefusedError or LaunchError when the runtime does not work on this machine.
    """

    async with Edge(pool_size=2) as edge:
        hall = hall_of(edge, runtime, image)
        reports: dict[str, tuple[Facts, View]] = {}
        async with await edge.create(hall.spec()) as box:
            probe = await probing.place(box)
            for name, user in _USERS.items():
                reports[name] = (
                    await probing.report(box, probe, user),
                    probing.view(box.spec, box.host_pid, as_root=name == "root"),
                )
        for item in ITEMS:
            yield await _line(item, reports, hall)


def hall_of(edge: Edge, runtime: Runtime, image: str) -> Hall:
    """Where live checks are carried out."""

    def spec(**fields: Any) -> SandboxSpec:
        resources = replace(_SMALL, **fields.pop("resources", {}))
        return SandboxSpec(image=image, runtime=runtime, resources=resources, lifecycle=Lifecycle(ttl_s=300), **fields)

    return Hall(edge, runtime, image, spec, probing.place)


async def _line(item: Item, reports: dict[str, tuple[Facts, View]], hall: Hall) -> Line:
    verdicts: list[tuple[str, Verdict]] = []
    for check in item.facts:
        said = {name: check(facts, view) for name, (facts, view) in reports.items()}
        if len(set(said.values())) == 1:
            verdicts.append(("", next(iter(said.values()))))
        else:
            verdicts += said.items()
    verdicts += [("", await _run_live(check, hall)) for check in item.live]
    if item.elsewhere:
        verdicts.append(("", Verdict("n/a", item.elsewhere)))
    statuses = {verdict.status for _, verdict in verdicts}
    status: Status = "red" if "red" in statuses else "green" if "green" in statuses else "n/a"
    shown = [(who, verdict) for who, verdict in verdicts if status != "red" or verdict.status == "red"]
    evidence = "; ".join(f"{who}: {verdict.evidence}" if who else verdict.evidence for who, verdict in shown)
    return Line(item.number, item.title, status, evidence)


async def _run_live(check: LiveCheck, hall: Hall) -> Verdict:
    """A check that cannot be carried out is red: what was not seen to hold does not count as held."""
    try:
        with anyio.fail_after(_LIVE_S):
            return await check(hall)
    except TimeoutError:
        return red(f"{check.__name__}: not done after {_LIVE_S:g} s")
    except (ProctorError, InfraError, OSError) as error:
        return red(f"{check.__name__}: {error}")
