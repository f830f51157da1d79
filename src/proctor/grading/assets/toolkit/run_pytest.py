# ruff: noqa
# mypy: ignore-errors
"""Runs pytest (5.1 and later, whatever the environment has) and reports each phase of each test.

What is reported is what was seen happen: the exception of a phase is taken from the call itself and compared with
pytest's report; a report that says "passed" although an exception was raised is sent as a conflict. Sentinels are
added to the session: a pair in a module of their own, and in every module (and class) that has expected tests a
decoy that must not pass (decoys.py; `decoys` is set by entry.py).
"""

import os
import tempfile


NEED = ("pytest", "unittest", "_pytest.assertion.rewrite", "_pytest.unittest", "pdb", "doctest")


def run(config, send):
    import pytest

    placed = decoys.Decoys(config["sentinels"]["decoys"], config["expected"])
    decoys.watch_pytest(placed)
    plugin = make_plugin(pytest, config, send, placed)
    return int(pytest.main(config["argv"][1:], plugins=[plugin]))


def make_plugin(pytest, config, send, placed):
    xfail_type = pytest.xfail.Exception
    skip_type = pytest.skip.Exception
    expected = set(config["expected"])
    cut = tuple(config["cut"])
    sentinels = Sentinels(pytest, config["sentinels"], placed)
    raised = {}

    def is_expected(nodeid):
        return nodeid in expected or (cut and nodeid.startswith(cut))

    class Watcher(object):
        @pytest.hookimpl(trylast=True)
        def pytest_configure(self, config):
            # Every expected test has to run, whatever the command or an ini file says about stopping early.
            config.option.maxfail = 0

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, session, items):
            send("collected", count=len(items))
            sentinels.plant(session, items, is_expected)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_setup(self, item):
            outcome = yield
            note(item, "setup", outcome)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item):
            outcome = yield
            note(item, "call", outcome)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_teardown(self, item):
            outcome = yield
            note(item, "teardown", outcome)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item, call):
            outcome = yield
            report = outcome.get_result()
            if not is_expected(item.nodeid) and item.nodeid not in sentinels.planted:
                return
            when = report.when
            kind = raised.pop((item.nodeid, when), None)
            if kind is None and call.excinfo is not None:
                kind = classify(call.excinfo.value)
            xfail = ""
            if hasattr(report, "wasxfail"):
                xfail = "raised" if kind == "xfail" else "mark"
            sub = getattr(report, "context", None) is not None and not isinstance(report, pytest_report_type())
            send(
                "sub" if sub else "phase",
                id=report.nodeid,
                when=when,
                outcome=report.outcome,
                seen=kind or "nothing",
                xfail=xfail,
            )

    def pytest_report_type():
        from _pytest.reports import TestReport

        class Exact(type):
            def __instancecheck__(cls, value):
                return type(value) is TestReport

        return Exact("Exact", (), {})

    def note(item, when, outcome):
        value = getattr(outcome, "excinfo", None)
        if value is not None:
            raised[(item.nodeid, when)] = classify(value[1])

    def classify(error):
        if isinstance(error, xfail_type):
            return "xfail"
        if isinstance(error, skip_type) or type(error).__name__ == "SkipTest":
            return "skip"
        return "error"

    return Watcher()


class Sentinels(object):
    """Places the planned names. `pass` and `fail` live in a module outside the repository, decoys beside real tests."""

    def __init__(self, pytest, plan, placed):
        self.pytest = pytest
        self.plan = plan
        self.placed = placed
        self.planted = set()

    def plant(self, session, items, is_expected):
        native = self.take_native(items)
        owners, modules = {}, {}
        for item in items:
            if not is_expected(item.nodeid):
                continue
            module = item.getparent(self.pytest.Module)
            if module is not None:
                modules[module] = item
            if item.parent is not module:
                owners[item.parent] = item
        for owner, sibling in list(owners.items()):
            decoy = native.get(owner)
            if decoy is None and type(owner).__name__ == "UnitTestCase":
                decoy = self.build(type(sibling), owner, True)
            self.place(items, sibling, decoy)
        for module, sibling in list(modules.items()):
            decoy = native.get(module)
            if decoy is None:
                decoy = self.build(self.pytest.Function, module, False)
            self.place(items, sibling, decoy)
        pair = self.clean(session)
        self.planted.update(item.nodeid for item in pair)
        items.extend(pair)

    def take_native(self, items):
        """Decoys that pytest found by itself, by what holds them; all leave the list and come back where they are wanted."""
        names, found = self.placed.names, {}
        for item in list(items):
            if item.name.partition("[")[0] in names:
                items.remove(item)
                if item.name in names:
                    found[item.parent] = item
        return found

    def place(self, items, sibling, decoy):
        if decoy is not None:
            items.insert(items.index(sibling) + 1, decoy)
            self.planted.add(decoy.nodeid)

    def build(self, kind, parent, method):
        """A decoy that pytest did not find: compiled in and not chosen by the command, or not compiled in."""
        name = next((n for n in self.placed.names if hasattr(parent.obj, n)), None)
        if name is None:
            if not self.placed.free:
                return None
            name = self.placed.free.pop()
            self.placed.placed[(parent.nodeid, name)] = name
            setattr(parent.obj, name, decoys.body(name, method))
        if hasattr(kind, "from_parent"):
            return kind.from_parent(parent, name=name)
        return kind(name, parent=parent)

    def clean(self, session):
        folder = tempfile.mkdtemp()
        path = os.path.join(folder, self.plan["module"] + ".py")
        with open(path, "w") as file:
            file.write(
                "def %s():\n    assert True\n\n\ndef %s():\n    assert not True\n"
                % (self.plan["pass"], self.plan["fail"])
            )
        module_type = self.pytest.Module
        if not hasattr(module_type, "from_parent"):
            import py

            module = module_type(py.path.local(path), parent=session)
        else:
            try:
                import pathlib

                module = module_type.from_parent(session, path=pathlib.Path(path))
            except TypeError:
                import py

                module = module_type.from_parent(session, fspath=py.path.local(path))
        return list(module.collect())
