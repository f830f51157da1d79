# ruff: noqa
# mypy: ignore-errors
"""A pytest plug-in that testifies from inside a verifier's own pytest session. Python 3.6 and later.

It changes nothing: no test is added and no report touched. It says that a session began and that it ended (code under test
may have left with `os._exit(0)`), how many tests were reported as passed although they raised, and whether a test that
must fail does fail here. Whatever goes wrong in it is swallowed: a verifier must not fail because it is watched.
"""

import os
import sys


def _take_over():
    """The channel for this session, or None. Leaves no trace of the witness in the environment."""
    value = os.environ.pop("PROCTOR_WITNESS", "")
    here = os.path.dirname(os.path.abspath(__file__))
    for name, separator, own in (("PYTEST_PLUGINS", ",", "proctor_witness"), ("PYTHONPATH", os.pathsep, here)):
        rest = [part for part in os.environ.get(name, "").split(separator) if part and part != own]
        if rest:
            os.environ[name] = separator.join(rest)
        else:
            os.environ.pop(name, None)
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]
    if not value:
        return None
    import binascii
    import hashlib
    import hmac
    import importlib.util

    fd, nonce, toolkit = value.split(":", 2)
    spec = importlib.util.spec_from_file_location("proctor_entry", os.path.join(toolkit, "entry.py"))
    entry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    session = binascii.hexlify(os.urandom(8)).decode("ascii")
    key = hmac.new(bytes(bytearray.fromhex(nonce)), session.encode("ascii"), hashlib.sha256).digest()
    return entry.Channel(int(fd), key, prefix=session + " ")


try:
    _channel = _take_over()
except Exception:
    _channel = None
_seen = {"conflicts": 0, "tests": 0}
_send = _channel.send if _channel is not None else (lambda kind, **fields: None)


def pytest_configure(config):
    _say("start", runner="witness", python="%d.%d.%d" % sys.version_info[:3])


def pytest_runtest_makereport(item, call):
    # Not a wrapper and not an answer: the report that pytest makes of this call is looked at in logreport.
    if call.when == "call" and call.excinfo is not None:
        _raised[item.nodeid] = type(call.excinfo.value).__name__


_raised = {}


def pytest_runtest_logreport(report):
    if report.when != "call":
        return
    _seen["tests"] += 1
    kind = _raised.pop(report.nodeid, None)
    if (
        kind not in (None, "Skipped", "SkipTest", "XFailed")
        and report.outcome == "passed"
        and not hasattr(report, "wasxfail")
    ):
        _seen["conflicts"] += 1


def pytest_sessionfinish(session, exitstatus):
    try:
        passed = _failing_test_passes(session)
    except Exception:
        passed = None
    _say(
        "session",
        tests=_seen["tests"],
        conflicts=_seen["conflicts"],
        decoy="unknown" if passed is None else ("passed" if passed else "failed"),
    )


def pytest_unconfigure(config):
    _say("end", code=0)


def _say(kind, **fields):
    try:
        _send(kind, **fields)
    except Exception:
        pass


def _failing_test_passes(session):
    """Whether a test that raises comes out as passed, by pytest's own function item and report. None: no module."""
    import pytest
    from _pytest.reports import TestReport
    from _pytest.runner import CallInfo

    items = [item for item in session.items if type(item) is pytest.Function]
    if not items:
        return None
    module = items[-1].getparent(pytest.Module)
    name = items[-1].name.split("[")[0] + "_" + "%04d" % (os.getpid() % 10000)

    def decoy():
        raise AssertionError(name)

    if hasattr(pytest.Function, "from_parent"):
        item = pytest.Function.from_parent(module, name=name, callobj=decoy)
    else:
        item = pytest.Function(name, parent=module, callobj=decoy)
    call = CallInfo.from_call(item.runtest, "call")
    return call.excinfo is None or TestReport.from_item_and_call(item, call).outcome != "failed"
