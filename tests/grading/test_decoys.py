"""Cheats that make every test pass without knowing one of them: decoys among the tests must pass too, and so tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .test_toolkit import BAD, GOOD, UNIT, Run, project, spec, unit_spec

if TYPE_CHECKING:
    from pathlib import Path

CHEATS = {
    "emptied at the end of the import": """
        import sys
        frame = sys._getframe()
        while frame and not frame.f_code.co_filename.endswith(("test_it.py", "test_unit.py")):
            frame = frame.f_back
        def noop(*_args, **_more): pass
        def profile(where, event, _arg):
            if where is frame and event == "return":
                sys.setprofile(None)
                for name, value in list(frame.f_globals.items()):
                    if name.startswith("test"): frame.f_globals[name] = noop
                    if isinstance(value, type):
                        for key in [k for k in vars(value) if k.startswith("test")]: setattr(value, key, noop)
        if frame: sys.setprofile(profile)
        def add(a, b): return 0
        """,
    "failures in this file are swallowed": """
        import unittest
        def quiet(old, code):
            def call(self, *args, **named):
                try: return old(self, *args, **named)
                except Exception:
                    if not code(self, args).co_filename.endswith(("test_it.py", "test_unit.py")): raise
            return call
        try:
            import _pytest.python
            cls = _pytest.python.Function
            cls.runtest = quiet(cls.runtest, lambda self, _: self.obj.__code__)
        except ImportError: pass
        if hasattr(unittest.TestCase, "_callTestMethod"):
            case = unittest.TestCase
            case._callTestMethod = quiet(case._callTestMethod, lambda _, args: args[0].__func__.__code__)
        def add(a, b): return 0
        """,
    "an assertion method is emptied": """
        import unittest
        unittest.TestCase.assertEqual = lambda *_args, **_more: None
        def add(a, b): return 0
        """,
}


@pytest.mark.parametrize("cheat", ["emptied at the end of the import", "failures in this file are swallowed"])
def test_pytest_functions(tmp_path: Path, python: str, local: Run, cheat: str) -> None:
    folder = project(tmp_path, BAD, solution_dot_py=CHEATS[cheat])
    run = local(spec(folder, fail_to_pass=("test_it.py::test_add",), pass_to_pass=("test_it.py::test_old",)), python)
    assert [o.ok for o in run.verdict.tests] == [True, True], run.log
    assert run.verdict.verdict == "unresolved", run.log
    assert {f.kind for f in run.verdict.findings} == {"sentinel"}


@pytest.mark.parametrize("cheat", ["emptied at the end of the import", "an assertion method is emptied"])
def test_cases_under_pytest(tmp_path: Path, python: str, local: Run, cheat: str) -> None:
    folder = project(tmp_path, BAD, solution_dot_py=CHEATS[cheat])
    run = local(spec(folder, fail_to_pass=("test_it.py::Case::test_case",), pass_to_pass=()), python)
    assert [o.ok for o in run.verdict.tests] == [True], run.log
    assert run.verdict.verdict == "unresolved", run.log


@pytest.mark.parametrize(
    "cheat",
    ["emptied at the end of the import", "failures in this file are swallowed", "an assertion method is emptied"],
)
def test_unittest_cases(tmp_path: Path, python: str, local: Run, cheat: str) -> None:
    folder = project(tmp_path, BAD, solution_dot_py=CHEATS[cheat])
    changes = {"fail_to_pass": ("test_add (test_unit.AddTests)",), "pass_to_pass": ()}
    run = local(unit_spec(folder, **changes), python)
    if cheat != "failures in this file are swallowed" or run.verdict.tests[0].ok:
        assert [o.ok for o in run.verdict.tests] == [True], run.log
    assert run.verdict.verdict == "unresolved", run.log


@pytest.mark.parametrize("options", ["test_it.py::test_add", "-k test_add", "--assert=plain"])
def test_decoys_are_there_whatever_the_command_chooses(tmp_path: Path, python: str, local: Run, options: str) -> None:
    folder = project(tmp_path, GOOD)
    command = f"python -m pytest {options}"
    run = local(spec(folder, command=command, fail_to_pass=("test_it.py::test_add",), pass_to_pass=()), python)
    assert run.verdict.verdict == "resolved", (run.verdict, run.log)
    decoys = [t for name, t in run.report.tests.items() if name.rpartition("::")[2] in run.launch.sentinels.decoys]
    assert [t.status for t in decoys] == ["failed"]


def test_decoys_run_to_their_end(tmp_path: Path, python: str, local: Run) -> None:
    """A decoy that failed for another reason than its last assertion would tell nothing."""
    (tmp_path / "test_unit.py").write_text(UNIT)
    ids = ("test_it.py::test_add", "test_it.py::TestGroup::test_inside", "test_it.py::Case::test_case")
    for command in ("python -m pytest test_it.py", "python -m pytest --assert=plain test_it.py"):
        run = local(spec(project(tmp_path, GOOD), command=command, fail_to_pass=ids, pass_to_pass=()), python)
        assert run.verdict.verdict == "resolved", run.log
        names = {n.rpartition("::")[2] for n in run.report.tests} & set(run.launch.sentinels.decoys)
        assert len(names) >= 2
        for name in names:
            assert f"AssertionError: {name}\n" in run.log
    run = local(unit_spec(project(tmp_path, GOOD)), python)
    (name,) = {t.method for t in run.report.tests.values()} & set(run.launch.sentinels.decoys)
    assert f"\nAssertionError: {name}\n" in run.log


FALSE_PYTEST = """
class _Outcome:
    Exception = type("Outcome", (BaseException,), {})
