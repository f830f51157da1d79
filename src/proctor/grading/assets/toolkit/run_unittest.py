# ruff: noqa
# mypy: ignore-errors
"""Runs `python -m unittest` or a script that ends in unittest's TextTestRunner, and reports each test once.

The runner and its result are the standard library's; they are tapped where TextTestRunner hands the result to the suite, so it
also holds for Django's runner, which subclasses neither. Sentinels: a TestCase of its own, and in each class that
has expected tests a decoy that must not pass.
"""

import copy
import os
import runpy
import sys
import unittest


def run(config, send):
    tap(config, send)
    if config["module"]:
        runpy.run_module(config["module"], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(config["argv"][0], run_name="__main__")
    return 0


def tap(config, send):
    runner = unittest.TextTestRunner
    original_run, original_make = runner.run, runner._makeResult
    state = {"depth": 0}
    placed = decoys.Decoys(config["sentinels"]["decoys"], config["expected"])
    decoys.watch_imports(placed)

    def make_result(self):
        result = original_make(self)
        Taps(send).attach(result)
        return result

    def run_suite(self, test):
        if state["depth"] == 0:
            send("collected", count=test.countTestCases())
            plant(test, config, placed)
            if hasattr(test, "addTest"):
                test.addTest(clean(config["sentinels"]))
        state["depth"] += 1
        try:
            self.failfast = False
            return original_run(self, test)
        finally:
            state["depth"] -= 1

    runner.run, runner._makeResult = run_suite, make_result


class Taps(object):
    """Listens to one result. A test's status is the worst event between its start and its stop."""

    ORDER = ("passed", "skipped", "xfailed", "xpassed", "failed", "error")
    EVENTS = (
        ("addSuccess", "passed"),
        ("addSkip", "skipped"),
        ("addExpectedFailure", "xfailed"),
        ("addUnexpectedSuccess", "xpassed"),
        ("addFailure", "failed"),
        ("addError", "error"),
    )

    def __init__(self, send):
        self.send = send
        self.open = {}

    def attach(self, result):
        for name, status in self.EVENTS:
            setattr(result, name, self.event(getattr(result, name), status))
        result.addSubTest = self.subtest(result.addSubTest)
        result.startTest = self.start(result.startTest)
        result.stopTest = self.stop(result.stopTest)

    def worst(self, test, status):
        key = test.id()
        seen = self.open.get(key)
        if seen is None:
            return
        if self.ORDER.index(status) > self.ORDER.index(seen[0] or "passed") or seen[0] is None:
            seen[0] = status

    def event(self, original, status):
        def add(test, *rest):
            self.worst(test, status)
            return original(test, *rest)

        return add

    def subtest(self, original):
        def add(test, subtest, err):
            if err is not None:
                failed = issubclass(err[0], test.failureException) if isinstance(err[0], type) else True
                self.worst(test, "failed" if failed else "error")
            return original(test, subtest, err)

        return add

    def start(self, original):
        def begin(test):
            self.open[test.id()] = [None]
            return original(test)

        return begin

    def stop(self, original):
        def finish(test):
            value = original(test)
            status = self.open.pop(test.id(), [None])[0]
            self.send("result", id=test.id(), names=names_of(test), status=status or "error")
            return value

        return finish


def names_of(test):
    """The forms in which runners print a test: `method (class)` old and new, first line of the docstring, bare method."""
    method = getattr(test, "_testMethodName", test.id().rpartition(".")[2])
    owner = "%s.%s" % (type(test).__module__, type(test).__qualname__)
    names = {"method": method, "label": "%s (%s)" % (method, owner), "text": str(test)}
    try:
        doc = test.shortDescription()
    except Exception:
        doc = None
    names["description"] = doc.strip() if isinstance(doc, str) else ""
    return names


def walk(suite):
    """Every (containing list, test) below a suite."""
    tests = getattr(suite, "_tests", None)
    if tests is None:
        return
    for test in list(tests):
        if isinstance(test, unittest.TestCase):
            yield tests, test
        elif test is not None:
            for found in walk(test):
                yield found


def plant(suite, config, placed):
    expected, done = set(config["expected"]), set()
    found = list(walk(suite))
    native = {type(test) for _, test in found if test._testMethodName in placed.names}
    for tests, test in found:
        owner = type(test)
        names = names_of(test)
        known = expected & {test.id(), names["label"], names["text"], names["description"], names["method"]}
        if not known or owner in done or owner in native:
            continue
        done.add(owner)
        name = next((n for n in placed.names if hasattr(owner, n)), None)
        if name is None:
            if not placed.free:
                continue
            name = placed.free.pop()
            setattr(owner, name, decoys.body(name, True))
        # A copy of its neighbour, since a class may be made in ways of its own.
        twin = copy.copy(test)
        twin._testMethodName, twin._testMethodDoc = name, None
        tests.insert(tests.index(test) + 1, twin)


def clean(plan):
    def good(self):
        self.assertTrue(True)

    def bad(self):
        self.assertTrue(False)

    case = type(plan["case"], (unittest.TestCase,), {plan["pass"]: good, plan["fail"]: bad})
    return unittest.TestSuite([case(plan["pass"]), case(plan["fail"])])
