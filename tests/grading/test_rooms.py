"""Clean rooms for real: honest work resolves, and nothing a candidate leaves behind gains a reward."""

from __future__ import annotations

import os
import textwrap
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from proctor.grading import Collected, Grade, GradeOptions, collect, grade
from proctor.sandbox import Edge, ImageStore, SandboxSpec
from proctor.sandbox.contract import Image, Layer, Resources
from proctor.tasks.model import Carry, Environment, Task, TestSpec, Verifier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.sandbox]

TESTS = """
import unittest
from calc import add

class AddTests(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
    def test_zero(self):
        self.assertEqual(add(0, 0), 0)
"""
BAD = "def add(a, b):\n    return a - b\n"
GOOD = "def add(a, b):\n    return a + b\n"
TEST_SH = """#!/bin/bash
python3 /tests/check.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
CHECK = """
import subprocess, sys
out = subprocess.run([sys.executable, "/app/calc.py"], capture_output=True, text=True).stdout.strip()
sys.exit(0 if out == "3" else 1)
"""


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    async with Edge(home=tmp_path_factory.mktemp("home"), pool_size=2) as edge:
        yield edge


@pytest.fixture(scope="module")
async def image(edge: Edge, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The host image with a small repository in /app."""
    from proctor.sandbox.images.build import ensure_image

    host = await ensure_image("host", store=ImageStore(tmp_path_factory.mktemp("images")))
    root = tmp_path_factory.mktemp("layer")
    root.chmod(0o755)
    app = root / "app"
    (app / "tests").mkdir(parents=True)
    (app / "calc.py").write_text(BAD)
    (app / "tests" / "__init__.py").write_text("")
    (app / "tests" / "test_add.py").write_text("import unittest\n")
    (app / "link").symlink_to("calc.py")
    return replace(host, layers=(*host.layers, Layer(path=root)), workdir="/app")


def groups_task(tmp_path: Path, image: Image, **changes: Any) -> Task:
    files = tmp_path / "files"
    (files / "tests").mkdir(parents=True, exist_ok=True)
    (files / "tests" / "test_add.py").write_text(TESTS)
    spec = TestSpec(
        runner="unittest",
        command="python3 -m unittest",
        fail_to_pass=("tests.test_add.AddTests.test_add",),
        pass_to_pass=("tests.test_add.AddTests.test_zero",),
        cwd="/app",
        files=files,
        protected=("tests",),
        timeout_s=30,
    )
    return task(Verifier("tests", tests=replace(spec, **changes)), Carry("patch", repo="/app"), tmp_path)


def reward_task(tmp_path: Path, carry: Carry | None = None, script: str = TEST_SH, **verifier: Any) -> Task:
    tests = tmp_path / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test.sh").write_text(script)
    (tests / "check.py").write_text(CHECK)
    return task(
        Verifier("reward", tests, tests / "test.sh", timeout_s=20, **verifier), carry or Carry("filesystem"), tmp_path
    )


def task(verifier: Verifier, carry: Carry, tmp_path: Path) -> Task:
    return Task(
        name="t",
        path=tmp_path,
        digest="sha256:0",
        instruction="",
        environment=Environment(image="host", workdir="/app", memory_mb=512, storage_mb=128),
        verifier=verifier,
        carry=carry,
        solution=None,
    )


async def attempt(edge: Edge, image: Image, task: Task, script: str, **options: Any) -> tuple[Collected, Grade]:
    """Run `script` as the candidate (root), collect, and grade."""
    box = await edge.create(SandboxSpec(image=image, workdir="/app", resources=Resources(memory_mb=512, disk_mb=128)))
    async with box:
        await box.exec(textwrap.dedent(script), timeout_s=20, keep=True)
        collected = await collect(task, box)
        if collected.kind == "live":
            return collected, await grade(task, collected, image=image, edge=edge)
    return collected, await grade(task, collected, image=image, edge=edge, options=GradeOptions(**options))


def solve(text: str = GOOD) -> str:
    return f"cat > /app/calc.py <<'X'\n{text}\nX\n"


PROGRAM = solve("def add(a, b):\n    return a + b\nprint(add(1, 2))")
WRONG = solve("def add(a, b):\n    return a - b\nprint(add(1, 2))")


# --- test groups ----------------------------------------------------------------------------------------------------


