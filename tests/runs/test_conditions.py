"""Conditions: planned beside the plain trials on equal draws, fixed in the lock, and measured in pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import pytest
from click.testing import CliRunner
from tests.analysis.frames import frame, trial
from tests.runs.toys import make_toy

from proctor.analysis.cards import card_lines
from proctor.analysis.changes import changes
from proctor.analysis.claims import Terms
from proctor.cli.compare import compare
from proctor.cli.show import show
from proctor.common import ConfigError
from proctor.models.scripted import Answer, ChatRequest, ScriptedServer, call
from proctor.runs.conditions import Condition
from proctor.runs.contenders import select
from proctor.runs.failures import read_failures
from proctor.runs.formats import RunLock, TrialResult, load
from proctor.runs.frame import load_trials
from proctor.runs.lock import differences, make_lock, write_lock
from proctor.runs.plan import trial_limits
from proctor.runs.record import read_lines
from proctor.runs.request import Request, plan_again, plan_request
from proctor.runs.summary import read_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import polars as pl

PLAN = '\n[proctor.ablations.plan]\nkind = "plan"\ntext = "Do it."\n'
TOOL = '\n[proctor.ablations.tool]\nkind = "tool"\nfile = "tool.sh"\npath = "/opt/exam/answer"\n'


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    for number in range(7):
        root = make_toy(tmp_path / "toys", f"toy-{number}", more=PLAN + TOOL if number else "")
        (root / "tool.sh").write_text("#!/bin/sh\nprintf 42\n")
    return tmp_path / "toys"


def test_conditions_are_planned_beside_the_plain_trials(toys: Path) -> None:
    asked = Request(
        sources=(str(toys),),
        agents=("null",),
        attempts=2,
        limits=("steps=5",),
        ablate=("plan", "budget=2"),
        perturb=("case,noise",),
        tool_faults=("0.2",),
    )
    plan = plan_request(asked)
    trials = plan.trials()
    by_name: dict[str, list[str]] = {}
    for one in trials:
        by_name.setdefault(one.condition.name, []).append(one.id)
    assert {name: len(ids) for name, ids in by_name.items()} == {
        "plain": 14, "ablate-plan": 12, "ablate-budget-x2": 14, "perturb-case+noise": 14, "tool-faults-0.2": 14,
    }  # fmt: skip
    assert "toy-0@null@1" in by_name["plain"]
    assert "toy-1@null@2@ablate-plan" in by_name["ablate-plan"]
    assert len({one.id for one in trials}) == len(trials)
    assert len({one.seed for one in trials if one.task.name == "toy-3" and one.attempt == 1}) == 1
    limits = {one.condition.name: trial_limits(one, plan.limits) for one in trials}
    assert (limits["plain"].steps, limits["ablate-budget-x2"].steps) == (5, 10)
    assert limits["ablate-budget-x2"].tool_call_s == limits["plain"].tool_call_s
    locked = {one.name: one for one in make_lock(plan, {}).conditions}
    assert list(locked) == ["ablate-plan", "ablate-budget-x2", "perturb-case+noise", "tool-faults-0.2"]
    assert locked["ablate-plan"].left_out == {"toy-0": "it has no such ablation"}
    assert locked["ablate-plan"].tasks["toy-1"].ablations == {"plan": "plan"}
    assert locked["ablate-budget-x2"].tasks["toy-0"].limits == {"steps": 10, "total_s": 60.0}


def test_a_run_is_planned_again_from_its_lock_and_notices_another_ablation(toys: Path, tmp_path: Path) -> None:
    extra = tmp_path / "extra.toml"
    extra.write_text('[[ablation]]\nname = "hint"\nkind = "knowledge"\ntext = "It is 42."\n')
    asked = Request(sources=(str(toys),), agents=("null",), ablate=(str(extra), "plan"), perturb=("noise",))
    lock = make_lock(plan_request(asked), {})
    write_lock(tmp_path, lock)
    lock = load(RunLock, tmp_path / "run.json")
    assert differences(lock, make_lock(plan_again(lock), {})) == []
    extra.write_text('[[ablation]]\nname = "hint"\nkind = "knowledge"\ntext = "It is 43."\n')
    (found,) = differences(lock, make_lock(plan_again(lock), {}))
    assert found.startswith("conditions: ablate-hint.tasks.toy-0.digest: ")


@pytest.mark.parametrize(
    ("file", "name", "words"),
    [
        ('[[ablation]]\nname = "less"\nkind = "remove"\nremove = ["not in there"]\n', None,
         "toy-0: 'not in there' is not in the instruction"),
        ('[[ablation]]\nname = "h"\nkind = "knowledge"\ntext = "a"\n'
         '[[ablation]]\nname = "h"\ntasks = ["toy-1"]\nkind = "knowledge"\ntext = "b"\n', None,
         "toy-1 would get the ablation h twice"),
        ('[[ablation]]\nname = "plan"\nkind = "plan"\ntext = "a"\n', "both", "toy-1 would get the ablation plan twice"),
    ],
)  # fmt: skip
def test_an_ablation_that_fits_no_task_or_comes_twice_is_refused_first(
    toys: Path, tmp_path: Path, file: str, name: str | None, words: str
) -> None:
    extra = tmp_path / "extra.toml"
    extra.write_text(file)
    asked = Request(sources=(str(toys),), agents=("null",), ablate=(str(extra), *(("plan",) if name else ())),
                    select=("toy-[0-6]",) if name is None else ("toy-[1-6]",), condition=name)  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        plan_request(asked)
    assert words in str(caught.value)


def test_a_named_condition_takes_every_change_at_once_and_no_plain_trials(toys: Path) -> None:
    asked = Request(sources=(str(toys),), agents=("null",), select=("toy-[1-6]",), condition="hard",
                    ablate=("plan",), perturb=("noise",), tool_faults=("0.1:fail",))  # fmt: skip
    plan = plan_request(asked)
    (condition,) = plan.conditions
    assert (condition.name, condition.ablations, condition.perturb) == ("hard", ("plan",), ("noise",))
    assert {one.id.count("@") for one in plan.trials()} == {2}
    again = plan_again(make_lock(plan, {}))
    assert again.conditions == plan.conditions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ablate": ("none",)}, "no task can be run under it: it has no such ablation"),
        ({"ablate": ("plan", "plan")}, "asked for twice"),
        ({"ablate": ("plan",), "condition": "x"}, "toy-0 cannot be run under it"),
        ({"ablate": ("budget=0",)}, "not in (0, 1000]"),
        ({"perturb": ("order",)}, "changes nothing in its instruction"),
        ({"tool_faults": ("0.1", "0.2"), "condition": "x"}, "once"),
        ({"perturb": ("noise",), "condition": "plain"}, "cannot be called plain"),
        ({"tool_faults": ("0.1",), "stop_when": "difference"}, "does not go with"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is(toys: Path, options: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_request(Request(sources=(str(toys),), agents=("null",), **options))  # type: ignore[arg-type]
    assert message in caught.value.message


def reader(chat: ChatRequest) -> Answer:
    """A model that does only what it is told how to do: with a plan it writes, with a program it runs it."""
    told = next(message["content"] for message in chat.messages if message["role"] == "user")
    if chat.turn:
        return call("finish", message="done")
    if "`/opt/exam/answer`" in told:
        return call("bash", command="/opt/exam/answer > answer.txt")
    return call("bash", command="printf 42 > answer.txt" if "## A plan" in told else "ls")


@pytest.fixture(scope="module")
def ablated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of seven toys: plain, with a plan, with a program, and with every tool call failing."""
    folder = tmp_path_factory.mktemp("ablated")
    for number in range(7):
        root = make_toy(folder / "toys", f"toy-{number}", more=PLAN + TOOL if number else PLAN)
        (root / "tool.sh").write_text("#!/bin/sh\nprintf 42\n")

    async def run() -> int:
        async with ScriptedServer(reader) as server:
            arguments = ["run", str(folder / "toys"), "--agent", "tool-loop", "--model", f"m@{server.base_url}",
                         "--ablate", "plan", "--ablate", "tool", "--tool-faults", "1:fail",
                         "-o", str(folder / "run")]  # fmt: skip
            done = await anyio.run_process([sys.executable, "-m", "proctor", *arguments], check=False)
            return done.returncode

    assert anyio.run(run) == 0
    return folder / "run"


