"""`proctor compare --drift` and `--crossed`: the command line around them (the analyses have tests of their own)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.analysis.test_crossed import worked

from proctor.cli.compare import compare
from proctor.common import ConfigError
from proctor.runs.frame import save_trials

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def trials(tmp_path: Path) -> str:
    save_trials(worked(), tmp_path / "trials.parquet")
    return str(tmp_path / "trials.parquet")


def test_a_crossing_in_words(trials: str) -> None:
    result = CliRunner().invoke(compare, [trials, "--crossed"], catch_exceptions=False)
    assert result.exit_code == 0
    for text in ("3 models x 2 harnesses x 4 tasks (4 clusters): 24 graded trials", "57.3 %", "-0.003333",
                 "F(2, 6) = 0.11", "Kendall tau", "for 0.9 with 2 harnesses and 1 attempts: 3 tasks"):  # fmt: skip
        assert text in result.output, text


def test_a_crossing_as_json(trials: str) -> None:
    result = CliRunner().invoke(compare, [trials, "--crossed", "--json"], catch_exceptions=False)
    found = json.loads(result.output)
    assert found["study"]["now"]["relative"] == pytest.approx(0.9239, abs=5e-5)
    assert list(found["inputs"]) == [trials]


def test_drift_needs_records(trials: str) -> None:
    with pytest.raises(ConfigError, match="read from records"):
        CliRunner().invoke(compare, [f"{trials}::h0+m1", f"{trials}::h1+m1", "--drift"], catch_exceptions=False)


def test_drift_is_between_two(trials: str) -> None:
    with pytest.raises(ConfigError, match="between two versions, not 6"):
        CliRunner().invoke(compare, [trials, "--drift"], catch_exceptions=False)


@pytest.mark.parametrize(
    "options", [["--drift", "--gate", "margin=0.1"], ["--crossed", "--all-pairs"], ["--drift", "--score", "resolved"]]
)
def test_options_that_mean_nothing_there_are_refused(trials: str, options: list[str]) -> None:
    result = CliRunner().invoke(compare, [trials, *options])
    assert result.exit_code == 2
    assert "do not go together" in result.output
