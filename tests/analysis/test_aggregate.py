"""From a trials frame to summaries: denominators, bounds, groups, conditions, provenance, and what is refused."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from tests.analysis.frames import frame, trial

from proctor.analysis.aggregate import Options, aggregate, as_json
from proctor.analysis.provenance import FORMULAS, Input
from proctor.common import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def suite(agent: str = "a", **more: Any) -> list[dict[str, Any]]:
    """Ten tasks, two attempts each; one trial is excluded, one hits a limit."""
    rows = []
    for number in range(10):
        for attempt in (1, 2):
            outcome = "resolved" if number + attempt < 9 else "unresolved"
            facts = {"difficulty": "hard" if number > 6 else "easy", "domain": "web" if number % 2 else "data"}
            rows.append(trial(f"t{number}", outcome, agent=agent, attempt=attempt, **{**facts, **more}))
    rows[0] |= {"outcome": "infra_error", "score": None}
    rows[-1] |= {"outcome": "agent_limit"}
    return rows


def test_denominators_and_bounds() -> None:
    one = aggregate(frame(suite())).of("a")
    assert (one.planned, one.graded, one.resolved) == (20, 19, 14)
    assert one.excluded == {"infra_error": 1}
    assert one.outcomes == {"resolved": 14, "unresolved": 4, "agent_limit": 1, "infra_error": 1}
    assert one.rate is not None
    assert one.rate.point == pytest.approx((7 * 1.0 + 0.5) / 10)
    assert (one.worst, one.best) == (pytest.approx(14 / 20), pytest.approx(15 / 20))
    assert one.clopper_pearson is None, "two attempts at a task are not independent trials"
    assert one.statement == (
        "a: 75.0 % on 10 tasks, 95 % interval 44.2 % to 91.9 %; 14 of 19 graded trials resolved, "
        "1 of 20 planned are excluded (1 infra_error)"
    )


def test_one_attempt_each_gets_wilson_and_on_request_clopper_and_pearson() -> None:
    one = aggregate(frame([trial(f"t{number}", "resolved" if number < 17 else "unresolved") for number in range(20)]))
    found = one.of("a")
    assert found.rate == found.wilson == found.headline
    assert found.rate is not None
    assert found.clopper_pearson is not None
    assert (found.rate.low, found.rate.high) == (pytest.approx(0.639581, abs=1e-6), pytest.approx(0.947631, abs=1e-6))
    assert found.clopper_pearson.low == pytest.approx(0.621073, abs=1e-6)


def test_a_frame_without_a_verdict_has_no_number_and_says_why() -> None:
    found = aggregate(frame([trial("t", "infra_error"), trial("u", "planned")])).of("a")
    assert found.headline is found.rate is found.success is None
    assert (found.worst, found.best) == (0.0, 1.0)
    assert found.statement == ("a: nothing was graded; 2 of 2 planned trials are excluded (1 infra_error, 1 planned)")
    assert as_json(found)["headline"] is None


def test_a_task_without_a_verdict_is_in_no_rate_but_in_the_bounds() -> None:
    found = aggregate(frame([trial("t"), trial("u", "verifier_error"), trial("v", "unresolved")])).of("a")
    assert (found.tasks_planned, found.tasks) == (3, 2)
    assert found.rate is not None
    assert found.rate.point == 0.5
    assert (found.worst, found.best) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert "planned tasks without a graded trial, which are in no rate: 1" in found.notes


def test_what_cannot_be_run_stays_in_the_count() -> None:
    found = aggregate(frame([trial("t"), trial("gpu", "unrunnable", task_digest=None, split=None)])).of("a")
    assert (found.planned, found.graded, found.excluded) == (2, 1, {"unrunnable": 1})
    assert (found.worst, found.best) == (0.5, 1.0)


def test_groups_reconcile_with_the_whole() -> None:
    found = aggregate(frame(suite())).of("a")
    for dimension in ("difficulty", "domain", "split"):
        groups = found.by(dimension)  # type: ignore[arg-type]
        assert sum(group.planned for group in groups) == found.planned
        assert sum(group.graded for group in groups) == found.graded
        assert sum(group.resolved for group in groups) == found.resolved
    assert [(group.name, group.tasks) for group in found.by("difficulty")] == [("easy", 7), ("hard", 3)]
    assert found.by("capability") == ()


def test_a_task_of_several_capabilities_counts_in_each_and_one_of_none_is_shown() -> None:
    rows = [trial("t", capabilities=["a", "b"]), trial("u", "unresolved", capabilities=["b"]), trial("v")]
    groups = aggregate(frame(rows)).of("a").by("capability")
    assert [(group.name, group.tasks, group.resolved) for group in groups] == [("a", 1, 1), ("b", 2, 1), (None, 1, 1)]


def test_clusters_are_what_the_rate_goes_by() -> None:
    rows = [
        trial(f"t{number}", "resolved" if number < 6 else "unresolved", cluster=f"c{number // 3}")
        for number in range(12)
    ]
    found = aggregate(frame(rows)).of("a")
    assert found.success is not None
    assert found.rate is not None
    assert found.wilson is not None
    assert found.success.cluster_error == pytest.approx(0.288675, abs=1e-6)
    assert found.rate.formula == "wilson/effective"
    assert found.rate.high - found.rate.low > found.wilson.high - found.wilson.low
    assert found.clopper_pearson is None


def test_a_graded_score_is_given_beside_success_only_where_it_says_more() -> None:
    assert aggregate(frame([trial("t"), trial("u", "unresolved")])).of("a").score is None
    found = aggregate(frame([trial("t"), trial("u", "unresolved", score=0.5)])).of("a")
    assert found.score is not None
    assert found.success is not None
    assert (found.score.mean, found.success.mean) == (0.75, 0.5)


def test_conditions_are_compared_with_plain_and_make_no_rate() -> None:
    rows = [trial(f"t{number}") for number in range(10)]
    rows += [trial(f"t{number}", "resolved" if number < 6 else "unresolved", condition="noisy") for number in range(8)]
    result = aggregate(frame(rows))
    found = result.of("a")
    assert result.conditions == ("plain", "noisy")
    assert (found.planned, found.resolved) == (10, 10)
    assert (result.planned, result.graded) == (18, 18)
    (changed,) = found.robustness
    assert (changed.condition, changed.tasks, changed.unpaired) == ("noisy", 8, 2)
    assert (changed.plain, changed.changed, changed.change.point) == (1.0, 0.75, -0.25)


def test_perturbed_input_is_another_version_of_the_same_task() -> None:
    rows = [trial(f"t{number}") for number in range(6)]
    rows += [trial(f"t{n}", "unresolved", condition="typos", task_digest=f"sha256:typos-{n}") for n in range(3)]
    result = aggregate(frame(rows))
    (changed,) = result.of("a").robustness
    assert (changed.tasks, changed.unpaired, changed.change.point) == (3, 3, -1.0)
    assert "tasks in a version of their own under typos: 3" in changed.notes
    assert not any("version" in note for note in result.notes)
    assert result.of("a").tasks == 6


def test_other_tasks_images_and_limits_are_pointed_out() -> None:
    rows = [trial("t", image_digest="1", limits="{}"), trial("t", attempt=2, image_digest="2", limits="{}")]
    rows += [trial("u", agent="b")]
    notes = aggregate(frame(rows)).notes
    assert any(note.startswith("the agents were not given the same tasks") for note in notes)
    assert "tasks run with more than one image: 1; trials that differ in it are counted together" in notes
    assert not any("limits" in note for note in notes)
    apart = aggregate(frame([trial("t", limits="{}"), trial("t", condition="hurried", limits='{"steps":3}')])).notes
    assert not any("limits" in note for note in apart), "a condition may well have limits of its own"


def test_an_agent_without_plain_trials_says_so() -> None:
    found = aggregate(frame([trial("t", condition="noisy")])).of("a")
    assert found.headline is None
    assert found.statement == "a: no trials under the condition plain"


def test_a_gap_that_fires_makes_the_held_out_rate_the_headline() -> None:
    rows = [trial(f"p{number}", "resolved" if number < 90 else "unresolved") for number in range(100)]
    rows += [
        trial(f"h{n}", "resolved" if n < 30 else "unresolved", split="held_out" if n % 2 else "private")
        for n in range(100)
    ]
    result = aggregate(frame(rows))
    found = result.of("a")
    assert found.gap is not None
    assert found.gap.alarm
    assert found.truth == "held_out"
    assert found.headline == found.gap.held_out
    assert found.rate is not None
    assert found.rate.point == 0.6
    assert found.statement.startswith("a: 30.0 % on held-out tasks (public ones score higher than chance allows)")
    assert any("the held-out rate is taken as the truth" in note for note in result.notes)


def test_weights_side_by_side() -> None:
    rows = []
    for agent, web, data in (("a", 8, 0), ("b", 5, 2)):
        rows += [
            trial(f"w{n}", "resolved" if n < web else "unresolved", agent=agent, domain="web", weight=1.0)
            for n in range(8)
        ]
        rows += [
            trial(f"d{n}", "resolved" if n < data else "unresolved", agent=agent, domain="data", weight=4.0)
            for n in range(2)
        ]
    custom = {"mine": {"w0": 1.0, "d0": 3.0}}
    result = aggregate(frame(rows), options=Options(weights=custom))
    found = {one.name: one for one in result.weightings.weightings}
    assert list(found) == ["task", "domain", "declared", "mine"]
    rates = {name: {rate.agent: rate.rate.point for rate in one.rates} for name, one in found.items()}
    assert rates["task"] == {"a": pytest.approx(0.8), "b": pytest.approx(0.7)}
    assert rates["domain"] == {"a": pytest.approx(0.5), "b": pytest.approx((5 / 8 + 1) / 2)}
    assert rates["declared"] == {"a": pytest.approx(0.5), "b": pytest.approx(13 / 16)}
    assert rates["mine"] == {"a": 0.25, "b": 1.0}
    assert found["mine"].rates[0].tasks == 2
    assert found["mine"].rates[0].effective_tasks == pytest.approx(1.6)
    assert result.weightings.depends
    assert "weighted by task a is ahead of b, weighted by domain it is not" in result.weightings.statement
    assert result.ranking == ("a", "b")


def test_economy_fronts_and_unknown_costs() -> None:
    rows = []
    for agent, price in (("a", 1.0), ("b", 2.0), ("c", None)):
        rows += [
            trial(
                f"t{n}", "resolved" if n < 5 else "unresolved", agent=agent, cost_usd=price, steps=n, prompt_tokens=10
            )
            for n in range(10)
        ]
    result = aggregate(frame(rows))
    costs = {one.measure: one for one in result.of("a").economy}
    assert costs["cost_usd"].total == 10.0
    assert costs["cost_usd"].per_resolved is not None
    assert costs["cost_usd"].per_resolved.point == 2.0
    assert costs["tokens"].known == 0, "completion tokens are not known, so the sum is not"
    assert {one.measure: one.total for one in result.of("c").economy}["cost_usd"] is None
    (only,) = result.fronts
    assert only.measure == "cost_usd"
    assert only.missing == ("c",)
    assert [(point.agent, point.on_front, point.dominated_by) for point in only.points] == [
        ("a", True, None),
        ("b", False, "a"),
    ]
    assert [point.probability for point in only.points] == [1.0, 0.0]


def test_two_agents_under_one_label_are_told_apart() -> None:
    rows = [trial("t", model="m1"), trial("t", "unresolved", model="m2", attempt=2)]
    assert [one.agent for one in aggregate(frame(rows)).summaries] == ["a (h 1, m1)", "a (h 1, m2)"]


def test_two_versions_of_a_task_are_two_tasks_and_said_to_be() -> None:
    rows = [trial("t"), trial("t", attempt=2, task_digest="sha256:other")]
    result = aggregate(frame(rows))
    assert result.of("a").tasks == 2
    assert "tasks in more than one version (digest): 1; each version counts as a task" in result.notes


def test_returned_models_are_gathered() -> None:
    rows = [trial("t", returned_models=["x-1"]), trial("u", returned_models=["x-2", "x-1"]), trial("v")]
    assert aggregate(frame(rows)).of("a").returned_models == ("x-1", "x-2")


def test_the_order_of_rows_changes_nothing_but_that_of_agents() -> None:
    rows = suite() + suite("b") + suite(condition="noisy")
    mixed = rows[:]
    random.Random(1).shuffle(mixed)
    mixed.sort(key=lambda row: row["agent"])
    assert as_json(aggregate(frame(rows))) == as_json(aggregate(frame(mixed)))


def test_lazy_eager_and_many_pieces_are_one() -> None:
    rows = suite() + suite("b")
    whole = as_json(aggregate(frame(rows)))
    assert as_json(aggregate(frame(rows).lazy())) == whole
    assert as_json(aggregate(pl.concat([frame([row]).lazy() for row in rows]))) == whole


def test_provenance_explains_every_formula_and_survives_json() -> None:
    source = Input("run", "run-1", "runs/run-1", "sha256:1", 20, damage="row 3 was changed", unrunnable=2)
    result = aggregate(frame(suite()), inputs=[source], options=Options(seed=7, level=0.9))
    text = json.dumps(as_json(result), allow_nan=False)
    assert result.provenance.inputs == (source,)
    assert (result.provenance.seed, result.provenance.level) == (7, 0.9)
    used = set(formulas(json.loads(text)))
    assert used
    assert used <= FORMULAS.keys()
    assert any("the ledger is damaged" in note for note in result.notes)
    assert any("tasks that could not be run there and are excluded: 2" in note for note in result.notes)


def formulas(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("formula"), str):
            yield value["formula"]
        for item in value.values():
            yield from formulas(item)
    elif isinstance(value, list):
        for item in value:
            yield from formulas(item)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "there are no trials"),
        ([trial("t"), trial("t")], "trial t@a@1@plain of run run occurs 2 times"),
        ([trial("t", "passed")], "trials with an outcome that is not on the list: 1"),
        ([trial("t", score=1.5)], "graded trials without a score in [0, 1]: 1"),
        ([trial("t", score=None)], "graded trials without a score in [0, 1]: 1"),
        ([trial("t", score=float("nan"))], "graded trials without a score in [0, 1]: 1"),
        ([trial("t", "infra_error", score=0.0)], "trials with a score and no verdict: 1"),
        ([trial("t", cost_usd=float("nan"))], "negative or not a finite number: 1"),
        ([trial("t", wall_s=float("inf"))], "negative or not a finite number: 1"),
        ([trial("t", prompt_tokens=-1)], "negative or not a finite number: 1"),
        ([trial("t", weight=-1.0)], "negative or not a finite number: 1"),
        ([{**trial("t"), "agent": None}], "trials without agent"),
        ([{**trial("t"), "outcome": None}], "trials without agent"),
        ([{**trial("t"), "task_digest": None}], "trials without agent"),
    ],
)
def test_what_is_refused(rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        aggregate(frame(rows))
    assert words in caught.value.line()


def test_bad_options_and_frames_are_refused() -> None:
    with pytest.raises(ConfigError):
        aggregate(frame([trial("t")]), options=Options(level=95))
    with pytest.raises(ConfigError):
        aggregate(frame([trial("t")]), options=Options(weights={"mine": {"t": -1.0}}))
    with pytest.raises(ConfigError, match="there is no task 'typo'"):
        aggregate(frame([trial("t")]), options=Options(weights={"mine": {"t": 1.0, "typo": 1.0}}))
    with pytest.raises(ConfigError, match="the frame lacks score"):
        aggregate(frame([trial("t")]).drop("score"))
