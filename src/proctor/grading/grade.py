"""The examiner: one trial's grade, from what was collected, in rooms of its own."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from proctor.common import ConfigError, InfraError
from proctor.grading.collect import repository_of
from proctor.grading.compat import verdict_of
from proctor.grading.contract import CompatVerdict, Grade, GradeFinding, TestOutcome
from proctor.grading.deliverable import dropped_findings, listing
from proctor.grading.flaky import settle, unsettled
from proctor.grading.harbor import reward_map, run_verifier
from proctor.grading.protect import Protection
from proctor.grading.room import RoomBroken, Rooms, make_tester, place_changes, place_toolkit
from proctor.grading.sanitise import Policy, apply_plan, read_plan
from proctor.grading.suite import SuiteRun, compat_verdict, run_suite
from proctor.grading.workspace import Applied, TestsDoNotApply, bring_patch, bring_tests, bring_work, shut
from proctor.sandbox.contract import FileError, SandboxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proctor.grading.deliverable import Collected
    from proctor.sandbox.contract import Image, Sandbox
    from proctor.sandbox.edge import Edge
    from proctor.sandbox.net import NetworkPolicy, OnNetwork
    from proctor.tasks.model import Task, TestSpec


@dataclass(frozen=True, slots=True)
class GradeOptions:
    """`reruns`: how often a failing pass-to-pass test is run again in a fresh room. `user`: who runs test groups
    (default: the task's verifier user, else an unprivileged account made for it). `give_back`: whether a frozen layer
    goes back to the Edge at the end; without it the same work can be graded again. `network`: what the rooms may reach
    (None: nothing); `on_network` gets the events of it."""

    reruns: int = 2
    user: str | None = None
    give_back: bool = True
    network: NetworkPolicy | None = None
    on_network: OnNetwork | None = None


async def grade(
    task: Task,
    collected: Collected,
    *,
    image: Image,
    edge: Edge,
    options: GradeOptions = GradeOptions(),
) -> Grade:
    """Grade what was collected. Never raises for what a candidate or a verifier did: that is in the grade.

    `verdict` is `error` with `infra` when the machinery failed (worth a retry), and without it when the verifier
    did. A frozen layer in `collected` is given back to the Edge at the end, unless the options say otherwise.
    """
    started = time.monotonic()
    examiner = _Examiner(task, collected, Rooms(task, image, edge, options.network, options.on_network), options)
    try:
        result = await examiner.grade()
    except (InfraError, SandboxError) as error:
        result = examiner.failed(error.line(), infra=True)
    except (ConfigError, TestsDoNotApply) as error:
        result = examiner.failed(str(error), infra=False)
    finally:
        if collected.layer is not None and options.give_back:
            with anyio.CancelScope(shield=True):
                await edge.drop(collected.layer)
    return replace(
        result,
        duration_s=time.monotonic() - started,
        rooms=examiner.rooms.opened,
        receipts=tuple(examiner.rooms.receipts),
    )


class WorkRefused(Exception):
    """The deliverable cannot be brought into a room. The candidate made it so; the machinery is not to blame."""


@asynccontextmanager
async def placing() -> AsyncIterator[None]:
    """While the deliverable is put in place, a file operation that fails is on the candidate's account."""
    try:
        yield
    except FileError as error:
        raise WorkRefused(f"the deliverable cannot be placed: {error}") from error


class _Examiner:
    """Carries one grade out; holds what its steps share."""

    def __init__(self, task: Task, collected: Collected, rooms: Rooms, options: GradeOptions) -> None:
        self.task = task
        self.collected = collected
        self.rooms = rooms
        self.options = options
        self.carried: dict[str, Any] = dict(collected.summary)
        self.findings: list[GradeFinding] = list(collected.findings)

    def base(self, **fields: Any) -> Grade:
        """A grade with everything that does not depend on the verdict."""
        values: dict[str, Any] = {
            "verdict": "unresolved",
            "resolved": False,
            "rewards": {},
            "in_place": self.collected.kind == "live",
            "carry": self.collected.kind,
            "carried": self.carried,
            "findings": tuple(self.findings),
        }
        return Grade(**{**values, **fields})

    def failed(self, why: str, *, infra: bool) -> Grade:
        """The verifier, or the machinery, gave no verdict."""
        return self.base(verdict="error", resolved=None, error=why, infra=infra)

    async def grade(self) -> Grade:
        if self.collected.problem:
            return self.unresolved_unrun(self.collected.problem)
        if self.collected.is_empty_prediction:
            return self.unresolved_unrun("the patch is empty")
        try:
            if self.task.verifier.kind == "reward":
                return await self.by_reward()
            spec = self.task.verifier.tests
            if spec is None:
                raise ConfigError("the task has no test groups", field="proctor.tests")
            return await self.by_tests(spec)
        except WorkRefused as error:
            return self.unresolved_unrun(str(error))
        except (RoomBroken, FileError) as error:
            self.findings.append(GradeFinding("broken-room", str(error), "review"))
            return self.unresolved_unrun(str(error))

    def unresolved_unrun(self, why: str, *, applied: bool = False) -> Grade:
        """Unresolved without running anything; the compat verdict says the same."""
        compat: CompatVerdict | None = None
        spec = self.task.verifier.tests
        if spec is not None and spec.compat_log_format is not None:
            compat = verdict_of({}, spec.fail_to_pass, spec.pass_to_pass, patch_applied=applied, graded=False)
        self.findings.append(GradeFinding("not-run", why))
        return self.base(error=why, compat=compat, rewards={"reward": 0.0})

    # --- reward files -----------------------------------------------------------------------------------------------

    async def by_reward(self) -> Grade:
        async with self.workplace() as box:
            run = await run_verifier(
                box,
                self.task.verifier,
                workdir=self.rooms.workdir,
                in_place=self.collected.kind == "live",
            )
        self.findings.extend(run.findings)
        logs = {"test-stdout.txt": run.stdout, "test-stderr.txt": run.stderr}
        if run.rewards is not None:
            values = reward_map(run.rewards)
            resolved = run.rewards.resolved
            return self.base(
                verdict="resolved" if resolved else "unresolved", resolved=resolved, rewards=values, logs=logs
            )
        if run.by_candidate or await self.works_without():
            return self.base(error=run.error, logs=logs, rewards={"reward": 0.0})
        return self.base(verdict="error", resolved=None, error=run.error, logs=logs)

    async def works_without(self) -> bool:
        """Whether the verifier gives a reward in a room without the work: then the work kept it from doing so."""
        try:
            async with self.rooms.open() as box:
                control = await run_verifier(box, self.task.verifier, workdir=self.rooms.workdir)
        except (RoomBroken, FileError):
            return False
        if control.rewards is not None:
            self.findings.append(GradeFinding("no-reward", "without the work, the verifier gives one", "review"))
        return control.rewards is not None

    @asynccontextmanager
    async def workplace(self) -> AsyncIterator[Sandbox]:
        """The room with the deliverable in it, or the candidate's own sandbox for `live`."""
        collected = self.collected
        if collected.kind == "live":
            if collected.box is None:
                raise ConfigError("a live deliverable needs the candidate's sandbox", field="proctor.carry")
            yield collected.box
            return
        if collected.kind == "filesystem":
            if collected.layer is None:
                raise InfraError("the frozen upper is gone", remedy="collect and grade within one Edge")
            policy = Policy.of(self.rooms.image, self.rooms.workdir, system=self.task.carry.system)
            if (spec := self.task.verifier.tests) is not None:
                policy = replace(policy, protects=Protection(self.task, spec, self.rooms.image.workdir).of_absolute)
            plan = await anyio.to_thread.run_sync(read_plan, collected.layer, self.rooms.image.layers, policy)
            self.carried["dropped"] = listing(plan.dropped)
            # A re-run carries the same; say it once.
            self.findings.extend(f for f in dropped_findings(plan.dropped) if f not in self.findings)
            async with self.rooms.open(layers=(collected.layer,)) as box:
                async with placing():
                    await apply_plan(box, plan, self.rooms.image.layers)
                yield box
            return
        async with self.rooms.open() as box:
            async with placing():
                await self.place(box)
            yield box

    async def place(self, box: Sandbox) -> None:
        """Bring collected states, or a prediction's patch, into a room that is graded by a reward file."""
        collected = self.collected
        if collected.changes is None:
            applied = await bring_patch(self.rooms, box, collected.patch or "")
            self.carried["applied"] = applied.how or "no"
            if not applied.how:
                raise WorkRefused(applied.detail)
            return
        root = "" if collected.kind == "paths" else repository_of(self.task, self.rooms.image.workdir)
        await place_changes(box, root, [replace(c, path=c.path.lstrip("/")) for c in collected.changes])

    # --- test groups ------------------------------------------------------------------------------------------------

    async def by_tests(self, spec: TestSpec) -> Grade:
        try:
            applied, first = await self.run_once(spec)
        except ConfigError as error:
            if not await self.starts_without(spec):
                raise
            raise RoomBroken(f"with this work the tests cannot be started: {error}") from error
        if first is None:
            self.carried["applied"] = applied.how or "no"
            return self.unresolved_unrun(applied.detail)
        self.carried |= {"applied": applied.how, "restored": list(applied.restored)}
        self.findings.extend(applied.findings)
        self.findings.extend(first.verdict.findings)
        verdict, tests = first.verdict.verdict, first.verdict.tests
        if verdict != "error":
            tests = await self.rerun(spec, first, tests)
            sound = all(f.severity == "note" for f in first.verdict.findings)
            verdict = "resolved" if sound and tests and all(t.ok for t in tests) else "unresolved"
        resolved = {"resolved": True, "unresolved": False, "error": None}[verdict]
        return self.base(
            verdict=verdict,
            resolved=resolved,
            rewards={} if resolved is None else {"reward": float(resolved)},
            tests=tests,
            compat=compat_verdict(spec, first, self.task.instance_id),
            error=first.verdict.error,
            logs={"test-output.txt": first.log},
        )

    async def starts_without(self, spec: TestSpec) -> bool:
        """Whether the test command can be started in a room without the work."""
        try:
            async with self.rooms.open() as box:
                await self.run_in(box, spec)
        except (ConfigError, TestsDoNotApply, RoomBroken, FileError):
            return False
        return True

    async def run_once(self, spec: TestSpec) -> tuple[Applied, SuiteRun | None]:
        """One run of the group in a room of its own; None when the patch did not go in."""
        if self.collected.kind in ("patch",):
            async with self.rooms.open() as box:
                async with placing():
                    applied = await bring_work(self.rooms, box, self.collected, spec)
                if not applied.how:
                    return applied, None
                return applied, await self.run_in(box, spec)
        async with self.workplace() as box:
            return Applied(self.collected.kind), await self.run_in(box, spec)

    async def run_in(self, box: Sandbox, spec: TestSpec) -> SuiteRun:
        await bring_tests(self.rooms, box, spec)
        await place_toolkit(box)
        user = self.options.user or self.task.verifier.user
        own: dict[str, str] = {}
        if user is None:
            user = await make_tester(box)
            await shut(box, spec.cwd)
            # The workspace is root's, which git would take for a trap.
            own = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
        env = {**own, **self.rooms.image.env, **self.task.environment.env, **self.task.verifier.env, **spec.env}
        return await run_suite(box, spec, env, user=user)

    async def rerun(self, spec: TestSpec, first: SuiteRun, tests: tuple[TestOutcome, ...]) -> tuple[TestOutcome, ...]:
        """Run again, in fresh rooms, while failing pass-to-pass tests could still turn out to be unstable."""
        runs = [first.verdict.tests]
        while len(runs) <= self.options.reruns and unsettled(runs) and self.collected.kind != "live":
            _, again = await self.run_once(spec)
            if again is None or again.verdict.verdict == "error":
                break
            runs.append(again.verdict.tests)
        settled = settle(runs)
        self.findings.extend(
            GradeFinding("unstable", f"{t.test_id}: {', '.join(t.runs)}") for t in settled if t.unstable
        )
        return settled