async def test_right_patch_resolves(edge: Edge, image: Image, tmp_path: Path) -> None:
    collected, result = await attempt(edge, image, groups_task(tmp_path, image), solve())
    assert result.verdict == "resolved", result
    assert collected.patch is not None
    assert "+    return a + b" in collected.patch
    assert (result.in_place, result.rooms, result.rewards) == (False, 1, {"reward": 1.0})
    assert len(result.receipts) == 1


async def test_no_patch_does_not(edge: Edge, image: Image, tmp_path: Path) -> None:
    _, result = await attempt(edge, image, groups_task(tmp_path, image), "true")
    assert (result.verdict, [str(t.status) for t in result.tests]) == ("unresolved", ["failed", "passed"])


PATCH_ATTACKS = {
    "edited tests": "printf 'import unittest\\nclass AddTests(unittest.TestCase):\\n def test_add(self): pass\\n"
    " def test_zero(self): pass\\n' > tests/test_add.py",
    "tests directory replaced by a link": "rm -rf tests; mkdir fake; echo > fake/__init__.py; ln -s fake tests",
    "exit at import": "echo 'import os; os._exit(0)' > calc.py",
    "TestCase.run patched": """
        cat > calc.py <<'X'
        import unittest
        def run(self, result=None):
            result.startTest(self); result.addSuccess(self); result.stopTest(self)
        unittest.TestCase.run = run
        def add(a, b): return 0
        X
        """,
    "sitecustomize": "echo 'import os; os._exit(0)' > sitecustomize.py; cp sitecustomize.py usercustomize.py",
    "standard library shadowed": "echo 'import os; os._exit(0)' > json.py; cp json.py unittest.py; cp json.py hmac.py",
    "forged lines": "echo \"print('test_add (tests.test_add.AddTests) ... ok\\\\nOK'); add = lambda a, b: 0\""
    " > calc.py",
    "load_tests returns nothing": "printf 'def load_tests(*a):\\n import unittest\\n return unittest.TestSuite()\\n'"
    " > tests/__init__.py",
    "reads the hidden tests": "cat /app/tests/test_add.py /opt/proctor-toolkit/* > calc.py",
    "exit handler": "printf 'import atexit, os\\natexit.register(lambda: os._exit(0))\\nadd = lambda a, b: 0\\n'"
    " > calc.py",
    "git settings": """
        git init -q . && git config core.fsmonitor 'touch /tmp/ran' && git config core.hooksPath /app/hooks
        mkdir -p hooks && printf '#!/bin/sh\\ntouch /tmp/ran' > hooks/post-checkout && chmod +x hooks/*
        """,
}


@pytest.mark.parametrize("attack", PATCH_ATTACKS)
async def test_patch_attack_gains_nothing(edge: Edge, image: Image, tmp_path: Path, attack: str) -> None:
    _, result = await attempt(edge, image, groups_task(tmp_path, image), PATCH_ATTACKS[attack])
    assert result.verdict == "unresolved", result
    assert result.rewards == {"reward": 0.0}


async def test_the_same_tricks_beside_right_work_cost_nothing(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = "echo 'import os; os._exit(0)' > sitecustomize.py; echo 'x' > tests/test_add.py\n" + solve()
    _, result = await attempt(edge, image, groups_task(tmp_path, image), script)
    assert result.verdict == "resolved"
    assert set(result.carried["restored"]) == {"sitecustomize.py", "tests/test_add.py"}


async def test_link_out_of_the_repository_is_not_carried(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = "ln -s /etc/passwd stolen; ln -sf ../../etc/shadow link; mkfifo pipe; ln -s calc.py good\n" + solve()
    collected, result = await attempt(edge, image, groups_task(tmp_path, image), script)
    assert {c.path for c in collected.changes or ()} == {"calc.py", "good"}
    assert result.verdict == "resolved"
    assert any(f.kind == "not-carried" for f in result.findings)


async def test_prediction_is_applied_by_git(edge: Edge, image: Image, tmp_path: Path) -> None:
    text = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    task = groups_task(tmp_path, image)
    result = await grade(task, Collected.from_patch(text), image=image, edge=edge)
    assert (result.verdict, result.carried["applied"]) == ("resolved", "git apply")


@pytest.mark.parametrize(
    "text", ["", "\n", "not a patch", "--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-nothing\n+like it\n"]
)
async def test_prediction_that_does_not_apply(edge: Edge, image: Image, tmp_path: Path, text: str) -> None:
    result = await grade(groups_task(tmp_path, image), Collected.from_patch(text), image=image, edge=edge)
    assert result.verdict == "unresolved"
    assert "patch" in result.error


PREDICTED = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"


def added(path: str, text: str, *, mode: str = "100644") -> str:
    """A section that adds a file."""
    body = "".join(f"+{line}\n" for line in text.splitlines())
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(text.splitlines())} @@\n{body}"
    )


