"""`run.toml`: a crossing declared in a file is the request that the options would have made."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from click.testing import CliRunner
from tests.runs.toys import make_toy

from proctor.agents.text_loop import END_MARKER
from proctor.cli.run import run
from proctor.common import ConfigError
from proctor.models.scripted import Answer, ChatRequest, ScriptedServer, call, say
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
record_snapshots = 5
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
    assert plan.options["record_snapshots"] == 5
    assert (plan.seed, plan.limits) == (7, {"steps": 12, "tokens": 2_000_000, "total_s": 30.5})


def test_conditions_are_declared_too(declare: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text('[[ablation]]\nname = "hint"\nkind = "knowledge"\ntext = "It is 42."\n')
    text = 'tasks = ["toys"]\nharnesses = ["null"]\nablate = ["more.toml", "budget=2"]\nperturb = ["noise"]\n'
    more = 'tool_faults = ["0.1:fail"]\nfaults = ["net.json"]\nallow_network = "asked"\n'
    request = read_declaration(declare(text + more))
    assert request.allow_network == "asked"
    assert request.ablate == (str(tmp_path / "more.toml"), "budget=2")
    assert (request.perturb, request.tool_faults, request.faults) == (("noise",), ("0.1:fail",), ("net.json",))
    plan = plan_request(replace(request, faults=()))
    names = ["plain", "ablate-hint", "ablate-budget-x2", "perturb-noise", "tool-faults-0.1-fail"]
    assert [condition.name for condition in plan.conditions] == names


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


def answer(chat: ChatRequest) -> Answer:
    """Model `good` is right in either harness; `odd` only in the tool loop."""
    value = 42 if chat.body["model"] == "good" or "tools" in chat.body else 41
    command = f"printf {value} > /app/answer.txt"
    if "tools" in chat.body:
        return [call("bash", command=command), call("finish")][min(chat.turn, 1)]
    return say(f"```bash\n{command}\n```" if chat.turn == 0 else END_MARKER)


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.anyio
async def test_a_crossing_from_declaration_to_conclusion(
    declare: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROCTOR_HOME", str(tmp_path / "home"))
    async with ScriptedServer(answer) as server:
        models = ", ".join(f'"{name}@{server.base_url}"' for name in ("good", "odd"))
        text = f'tasks = ["toys"]\nharnesses = ["tool-loop", "text-loop"]\nmodels = [{models}]\nattempts = 2\n'
        command = [sys.executable, "-m", "proctor", "run", "--plan", str(declare(text)), "-o", str(tmp_path / "run")]
        done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr.decode()
    command = [sys.executable, "-m", "proctor", "compare", str(tmp_path / "run"), "--crossed", "--json"]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert (found["models"], found["harnesses"], found["tasks"], found["trials"]) == (
        ["good", "odd"], ["text-loop", "tool-loop"], 3, 24)  # fmt: skip
    means = {(cell["model"], cell["harness"]): cell["mean"] for cell in found["cells"]}
    assert means == {
        ("good", "text-loop"): 1,
        ("good", "tool-loop"): 1,
        ("odd", "text-loop"): 0,
        ("odd", "tool-loop"): 1,
    }
    shares = {" x ".join(one["effect"]) or "residual": one["share"] for one in found["components"]["components"]}
    assert shares["model x harness"] == pytest.approx(1.0), "all of it is which model is in which harness"
