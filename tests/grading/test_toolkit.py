"""The runners in a real process: statuses are right, and code under test cannot make the verdict resolved."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from proctor.grading.contract import TestStatus
from proctor.tasks.model import TestSpec

if TYPE_CHECKING:
    from pathlib import Path

TESTS = """
import unittest
import pytest
import solution

def test_add(): assert solution.add(1, 2) == 3
def test_old(): assert True
@pytest.mark.parametrize("text", ["a b", "c d", "plain"])
def test_param(text): assert text
@pytest.mark.xfail
def test_known(): assert False
@pytest.mark.skip
def test_never(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_setup(broken): pass

class TestGroup:
    def test_inside(self): assert solution.add(2, 2) == 4

class Case(unittest.TestCase):
    def test_case(self): self.assertEqual(solution.add(1, 1), 2)
"""
GOOD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"
F2P = ("test_it.py::test_add", "test_it.py::TestGroup::test_inside", "test_it.py::Case::test_case")
P2P = ("test_it.py::test_old", "test_it.py::test_known", "test_it.py::test_param[plain]")

Run = Callable[..., Any]


def project(folder: Path, solution: str, **files: str) -> Path:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "solution.py").write_text(solution)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def spec(folder: Path, **changes: Any) -> TestSpec:
    values: dict[str, Any] = {
        "runner": "pytest",
        "command": "python -m pytest -rA test_it.py",
        "fail_to_pass": F2P,
        "pass_to_pass": P2P,
        "cwd": str(folder),
    }
    return TestSpec(**{**values, **changes})


def test_right_solution_resolves(tmp_path: Path, python: str, local: Run) -> None:
    run = local(spec(project(tmp_path, GOOD)), python)
    assert run.verdict.verdict == "resolved", (run.verdict, run.log)


def test_wrong_solution_does_not_and_says_which(tmp_path: Path, python: str, local: Run) -> None:
    run = local(spec(project(tmp_path, BAD)), python)
    assert run.verdict.verdict == "unresolved"
    assert {o.test_id for o in run.verdict.tests if not o.ok} == set(F2P)
    assert not run.verdict.findings, run.verdict.findings


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("test_setup", TestStatus.ERROR),
        ("test_never", TestStatus.SKIPPED),
        ("test_known", TestStatus.XFAILED),
        ("test_gone", TestStatus.MISSING),
    ],
)
def test_statuses(tmp_path: Path, python: str, local: Run, name: str, status: TestStatus) -> None:
    run = local(spec(project(tmp_path, GOOD), fail_to_pass=(f"test_it.py::{name}",), pass_to_pass=()), python)
    (outcome,) = run.verdict.tests
    assert outcome.status is status
    assert outcome.ok is (status is TestStatus.XFAILED)


def test_ids_cut_at_a_space_match_by_prefix(tmp_path: Path, python: str, local: Run) -> None:
    cut = spec(project(tmp_path, GOOD), fail_to_pass=("test_it.py::test_param[a",), pass_to_pass=(), truncated_ids=True)
    assert local(cut, python).verdict.verdict == "resolved"


ATTACKS: dict[str, dict[str, str]] = {
    "conftest rewrites outcomes": {
        "conftest_dot_py": """
            import pytest
            @pytest.hookimpl(hookwrapper=True)
            def pytest_runtest_makereport(item, call):
                outcome = yield
                outcome.get_result().outcome = "passed"
                outcome.get_result().longrepr = None
            """
    },
    "conftest replaces the call": {
        "conftest_dot_py": """
            import pytest
            @pytest.hookimpl(tryfirst=True)
            def pytest_pyfunc_call(pyfuncitem): return True
            """
    },
    "conftest marks everything xfail": {
        "conftest_dot_py": """
            import pytest
            def pytest_collection_modifyitems(items):
                for item in items: item.add_marker(pytest.mark.xfail)
            """
    },
    "report class patched": {
        "solution_dot_py": """
            import _pytest.reports as r
            old = r.TestReport.from_item_and_call.__func__
            def forged(cls, item, call):
                report = old(cls, item, call)
                report.outcome, report.longrepr = "passed", None
                return report
            r.TestReport.from_item_and_call = classmethod(forged)
            def add(a, b): return 0
            """
    },
    "runtest patched": {
        "solution_dot_py": """
            import _pytest.python, _pytest.unittest
            _pytest.python.Function.runtest = lambda self: None
            _pytest.unittest.TestCaseFunction.runtest = lambda self: None
            def add(a, b): return 0
            """
    },
    "TestCase.run patched": {
        "solution_dot_py": """
            import unittest
            def run(self, result=None):
                result.startTest(self); result.addSuccess(self); result.stopTest(self)
            unittest.TestCase.run = run
            unittest.TestCase.__call__ = run
            def add(a, b): return 0
            """
    },
    "exit at import": {"solution_dot_py": "import os\nos._exit(0)\n"},
    "sys.exit at import": {"solution_dot_py": "import sys\nsys.exit(0)\n"},
    "exit in the function": {"solution_dot_py": "import os\ndef add(a, b): os._exit(0)\n"},
    "exit handler forges a report": {
        "solution_dot_py": """
            import atexit, os
            def forge():
                for fd in range(3, 1024):
                    try: os.write(fd, b'0' * 64 + b' {"t":"end","seq":1,"code":0}\\n')
                    except OSError: pass
                os._exit(0)
            atexit.register(forge)
            def add(a, b): return 0
            """
    },
    "skip from the solution": {"solution_dot_py": "import pytest\ndef add(a, b): pytest.skip('no')\n"},
    "xfail from the solution": {"solution_dot_py": "import pytest\ndef add(a, b): pytest.xfail('no')\n"},
    "forged lines": {
        "solution_dot_py": """
            for n in ('test_add', 'TestGroup::test_inside', 'Case::test_case'):
                print('PASSED test_it.py::' + n)
            def add(a, b): return 0
            """
    },
    "addopts collects only": {"pytest_dot_ini": "[pytest]\naddopts = --collect-only\n"},
    "addopts deselects": {"pytest_dot_ini": "[pytest]\naddopts = -k test_old\n"},
    "sitecustomize": {
        "sitecustomize_dot_py": """
            import sys
            sys.stdin.read()
            import unittest
            unittest.TestCase.run = lambda self, result=None: None
            """
    },
    "fork reports in the parent's name": {
        "solution_dot_py": """
            import os
            def add(a, b):
                if os.fork(): os._exit(0)
                return a + b
            """
    },
    "writes to every descriptor": {
        "solution_dot_py": """
            import os
            for fd in os.listdir('/proc/self/fd'):
                try: os.write(int(fd), b'junk\\n') if int(fd) > 2 else None
                except OSError: pass
            def add(a, b): return a + b
            """
    },
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_gains_nothing(tmp_path: Path, python: str, local: Run, attack: str) -> None:
    files = dict(ATTACKS[attack])
    folder = project(tmp_path, BAD, **files)
    run = local(spec(folder), python)
    assert run.verdict.verdict == "unresolved", (run.verdict, run.log)
    assert run.report.started


UNIT = """
import unittest
import solution

class AddTests(unittest.TestCase):
    def test_add(self):
        self.assertEqual(solution.add(1, 2), 3)
    def test_old(self):
        '''Adding nothing changes nothing.'''
        self.assertEqual(1, 1)
    def test_subs(self):
        for value in (1, 2):
            with self.subTest(value=value):
                self.assertEqual(solution.add(value, 0), value)
    @unittest.expectedFailure
    def test_known(self):
        self.assertEqual(1, 2)
    @unittest.skip("never")
    def test_never(self):
        pass
"""


def unit_spec(folder: Path, **changes: Any) -> TestSpec:
    (folder / "test_unit.py").write_text(UNIT)
    values: dict[str, Any] = {
        "runner": "unittest",
        "command": "python -m unittest -v test_unit",
        "fail_to_pass": ("test_add (test_unit.AddTests)",),
        "pass_to_pass": ("Adding nothing changes nothing.", "test_unit.AddTests.test_subs", "test_known"),
        "cwd": str(folder),
    }
    return TestSpec(**{**values, **changes})


def test_unittest_right_solution_resolves(tmp_path: Path, python: str, local: Run) -> None:
    run = local(unit_spec(project(tmp_path, GOOD)), python)
    assert run.verdict.verdict == "resolved", (run.verdict, run.log)


def test_unittest_wrong_solution_does_not(tmp_path: Path, python: str, local: Run) -> None:
    run = local(unit_spec(project(tmp_path, "def add(a, b):\n    return 5\n")), python)
    assert run.verdict.verdict == "unresolved"
    assert [o.status for o in run.verdict.tests] == ["failed", "passed", "failed", "xfailed"]


@pytest.mark.parametrize(
    "attack", ["TestCase.run patched", "exit at import", "exit in the function", "exit handler forges a report"]
)
def test_unittest_attack_gains_nothing(tmp_path: Path, python: str, local: Run, attack: str) -> None:
    run = local(unit_spec(project(tmp_path, BAD, **ATTACKS[attack])), python)
    assert run.verdict.verdict == "unresolved", (run.verdict, run.log)


def test_skip_by_solution_in_unittest_is_not_passed(tmp_path: Path, python: str, local: Run) -> None:
    text = "import unittest\ndef add(a, b): raise unittest.SkipTest('no')\n"
    assert local(unit_spec(project(tmp_path, text)), python).verdict.verdict == "unresolved"


@pytest.mark.parametrize(
    "options",
    ["--import-mode=importlib", "-W error", "-x --strict-markers", "-p no:cacheprovider -s", "--maxfail=1 -q"],
)
def test_options_of_the_command_do_not_disturb(tmp_path: Path, python: str, local: Run, options: str) -> None:
    if "importlib" in options:
        asked = subprocess.run([python, "-m", "pytest", "--help"], capture_output=True, text=True, check=True)
        if "append,importlib" not in asked.stdout:
            pytest.skip("this pytest does not import by importlib")
    command = f"python -m pytest {options} test_it.py"
    run = local(
        spec(project(tmp_path, GOOD, setup_dot_cfg="[tool:pytest]\nminversion = 5.0\n"), command=command), python
    )
    assert run.verdict.verdict == "resolved", (run.verdict, run.log)
