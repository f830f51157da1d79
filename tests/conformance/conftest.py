"""The outcomes of all checks for each runtime; a runtime that does not work here is skipped by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proctor.common import ProctorError
from proctor.sandbox import Edge
from proctor.sandbox.conformance import Subject, run_all
from proctor.sandbox.runtimes.capabilities import CAPABILITIES

if TYPE_CHECKING:
    from proctor.sandbox.conformance import Outcome


@pytest.fixture(scope="module", params=list(CAPABILITIES))
async def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, docker_engine: None
) -> dict[str, Outcome]:
    """Of every check, by its id, for one runtime."""
    async with Edge(tmp_path_factory.mktemp("home"), pool_size=4) as edge:
        try:
            await edge.ready(request.param)
        except ProctorError as error:
            pytest.skip(f"runtime {request.param}: {error.message}")
        subject = Subject(edge, request.param)
        return {outcome.check: outcome async for outcome in run_all(subject)}
