"""Shared fixtures: what this machine can do, and where the shared data is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("proctor", deadline=None)  # a busy machine is not a failed property
settings.load_profile("proctor")

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Proctor runs on asyncio through anyio."""
    return "asyncio"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real tasks and trajectories beside the repository."""
    return DATA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, by name, what this machine cannot run; order fast tests before slow ones."""
    native = sys.platform == "linux" and os.geteuid() == 0
    for item in items:
        if item.get_closest_marker("data") and not DATA.is_dir():
            item.add_marker(pytest.mark.skip(reason="the folder ../shared/data is not beside this repository"))
        if item.get_closest_marker("sandbox") and not native:
            item.add_marker(pytest.mark.skip(reason="the native sandbox needs Linux and root"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
