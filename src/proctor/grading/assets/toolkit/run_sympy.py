# ruff: noqa
# mypy: ignore-errors
"""SymPy's own `bin/test`: its reporter is tapped when the project's runner module is imported.

The runner is part of the project; the grader restores its files to the base commit before it runs. Sentinels
live in a test file outside the repository that runs after the first real file.
"""

import importlib.machinery
import os
import runpy
import sys
import tempfile

MODULES = ("sympy.utilities.runtests", "sympy.testing.runtests")
EVENTS = (
    ("test_pass", "passed"),
    ("test_fail", "failed"),
    ("test_exception", "error"),
    ("test_xfail", "xfailed"),
    ("test_xpass", "xpassed"),
    ("test_skip", "skipped"),
)


def run(config, send):
    sys.meta_path.insert(0, Finder(lambda module: tap(module, config, send)))
    runpy.run_path(config["argv"][0], run_name="__main__")
    return 0


class Finder(object):
    """Finds the runner module as usual and has it tapped as soon as it has been executed."""

    def __init__(self, patch):
        self.patch = patch

    def find_spec(self, name, path=None, target=None):
        if name not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        original, patch = spec.loader.exec_module, self.patch

        def exec_module(module):
            original(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def tap(module, config, send):
    if not hasattr(module, "PyTestReporter"):
        return
    reporter, tests = module.PyTestReporter, module.SymPyTests
    state = {"file": "", "current": None, "planted": False}
    plan = config["sentinels"]

    def wrap(name, status):
        original = getattr(reporter, name)

        def event(self, *args, **kwargs):
            current, state["current"] = state["current"], None
            if current is not None:
                names = {"method": current, "label": current, "text": current, "description": ""}
                send("result", id=state["file"] + "::" + current, names=names, status=status)
            return original(self, *args, **kwargs)

        setattr(reporter, name, event)

    for name, status in EVENTS:
        wrap(name, status)

    enter = reporter.entering_test

    def entering_test(self, f):
        state["current"] = f.__name__
        return enter(self, f)

    reporter.entering_test = entering_test
    original_file = tests.test_file

    def test_file(self, filename, *args, **kwargs):
        state["file"], state["current"] = os.path.relpath(filename, config["cwd"]), None
        value = original_file(self, filename, *args, **kwargs)
        if not state["planted"]:
            state["planted"] = True
            path = sentinel_file(plan)
            state["file"] = plan["module"]
            original_file(self, path, *args, **kwargs)
        return value

    tests.test_file = test_file


def sentinel_file(plan):
    path = os.path.join(tempfile.mkdtemp(), plan["module"] + ".py")
    with open(path, "w") as file:
        file.write("def %s():\n    assert True\n\n\ndef %s():\n    assert not True\n" % (plan["pass"], plan["fail"]))
    return path