PREDICTION_ATTACKS = {
    # `patch` takes headers and counts that `git apply` and any strict reader do not see.
    "counts that lie": PREDICTED + "@@ -9,0 +9,40 @@\n" + added("sitecustomize.py", "import os\nos._exit(0)"),
    "an index line": PREDICTED + "Index: sitecustomize.py\n@@ -0,0 +1 @@\n+import os; os._exit(0)\n",
    "an old file": PREDICTED + "*** /dev/null\n--- conftest.py\n@@ -0,0 +1 @@\n+raise SystemExit(0)\n",
    "git's own directory": '--- /dev/null\n+++ b/.git/config\n@@ -0,0 +1,2 @@\n+[filter "x"]\n'
    "+\tclean = touch /tmp/ran\n" + PREDICTED,
    "a script for ed": "--- calc.py\n+++ calc.py\n1c\n.\n!touch /app/ran\n.\nw\n",
    "a link that leaves": added("held", "/etc/passwd", mode="120000").rstrip("\n") + "\n\\ No newline at end of file\n",
}


@pytest.mark.parametrize("attack", PREDICTION_ATTACKS)
async def test_prediction_attack_leaves_nothing(edge: Edge, image: Image, tmp_path: Path, attack: str) -> None:
    """Whatever a program takes from an odd patch, the room the tests run in has none of it."""
    task = groups_task(
        tmp_path,
        image,
        runner="command",
        command="python3 look.py {id}",
        fail_to_pass=("calc",),
        pass_to_pass=("clean",),
        protected=("tests", "look.py"),
    )
    (tmp_path / "files" / "look.py").write_text(
        "import os, sys, calc\n"
        "extra = set(os.listdir('/app')) - {'calc.py', 'link', 'tests', 'look.py', '__pycache__', '.git'}\n"
        "extra |= set(os.listdir('/app/.git') if os.path.isdir('/app/.git') else [])\n"
        "ok = calc.add(1, 2) == 3 if sys.argv[1] == 'calc' else not extra\n"
        "sys.exit(print('extra', extra) or not ok)\n"
    )
    result = await grade(task, Collected.from_patch(PREDICTION_ATTACKS[attack]), image=image, edge=edge)
    assert result.verdict in ("resolved", "unresolved"), result
    assert {t.test_id: t.status for t in result.tests}.get("clean", "passed") == "passed", result


