"""Test commands are taken apart exactly, or refused."""

from __future__ import annotations

import pytest

from proctor.common import ConfigError
from proctor.grading.command import Invocation, parse_command, split_env
from proctor.grading.junit import judge_junit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pytest -rA tests/test_cli.py", Invocation("pytest", None, ("-rA", "tests/test_cli.py"), {})),
        ("python3 -m unittest -v a.b", Invocation("python3", "unittest", ("-v", "a.b"), {})),
        ("python tests/run.py x", Invocation("tests/run.py", None, ("x",), {})),
        (
            "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C x.py",
            Invocation(
                "bin/test", None, ("-C", "x.py"), {"PYTHONWARNINGS": "ignore::UserWarning,ignore::SyntaxWarning"}
            ),
        ),
        ("cd x && make y; pytest 'a b'", Invocation("pytest", None, ("a b",), {}, "cd x && make y")),
        ("pytest -k 'a and not b'", Invocation("pytest", None, ("-k", "a and not b"), {})),
    ],
)
def test_commands(text: str, expected: Invocation) -> None:
    assert parse_command(text) == expected


@pytest.mark.parametrize(
    "text", ["", "A=1", "pytest | tee x", "pytest > x", "pytest $(ls)", "pytest `ls`", "python -c 'x'", "pytest &", "'"]
)
def test_commands_that_need_a_shell_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_command(text)


def test_start_up_variables_are_held_back_and_dangerous_ones_left_out() -> None:
    early, late = split_env({"PATH": "/bin", "PYTHONPATH": "/x", "BASH_ENV": "/evil", "LD_PRELOAD": "/evil.so"})
    assert early["PATH"] == "/bin"
    assert not {"PYTHONPATH", "BASH_ENV", "LD_PRELOAD"} & set(early)
    assert late == {"PYTHONPATH": "/x"}


JUNIT = b"""<testsuites><testsuite><testcase classname="m" name="a"/>
<testcase classname="m" name="b"><failure/></testcase>
<testcase classname="m" name="c"><skipped/></testcase><testcase classname="n" name="a"/></testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("ids", "verdict"),
    [
        (("m::a",), "resolved"),
        (("m.b",), "unresolved"),
        (("m::c",), "unresolved"),
        (("a",), "unresolved"),
        (("z",), "unresolved"),
    ],
)
def test_junit(ids: tuple[str, ...], verdict: str) -> None:
    assert judge_junit(JUNIT, ids, ()).verdict == verdict


@pytest.mark.parametrize("data", [b"", b"<", b"<!DOCTYPE x><a/>", b"\xff", "<!DOCTYPE x><a/>".encode("utf-16")])
def test_junit_that_is_not_usable(data: bytes) -> None:
    assert judge_junit(data, ("m::a",), ()).verdict == "unresolved"
