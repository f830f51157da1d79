"""The whole path once, in seconds: a sandbox answers, and an exam tells a solution from nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proctor.sandbox import SandboxSpec, create

DEMO = Path(__file__).parent.parent / "examples" / "demo"


@pytest.mark.sandbox
async def test_a_sandbox_answers():
    async with create(SandboxSpec()) as box:
        result = await box.exec("echo hello; id -u")
        assert result.text == "hello\n0\n"
        assert (await box.exec("exit 3")).exit_code == 3


@pytest.mark.sandbox
def test_an_exam_tells_a_solution_from_nothing(tmp_path):
    run = [sys.executable, "-m", "proctor", "run", str(DEMO / "fix-median"), "--agent", "oracle", "--agent", "null"]
    done = subprocess.run([*run, "-o", str(tmp_path / "run")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert ledger.count('"resolved"') >= 1
    assert ledger.count('"unresolved"') >= 1
