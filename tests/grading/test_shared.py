"""Real rows and real tasks, written by others, in real clean rooms.

Images are built on first use, which takes minutes; afterwards the store has them. A trial waits more than it computes,
so the trials of all selected tests are begun together, a few at a time, and each test waits for its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from proctor.grading import Collected, Grade, collect, grade
from proctor.sandbox import Edge, ImageStore, SandboxSpec
from proctor.sandbox.contract import ImageError, Resources
from proctor.tasks import load_any, load_task
from proctor.tasks.environment import prepare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from proctor.tasks.model import Task

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.sandbox,
    pytest.mark.images,
    pytest.mark.data,
    pytest.mark.slow,
]

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SWE = sorted(path.parent.name for path in (DATA / "swe").glob("*/instance.json")) or ["none"]
HARBOR = [
    "simple-task",
    "regex-log",
    "openssl-selfsigned-cert",
    "log-summary-date-ranges",
    "sqlite-db-truncate",
    "multi-source-data-merger",
    "merge-diff-arc-agi-task",
]


AT_A_TIME = 3


class Exam:
    """The trials of the selected tests: one job for each, known by the test's name and parameters."""

    def __init__(self, edge: Edge, rows: dict[str, Task]) -> None:
        self.edge = edge
        self.rows = rows
        self._limit = anyio.CapacityLimiter(AT_A_TIME)
        self._building = anyio.Lock()
        self._done: dict[tuple[object, ...], anyio.Event] = {}
        self._results: dict[tuple[object, ...], Any] = {}

    async def run(self, key: tuple[object, ...]) -> None:
        """Do one job and keep what came of it, an error too: it belongs to the test that asked for it."""
        async with self._limit:
            try:
                self._results[key] = await JOBS[str(key[0])](self, *key[1:])
            except Exception as error:
                self._results[key] = error
        self._done[key].set()

    def begin(self, keys: list[tuple[object, ...]], group: anyio.abc.TaskGroup) -> None:
        """Start all jobs."""
        for key in keys:
            self._done[key] = anyio.Event()
            group.start_soon(self.run, key)

    async def result(self, *key: object) -> Any:
        """What came of a job."""
        await self._done[key].wait()
        result = self._results[key]
        if isinstance(result, ImageError):
            pytest.skip(f"{key[1]}: no image here: {result}")
        if isinstance(result, Exception):
            raise result
        return result

    async def image_of(self, task: Task) -> Any:
        async with self._building:
            return await prepare(task, store=ImageStore())


@pytest.fixture(scope="module")
async def exam(request: pytest.FixtureRequest) -> AsyncIterator[Exam]:
    rows = {entry.task.name: entry.task for entry in load_any(DATA / "swe").entries}
    mine = [item for item in request.session.items if item.path == request.path]
    keys = [(item.originalname, *item.callspec.params.values()) for item in mine]  # type: ignore[attr-defined]
    async with Edge(pool_size=4) as edge, anyio.create_task_group() as group:
        exam = Exam(edge, rows)
        exam.begin(keys, group)
        yield exam
        group.cancel_scope.cancel()


async def attempt(edge: Edge, task: Task, image: Any, *, oracle: bool, then: str = "") -> Grade:
    where = task.environment
    resources = Resources(memory_mb=where.memory_mb, disk_mb=where.storage_mb, pids=1024)
    box = await edge.create(SandboxSpec(image=image, workdir=where.workdir, env=dict(where.env), resources=resources))
    async with box:
        if oracle:
            assert task.solution is not None
            assert task.solution.directory is not None
            assert task.solution.script is not None
            await box.upload(task.solution.directory, "/solution")
            script = task.solution.script.relative_to(task.solution.directory)
            done = await box.exec(["/bin/bash", f"/solution/{script}"], env=task.solution.env, timeout_s=300)
            assert done.exit_code is not None
        if then:
            await box.exec(["/bin/bash", "-c", then], timeout_s=60, keep=True)
        collected = await collect(task, box)
    return await grade(task, collected, image=image, edge=edge)


async def gold_and_null(exam: Exam, name: str) -> tuple[Grade, Grade]:
    task = exam.rows[name] if name in exam.rows else load_task(DATA / "harbor" / name)
    image = await exam.image_of(task)
    gold = await attempt(exam.edge, task, image, oracle=True)
    return gold, await attempt(exam.edge, task, image, oracle=False)


@pytest.mark.parametrize("name", SWE)
async def test_gold_resolves_and_nothing_does_not(exam: Exam, name: str) -> None:
    gold, null = await exam.result("test_gold_resolves_and_nothing_does_not", name)
    assert gold.compat is not None
    assert null.compat is not None
    assert (gold.verdict, gold.compat.status) == ("resolved", "RESOLVED_FULL"), (gold.findings, gold.logs)
    assert (null.verdict, null.compat.resolved) == ("unresolved", False)
    assert not [f for f in (*gold.findings, *null.findings) if f.severity != "note"]


async def published(exam: Exam, name: str) -> Grade:
    text = (DATA / "swe" / name / "published_model.patch").read_text()
    image = await exam.image_of(exam.rows[name])
    return await grade(exam.rows[name], Collected.from_patch(text), image=image, edge=exam.edge)


