"""Toy tasks on the host image: small enough that a trial is mostly the machinery around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TOML = """\
schema_version = "1.4"

[task]
name = "{name}"

[environment]
network_mode = "no-network"
cpus = 1
memory_mb = 256
storage_mb = 64
workdir = "/app"

[verifier]
timeout_sec = 30.0

[agent]
timeout_sec = 30.0

[proctor]
image = "host"
"""
TEST = """\
#!/bin/sh
mkdir -p /logs/verifier
if [ "$(cat /app/answer.txt 2>/dev/null)" = "{answer}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def make_toy(
    folder: Path, name: str, *, answer: str = "42", solve: str | None = None, test: str | None = None, more: str = ""
) -> Path:
    """A task that asks for a file with the answer in it. `more` goes into its `[proctor]` table."""
    root = folder / name
    (root / "tests").mkdir(parents=True)
    (root / "solution").mkdir()
    (root / "environment").mkdir()
    (root / "environment" / "notes.txt").write_text("nothing of interest\n")
    (root / "task.toml").write_text(TOML.format(name=name) + more)
    (root / "instruction.md").write_text(f"Write {answer} to /app/answer.txt.\n")
    (root / "tests" / "test.sh").write_text(test or TEST.format(answer=answer))
    (root / "solution" / "solve.sh").write_text(solve or f"#!/bin/sh\nprintf %s {answer} > /app/answer.txt\n")
    for script in (root / "tests" / "test.sh", root / "solution" / "solve.sh"):
        script.chmod(0o755)
    return root
