"""Builds of launcher and guest in which one hardening step is left out: the one that their own name ends with."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import partial
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox.native.launcher import BINARY, LauncherConfig
from proctor.sandbox.runtimes import native

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CSRC = BINARY.parent.parent / "csrc"


def steps() -> set[str]:
    """The names of all steps, as the sources have them."""
    return {name for path in CSRC.glob("*.c") for name in re.findall(r'hardened\("([a-z-]+)"\)', path.read_text())}


@pytest.fixture(scope="session")
def weak_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build, all of whose steps are there until it is called by a name."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("weakened") / "proctor-init"
    flags = ["-std=c11", "-O1", "-static", "-D_GNU_SOURCE", "-DPROCTOR_WEAKEN", "-fno-strict-aliasing"]
    subprocess.run([compiler, *flags, "-o", target, *sorted(CSRC.glob("*.c"))], check=True)
    return target


@pytest.fixture
def weaken(weak_binary: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`weaken(step)`: Edges of this test run without it."""

    def leave_out(step: str) -> None:
        named = weak_binary.with_name(f"proctor-init--{step}")
        if not named.exists():
            named.hardlink_to(weak_binary)
        monkeypatch.setattr(native, "LauncherConfig", partial(LauncherConfig, binary=named))

    return leave_out