async def test_odd_names_are_carried_whole(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = r"""
        touch "$(printf 'new\nline')" "$(printf 'byte\377')" ' space ' "quo'te" 'b\\s'; mkdir -p a/b/c; echo x > a/b/c/d
        printf '\000\377' > binary; chmod 755 binary; rm link; mv tests moved
        """
    collected, result = await attempt(edge, image, groups_task(tmp_path, image), script + solve())
    names = {c.path for c in collected.changes or ()}
    assert {"new\nline", "byte\udcff", " space ", "quo'te", "b\\\\s", "a/b/c/d", "binary", "link", "calc.py"} <= names
    assert {"tests/test_add.py", "moved/test_add.py"} <= names
    assert result.verdict == "resolved", result


async def test_a_file_that_became_a_directory_is_carried(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = "rm link calc.py; mkdir link calc; echo x > link/inside\n" + solve().replace("calc.py", "calc/__init__.py")
    collected, result = await attempt(edge, image, groups_task(tmp_path, image), script)
    assert {c.path: c.after is None for c in collected.changes or ()} == {
        "calc.py": True, "calc/__init__.py": False, "link": True, "link/inside": False}  # fmt: skip
    assert result.verdict == "resolved", result


async def test_too_much_to_carry_is_unresolved(edge: Edge, image: Image, tmp_path: Path) -> None:
    collected, result = await attempt(edge, image, groups_task(tmp_path, image), "truncate -s 80M big\n" + solve())
    assert collected.problem
    assert (result.verdict, result.rooms) == ("unresolved", 0)


@pytest.mark.parametrize(
    ("runner", "command", "expected"),
    [
        ("command", "python3 -c 'import calc, sys; sys.exit(calc.add(int(sys.argv[1]), 1) != 3)' {id}", "2"),
        ("junit", "python3 write_junit.py {junit}", "m::add"),
    ],
)
async def test_other_runners(
    edge: Edge, image: Image, tmp_path: Path, runner: str, command: str, expected: str
) -> None:
    task = groups_task(tmp_path, image, runner=runner, command=command, fail_to_pass=(expected,), pass_to_pass=())
    (tmp_path / "files" / "write_junit.py").write_text(
        "import calc, sys\nbad = '' if calc.add(1, 2) == 3 else '<failure/>'\n"
        "open(sys.argv[1], 'w').write(f'<x><testcase classname=\"m\" name=\"add\">{bad}</testcase></x>')\n"
    )
    _, good = await attempt(edge, image, task, solve())
    _, null = await attempt(edge, image, task, "true")
    assert (good.verdict, null.verdict) == ("resolved", "unresolved"), (good, null)


async def test_prediction_for_a_task_with_a_reward_file(edge: Edge, image: Image, tmp_path: Path) -> None:
    text = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,3 @@\n def add(a, b):\n-    return a - b\n"
    text += "+    return a + b\n+print(add(1, 2))\n"
    task = reward_task(tmp_path, Carry("patch", repo="/app"))
    right = await grade(task, Collected.from_patch(text), image=image, edge=edge)
    empty = await grade(task, Collected.from_patch(""), image=image, edge=edge)
    wrong = await grade(task, Collected.from_patch(text.replace("a - b", "a * b")), image=image, edge=edge)
    assert [r.verdict for r in (right, empty, wrong)] == ["resolved", "unresolved", "unresolved"]


async def test_a_deliverable_that_cannot_be_placed_is_unresolved(edge: Edge, image: Image, tmp_path: Path) -> None:
    task = groups_task(tmp_path, image)
    small = replace(task, environment=replace(task.environment, storage_mb=8))
    _, result = await attempt(edge, image, small, "head -c 30000000 /dev/urandom > big\n" + solve())
    assert (result.verdict, result.infra) == ("unresolved", False), result


async def test_a_room_that_cannot_be_made_is_the_machinerys_fault(edge: Edge, image: Image, tmp_path: Path) -> None:
    broken = replace(image, layers=(Layer(path=tmp_path / "gone"),))
    result = await grade(groups_task(tmp_path, image), Collected.from_patch("x"), image=broken, edge=edge)
    assert (result.verdict, result.infra, result.resolved) == ("error", True, None)


async def test_cancelling_a_grade_closes_its_room(edge: Edge, image: Image, tmp_path: Path) -> None:
    task = groups_task(tmp_path, image)
    (tmp_path / "files" / "tests" / "test_add.py").write_text("import time\ntime.sleep(60)\n")
    with anyio.move_on_after(1.0):
        await grade(task, Collected.from_patch("--- a/n\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"), image=image, edge=edge)
    with anyio.fail_after(10):
        while any(box.spec.labels.get("proctor.purpose") == "grading" for box in edge.boxes):
            await edge.wait_change()


async def test_program_that_is_not_there_is_the_verifiers_error(edge: Edge, image: Image, tmp_path: Path) -> None:
    task = groups_task(tmp_path, image, command="python7 -m unittest")
    _, result = await attempt(edge, image, task, solve())
    assert (result.verdict, result.infra, result.resolved) == ("error", False, None)
    assert "python7" in result.error


async def test_hanging_solution_is_unresolved(edge: Edge, image: Image, tmp_path: Path) -> None:
    task = groups_task(tmp_path, image, timeout_s=3.0)
    _, result = await attempt(edge, image, task, "echo 'while True: pass' > calc.py")
    assert result.verdict == "unresolved"
    assert any("EXEC_TIMEOUT" in f.detail for f in result.findings)


async def test_unstable_test_is_run_again(edge: Edge, image: Image, tmp_path: Path) -> None:
    """Fails in about half of its runs, by the room's random boot-independent facts (a fresh uuid)."""
    text = TESTS.replace(
        "self.assertEqual(add(0, 0), 0)",
        "self.assertGreater(open('/proc/sys/kernel/random/uuid').read(1), '7')",
    )
    task = groups_task(tmp_path, image)
    (tmp_path / "files" / "tests" / "test_add.py").write_text(text)
    seen = set()
    for _ in range(30):
        _, result = await attempt(edge, image, task, solve())
        (stable, odd) = result.tests
        assert stable.ok
        assert not stable.unstable
        seen.add(odd.unstable)
        assert odd.unstable == (len(set(odd.runs)) > 1)
        assert result.rooms == max(1, len(odd.runs))
        if odd.unstable:
            break
    assert True in seen


# --- reward files ---------------------------------------------------------------------------------------------------


async def test_filesystem_carry_resolves(edge: Edge, image: Image, tmp_path: Path) -> None:
    _, result = await attempt(edge, image, reward_task(tmp_path), PROGRAM)
    assert (result.verdict, result.rewards) == ("resolved", {"reward": 1.0}), result
    assert not [f for f in result.findings if f.kind == "unguarded"]


async def test_filesystem_carry_of_wrong_work_does_not(edge: Edge, image: Image, tmp_path: Path) -> None:
    _, result = await attempt(edge, image, reward_task(tmp_path), WRONG)
    assert (result.verdict, result.rewards) == ("unresolved", {"reward": 0.0})


async def test_paths_carry(edge: Edge, image: Image, tmp_path: Path) -> None:
    task = reward_task(tmp_path, Carry("paths", paths=("/app/calc.py",)))
    _, result = await attempt(edge, image, task, PROGRAM)
    assert result.verdict == "resolved", result


async def test_live_is_graded_in_place(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = "#!/bin/bash\nif kill -0 $(cat /app/pid); then echo 1 > /logs/verifier/reward.txt; fi\n"
    task = reward_task(tmp_path, Carry("live"), script)
    _, result = await attempt(edge, image, task, "sleep 60 & echo $! > /app/pid")
    assert (result.verdict, result.in_place, result.rooms) == ("resolved", True, 0), result


REWARD_ATTACKS = {
    "planted rewards": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}'"
    " > /logs/verifier/reward.json; chmod 444 /logs/verifier/*",
    "background writer": "(setsid sh -c 'while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt;"
    " done' >/dev/null 2>&1 &) ; sleep 0.1",
    "path trojan": "for d in /usr/local/bin /usr/local/sbin /bin /root/.local/bin; do mkdir -p $d 2>/dev/null;"
    " printf '#!/bin/sh\\nexit 0\\n' > $d/python3 2>/dev/null; chmod +x $d/python3 2>/dev/null; done; true",
    "shell start-up": "echo 'echo 1 > /logs/verifier/reward.txt; exit 0' | tee /root/.bashrc /root/.profile"
    " /root/.bash_profile /etc/bash.bashrc /etc/profile; echo BASH_ENV=/root/.bashrc >> /etc/environment",
    "preload": "echo /app/evil.so > /etc/ld.so.preload; touch /app/evil.so",
    "tests replaced": "mkdir -p /tests; ln -s /app/calc.py /tests/check.py; printf '#!/bin/sh\\necho 1 >"
    " /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests/*",
    "logs is a link": "rm -rf /logs; mkdir /app/logs; ln -s /app/logs /logs; mkdir -p /app/logs/verifier;"
    " echo 1 > /app/logs/verifier/reward.txt",
    "sitecustomize": "for d in $(python3 -c 'import sys; print(*sys.path)') /app; do echo 'import os; os._exit(0)' >"
    " $d/sitecustomize.py; done 2>/dev/null; true",
    "writes its own reward": solve(
        "import os\nos.makedirs('/logs/verifier', exist_ok=True)\nopen('/logs/verifier/reward.txt', 'w').write('1')"
    ),
    "writes a reward nobody names": solve("open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')"),
    "moves a reward into place": solve(
        "import os\nopen('/tmp/x', 'w').write('1')\nos.rename('/tmp/x', '/logs/verifier/reward.txt')"
    ),
    "daemon waits for the verifier": solve(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.closerange(0, 3)\n"
        "        while True:\n"
        "            try: open('/logs/verifier/reward.txt', 'w').write('1')\n"
        "            except OSError: pass\n"
    ),
    "replaces the log directory": solve(
        "import os, shutil\nos.rename('/logs/verifier', '/logs/old')\nos.mkdir('/logs/verifier')\n"
        "open('/logs/verifier/reward.txt', 'w').write('1')\nos.symlink('reward.txt', '/logs/verifier/x')"
    ),
}


@pytest.mark.parametrize("attack", REWARD_ATTACKS)
async def test_reward_attack_gains_nothing(edge: Edge, image: Image, tmp_path: Path, attack: str) -> None:
    _, result = await attempt(edge, image, reward_task(tmp_path), WRONG + REWARD_ATTACKS[attack])
    assert result.verdict == "unresolved", result
    assert result.rewards == {"reward": 0.0}


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "\uff11", "1_0", "", "true", "1 1"])
async def test_verifier_that_writes_no_number_is_an_error(edge: Edge, image: Image, tmp_path: Path, value: str) -> None:
    script = f"#!/bin/bash\nprintf '{value}' > /logs/verifier/reward.txt\n"
    _, result = await attempt(edge, image, reward_task(tmp_path, script=script), "true")
    assert (result.verdict, result.resolved, result.infra) == ("error", None, False)


