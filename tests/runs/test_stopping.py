"""A run that its own results may end: it stops by evidence, in an order drawn beforehand, and hides nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.runs.conftest import DeskExaminer, make_plan
from tests.runs.test_engine import no_wait

from proctor.analysis.sequential import e_value
from proctor.common import ConfigError, InfraError
from proctor.runs.engine import Event, execute
from proctor.runs.formats import TrialResult, load
from proctor.runs.frame import load_trials
from proctor.runs.ledger import verify_ledger
from proctor.runs.lock import make_lock, write_lock
from proctor.runs.outcome import Outcome
from proctor.runs.stopping import DifferenceRule, make_rule, parse_rule
from proctor.runs.summary import read_run

if TYPE_CHECKING:
    from pathlib import Path

    from proctor.agents.contract import AgentResult
    from proctor.runs.plan import RunPlan, TrialPlan

pytestmark = pytest.mark.anyio


def result_of(trial: TrialPlan, outcome: Outcome) -> TrialResult:
    """A result with nothing in it but the outcome."""
    return TrialResult(
        run_id="run-test", trial_id=trial.id, task=trial.task.name, task_digest=trial.task.digest,
        agent=trial.agent.label, attempt=trial.attempt, seed=trial.seed, tries=1, outcome=outcome, stop="finished",
        started_at="", ended_at="", duration_s=0.0,
    )  # fmt: skip


def feed(rule: DifferenceRule, plan: RunPlan, outcomes: dict[str, Outcome], order: list[TrialPlan]) -> int | None:
    """Results in this order; returns after how many of them the rule decided."""
    for count, trial in enumerate(order, 1):
        rule.take(result_of(trial, outcomes[trial.id]))
        if rule.decision() is not None:
            return count
    return None


def results_on_disk(run_dir: Path) -> list[TrialResult]:
    return [load(TrialResult, path) for path in run_dir.glob("trials/*/result.json")]


async def test_a_clear_difference_ends_the_run_and_the_rest_is_named(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan(20)
    write_lock(run_dir, make_lock(plan, {}))
    events: list[Event] = []
    execution = await execute(
        plan, run_dir, desk, concurrency=1, rule=make_rule("difference", plan), on_event=events.append
    )
    assert not execution.interrupted
    assert execution.stopped
    assert len(execution.results) == 16, "eight discordant tasks in a row are the first evidence of 20: 28.4"
    (row,) = verify_ledger(run_dir).of("stopped")
    assert row.data["rule"] == "difference"
    assert row.data["reason"] == "idler differs from solver (-, e = 28.4)"
    assert row.data["facts"]["e_values"] == {"idler": pytest.approx(e_value(0, 8), abs=1e-6)}
    assert len(row.data["trials"]) == 24
    assert {*row.data["trials"], *execution.results} == {trial.id for trial in plan.trials()}
    assert sum(event.kind == "stopped" for event in events) == 24
    view = read_run(run_dir)
    assert [(line.planned, line.graded, dict(line.excluded)) for line in view.rows()] == [(20, 8, {"stopped": 12})] * 2
    frame = load_trials([run_dir]).trials.collect()
    assert frame.height == 40
    assert dict(frame["outcome"].value_counts().iter_rows()) == {"resolved": 8, "unresolved": 8, "stopped": 24}


async def test_a_stopped_run_stays_stopped(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan(20)
    await execute(plan, run_dir, desk, concurrency=1, rule=make_rule("difference", plan))
    again = await execute(plan, run_dir, desk, concurrency=1, rule=make_rule("difference", plan))
    assert again.results == {}
    assert len(list(verify_ledger(run_dir).of("stopped"))) == 1


async def test_agents_that_do_not_differ_are_run_to_the_end(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan(20, ("idler", "other-idler"))
    execution = await execute(plan, run_dir, desk, concurrency=2, rule=make_rule("difference", plan))
    assert execution.stopped is None
    assert len(execution.results) == 40
    assert list(verify_ledger(run_dir).of("stopped")) == []


async def test_every_comparison_has_to_be_decided(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan(20, ("solver", "idler", "other-idler"))
    execution = await execute(plan, run_dir, desk, concurrency=1, rule=make_rule("difference", plan))
    assert execution.stopped
    assert execution.stopped.facts["threshold"] == 40, "two comparisons share one level"
    assert set(execution.stopped.facts["e_values"]) == {"idler", "other-idler"}
    assert len(execution.results) == 27


@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_the_decision_does_not_depend_on_who_ends_first(
    run_dir: Path, desk: DeskExaminer, concurrency: int
) -> None:
    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        await anyio.sleep(random.random() * 0.01)
        return None

    desk.act = act
    plan = make_plan(25)
    execution = await execute(plan, run_dir, desk, concurrency=concurrency, rule=make_rule("difference", plan))
    assert execution.stopped
    assert execution.stopped.facts["units"] == {"idler": 8}
    assert 16 <= len(execution.results) <= 16 + 3 * concurrency
    assert len(execution.results) + len(next(verify_ledger(run_dir).of("stopped")).data["trials"]) == 50


@pytest.mark.parametrize("text", ["difference", "sprt:p0=0.6,p1=0.8"])
async def test_the_decision_can_be_made_again_from_the_record(run_dir: Path, desk: DeskExaminer, text: str) -> None:
    plan = make_plan(25, ("solver", "idler") if text == "difference" else ("solver",))
    execution = await execute(plan, run_dir, desk, concurrency=4, rule=make_rule(text, plan))
    assert execution.stopped
    again = make_rule(text, plan)
    for result in results_on_disk(run_dir):
        again.take(result)
    assert again.decision() == execution.stopped
    assert next(verify_ledger(run_dir).of("stopped")).data["facts"] == execution.stopped.facts


async def test_interrupted_runs_go_on_counting(run_dir: Path, desk: DeskExaminer) -> None:
    stop = anyio.Event()

    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if len(desk.graded) >= 9:
            stop.set()
            await anyio.sleep_forever()
        return None

    desk.act = act
    plan = make_plan(20)
    first = await execute(plan, run_dir, desk, concurrency=1, stop=stop, rule=make_rule("difference", plan))
    assert first.interrupted
    assert len(first.results) == 9
    second = await execute(plan, run_dir, DeskExaminer(desk.desk), concurrency=1, rule=make_rule("difference", plan))
    assert second.stopped
    assert len(second.results) == 7, "the nine of the first call count too"


async def test_what_has_no_verdict_is_passed_over(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan(20)
    drawn = make_rule("difference", plan).order(plan.trials())
    broken = {drawn[2].id, drawn[9].id}

    async def act(trial: TrialPlan, tries: int) -> AgentResult | None:
        if trial.id in broken:
            raise InfraError("the node blinked")
        return None

    desk.act = act
    execution = await execute(plan, run_dir, desk, concurrency=1, rule=make_rule("difference", plan), backoff=no_wait)
    assert execution.stopped
    assert len(execution.results) == 20, "two tasks more than without faults"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_results_in_any_order_give_the_same_evidence(shuffled: random.Random) -> None:
    plan = make_plan(12, attempts=2)
    coin = random.Random(shuffled.random())
    outcomes = {trial.id: coin.choice([Outcome.RESOLVED, Outcome.UNRESOLVED]) for trial in plan.trials()}
    one, other = (make_rule("difference:alpha=0.000001", plan) for _ in range(2))
    assert isinstance(one, DifferenceRule)
    assert isinstance(other, DifferenceRule)
    trials = plan.trials()
    assert feed(one, plan, outcomes, list(trials)) is None
    shuffled.shuffle(trials)
    assert feed(other, plan, outcomes, trials) is None
    assert one._evidence["idler"].value == pytest.approx(other._evidence["idler"].value)


def test_an_agent_that_fails_quickly_is_not_seen_failing_first() -> None:
    """Both resolve half of the tasks; the idler's failures all end before anything else does."""
    plan = make_plan(40)
    coin = random.Random(4)
    outcomes = {trial.id: coin.choice([Outcome.RESOLVED, Outcome.UNRESOLVED]) for trial in plan.trials()}
    quick = sorted(plan.trials(), key=lambda t: not (t.agent.label == "idler" and outcomes[t.id] is Outcome.UNRESOLVED))
    rule = make_rule("difference", plan)
    assert isinstance(rule, DifferenceRule)
    assert feed(rule, plan, outcomes, quick) is None


