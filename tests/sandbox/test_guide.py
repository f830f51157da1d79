"""The guides do what they say: every command and every program in them is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proctor.sandbox import Edge

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCKS = [
    pytest.param(language, text, id=f"{guide}-{number}-{language}")
    for guide in ("sandbox", "network", "design/durable")
    for number, (language, text) in enumerate(
        re.findall(r"^```(bash|python)\n(.*?)^```$", (DOCS / f"{guide}.md").read_text(), re.DOTALL | re.MULTILINE), 1
    )
]


@pytest.mark.sandbox
@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_an_example_runs(language: str, text: str, tmp_path: Path) -> None:
    command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PROCTOR_IMAGES": str(Edge()._images._open().root),
        "PROCTOR_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or "assert" in text
