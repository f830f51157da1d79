"""The isolation self-test: green on what works here, and judged by facts that are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proctor.cli.main import cli
from proctor.common import ConfigError, InfraError
from proctor.sandbox import Edge, Lifecycle, Resources, adoption
from proctor.sandbox._plans import check
from proctor.sandbox.net import NetworkPolicy, Rule
from proctor.sandbox.selftest import ITEMS, table
from proctor.sandbox.selftest.facts import Facts

from .edges import small

pytestmark = pytest.mark.anyio


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


SPECS: dict[str, dict[str, Any]] = {
    "an ordinary user": {"user": "nobody", "workdir": "/work"},
    "a policy": {"network": NetworkPolicy("allow", (Rule("a.test", (80,)),))},
    "open": {"network": "open"},
    "durable": {"lifecycle": Lifecycle(durable=True)},
    "loop": {"resources": Resources(memory_mb=64, disk_mb=64, disk_driver="loop")},
    "tiny": {"resources": Resources(cpus=0.1, memory_mb=16, disk_mb=4, pids=2)},
    "a hostile environment": {"env": {"LD_PRELOAD": "/x", "PATH": "/nowhere"}},
}


@pytest.mark.sandbox
async def test_the_short_form_leaves_every_kind_of_sandbox_as_it_was(tmp_path: Path) -> None:
    async with Edge(tmp_path, pool_size=2, durable=True) as edge:
        for name, fields in SPECS.items():
            async with await edge.create(small(self_test=True, **fields)) as box:
                assert [entry.path for entry in await box.diff() if entry.path != "/work"] == [], name
                assert (await box.receipt()).execs == 0
                await box.reset()
                receipt = await box.receipt()
            assert (receipt.incarnation, receipt.self_test["red"]) == (2, 0), name


@pytest.mark.sandbox
async def test_a_later_edge_knows_that_it_was_tested_and_takes_over_nothing_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small(self_test=True, lifecycle=Lifecycle(durable=True))
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        box = await edge.create(spec)
        written = edge._estate.folder(box.id) / adoption._LIVE
        tested_at_writing: list[bool] = []
        monkeypatch.setattr(
            edge._estate, "note_live", lambda one: tested_at_writing.append(bool(one._history.self_test))
        )
        async with await edge.create(spec):
            assert tested_at_writing == [True]
        assert json.loads(written.read_text())["self_test"]["red"] == 0
        before = (await box.receipt()).self_test
    async with Edge(tmp_path, pool_size=1, durable=True) as edge:
        (again,) = edge.boxes
        assert (await again.receipt()).self_test == before
        await again.close()


def test_a_sandbox_too_small_for_it_is_refused_by_the_field() -> None:
    with pytest.raises(ConfigError, match="2 processes") as caught:
        check(small(self_test=True, resources=Resources(pids=1)))
    assert caught.value.field == "resources.pids"


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["native", "runsc"])
def test_the_command_is_green(runtime: str) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--isolation", "--runtime", runtime, "--json"])
    found = json.loads(result.stdout)["runtimes"][runtime]
    if not found["works"] and runtime != "native":
        pytest.skip(found["reason"])
    assert [item for item in found["items"] if item["status"] == "red"] == []
    assert len(found["items"]) == len(ITEMS)
    assert all(item["evidence"] for item in found["items"])
    assert result.exit_code == 0