def test_tasks_are_drawn_by_the_seed_and_repeats_stay_together() -> None:
    plan = make_plan(10, attempts=3)
    drawn = make_rule("difference", plan).order(plan.trials())
    tasks = [trial.task.name for trial in drawn]
    assert [tasks[i] for i in range(0, 60, 6)] == list(dict.fromkeys(tasks)), "all six trials of a task in a row"
    assert list(dict.fromkeys(tasks)) != [entry.task.name for entry in plan.entries]
    other = make_plan(10, attempts=3, seed=1)
    assert [t.task.name for t in make_rule("difference", other).order(other.trials())] != tasks
    assert make_rule("difference", plan).order(plan.trials()) == drawn


async def test_sprt_of_one_agent(run_dir: Path, desk: DeskExaminer) -> None:
    plan = make_plan(30, ("solver",))
    execution = await execute(plan, run_dir, desk, concurrency=1, rule=make_rule("sprt:p0=0.6,p1=0.8", plan))
    assert execution.stopped
    # integrity research, section 3.9: eleven straight successes accept p1.
    assert execution.stopped.facts["graded"] == len(execution.results) == 11
    assert execution.stopped.reason == "a resolve rate of 0.8 is accepted after 11 graded trials"


@pytest.mark.parametrize(
    "text",
    ["", "never", "difference:beta=1", "difference:alpha=x", "difference:alpha=2", "sprt", "sprt:p0=0.5",
     "sprt:p0=0.8,p1=0.6"],
)  # fmt: skip
def test_a_rule_that_is_not_understood(text: str) -> None:
    with pytest.raises(ConfigError):
        make_rule(text, make_plan(3, ("solver",) if text.startswith("sprt") else ("a", "b")))


