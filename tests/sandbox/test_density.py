"""The density bench is also a test: distinct namespaces, ids and groups, and an answer from every one.

10,000 alive take minutes, about 15 GiB and a machine of their own: `pytest -m heavy tests/sandbox/test_density.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "density.py"


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("count", "options"),
    [
        (30, ["--burst"]),
        pytest.param(1000, ["--burst"], marks=pytest.mark.heavy),
        pytest.param(10_000, ["--at-once", "1"], marks=pytest.mark.heavy),
    ],
)
def test_so_many_are_alive_at_once_and_each_answers(tmp_path: Path, count: int, options: list[str]) -> None:
    command = [sys.executable, str(BENCH), "--count", str(count), "--json", str(tmp_path / "found.json"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["alive"], found["answered"], found["create_failures"]) == (count, count, [])
    assert set(found["distinct"].values()) == {count}
    assert found["idle_cpu_share"] < 0.05, "nothing polls"
