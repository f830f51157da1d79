"""`run.toml`: a crossing declared in a file is the request that the options would have made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.runs.toys import make_toy

from proctor.cli.run import run
from proctor.common import ConfigError
from proctor.runs.declaration import read_declaration
from proctor.runs.request import plan_request

if TYPE_CHECKING:
    from collections.abc import Callable

CROSSING = """\
version = 1
tasks = ["toys"]
harnesses = ["tool-loop", "text-loop", { use = "scripted", label = "replay", options = { script = "act.json" } }]
models = ["a@http://127.0.0.1:9/v1", "models/b.toml"]
attempts = 3
seed = 7
select = ["alpha", "be*"]
[limits]
steps = 12
tokens = 2000000
total_s = 30.5
"""


@pytest.fixture
def declare(tmp_path: Path) -> Callable[[str], Path]:
    for name in ("alpha", "beta", "gamma"):
        make_toy(tmp_path / "toys", name)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "b.toml").write_text('name = "b"\nbase_url = "http://127.0.0.1:9/v1"\n')
    (tmp_path / "act.json").write_text("[]")

    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_a_crossing_is_planned_whole(
    declare: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    plan = plan_request(read_declaration(declare(CROSSING)))
    labels = ["tool-loop+a", "tool-loop+b", "text-loop+a", "text-loop+b", "replay"]
    assert [agent.label for agent in plan.agents] == labels
    assert plan.agents[4].options == {"script": str(tmp_path / "act.json")}
    assert [entry.task.name for entry in plan.entries] == ["alpha", "beta"]
    assert len(plan.trials()) == 5 * 2 * 3
    assert (plan.seed, plan.limits) == (7, {"steps": 12, "tokens": 2_000_000, "total_s": 30.5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tasks = ["toys"]', "harnesses"),
        ('tasks = ["toys"]\nharnesses = ["null"]\nharness = ["x"]', "harness"),
        ('tasks = ["toys"]\nharnesses = [{ label = "x" }]', "harnesses.0"),
        ('tasks = ["toys"]\nharnesses = ["null"]\nattempts = 0', "attempts"),
        ('tasks = ["toys"]\nharnesses = ["null"]\nversion = 2', "version"),
        ("tasks = [", "not TOML"),
        ('tasks = ["toys"]\nharnesses = ["null"]\n[options]\n"a.b" = 1', "options.a.b"),
    ],
)
def test_what_is_wrong_is_named(declare: Callable[[str], Path], text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_declaration(declare(text))
    assert message in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_declaration(Path("/nowhere/run.toml"))


def test_a_declared_run_takes_nothing_else(declare: Callable[[str], Path]) -> None:
    result = CliRunner().invoke(run, ["--plan", str(declare(CROSSING)), "--attempts", "2"])
    assert result.exit_code == 2
    assert "--plan takes everything from its file" in result.output