def test_a_rule_that_does_not_fit_the_plan() -> None:
    with pytest.raises(ConfigError, match="between two agents"):
        make_rule("difference", make_plan(3, ("solver",)))
    for plan in (make_plan(3), make_plan(3, ("solver",), attempts=2)):
        with pytest.raises(ConfigError, match="one agent with one attempt"):
            make_rule("sprt:p0=0.6,p1=0.8", plan)
    assert parse_rule("sprt:p0=0.6,p1=0.8") == ("sprt", {"p0": 0.6, "p1": 0.8, "alpha": 0.05, "beta": 0.1})


async def test_a_watched_run_is_compared_by_evidence_that_allows_for_looking(run_dir: Path, desk: DeskExaminer) -> None:
    """Also when the rule never fired: who may stop at 20 *and* may test at the end errs twice."""
    from proctor.analysis.claims import Terms, compare
    from proctor.analysis.gate import GateRule
    from proctor.runs.contenders import select

    plan = make_plan(7, options={"stop_when": "difference"})
    write_lock(run_dir, make_lock(plan, {}))
    execution = await execute(plan, run_dir, desk, concurrency=2, rule=make_rule("difference", plan))
    assert execution.stopped is None, "seven tasks give an e-value of 16"
    selection = select([str(run_dir)])
    assert selection.watched
    plain = compare(selection.sides).claims[0]
    assert (plain.word, plain.tests[0].formula) == ("worse", "mcnemar-exact")
    result = compare(selection.sides, Terms(anytime=selection.watched), gate=GateRule(0.02))
    assert (result.claims[0].word, result.claims[0].tests[0].formula) == (
        "not distinguishable",
        "e-value-uniform-mixture",
    )
    assert result.gate
    assert result.gate.verdict == "inconclusive"
