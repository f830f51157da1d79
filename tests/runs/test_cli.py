"""The command line of `proctor run`: what is wrong is said in one line, before anything is built or started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.runs.conftest import make_plan
from tests.runs.toys import make_toy

from proctor.cli.main import main
from proctor.cli.run import SECTIONS, run
from proctor.runs.conditions import Condition
from proctor.runs.formats import RunLock, load
from proctor.runs.lock import differences, make_lock, write_lock

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_toy(tmp_path / "toys", "toy")


def prepare_files(folder: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "something").write_text("")
    (folder / "begun").mkdir()
    write_lock(folder / "begun", make_lock(make_plan(), {}))
    (folder / "broken.jsonl").write_text('{"instance_id": "a", "model_patch": ""}\n{"instance_id": \n')
    (folder / "empty").mkdir()
    (folder / "keyed.toml").write_text('name = "m"\nbase_url = "http://127.0.0.1:1"\napi_key_env = "NO_SUCH_KEY"\n')
    (folder / "none").mkdir()
    (folder / "none" / "dataset.toml").write_text(
        '[dataset]\nname = "none"\n[[unrunnable]]\nname = "one"\nreason = "no Python 2.7"\n'
    )
    (folder / "bad-lock").mkdir()
    (folder / "bad-lock" / "run.json").write_text('{"version": 1, "surprise": true}')


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--agent", "null"], 4, "no tasks are given"),
        (["toys"], 4, "no agent is given"),
        (["nowhere", "--agent", "null"], 4, "does not exist"),
        (["empty", "--agent", "null"], 4, "holds no tasks"),
        (["toys", "--agent", "nobody"], 4, "no harness 'nobody'"),
        (["toys", "--agent", "null", "--agent", "null"], 4, "'null' is given twice"),
        (["toys", "toys", "--agent", "null"], 4, "task 'toy' is given twice"),
        (["toys", "--agent", "null", "--task", "other"], 4, "no task is selected"),
        (["toys", "--agent", "null", "--split", "private"], 4, "no task is left"),
        (["none", "--agent", "null"], 4, "one: no Python 2.7"),
        (["toys", "--agent", "null", "--limit", "steps=none"], 4, "--limit steps"),
        (["toys", "--agent", "null", "--option", "x=1"], 4, "--option x"),
        (["toys", "--agent", "null", "--condition", "a b"], 4, "not the name of a condition"),
        (
            ["toys", "--agent", "tool-loop", "--model", "m@http://127.0.0.1:1/v1", "--limit", "cost_usd=1"],
            5,
            "price of m",
        ),
        (["toys", "--agent", "tool-loop", "--model", "keyed.toml"], 4, "NO_SUCH_KEY is not set"),
        (["toys", "--agent", "null", "-o", "full"], 4, "not an empty directory"),
        (["toys", "--agent", "null", "-o", "begun"], 4, "there is a run here already"),
        (["toys", "--agent", "null", "--attempts", "0"], 2, "attempts"),
        (["toys", "--predictions", "none.jsonl"], 4, "none.jsonl"),
        (["toys", "--predictions", "broken.jsonl"], 4, "broken.jsonl"),
        (["toys", "--predictions", "broken.jsonl", "--agent", "null"], 4, "without an agent"),
        (["--resume", "empty"], 4, "is this a run directory?"),
        (["--resume", "bad-lock"], 4, "run.json"),
        (["--resume", "begun", "--agent", "null"], 2, "takes everything from the run itself"),
        (["--resume", "begun", "-o", "x"], 2, "takes everything from the run itself"),
        (["--resume", "begun"], 4, "no harness 'solver'"),
    ],
)
def test_bad_input(
    toy: Path, tmp_path: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_files(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    assert main(["run", *arguments]) == code
    assert words in capsys.readouterr().err
    assert sorted(path for path in tmp_path.rglob("*")) == before, "nothing was made"


def test_help_has_every_option_in_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    for section in SECTIONS:
        assert f"{section}:" in text
    assert {name for names in SECTIONS.values() for name in names} == {
        parameter.name for parameter in run.params if parameter.name != "tasks"
    }


def test_a_lock_says_what_has_changed() -> None:
    old = make_lock(make_plan(), {})
    assert differences(old, make_lock(make_plan(), {})) == []
    assert differences(old, old.model_copy(update={"created_at": "now", "git_commit": "x", "host": old.host})) == []
    changes = {
        "seed": {"seed": 3},
        "attempts": {"attempts": 2},
        "agent idler": {"agents": ("solver",)},
        "task task-3: new": {"tasks": 4},
        "task task-2: gone": {"tasks": 2},
        "limits": {"limits": {"steps": 3}},
        "condition: plain then, noisy now": {"conditions": (Condition("noisy"),)},
        "predictions_digest": {"predictions_digest": "sha256:0"},
    }
    for words, arguments in changes.items():
        found = differences(old, make_lock(make_plan(**arguments), {}))  # type: ignore[arg-type]
        assert any(words in line for line in found), (words, found)


def test_a_lock_from_before_a_field_was_added_still_loads(tmp_path: Path) -> None:
    write_lock(tmp_path, make_lock(make_plan(), {}))
    old = json.loads((tmp_path / "run.json").read_text())
    del old["condition"]
    for task in old["tasks"]:
        for name in ("difficulty", "capabilities", "domain", "cluster"):
            del task[name]
    (tmp_path / "run.json").write_text(json.dumps(old))
    assert differences(load(RunLock, tmp_path / "run.json"), make_lock(make_plan(), {})) == []


def test_the_lock_holds_harness_and_model_apart_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from proctor.runs.lock import lock_agent, unlock_model
    from proctor.runs.request import load_agents

    monkeypatch.setenv("EXAM_KEY", "secret")
    (agent,) = load_agents(["tool-loop"], ["m@http://127.0.0.1:1/v1"], ["max_nudges=1"])
    locked = lock_agent(agent)
    assert (locked.harness.name, locked.options) == ("tool-loop", {"max_nudges": 1})
    assert locked.model
    assert unlock_model(locked.model) == agent.model
    assert json.loads(locked.model_dump_json())["model"]["sampling"]["temperature"] == 0.0
