"""`compare`: the words it uses, what it refuses, and that it is seldom wrong when there is nothing to find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.analysis.sides import make_trials, single

from proctor.analysis.claims import Terms, compare
from proctor.analysis.exploration import explore
from proctor.analysis.gate import GateRule, parse_gate, score_tails, tails
from proctor.analysis.paired import Estimate
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from proctor.analysis.comparison import Claim

QUICK = Terms(resamples=200, draws=2000)


def claim(a: pl.DataFrame, b: pl.DataFrame, terms: Terms = QUICK) -> Claim:
    (found,) = compare({"a": a, "b": b}, terms).claims
    return found


# --- Words ------------------------------------------------------------------------------------------------------------


def test_five_discordant_tasks_are_not_enough_and_six_are() -> None:
    five = claim(single("a", "-" * 5 + "+" * 15), single("b", "+" * 20))
    six = claim(single("a", "-" * 6 + "+" * 14), single("b", "+" * 20))
    assert (five.word, five.p) == ("not distinguishable", 0.0625)
    assert (six.word, six.p) == ("better", 0.03125)
    assert "not distinguishable at this size" in five.sentence
    assert "better" not in five.sentence
    assert six.sentence.startswith("b is better than a (+30.0 points")


def test_worse_is_the_same_the_other_way_round() -> None:
    a, b = single("a", "-" * 8 + "+" * 12), single("b", "+" * 20)
    one, other = claim(a, b), claim(b, a)
    assert (one.word, other.word) == ("better", "worse")
    assert one.difference.point == -other.difference.point
    assert (one.difference.low, one.difference.high) == (
        pytest.approx(-other.difference.high, abs=1e-9),
        pytest.approx(-other.difference.low, abs=1e-9),
    )


def test_an_agent_against_itself() -> None:
    found = claim(single("a", "+-+-++"), single("b", "+-+-++"))
    assert (found.word, found.p, found.difference.point) == ("not distinguishable", 1.0, 0.0)
    assert found.difference.low < -0.2
    assert found.difference.high > 0.2


def test_too_few_tasks_can_show_nothing_and_it_says_so() -> None:
    found = claim(single("a", "-----"), single("b", "+++++"))
    assert (found.word, found.mde) == ("not distinguishable", None)
    assert any("at least 6 are needed" in note for note in found.notes)
    assert found.needed
    assert found.needed.designs[0].tasks >= 6


def test_what_it_would_take_is_told_in_tasks_and_attempts() -> None:
    random = np.random.default_rng(1)
    sides = [
        make_trials(name, {f"t{i}": list((random.random(4) < rate).astype(float)) for i in range(30)})
        for name, rate in (("a", 0.5), ("b", 0.58))
    ]
    found = claim(*sides)
    assert found.word == "not distinguishable"
    assert found.needed
    designs = {design.attempts: design.tasks for design in found.needed.designs}
    assert set(designs) == {1, 2, 4, 8}
    assert designs[1] > designs[2] > designs[4] > designs[8] >= 6
    assert found.needed.designs[0].trials == 2 * designs[1]


def test_repeats_and_graded_scores_flip_signs_by_task() -> None:
    # integrity research, section 3.4, with five attempts at each of ten tasks.
    first, second = (1, 0.8, 0.6, 0.2, 1, 0.4, 0, 0.6, 0.8, 1), (0.8, 0.6, 0.6, 0, 1, 0.2, 0, 0.4, 0.8, 0.8)
    sides = [
        make_trials(name, {f"t{i}": [1.0] * round(5 * m) + [0.0] * (5 - round(5 * m)) for i, m in enumerate(means)})
        for name, means in (("b", second), ("a", first))
    ]
    found = claim(*sides)
    assert found.difference.point == pytest.approx(0.12)
    assert (found.difference.low, found.difference.high) == (
        pytest.approx(0.046118, abs=1e-6),
        pytest.approx(0.193882, abs=1e-6),
    )
    by_formula = {test.formula: test for test in found.tests}
    assert by_formula["sign-flip-exact"].primary
    assert by_formula["sign-flip-exact"].p == pytest.approx(0.03125)
    assert by_formula["paired-t"].p == pytest.approx(0.005121, abs=1e-6)
    assert found.word == "better"
    assert found.discordance is None


def test_clusters_flip_as_one() -> None:
    # integrity research, section 3.4: four clusters are too few, whatever the tasks say.
    by_cluster = ((0.2, 0.2, 0), (0.1, -0.1, 0), (0.3, 0.2, 0.1), (0, 0, -0.1))
    clusters = {f"t{g}{i}": f"repo-{g}" for g in range(4) for i in range(3)}
    a = make_trials("a", {name: [0.5] for name in clusters}, clusters=clusters)
    b = make_trials("b", {name: [0.5 + by_cluster[int(name[1])][int(name[2])]] for name in clusters}, clusters=clusters)
    found = claim(a, b)
    assert (found.clusters, found.clustered, found.tasks) == (4, True, 12)
    assert found.p == pytest.approx(0.5)
    assert found.tests[0].formula == "cluster-sign-flip-exact"
    assert found.difference.point == pytest.approx(0.075)
    half = (found.difference.high - found.difference.low) / 2
    assert half == pytest.approx(3.182446 * 0.055067, abs=1e-4)
    assert any("4 clusters cannot show" in note for note in found.notes)


def test_several_claims_share_one_level() -> None:
    base = single("a", "-" * 6 + "+" * 14)
    better = single("b", "+" * 20)
    result = compare({"a": base, "b": better, "c": single("c", "-" * 6 + "+" * 14)}, QUICK)
    assert result.multiplicity == "holm"
    assert [c.word for c in result.claims] == ["not distinguishable", "not distinguishable"]
    assert result.claims[0].p_adjusted == pytest.approx(2 * 0.03125)
    assert len(compare({"a": base, "b": better, "c": base}, Terms(all_pairs=True, draws=500)).claims) == 3


def test_significant_but_below_the_detectable_size_is_said_to_be_uncertain() -> None:
    found = claim(single("a", "-" * 12 + "+" * 3 + "+" * 35), single("b", "+" * 12 + "-" * 3 + "+" * 35))
    assert found.word == "better"
    assert found.mde
    assert abs(found.difference.point) < found.mde
    assert any("probably smaller" in note for note in found.notes)


# --- Denominators -----------------------------------------------------------------------------------------------------


def test_what_has_no_score_is_counted_and_bounded() -> None:
    result = compare({"a": single("a", "-+-+-+-+!!"), "b": single("b", "++++!+++++")}, QUICK)
    (found,) = result.claims
    assert result.contenders[0].excluded == {"infra_error": 2}
    assert (result.contenders[1].planned, result.contenders[1].graded) == (10, 9)
    assert found.tasks == 7
    assert found.unpaired == {"the baseline has no score": 2, "the contender has no score": 1} or found.unpaired == {
        "the contender has no score": 1,
        "the baseline has no score": 2,
    }
    assert found.worst < found.difference.point < found.best


def test_what_neither_can_run_here_is_counted_and_held_against_nobody() -> None:
    sides = {"a": single("a", "+" * 80 + "u" * 20), "b": single("b", "+" * 80 + "u" * 20)}
    result = compare(sides, QUICK, gate=GateRule(0.1))
    (found,) = result.claims
    assert result.contenders[0].excluded == {"unrunnable": 20}
    assert found.unpaired == {"cannot be run here": 20}
    assert (found.worst, found.best) == (0.0, 0.0)
    assert result.gate
    assert result.gate.verdict == "pass"


def test_tasks_of_one_side_only_are_named() -> None:
    found = claim(single("a", "+-+-+-++"), single("b", "+-+-"))
    assert found.tasks == 4
    assert found.unpaired == {"only the baseline was given it": 4}


def test_a_lucky_exclusion_is_pointed_out() -> None:
    found = claim(single("a", "-" * 8 + "+" * 12), single("b", "+" * 8 + "!" * 12))
    assert found.word == "better"
    assert any("could turn the sign" in note for note in found.notes)


def test_a_stopped_run_is_judged_by_its_e_value_only() -> None:
    a, b = single("a", "-" * 7 + "s" * 13), single("b", "+" * 7 + "s" * 13)
    found = claim(a, b)
    assert found.e_value == pytest.approx(2**7 / 8)
    assert (found.tests[0].formula, found.tests[0].primary) == ("e-value-uniform-mixture", True)
    assert found.p == pytest.approx(8 / 2**7)
    assert found.word == "not distinguishable", "fixed-size McNemar would have said 0.016"
    assert found.unpaired == {"left out by the stopping rule": 13}
    assert any("stopping rule" in note for note in found.notes)
    assert claim(single("a", "-" * 10 + "s" * 9), single("b", "+" * 10 + "s" * 9)).word == "better"


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("task_digest", "sha256:other", "another content of the task at task-000, task-001, task-002"),
        ("image_digest", "sha256:other", "another image at"),
        ("limits", '{"total_s":60}', "other limits at"),
        ("condition", "no-network", "another condition at"),
    ],
)
def test_other_terms_are_refused_by_name(column: str, value: str, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        claim(single("a", "+-+"), single("b", "+-+", **{column: value}))


def test_another_judge_is_refused_where_the_frame_knows_judges() -> None:
    a = single("a", "+-+").with_columns(judge_digest=pl.lit("sha256:one"))
    with pytest.raises(RefusedError, match="another judge at"):
        claim(a, a.with_columns(judge_digest=pl.lit("sha256:two")))


def test_what_is_meant_to_differ_may() -> None:
    a, b = single("a", "+-+-+-"), single("b", "+-+-+-", condition="hint")
    assert claim(a, b, Terms(ignore=frozenset({"condition"}))).tasks == 6


def test_two_models_under_one_name_are_refused() -> None:
    mixed = pl.concat([single("a", "+-+", model="one"), single("a", "+-+", model="two")])
    with pytest.raises(RefusedError, match="more than one model"):
        claim(mixed, single("b", "+-+"))


def test_nothing_in_common_is_refused_with_the_reason() -> None:
    with pytest.raises(RefusedError, match="no task has scores on both sides"):
        claim(single("a", "!!!"), single("b", "+-+"))


@pytest.mark.parametrize("terms", [{"level": 1.5}, {"power": 0}, {"effect": 2}, {"score": "nice"}, {"seed": -3}])
def test_bad_terms(terms: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Terms(**terms)  # type: ignore[arg-type]


def test_one_side_is_no_comparison() -> None:
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare({"a": single("a", "+-")})


# --- The gate ---------------------------------------------------------------------------------------------------------


def test_non_inferiority_worked_number() -> None:
    # integrity research, section 3.4: d -.01, SE .02, margin .05 gives z 2.0, p .022750.
    p, other = tails(Estimate(-0.01, 0.02, 10**9, 10**9, "paired-t"), 0.05)
    assert p == pytest.approx(0.022750, abs=1e-6)
    assert p + other == pytest.approx(1)


@pytest.mark.parametrize(
    ("old", "new", "margin", "verdict"),
    [
        ("+" * 300, "+" * 300, 0.02, "pass"),
        ("+" * 20, "+" * 20, 0.02, "inconclusive"),
        ("+" * 300, "-" * 60 + "+" * 240, 0.02, "fail"),
        ("+" * 300, "-" * 6 + "+" * 294, 0.02, "inconclusive"),
        ("-" * 60 + "+" * 240, "+" * 300, 0.02, "pass"),
        ("+" * 300, "!" * 30 + "+" * 270, 0.02, "inconclusive"),
        ("+" * 300, "!" * 30 + "+" * 170 + "-" * 100, 0.02, "fail"),
    ],
)
def test_the_gate_has_three_answers(old: str, new: str, margin: float, verdict: str) -> None:
    result = compare({"old": single("o", old), "new": single("n", new)}, QUICK, gate=GateRule(margin))
    assert result.gate
    assert result.gate.verdict == verdict
    assert bool(result.gate.reasons) == (verdict != "pass")


@pytest.mark.parametrize(("n", "margin"), [(45, 0.05), (60, 0.05), (150, 0.02), (190, 0.02)])
@pytest.mark.parametrize("both", [0.0, 0.03])
def test_the_gate_seldom_passes_what_is_worse_by_the_margin(n: int, margin: float, both: float) -> None:
    """Exact probability of a pass when the true difference is just -margin, summed over all counts."""
    from scipy.stats import multinomial

    passed = 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            weight = float(multinomial.pmf([b, c, n - b - c], n, [both, both + margin, 1 - 2 * both - margin]))
            if weight > 1e-7 and score_tails(b, c, n, margin)[0] <= 0.025:
                passed += weight
    assert passed <= 0.03, "2.5 % is asked for; the score test is approximate"


def test_the_gate_agrees_with_the_interval() -> None:
    for lost in range(0, 40, 3):
        result = compare({"o": single("o", "+" * 200), "n": single("n", "-" * lost + "+" * (200 - lost))},
                         QUICK, gate=GateRule(0.1))  # fmt: skip
        assert result.gate
        interval = result.claims[0].difference
        assert (result.gate.verdict == "pass") == (interval.low > -0.1)
        assert (result.gate.verdict == "fail") == (interval.high < -0.1)


@pytest.mark.parametrize("text", ["", "0.02", "margin", "margin=x", "margin=2", "margin=0.1,margin=0.2", "other=1"])
def test_a_gate_that_is_not_understood(text: str) -> None:
    with pytest.raises(ConfigError, match="gate"):
        parse_gate(text)
    assert parse_gate("margin=0.02, max_excluded=0.1") == GateRule(0.02, 0.1)


def test_a_gate_is_between_two() -> None:
    side = single("a", "+-")
    with pytest.raises(ConfigError, match="between two"):
        compare({"a": side, "b": side, "c": side}, gate=GateRule(0.1))


# --- Groups, for looking ----------------------------------------------------------------------------------------------


def test_groups_are_shown_with_q_values_over_all_of_them() -> None:
    def side(name: str, marks: str) -> pl.DataFrame:
        parts = [
            single(name, marks, domain="web"),
            single(name, "+-" * 10, domain="data").with_columns(pl.col("task") + "-data"),
            single(name, "+-" * 10).with_columns(pl.col("task") + "-none"),
        ]
        return pl.concat(parts)

    lines = explore({"a": side("a", "-" * 20), "b": side("b", "+" * 20)}, "domain", QUICK)
    assert [(line.name, line.tasks, line.difference.point) for line in lines] == [("web", 20, 1.0), ("data", 20, 0.0)]
    assert [line.q for line in lines] == pytest.approx([2 * 2.0**-19, 1.0])


def test_a_task_of_two_capabilities_counts_in_both() -> None:
    sides = {name: single(name, marks, capabilities=["shell", "sql"]) for name, marks in (("a", "+-"), ("b", "++"))}
    assert sorted((line.name, line.tasks) for line in explore(sides, "capability", QUICK)) == [("shell", 2), ("sql", 2)]
    assert explore({"a": single("a", "+!"), "b": single("b", "!+")}, "domain", QUICK) == ()


def test_one_name_and_two_models_behind_it_is_said() -> None:
    sides = {day: single("bot", "+-+-", model="m", returned_models=[f"m-{day}"]) for day in ("monday", "tuesday")}
    (note,) = compare(sides, QUICK).notes
    assert "m was answered by different models: m-monday and m-tuesday" in note


# --- Properties and simulation ----------------------------------------------------------------------------------------

marks = st.lists(st.sampled_from(["++", "+-", "-+", "--", "!+", "-!"]), min_size=1, max_size=40)


@settings(max_examples=50)
@given(marks, st.randoms())
def test_swapping_sides_and_shuffling_tasks_change_nothing_else(pairs: list[str], random: object) -> None:
    a, b = (single(name, "".join(p[i] for p in pairs)) for i, name in enumerate("ab"))
    if not any("!" not in p for p in pairs):
        return
    one, other = claim(a, b), claim(b, a.sample(fraction=1, shuffle=True, seed=1))
    assert one.p == pytest.approx(other.p)
    assert one.difference.point == pytest.approx(-other.difference.point)
    assert one.worst == pytest.approx(-other.best)
    assert {one.word, other.word} in ({"not distinguishable"}, {"better", "worse"})
    assert one.tasks + sum(one.unpaired.values()) == len(pairs)
    assert one.worst - 1e-9 <= one.best


def test_equal_inputs_and_seed_give_an_equal_comparison() -> None:
    sides = {"a": single("a", "+-" * 20), "b": single("b", "-+++" * 10)}
    assert compare(sides, QUICK) == compare(sides, QUICK)


def clustered_null(random: np.random.Generator, clusters: int, size: int, attempts: int) -> tuple[pl.DataFrame, ...]:
    """Two agents, on the average equally good, each with its own strengths: repositories that suit it."""
    names = {f"c{g}-t{i}": f"c{g}" for g in range(clusters) for i in range(size)}
    base = random.normal(0, 1.2, clusters)
    sides = []
    for agent in "ab":
        suits = base + random.normal(0, 1.0, clusters)
        scores = {}
        for name, cluster in names.items():
            p = 1 / (1 + np.exp(-suits[int(cluster[1:])] - random.normal(0, 0.5)))
            scores[name] = list((random.random(attempts) < p).astype(float))
        sides.append(make_trials(agent, scores, clusters=names))
    return tuple(sides)


@pytest.mark.slow
@pytest.mark.parametrize(("clusters", "size", "attempts"), [(12, 8, 1), (25, 4, 1), (8, 6, 3)])
def test_under_the_null_with_clustered_tasks_a_word_is_wrong_at_most_one_time_in_twenty(
    clusters: int, size: int, attempts: int
) -> None:
    random = np.random.default_rng(2024)
    terms, rounds = Terms(draws=1000, resamples=100), 600
    words = naive = 0
    for _ in range(rounds):
        a, b = clustered_null(random, clusters, size, attempts)
        found = claim(a, b, terms)
        words += found.word != "not distinguishable"
        naive += {test.formula: test.p for test in found.tests}["paired-t"] <= 0.05
    error = 1.96 * (0.05 * 0.95 / rounds) ** 0.5
    assert words / rounds <= 0.05 + error
    assert naive / rounds > 0.10, "tasks taken as independent would mislead: the simulation is no straw man"


@pytest.mark.slow
def test_many_small_losses_against_a_rare_large_gain_earn_no_word() -> None:
    """Equal means, far from symmetric: sign-flip by itself is wrong nearly one time in five."""
    random, rounds = np.random.default_rng(3), 500
    words = flips = 0
    for _ in range(rounds):
        a = make_trials("a", {f"t{i}": [0.5] for i in range(30)})
        b = make_trials("b", {f"t{i}": [1.0 if random.random() < 0.1 else 0.4 / 0.9] for i in range(30)})
        found = claim(a, b, Terms(draws=1000, resamples=50))
        words += found.word != "not distinguishable"
        flips += found.p <= 0.05
    assert words / rounds <= 0.05 + 1.96 * (0.05 * 0.95 / rounds) ** 0.5
    assert flips / rounds > 0.10


@pytest.mark.slow
def test_under_the_null_with_three_agents_holm_keeps_the_level_of_all_claims_together() -> None:
    random, rounds = np.random.default_rng(5), 500
    wrong = 0
    for _ in range(rounds):
        p = random.random(40)
        sides = {name: single(name, "".join("+" if x else "-" for x in random.random(40) < p)) for name in "abcd"}
        result = compare(sides, Terms(draws=500, resamples=50, all_pairs=True))
        wrong += any(c.word != "not distinguishable" for c in result.claims)
    assert wrong / rounds <= 0.05 + 1.96 * (0.05 * 0.95 / rounds) ** 0.5