@pytest.mark.sandbox
def test_what_an_agent_lacked_is_found_with_its_interval(ablated: Path) -> None:
    comparison = changes(select([str(ablated)], conditions=True).sides, Terms(resamples=500))
    claims = {claim.contender: claim for claim in comparison.claims}
    plan = claims["tool-loop+m [ablate-plan]"]
    assert (plan.tasks, plan.baseline_mean, plan.contender_mean, plan.word) == (7, 0.0, 1.0, "better")
    assert plan.p == pytest.approx(2 / 2**7)
    assert plan.p_adjusted == pytest.approx(3 * plan.p)
    assert plan.difference.low > 0
    tool = claims["tool-loop+m [ablate-tool]"]
    assert (tool.tasks, tool.contender_mean) == (6, 1.0)
    assert dict(tool.unpaired) == {"only the baseline was given it": 1}
    assert claims["tool-loop+m [tool-faults-1-fail]"].difference.point == 0


@pytest.mark.sandbox
def test_rates_and_accounts_keep_conditions_apart(ablated: Path) -> None:
    view = read_run(ablated)
    assert [(row.condition, row.planned, row.resolved) for row in view.rows()] == [
        ("plain", 7, 0), ("ablate-plan", 7, 7), ("ablate-tool", 6, 6), ("tool-faults-1-fail", 7, 0),
    ]  # fmt: skip
    out = CliRunner().invoke(show, [str(ablated)]).output
    assert "plain and under 3 conditions" in out
    found = read_failures(load_trials([ablated]).trials.collect())
    assert found.account.reconciles
    assert set(found.account.by_agent) == {
        "tool-loop+m", *(f"tool-loop+m, {name}" for name in view.conditions if name != "plain"),
    }  # fmt: skip
    refused = CliRunner().invoke(compare, [str(ablated)])
    assert "--conditions" in str(refused.exception)