async def test_verifier_that_writes_nothing_is_an_error(edge: Edge, image: Image, tmp_path: Path) -> None:
    _, result = await attempt(edge, image, reward_task(tmp_path, script="#!/bin/sh\n# reward.txt\nexit 0\n"), "true")
    assert (result.verdict, result.error) == ("error", "the verifier left no reward file")


async def test_verifier_that_is_hung_by_the_work_is_unresolved(edge: Edge, image: Image, tmp_path: Path) -> None:
    task = reward_task(tmp_path)
    task = replace(task, verifier=replace(task.verifier, timeout_s=2.0))
    _, result = await attempt(edge, image, task, solve("while True: pass"))
    assert result.verdict == "unresolved"


async def test_reward_json_is_preferred_when_the_tests_name_it(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = '#!/bin/bash\necho 0 > /logs/verifier/reward.txt\necho \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json\n'
    _, result = await attempt(edge, image, reward_task(tmp_path, script=script), "true")
    assert (result.verdict, result.rewards) == ("resolved", {"a": 1.0, "b": 2.0})


async def test_verifier_environment_is_clean(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = '#!/bin/bash\n[ "$GIVEN" = yes ] && [ "$PWD" = /app ] && echo 1 > /logs/verifier/reward.txt\n'
    _, result = await attempt(
        edge, image, reward_task(tmp_path, script=script, env={"GIVEN": "yes"}), "export GIVEN=no"
    )
    assert result.verdict == "resolved", result


async def test_system_changes_cross_only_when_the_task_says_so(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = "#!/bin/bash\nif [ -e /etc/made ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    for system, verdict in ((False, "unresolved"), (True, "resolved")):
        task = reward_task(tmp_path, Carry("filesystem", system=system), script)
        _, result = await attempt(edge, image, task, "touch /etc/made; rm -f /etc/hostname")
        assert result.verdict == verdict


async def test_what_was_deleted_from_the_system_is_restored(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = "#!/bin/bash\nif [ -s /etc/passwd ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    _, result = await attempt(
        edge, image, reward_task(tmp_path, script=script), "rm -rf /etc/passwd; rm -rf /opt /root"
    )
    assert result.verdict == "resolved"


async def test_no_network_in_the_room(edge: Edge, image: Image, tmp_path: Path) -> None:
    script = "#!/bin/bash\n[ \"$(tail -n +3 /proc/net/dev | grep -cv ' lo:')\" = 0 ]"
    script += " && echo 1 > /logs/verifier/reward.txt\n"
    _, result = await attempt(edge, image, reward_task(tmp_path, script=script), "true")
    assert result.verdict == "resolved", result


async def test_frozen_layers_are_given_back(edge: Edge, image: Image, tmp_path: Path) -> None:
    collected, _ = await attempt(edge, image, reward_task(tmp_path), PROGRAM)
    assert collected.layer is not None
    from proctor.common import RefusedError

    with pytest.raises(RefusedError):
        await edge.create(SandboxSpec(image=image, layers=(collected.layer,)))


async def test_grading_leaks_no_descriptor_and_no_thread(edge: Edge, image: Image, tmp_path: Path) -> None:
    async def settle() -> tuple[int, int]:
        with anyio.fail_after(10):
            while edge.boxes:
                await edge.wait_change()
        await anyio.sleep(0.2)
        guards = sum(thread.name == "proctor-reward-guard" for thread in threading.enumerate())
        return len(os.listdir("/proc/self/fd")), guards

    reward, groups = reward_task(tmp_path), groups_task(tmp_path, image)
    for task in (reward, groups):
        await attempt(edge, image, task, WRONG)
    before = await settle()
    for _ in range(5):
        for task in (reward, groups):
            await attempt(edge, image, task, PROGRAM)
    assert await settle() == before
