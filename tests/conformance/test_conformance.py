"""Every runtime does what the contract says, or declares that it does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proctor.sandbox.conformance import Check, all_checks
from proctor.sandbox.runtimes.capabilities import table

if TYPE_CHECKING:
    from proctor.sandbox.conformance import Outcome

pytestmark = pytest.mark.anyio
PAGE = Path(__file__).parents[2] / "docs/runtimes.md"


@pytest.mark.sandbox
@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
async def test_conforms(outcomes: dict[str, Outcome], check: Check) -> None:
    outcome = outcomes[check.id]
    if outcome.status == "skipped":
        pytest.skip(outcome.detail)
    assert outcome.status == "passed", f"{outcome.claim} {outcome.detail}"


def test_every_check_has_a_name_of_its_own_and_a_claim() -> None:
    checks = all_checks()
    assert len({check.id for check in checks}) == len(checks) > 40
    assert all(check.claim.endswith(".") for check in checks)


def test_the_table_of_the_page_is_the_one_of_the_code() -> None:
    written = re.search(r"<!-- capabilities -->\n(.*?)<!-- /capabilities -->", PAGE.read_text(), re.DOTALL)
    assert written is not None
    assert written[1].strip() == table().strip(), "run `proctor doctor --capabilities` and paste"