@pytest.mark.sandbox
def test_a_card_tells_what_became_of_the_task_under_each_condition(ablated: Path) -> None:
    cards = read_failures(load_trials([ablated]).trials.collect()).cards()
    (card,) = [one for one in cards if one.trial == "toy-1@tool-loop+m@1"]
    told = {name: (won, graded) for name, won, graded in card.conditions}
    assert told == {"plain": (0, 1), "ablate-plan": (1, 1), "ablate-tool": (1, 1), "tool-faults-1-fail": (0, 1)}
    assert "this task, resolved under: plain 0 of 1, ablate-plan 1 of 1" in "\n".join(card_lines(card))


@pytest.mark.sandbox
def test_a_tool_that_was_given_is_not_the_agents_work(ablated: Path) -> None:
    folder = ablated / "trials" / "toy-1@tool-loop+m@1@ablate-tool"
    paths = [entry["path"].lstrip("/") for entry in json.loads((folder / "diff.json").read_text())["entries"]]
    assert "app/answer.txt" in paths
    assert not any(path.startswith("opt") for path in paths)
    told = json.loads((folder / "trajectory.json").read_text())["steps"][1]["message"]
    assert "## A tool for this task" in told


@pytest.mark.sandbox
def test_a_tool_that_cannot_be_put_there_stops_the_run_with_the_path(tmp_path: Path) -> None:
    root = make_toy(tmp_path, "toy", more=TOOL.replace("/opt/exam/answer", "/usr/bin/answer"))
    (root / "tool.sh").write_text("#!/bin/sh\n")
    command = [sys.executable, "-m", "proctor", "run", str(root), "--agent", "null", "--ablate", "tool",
               "-o", str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 4
    assert "ablation: /usr/bin/answer: cannot be written in this image" in done.stderr


@pytest.mark.sandbox
def test_what_was_injected_is_on_record_and_nobodys_fault(ablated: Path) -> None:
    folder = ablated / "trials" / "toy-1@tool-loop+m@1@tool-faults-1-fail"
    result = load(TrialResult, folder / "result.json")
    assert (result.condition, result.injected, result.tries) == ("tool-faults-1-fail", 1, 1)
    assert [line["injected"] for line in read_lines(folder / "exec.jsonl")] == ["fail"]
    found = read_failures(load_trials([ablated]).trials.collect())
    (judged,) = [one for one in found.judged if one.seen.behaviour.trial == folder.name]
    signals = {signal.name: signal for signal in judged.signals}
    assert [str(place) for place in signals["injected fault"].evidence] == ["exec.jsonl#1"]
    assert not {"tool fault", "unhandled error"} & set(signals)
    assert judged.cause is not None
    assert judged.cause.name == "missing"


def test_a_condition_of_another_run_is_paired_by_agent(toys: Path) -> None:
    assert Condition("x").is_treated is False
    with pytest.raises(ConfigError, match="nothing was run under another condition"):
        changes({"a": load_frame("plain")})
    with pytest.raises(ConfigError, match="there are no plain trials, only hurried"):
        changes({"a": load_frame("hurried")})
    (claim,) = changes({"a": load_frame("plain", "hurried")}).claims
    assert (claim.baseline, claim.contender) == ("a", "a [hurried]")


def load_frame(*conditions: str) -> pl.DataFrame:
    return frame([trial(f"t{number}", condition=name) for name in conditions for number in range(8)])
