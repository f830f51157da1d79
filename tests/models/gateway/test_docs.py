"""The examples of docs/gateway.md: the configuration is valid, the program runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.models.gateway import load_gateway_config

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "gateway.md").read_text("utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_files_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIN_KEY", "key-for-the-example")
    gateway, prices = blocks("toml")
    (tmp_path / "gateway.toml").write_text(gateway)
    (tmp_path / "prices.toml").write_text(prices)
    config = load_gateway_config(tmp_path / "gateway.toml")
    assert config.models["best"].id == "best-2026-11-01"
    assert config.prices is not None


def test_the_program_runs(tmp_path: Path) -> None:
    (program,) = blocks("python")
    (tmp_path / "example.py").write_text(program)
    done = subprocess.run(
        [sys.executable, tmp_path / "example.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "hello 10 1\n", done.stderr
