"""Shared fixtures: what this machine can do, and where the shared data is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# A busy machine is not a failed property. In continuous integration the examples are the same every time, so that its
# answer is about the commit; elsewhere each run looks for new ones.
settings.register_profile("proctor", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("proctor")

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Proctor runs on asyncio through anyio."""
    return "asyncio"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real tasks and trajectories beside the repository."""
    return DATA


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The machine's engine, or one of our own for the length of the tests, if one can be started here."""
    if os.environ.get("DOCKER_HOST") or os.path.exists("/var/run/docker.sock"):
        yield
        return
    room = tmp_path_factory.mktemp("engine")
    with open(room / "log", "wb") as log:
        engine = subprocess.Popen([ROOT / "scripts/engine", str(room)], stdout=log, stderr=log)
    deadline = time.monotonic() + 30
    while not (room / "docker.sock").exists() and engine.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.environ["DOCKER_HOST"] = f"unix://{room}/docker.sock"
    try:
        yield
    finally:
        del os.environ["DOCKER_HOST"]
        engine.terminate()
        engine.wait(timeout=30)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, by name, what this machine cannot run; order fast tests before slow ones."""
    native = sys.platform == "linux" and os.geteuid() == 0
    for item in items:
        if item.get_closest_marker("data") and not DATA.is_dir():
            item.add_marker(pytest.mark.skip(reason="the folder ../shared/data is not beside this repository"))
        if item.get_closest_marker("sandbox") and not native:
            item.add_marker(pytest.mark.skip(reason="the native sandbox needs Linux and root"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
