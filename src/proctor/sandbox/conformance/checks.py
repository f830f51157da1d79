"""What a check is, how one is run, and the list of all."""

from __future__ import annotations

import importlib
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio

from proctor.common import InfraError, ProctorError
from proctor.sandbox.contract import Lifecycle, Resources, SandboxSpec
from proctor.sandbox.edge import Edge
from proctor.sandbox.runtimes.capabilities import Capabilities, capabilities_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from proctor.sandbox.box import Box
    from proctor.sandbox.contract import ExecResult, Runtime

_GROUPS: Final = ("commands", "processes", "files", "limits", "disks", "network", "life")
_CHECK_S = 120.0
_WIDTH = 4
_ALONE: Final = ("limits.cpu", "life.nothing_is_left")
"""What measures this process, or the machine."""
_SMALL = Resources(cpus=1.0, memory_mb=256, disk_mb=32, disk_inodes=2000, pids=32)


class Failure(InfraError):
    """A runtime does not behave as the contract says."""


class _NotApplicable(Exception):
    """The runtime declares that it cannot do this."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that every runtime has to do."""

    group: str
    name: str
    claim: str
    """What is true of a runtime that passes, in one sentence."""
    run: Callable[[Subject], Awaitable[None]]

    @property
    def id(self) -> str:
        """`group.name`."""
        return f"{self.group}.{self.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check."""

    check: str
    claim: str
    status: Literal["passed", "failed", "skipped"]
    detail: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A runtime under test, on an open Edge."""

    edge: Edge
    runtime: Runtime
    image: str = "host"

    @property
    def can(self) -> Capabilities:
        """What the runtime declares."""
        return capabilities_of(self.runtime)

    def spec(self, **fields: Any) -> SandboxSpec:
        """A spec of small limits and a short life; `resources` may be a dict of changes."""
        resources = fields.pop("resources", {})
        return SandboxSpec(
            image=fields.pop("image", self.image),
            runtime=self.runtime,
            resources=replace(_SMALL, **resources),
            lifecycle=fields.pop("lifecycle", Lifecycle(ttl_s=300)),
            **fields,
        )

    @asynccontextmanager
    async def box(self, **fields: Any) -> AsyncIterator[Box]:
        """A sandbox of the runtime under test."""
        async with await self.edge.create(self.spec(**fields)) as box:
            yield box

    def needs(self, able: bool, what: str) -> None:
        """Skip the rest of a check that the runtime declares it cannot do."""
        if not able:
            raise _NotApplicable(f"runtime {self.runtime} declares: no {what}")


def expect(condition: bool, claim: str, evidence: object = None) -> None:
    """Fail unless `condition`; `evidence` is shown."""
    if not condition:
        shown = "" if evidence is None else f": {describe(evidence)}"
        raise Failure(f"{claim}{shown}")


def describe(evidence: object) -> str:
    """Evidence in a line: of a result of a command, what decides."""
    from proctor.sandbox.contract import ExecResult

    if not isinstance(evidence, ExecResult):
        return repr(evidence)[:400]
    one = evidence
    end = f"exit {one.exit_code}" if one.signal is None else f"signal {one.signal}"
    return f"{end}, reason {one.reason}, stdout {one.stdout.data[-200:]!r}, stderr {one.stderr.data[-200:]!r}"


def expect_ok(result: ExecResult) -> ExecResult:
    """Fail unless a command that has to work has worked."""
    expect(result.ok, f"{' '.join(result.argv)[-80:]!r} works", result)
    return result


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order in which they are run."""
    found: list[Check] = []
    for group in _GROUPS:
        module = importlib.import_module(f"proctor.sandbox.conformance.{group}")
        for run in module.CHECKS:
            claim = (run.__doc__ or "").split("\n", 1)[0].strip()
            found.append(Check(group, run.__name__, claim, run))
    return tuple(found)


async def run_check(check: Check, subject: Subject) -> Outcome:
    """One check to its outcome; it never raises but for cancellation."""
    start = time.monotonic()
    status: Literal["passed", "failed", "skipped"] = "passed"
    detail = ""
    try:
        with anyio.fail_after(_CHECK_S):
            await check.run(subject)
    except _NotApplicable as reason:
        status, detail = "skipped", str(reason)
    except TimeoutError:
        status, detail = "failed", f"not done after {_CHECK_S:g} s"
    except (ProctorError, OSError) as error:
        status, detail = "failed", error.message if isinstance(error, ProctorError) else str(error)
    return Outcome(check.id, check.claim, status, detail, time.monotonic() - start)


async def run_all(subject: Subject, *, pattern: str = "") -> AsyncIterator[Outcome]:
    """Every check whose id contains `pattern`: a few at a time, as most of them wait; the `_ALONE` ones at the end."""
    checks = [check for check in all_checks() if pattern in check.id]
    done_in, done = anyio.create_memory_object_stream[Outcome](len(checks) or 1)
    width = anyio.Semaphore(_WIDTH)

    async def one(check: Check) -> None:
        async with width:
            await done_in.send(await run_check(check, subject))

    async with anyio.create_task_group() as tasks:
        together = [check for check in checks if check.id not in _ALONE]
        for check in together:
            tasks.start_soon(one, check)
        for _ in together:
            yield await done.receive()
    done_in.close()
    done.close()
    for check in checks:
        if check.id in _ALONE:
            yield await run_check(check, subject)


async def run_checks(runtime: Runtime, *, image: str = "host", pattern: str = "") -> AsyncIterator[Outcome]:
    """`run_all` on an Edge of its own.

    Raises RefusedError or LaunchError when the runtime does not work on this machine.
    """
    async with Edge(pool_size=_WIDTH) as edge:
        await edge.ready(runtime)
        async for outcome in run_all(Subject(edge, runtime, image), pattern=pattern):
            yield outcome
