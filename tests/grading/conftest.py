"""Runs a test group through the channel with plain subprocesses: the toolkit's own tests need no sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proctor.grading.channel import Launch, prepare
from proctor.grading.command import parse_command
from proctor.grading.report import Report, parse_report
from proctor.grading.verdict import StrictVerdict, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from proctor.tasks.model import TestSpec

TOOLKIT = Path(__file__).resolve().parents[2] / "src" / "proctor" / "grading" / "assets" / "toolkit"


@dataclass(frozen=True)
class LocalRun:
    """Outcome of one local run."""

    verdict: StrictVerdict
    report: Report
    log: str
    exit_code: int
    launch: Launch


def run_local(
    spec: TestSpec, python: str, *, script: str | None = None, env: dict[str, str] | None = None, timeout_s: float = 60
) -> LocalRun:
    """Start the group's command under the channel in `spec.cwd` and judge what it reports."""
    invocation = parse_command(spec.command)
    launch = prepare(
        spec,
        invocation,
        python=python,
        script=script,
        env={"PATH": os.environ["PATH"], "HOME": spec.cwd, **(env or {})},
        toolkit=str(TOOLKIT),
    )
    read, write = os.pipe()
    chunks: list[bytes] = []

    def drain() -> None:
        while chunk := os.read(read, 65536):
            chunks.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        done = subprocess.run(
            ["/bin/bash", "-c", f'exec "$@" {launch.report_fd}>&{write} {write}>&-', "bash", *launch.argv],
            input=launch.stdin,
            env=dict(launch.env),
            cwd="/",
            pass_fds=(write,),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    finally:
        os.close(write)
        reader.join(timeout=10)
        os.close(read)
    report = parse_report(b"".join(chunks), launch.nonce, runner=spec.runner)
    verdict = judge(
        report,
        launch.sentinels,
        runner=spec.runner,
        fail_to_pass=spec.fail_to_pass,
        pass_to_pass=spec.pass_to_pass,
        truncated_ids=spec.truncated_ids,
    )
    return LocalRun(verdict, report, done.stdout.decode("utf-8", "replace"), done.returncode, launch)


def pythons() -> list[str]:
    """This interpreter, and those of PROCTOR_TEST_PYTHONS (colon separated) for the other versions we support."""
    return [sys.executable, *filter(None, os.environ.get("PROCTOR_TEST_PYTHONS", "").split(":"))]


@pytest.fixture(params=pythons(), ids=lambda p: Path(p).parent.parent.name if p != sys.executable else "own")
def python(request: pytest.FixtureRequest) -> str:
    """Each interpreter that the toolkit is tested with."""
    return str(request.param)


@pytest.fixture
def local() -> Callable[..., LocalRun]:
    """`run_local` for tests."""
    return run_local