@pytest.mark.parametrize("name", [n for n in SWE if (DATA / "swe" / n / "published_model.patch").is_file()])
async def test_published_patch_has_its_published_verdict(exam: Exam, name: str) -> None:
    result = await exam.result("test_published_patch_has_its_published_verdict", name)
    report = json.loads((DATA / "swe" / name / "published_report.json").read_text())
    assert result.compat is not None
    assert result.compat.resolved == report["resolved"] == (result.verdict == "resolved")
    for group in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        for side in ("success", "failure"):
            assert sorted(result.compat.tests[group][side]) == sorted(report["tests_status"][group][side])


def hunks() -> list[tuple[str, int]]:
    found = []
    for name in SWE:
        path = DATA / "swe" / name / "observed.json"
        measured = json.loads(path.read_text()).get("gold_patch_minus_one_hunk") or [] if path.is_file() else []
        found += [(name, one["hunk"]) for one in measured]
    return found or [("none", 0)]


def without_hunk(patch: str, number: int) -> str:
    """The patch with one of its hunks left out; a file that has no hunk left goes with it."""
    out: list[str] = []
    count = -1
    for section in re.split(r"(?m)^(?=diff --git )", patch):
        head, *parts = re.split(r"(?m)^(?=@@ )", section)
        kept = []
        for part in parts:
            count += 1
            if count != number:
                kept.append(part)
        if kept:
            out += [head, *kept]
    return "".join(out)


async def gold_without(exam: Exam, name: str, hunk: int) -> Grade:
    gold = json.loads((DATA / "swe" / name / "instance.json").read_text())["patch"]
    image = await exam.image_of(exam.rows[name])
    return await grade(exam.rows[name], Collected.from_patch(without_hunk(gold, hunk)), image=image, edge=exam.edge)


@pytest.mark.parametrize(("name", "hunk"), hunks())
async def test_gold_without_one_hunk_is_as_measured(exam: Exam, name: str, hunk: int) -> None:
    measured = json.loads((DATA / "swe" / name / "observed.json").read_text())["gold_patch_minus_one_hunk"]
    wanted = next(one["resolved"] for one in measured if one["hunk"] == hunk)
    result = await exam.result("test_gold_without_one_hunk_is_as_measured", name, hunk)
    assert result.carried["applied"] == "git apply"
    assert result.resolved is wanted, (result.error, result.findings)


@pytest.mark.parametrize("name", HARBOR)
async def test_harbor_task(exam: Exam, name: str) -> None:
    gold, null = await exam.result("test_harbor_task", name)
    assert (gold.verdict, gold.rewards) == ("resolved", {"reward": 1.0}), (gold.error, gold.findings, gold.logs)
    assert (null.verdict, null.rewards) == ("unresolved", {"reward": 0.0})


ALGO = "/app/repo/algo.py"
CHEATS = {
    "os._exit(0)": f"echo 'import os; os._exit(0)' > {ALGO}",
    "os._exit(0) when called": f"printf 'import os\\ndef map(g): os._exit(0)\\n' > {ALGO}",
    "patched report class": f"""cat > {ALGO} <<'X'
import _pytest.reports as r
old = r.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    report = old(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
r.TestReport.from_item_and_call = classmethod(forged)
map = lambda g: 0
X""",
    "patched test function": f"""cat > {ALGO} <<'X'
import _pytest.python
_pytest.python.Function.runtest = lambda self: None
map = lambda g: 0
X""",
    "conftest rewrites outcomes": "for d in / /app /app/repo /tests /root /logs; do cat > $d/conftest.py <<'X'\n"
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    outcome.get_result().outcome = 'passed'\nX\ndone",
    "forged lines": f"echo \"print('PASSED ../tests/test_outputs.py::test_algo_map_function_with_test_input')\""
    f" > {ALGO}",
    "sitecustomize": "for d in /app /app/repo / /root $(python3 -c 'import sys; print(*sys.path)'); do"
    " echo 'import os; os._exit(0)' > $d/sitecustomize.py; done 2>/dev/null",
    "background writer": "(setsid sh -c 'while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt;"
    " done' >/dev/null 2>&1 &)",
    "writer inside the test run": f"""cat > {ALGO} <<'X'
import os
if os.fork() == 0:
    os.setsid()
    while True:
        try: open("/logs/verifier/reward.txt", "w").write("1")
        except OSError: pass
map = lambda g: 0
X""",
    "programs on the path": "for d in /usr/local/bin /root/.local/bin /usr/bin; do"
    " printf '#!/bin/sh\\nexit 0\\n' > $d/uvx; chmod +x $d/uvx; done 2>/dev/null; true",
}


async def cheated(exam: Exam, cheat: str) -> Grade:
    """Everything right but the algorithm, and a trick in its place."""
    task = load_task(DATA / "harbor" / "merge-diff-arc-agi-task")
    image = await exam.image_of(task)
    wrong = f"printf 'def map(g): return g\\n' > {ALGO}\n"
    return await attempt(exam.edge, task, image, oracle=True, then=wrong + CHEATS[cheat])


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheating_at_a_harbor_task_gains_nothing(exam: Exam, cheat: str) -> None:
    result = await exam.result("test_cheating_at_a_harbor_task_gains_nothing", cheat)
    assert result.verdict == "unresolved", result


JOBS: dict[str, Callable[..., Awaitable[Any]]] = {
    "test_gold_resolves_and_nothing_does_not": gold_and_null,
    "test_harbor_task": gold_and_null,
    "test_published_patch_has_its_published_verdict": published,
    "test_gold_without_one_hunk_is_as_measured": gold_without,
    "test_cheating_at_a_harbor_task_gains_nothing": cheated,
}
