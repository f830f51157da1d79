"""A run says what isolates the candidate, has it, keeps it in the lock, and is refused where it cannot be had."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proctor.common import ConfigError, RefusedError
from proctor.runs.isolation import Isolation
from proctor.sandbox import Tier

DEMO = Path(__file__).parents[2] / "examples/demo"


def proctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proctor", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_words_and_locks() -> None:
    assert Isolation.parse(None, None) == Isolation()
    assert Isolation().as_options() == {}
    gvisor = Isolation.parse("runsc", "gvisor")
    assert (gvisor.runtime, gvisor.min_tier) == ("runsc", Tier.GVISOR)
    assert Isolation.locked(json.loads(json.dumps(gvisor.as_options()))) == gvisor
    with pytest.raises(ConfigError, match="no tier"):
        Isolation.parse(None, "moon")
    for runtime, tier, field in (
        ("rkt", None, "runtime"),
        (None, "gvisor", "min_tier"),
        ("docker", "gvisor", "min_tier"),
    ):
        with pytest.raises(RefusedError) as refused:
            Isolation.parse(runtime, tier)
        assert refused.value.field == field


@pytest.mark.sandbox
@pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed")
def test_the_candidate_is_isolated_as_asked_and_the_record_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tasks = ("--task", "proctor-demo/fix-median")
    done = proctor("run", str(DEMO), *tasks, "--agent", "oracle", "--runtime", "runsc", "--min-tier", "gvisor",
                   "-o", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "run.json").read_text())["options"]["isolation"] == {
        "runtime": "runsc",
        "min_tier": "gvisor",
    }
    (receipt,) = (json.loads(path.read_text()) for path in out.glob("trials/*/receipt.json"))
    assert receipt["agent"]["tier"] == "gvisor"
    assert receipt["agent"]["runtime"] == "container/runsc"
    assert all(room["tier"] == "namespaces-userns" for room in receipt["grading"])
    (result,) = (json.loads(path.read_text()) for path in out.glob("trials/*/result.json"))
    assert result["outcome"] == "resolved"


def test_what_no_machine_can_honour_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = proctor("run", str(DEMO), "--agent", "oracle", "--min-tier", "gvisor", "-o", str(tmp_path / "out"))
    assert done.returncode == 5
    assert "min_tier: runtime native achieves namespaces-userns" in done.stderr
    assert not (tmp_path / "out").exists()
