"""A small task that is right in every respect, to be spoiled one thing at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

settings.register_profile("no-deadline", deadline=None)  # the machine may be busy; that is not what is tested
settings.load_profile("no-deadline")

GOOD_TOML = """\
schema_version = "1.4"

[environment]
network_mode = "no-network"
workdir = "/app"

[agent]
user = "agent"
"""

GOOD_FILES: dict[str, str] = {
    "instruction.md": "Write hello.txt.\n",
    "environment/Dockerfile": "FROM debian@sha256:" + "0" * 64 + "\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/sh\ntest -f /app/hello.txt && echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/sh\ntouch /app/hello.txt\n",
}


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Path]:
    """`make_task(toml, files, name=…)`: a task directory; a file given as None is left out."""

    def make(toml: str = GOOD_TOML, files: Mapping[str, str | bytes | None] | None = None, name: str = "task") -> Path:
        root = tmp_path / name
        for relative, content in {**GOOD_FILES, "task.toml": toml, **(files or {})}.items():
            if content is None:
                continue
            path = root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            if relative.endswith(".sh"):
                path.chmod(0o755)
        return root

    return make


@pytest.fixture(autouse=True)
def private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports and filtered copies of these tests stay in their own directory."""
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "state"))
