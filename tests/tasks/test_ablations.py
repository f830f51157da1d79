"""Ablations: what a task or a file may declare, and what each makes of instruction and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.runs.toys import make_toy

from proctor.common import ConfigError
from proctor.tasks import load_any
from proctor.tasks.ablations import longer_budget, read_ablations
from proctor.tasks.load import load_task
from proctor.tasks.model import AgentLimits

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.tasks.model import Task

TABLES = """
[proctor.ablations.know]
kind = "knowledge"
text = "The answer has two digits."

[proctor.ablations.plan]
kind = "plan"
file = "hints/plan.md"

[proctor.ablations.tool]
kind = "tool"
file = "hints/tool.sh"
path = "/opt/exam/tool"

[proctor.ablations.time]
kind = "budget"
limits = { steps = 90, total_s = 10.0 }

[proctor.ablations.bare]
kind = "remove"
remove = [" to /app/answer.txt"]
"""


def toy(folder: Path, tables: str) -> Path:
    root = make_toy(folder, "toy", more=tables)
    (root / "hints").mkdir()
    (root / "hints" / "plan.md").write_text("1. Open the file.\n2. Write.\n")
    (root / "hints" / "tool.sh").write_text("#!/bin/sh\necho 42\n")
    return root


def test_each_kind_changes_one_thing(tmp_path: Path) -> None:
    task = load_task(toy(tmp_path, TABLES))
    found = {one.name: one for one in task.ablations}
    limits = AgentLimits()
    told = {name: one.instruct(task.instruction) for name, one in found.items()}
    assert told["know"] == "Write 42 to /app/answer.txt.\n\n## What you need to know\n\nThe answer has two digits.\n"
    assert told["plan"].endswith("## A plan\n\n1. Open the file.\n2. Write.\n")
    assert "`/opt/exam/tool`" in told["tool"]
    assert (found["tool"].path, found["tool"].program) == ("/opt/exam/tool", b"#!/bin/sh\necho 42\n")
    assert told["time"] == task.instruction
    assert found["time"].budget(limits) == {"steps": 90, "total_s": 10.0}
    assert told["bare"] == "Write 42.\n"
    assert all(found[name].budget(limits) == {} for name in ("know", "plan", "tool", "bare"))
    assert len({one.digest for one in found.values()}) == 5


def test_a_longer_budget_keeps_what_bounds_one_call_and_what_is_not_set() -> None:
    changed = longer_budget(2.5).budget(AgentLimits(total_s=10, steps=3, tool_call_s=5))
    assert changed == {"total_s": 25.0, "steps": 8}
    assert longer_budget(0.01).budget(AgentLimits(steps=3))["steps"] == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('kind = "plan"', "needs exactly one of text, file"),
        ('kind = "plan"\ntext = "x"\nfile = "hints/plan.md"', "needs exactly one of text, file"),
        ('kind = "plan"\nremove = ["x"]', "not remove"),
        ('kind = "tool"\nfile = "hints/tool.sh"', "needs `file`"),
        ('kind = "tool"\nfile = "hints/tool.sh"\npath = "opt/x"', "absolute path"),
        ('kind = "budget"', "needs exactly one of limits, factor"),
        ('kind = "budget"\nfactor = 0', "greater than 0"),
        ('kind = "remove"\nremove = ["not in there"]', "is not in the instruction"),
        ('kind = "remove"\nremove = ["Write 42 to /app/answer.txt."]', "nothing of the instruction would be left"),
        ('kind = "plan"\nfile = "../plan.md"', "without `..`"),
        ('kind = "plan"\nfile = "hints/none.md"', "No such file"),
        ('kind = "plan"\nfile = "environment/notes.txt"', "every trial has it"),
        ('kind = "wish"\ntext = "x"', "kind"),
    ],
)
def test_what_cannot_be_meant_is_an_error_with_its_place(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(toy(tmp_path, f"\n[proctor.ablations.x]\n{table}\n"))
    assert message in caught.value.message
    assert "proctor.ablations.x" in caught.value.message


def test_a_file_gives_ablations_to_tasks_that_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "plan.md").write_text("Think first.\n")
    path = tmp_path / "more.toml"
    path.write_text(
        'version = 1\n[[ablation]]\nname = "plan"\ntasks = ["fix-*"]\nkind = "plan"\nfile = "plan.md"\n'
        '[[ablation]]\nname = "plan"\ntasks = ["sort-photos"]\nkind = "plan"\ntext = "List them."\n'
    )
    one, other = read_ablations(path)
    assert (one.ablation.text, other.ablation.text) == ("Think first.\n", "List them.")
    names = ["proctor-demo/fix-median", "sort-photos", "x/sort-photos", "merge-orders"]
    assert [one.is_for(name) for name in names] == [True, False, False, False]
    assert [other.is_for(name) for name in names] == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 2\n[[ablation]]", "version"),
        ("version = 1", "ablation"),
        ('[[ablation]]\nname = "a b"\nkind = "plan"\ntext = "x"', "ablation.0.name"),
        ('[[ablation]]\nname = "a"\nkind = "plan"\ntext = "x"\nhelp = 1', "ablation.0.help"),
        ('[[ablation]]\nname = "a"\nkind = "plan"\nfile = "none.md"', "none.md"),
        ("[[", "not TOML"),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "more.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_ablations(path)
    assert message in caught.value.line()


def test_the_demo_declares_some(demo: list[Task]) -> None:
    declared = {task.name.rpartition("/")[2]: [one.name for one in task.ablations] for task in demo if task.ablations}
    assert declared == {"fix-median": ["plan", "undefined"], "query-sensors": ["plan", "tool"]}


@pytest.fixture
def demo() -> list[Task]:
    from pathlib import Path

    root = Path(__file__).resolve().parents[2] / "examples" / "demo"
    return [entry.task for entry in load_any(root).entries]
