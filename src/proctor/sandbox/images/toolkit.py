"""Toolkit layers: things to stack above any image without building it anew."""

from __future__ import annotations

import importlib.resources
import shutil
import sys
from typing import TYPE_CHECKING

import anyio

from proctor.common import digest_bytes
from proctor.sandbox.images.machine import index_environment
from proctor.sandbox.images.tools import Progress, require_root, run_tool, silent

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.sandbox.contract import Layer
    from proctor.sandbox.images.store import ImageStore, Workspace

PYTEST_HOME = "/opt/proctor/pytest"
_LAUNCHER = f"""#!/usr/bin/env python3
import sys

sys.path.insert(0, "{PYTEST_HOME}")

from pytest import console_main

if __name__ == "__main__":
    sys.exit(console_main())
"""


async def pytest_toolkit(*, store: ImageStore, progress: Progress = silent) -> Layer:
    """A layer with pytest and what it needs (pure Python, 3.11 or newer) at /opt/proctor/pytest.

    Use it with `PYTHONPATH=/opt/proctor/pytest python3 -m pytest`, or /opt/proctor/pytest/bin/pytest.
    """
    requirements = (importlib.resources.files("proctor.sandbox.images.assets") / "pytest.txt").read_bytes()
    ref = f"toolkit:pytest-{digest_bytes(requirements + _LAUNCHER.encode())[7:19]}"
    if store.find_digest(ref) is not None:
        return store.resolve(ref).layers[0]
    require_root("a toolkit layer")
    progress(0, 1, "installing pytest into a toolkit layer")
    with store.workspace() as workspace:
        listing = workspace.path / "requirements.txt"
        listing.write_bytes(requirements)
        packages = workspace.path / "packages"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--require-hashes"]
        command += ["--only-binary", ":all:", "--target", str(packages), "-r", str(listing)]
        await run_tool(command, what="installing pytest", env=index_environment(), on_line=progress, total=1)
        layer = await anyio.to_thread.run_sync(_commit, packages, workspace)
        store.put(ref, [layer], labels={"toolkit": "pytest"})
    return layer


def _commit(packages: Path, workspace: Workspace) -> Layer:
    root = workspace.directory("toolkit")
    (root / "opt/proctor").mkdir(parents=True)
    # The scripts that pip wrote name the interpreter of this machine.
    shutil.rmtree(packages / "bin", ignore_errors=True)
    home = root / PYTEST_HOME[1:]
    shutil.copytree(packages, home)
    for path in home.glob("*.dist-info/RECORD"):
        path.unlink()
    for path in home.glob("*.dist-info/direct_url.json"):
        path.unlink()
    (home / "bin").mkdir()
    (home / "bin/pytest").write_text(_LAUNCHER)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
    return workspace.commit(root, deletions=False)