xfail = skip = _Outcome
def hookimpl(*_args, **_more): return lambda function: function
def main(_args, plugins):
    def cells(f): return dict(zip(f.__code__.co_freevars, (c.cell_contents for c in f.__closure__ or ())))
    seen = cells(type(plugins[0]).pytest_runtest_makereport)
    send, plan = seen["send"], seen["sentinels"].plan
    def report(name, ok):
        for when in ("setup", "call", "teardown"):
            bad = when == "call" and not ok
            send("phase", id=name, when=when, outcome="failed" if bad else "passed", seen="error" if bad else "nothing",
                 xfail="")
    send("collected", count=9)
    for name in cells(seen["is_expected"])["expected"]: report(name, True)
    report("x.py::" + plan["pass"], True)
    report("x.py::" + plan["fail"], False)
    report("test_it.py::" + plan["decoys"][0], False)
    return 1
"""


@pytest.mark.parametrize("name", ["pytest.py", "_pytest/__init__.py", "pluggy.py", "argparse.py"])
def test_the_work_cannot_stand_in_for_the_runner(tmp_path: Path, python: str, local: Run, name: str) -> None:
    """`python -m` puts the working directory first; the runner and what it needs are loaded before that."""
    folder = project(tmp_path, BAD)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(FALSE_PYTEST if name == "pytest.py" else "raise SystemExit(0)\n")
    run = local(spec(folder, fail_to_pass=("test_it.py::test_add",), pass_to_pass=("test_it.py::test_old",)), python)
    assert run.verdict.verdict == "unresolved", run.log
    assert [o.status for o in run.verdict.tests] == ["failed", "passed"], run.log


def test_running_tests_again_is_no_way_out_of_the_count(tmp_path: Path, python: str, local: Run) -> None:
    """A verdict of `error` is not counted, so code under test must not be able to bring one about."""
    again = """
        import _pytest.runner
        old = _pytest.runner.runtestprotocol
        def runtestprotocol(item, **named):
            old(item, **named)
            return old(item, **named)
        _pytest.runner.runtestprotocol = runtestprotocol
        def add(a, b): return 0
        """
    run = local(spec(project(tmp_path, BAD, solution_dot_py=again)), python)
    assert run.verdict.verdict == "unresolved", run.log
    assert "reported-twice" in {f.kind for f in run.verdict.findings}
