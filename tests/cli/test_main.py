"""The front door: fast help, few verbs, errors in one line with a documented exit code."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from proctor.cli import main as front
from proctor.common import ConfigError, ExitCode, InfraError, RefusedError

HEAVY = {"anyio", "httpx", "pydantic", "rich", "starlette", "uvicorn", "zstandard", "pyarrow", "asyncio"}


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from proctor.cli.main import main; main(['--help']);"
        f"print('HEAVY', sorted(set({sorted(HEAVY)!r}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in result.stdout
    assert "Exit codes" in result.stdout


def test_at_most_twelve_verbs_and_each_loads() -> None:
    assert len(front.VERBS) <= 12
    context = click.Context(front.cli)
    for verb in front.VERBS:
        command = front.cli.get_command(context, verb)
        assert command is not None, verb
        assert command.help or command.short_help, verb


def test_unknown_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(["frobnicate"]) == ExitCode.USAGE
    assert "frobnicate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad", field="task.toml: x", remedy="mend it"), ExitCode.BAD_INPUT),
        (RefusedError("cannot"), ExitCode.REFUSED),
        (InfraError("broke\nin two lines"), ExitCode.INFRA),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    error: Exception, code: ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(front.cli, "main", fail)
    assert front.main(["doctor"]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("proctor: ")
