"""One Edge for each runtime under test; a runtime that does not work here is skipped by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proctor.common import ProctorError
from proctor.sandbox import Edge
from proctor.sandbox.conformance import Subject
from proctor.sandbox.runtimes.capabilities import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(scope="module", params=list(CAPABILITIES))
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    async with Edge(tmp_path_factory.mktemp("home"), pool_size=2) as edge:
        try:
            await edge.ready(request.param)
        except ProctorError as error:
            pytest.skip(f"runtime {request.param}: {error.message}")
        yield Subject(edge, request.param)
