"""The isolation self-test: green on what works here, and judged by facts that are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from proctor.cli.main import cli
from proctor.common import InfraError
from proctor.sandbox.selftest import ITEMS, table
from proctor.sandbox.selftest.facts import Facts


def test_a_report_that_was_cut_off_is_no_report() -> None:
    assert Facts.parse(b"a\t1\na\t2\nend\t1\n").many("a") == ("1", "2")
    for broken in (b"", b"a\t1\n", b"nonsense\nend\t1\n"):
        with pytest.raises(InfraError):
            Facts.parse(broken)


def test_items_are_numbered_once_and_each_is_checked_or_says_where() -> None:
    numbers = [item.number for item in ITEMS]
    assert numbers == sorted(set(numbers))
    for item in ITEMS:
        assert bool(item.facts or item.live) != bool(item.elsewhere), item


def test_the_threat_model_has_the_same_list() -> None:
    page = Path(__file__).parents[2] / "docs/design/threat-model.md"
    assert page.read_text().endswith(table()), "write proctor.sandbox.selftest.table() at its end"


@pytest.mark.sandbox
def test_the_command_is_green_on_native() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--isolation", "--runtime", "native", "--json"])
    native = json.loads(result.output)["runtimes"]["native"]
    assert [item for item in native["items"] if item["status"] == "red"] == []
    assert len(native["items"]) == len(ITEMS)
    assert all(item["evidence"] for item in native["items"])
    assert result.exit_code == 0
