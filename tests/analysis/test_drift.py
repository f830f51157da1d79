"""Drift of behaviour: the worked numbers, the seed case, and how often it is found where there is none."""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, permutation_test

from proctor.analysis.behaviour import Action, Behaviour, tool_action
from proctor.analysis.detect import detect_drift
from proctor.analysis.drift import Drift, DriftOptions, Tolerance
from proctor.analysis.multiplicity import holm
from proctor.analysis.permutation import sign_flip
from proctor.analysis.relabel import Relabelling, excess, seen_mask
from proctor.common import ConfigError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

LETTERS = {"R": "read_file", "E": "edit_file", "T": "bash", "B": "bash", "F": "finish"}


def act(letter: str, number: int) -> Action:
    """R reads the same file again, r another each time, E edits, T tests, B runs something, F finishes."""
    arguments: dict[str, Any] = {
        "R": {"path": "a.py"},
        "r": {"path": f"{number}.py"},
        "E": {"path": "a.py", "old_text": str(number), "new_text": "x"},
        "T": {"command": "pytest"},
        "B": {"command": "python a.py"},
        "F": {"message": "done"},
    }[letter]
    return tool_action(LETTERS[letter.upper()], arguments, result=f"{arguments}", failed=False,
                       evidence=f"trajectory.json#/steps/{number}/tool_calls/0")  # fmt: skip


def run(letters: str, task: str = "t", attempt: int = 1, **more: Any) -> Behaviour:
    actions = tuple(act(letter, number) for number, letter in enumerate(letters, 1))
    return Behaviour(f"{task}@{attempt}", "run", task, more.pop("agent", "a"), actions, **{"score": 1.0, **more})


def runs(behaviours: Sequence[tuple[str, str, int]], **more: Any) -> list[Behaviour]:
    """From (task, letters, tokens)."""
    return [
        run(letters, task, number, tokens=tokens, **more) for number, (task, letters, tokens) in enumerate(behaviours)
    ]


def test_worked_ratio_of_tokens() -> None:
    # Integrity research, section 6, point 2.
    before, after = (1000, 1200, 800, 1500, 900), (1900, 2500, 1500, 3200, 1700)
    found = detect_drift(
        runs([(f"t{i}", "RET", tokens) for i, tokens in enumerate(before)]),
        runs([(f"t{i}", "RET", tokens) for i, tokens in enumerate(after)]),
    )["tokens"]
    assert found.point == pytest.approx(1.9731, abs=5e-5)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (
        pytest.approx(1.8288, abs=5e-5),
        pytest.approx(2.1289, abs=5e-5),
    )
    # Point 7: the paired sign-flip of five gives .0625 at least, so nothing is claimed.
    assert found.p == found.smallest_p == 0.0625
    assert found.verdict == "inconclusive"


def test_worked_mix_of_tools() -> None:
    # Integrity research, section 6, point 3: (50, 30, 20) against (40, 50, 10) calls.
    one = run("R" * 50 + "E" * 30 + "T" * 20)
    other = run("R" * 40 + "E" * 50 + "T" * 10)
    assert detect_drift([one], [other])["tool_mix"].point == pytest.approx(0.034498, abs=1e-6)


def test_worked_separated_runs_of_one_task() -> None:
    # Integrity research, section 6, point 7: five against five, fully separated.
    low, high = (10, 11, 12, 13, 14), (20, 21, 22, 23, 24)
    found = detect_drift(runs([("t", "RET", n) for n in low]), runs([("t", "RET", n) for n in high]))["tokens"]
    assert found.p == pytest.approx(0.007937, abs=1e-6)
    assert found.p == pytest.approx(mannwhitneyu(low, high, method="exact").pvalue)


def seed_case(attempts: int, tasks: int = 6) -> tuple[list[Behaviour], list[Behaviour]]:
    """The same result with twice the tokens, from one read-only tool called again and again."""
    rng = np.random.default_rng(4)
    before, after = [], []
    for task in range(tasks):
        for attempt in range(attempts):
            noise = int(rng.integers(0, 60))
            more = "r" * int(rng.integers(0, 2))
            before.append(run(f"R{more}rETF", f"t{task}", attempt, tokens=1000 + noise, agent="v1"))
            after.append(run(f"R{more}RRRRRRErTF", f"t{task}", attempt, tokens=2000 + 2 * noise, agent="v2"))
    return before, after


def test_the_seed_case_is_caught() -> None:
    found = detect_drift(*seed_case(attempts=3))
    assert found.verdict == "fail"
    assert found.same_result is True
    assert {shift.name for shift in found.shifts if shift.verdict == "fail"} >= {
        "tokens",
        "calls",
        "repetition",
        "sequence",
    }
    assert found["tokens"].point == pytest.approx(2.0, abs=0.01)
    first = found.findings[0]
    assert first.startswith("the same result with 2 times the tokens")
    assert "read-only tool read_file is called" in first
    assert found.tools[0].tool == "read_file"
    assert found.tools[0].read_only
    assert found.tools[0].repeats > 0.6 > found.tools[0].baseline_repeats == 0
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["verdict"] == "fail"


def test_the_seed_case_with_one_run_of_each_at_eight_tasks() -> None:
    found = detect_drift(*seed_case(attempts=1, tasks=8))
    assert found.verdict == "fail"
    assert found["tokens"].verdict == "fail"
    assert any("run each version twice" in note for note in found.notes)


def test_the_seed_case_at_too_few_tasks_is_not_called_a_pass() -> None:
    found = detect_drift(*seed_case(attempts=1, tasks=4))
    assert found.verdict == "inconclusive"
    assert "so few runs" in found["tokens"].reason


def test_the_same_agent_again_passes() -> None:
    rng = np.random.default_rng(8)

    def version() -> list[Behaviour]:
        return [
            run("R" + "r" * int(rng.integers(1, 3)) + "E" * int(rng.integers(3, 5)) + "TTTF", f"t{task}", k,
                tokens=int(rng.integers(950, 1050)))
            for task in range(20) for k in range(4)
        ]  # fmt: skip

    found = detect_drift(version(), version())
    assert found.verdict == "pass", [(shift.name, shift.reason) for shift in found.shifts if shift.gated]
    assert found.findings == ()


def test_fewer_tokens_are_a_change_and_no_failure() -> None:
    before, after = seed_case(attempts=3)
    found = detect_drift(after, before)
    assert found["tokens"].changed
    assert found["tokens"].verdict == "pass"


@pytest.mark.slow
def test_how_often_it_cries_wolf() -> None:
    # One version against itself, with tasks that differ and runs that vary: Holm keeps any false change below 5 %.
    rng = np.random.default_rng(21)
    repeats, false = 120, 0
    for _ in range(repeats):
        sizes = rng.integers(2, 8, size=6)

        def version(sizes: Any = sizes) -> list[Behaviour]:
            return [
                run("".join(rng.choice(list("RrETB"), size=size + int(rng.integers(0, 4)))), f"t{task}", k,
                    tokens=int(rng.lognormal(7, 0.5)))
                for task, size in enumerate(sizes) for k in range(3)
            ]  # fmt: skip

        found = detect_drift(version(), version(), DriftOptions(draws=400))
        false += any(shift.changed for shift in found.shifts if shift.gated)
    assert false <= 12, "the 98 % quantile of Binomial(120, 0.05) is 11"


def test_a_host_never_seen_needs_no_statistics() -> None:
    before = [run("RETF", f"t{i}", tokens=100) for i in range(3)]
    after = [run("RETF", f"t{i}", tokens=100) for i in range(2)]
    after.append(run("RETF", "t2", tokens=100, hosts={"evil.example": "exec.jsonl#7"}))
    found = detect_drift(before, after)
    assert found.verdict == "fail"
    (alert,) = (novelty for novelty in found.novelties if novelty.alert)
    assert (alert.kind, alert.item, alert.trials) == ("host", "evil.example", 1)
    assert alert.evidence == ("t2@1: exec.jsonl#7",)
    assert "never seen before: host evil.example, in 1 trials" in found.findings


def test_a_new_snapshot_behind_the_same_name_is_named() -> None:
    found = detect_drift([run("RET", returned_models=("m-2025-01",))], [run("RET", returned_models=("m-2025-06",))])
    assert [(novelty.kind, novelty.alert) for novelty in found.novelties] == [("model", False)]
    assert "m-2025-06" in found.findings[0]


def test_where_the_typical_runs_part() -> None:
    found = detect_drift([run("RRET")], [run("RREBT")])
    (parted,) = found.divergences
    assert (parted.shared, parted.baseline, parted.new) == (3, "bash pytest", "bash python a.py")
    assert parted.new_evidence == "t@1: trajectory.json#/steps/4/tool_calls/0"


def test_repeats_end_at_a_write() -> None:
    assert [action.evidence.split("/")[2] for action in run("RRERR").repeats()] == ["2", "5"]
    assert run("rrrr").repeats() == ()


def test_edits_that_nobody_checked() -> None:
    assert [run(letters).unverified_edits for letters in ("EETF", "ETEEF", "RF", "EBE")] == [0, 2, 0, 1]


def test_unknown_tokens_are_not_zero() -> None:
    found = detect_drift([run("RET"), run("RET", "u", tokens=5)], [run("RET"), run("RET", "u", tokens=5)])
    assert found["tokens"].tasks == 1
    assert found["tokens"].left_out == 1
    nothing = detect_drift([run("RET")], [run("RET")])
    assert any("tokens is not known" in note for note in nothing.notes)


def test_another_content_of_the_task_is_no_drift() -> None:
    with pytest.raises(RefusedError, match="another content of the task at t"):
        detect_drift([run("RET", task_digest="sha256:1")], [run("RET", task_digest="sha256:2")])


def test_no_common_task() -> None:
    with pytest.raises(ConfigError, match="no task"):
        detect_drift([run("RET", "a")], [run("RET", "b")])


def test_unknown_gates_are_refused() -> None:
    with pytest.raises(ConfigError, match="vibes"):
        DriftOptions(gated=("vibes",))


def test_clusters_widen_the_interval() -> None:
    jump = [1.0, 1.0, 1.0, 1.9, 1.9, 1.9, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    sides = [
        [run("RET", f"t{i:02}", tokens=int(1000 * f), cluster=f"c{i // 3}") for i, f in enumerate(factors)]
        for factors in ([1.0] * 12, jump)
    ]
    clustered = detect_drift(*sides)["tokens"].interval
    plain = detect_drift(*([run("RET", one.task, tokens=one.tokens) for one in side] for side in sides))[
        "tokens"
    ].interval
    assert clustered is not None
    assert plain is not None
    assert clustered.high - clustered.low > 1.5 * (plain.high - plain.low)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8))
def test_single_runs_are_the_sign_flip_test(pairs: list[tuple[int, int]]) -> None:
    sides = [[run("E" * pair[side] + "F", f"t{i}") for i, pair in enumerate(pairs)] for side in (0, 1)]
    found = detect_drift(*sides)["calls"]
    flips = sign_flip([math.log((b + 1) / (a + 1)) for a, b in pairs])
    assert found.p == pytest.approx(flips.p)


def test_one_task_is_the_permutation_test_of_scipy() -> None:
    one, other = (900, 1000, 1300, 1250), (1200, 1500, 1260)
    found = detect_drift(runs([("t", "RET", n) for n in one]), runs([("t", "RET", n) for n in other]))["tokens"]

    def statistic(x: Any, y: Any) -> float:
        return abs(math.log(np.mean(y)) - math.log(np.mean(x)))

    theirs = permutation_test((one, other), statistic, vectorized=False, alternative="greater", n_resamples=np.inf)
    assert found.p == pytest.approx(theirs.pvalue)
    assert found.exact


def test_drawn_assignments_agree_with_all() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=(4, 6))
    exact = Relabelling(((3, 3),) * 3, draws=10)
    drawn = Relabelling(((3, 3),) * 4, draws=20_000, seed=5)
    assert exact.exact
    assert not drawn.exact
    for task in range(4):
        mask = drawn.masks(task)
        assert (mask.sum(axis=1) == 3).all()
        assert mask.mean(axis=0) == pytest.approx(0.5, abs=0.02)
    found = sum(np.where(drawn.masks(task), values[task], -values[task]).sum(axis=1) for task in range(4))
    assert float(np.std(found)) == pytest.approx(
        math.sqrt(
            sum(float(np.var([sum(v[list(c)]) * 2 - v.sum() for c in combinations(range(6), 3)])) for v in values)
        ),
        rel=0.03,
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 4), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_the_excess_of_distances_is_unbiased(first: int, second: int, seed: int) -> None:
    # Over all assignments of the same runs the mean excess is zero: a version that makes no difference shows none.
    points = np.random.default_rng(seed).integers(0, 9, size=first + second).astype(float)
    matrix = np.abs(points[:, None] - points[None, :])
    relabelling = Relabelling(((first, second),))
    assert float(excess(relabelling.masks(0), matrix).mean()) == pytest.approx(0, abs=1e-9)
    assert excess(seen_mask((first, second)), matrix).shape == (1,)


def test_tolerances_can_be_set() -> None:
    wide = DriftOptions(tolerances={**DriftOptions().tolerances, "tokens": Tolerance(high=3.0)})
    found = detect_drift(*seed_case(attempts=3), wide)
    assert found["tokens"].verdict == "pass"
    assert found["tokens"].changed


def test_the_values_are_those_of_the_seed() -> None:
    options = DriftOptions(draws=300, seed=9)
    one, same = (detect_drift(*seed_case(attempts=3), options) for _ in range(2))
    assert isinstance(one, Drift)
    assert one == same


def formulas(value: Any) -> set[str]:
    """Every formula id in a JSON document."""
    if isinstance(value, dict):
        own = {value["formula"]} if isinstance(value.get("formula"), str) else set()
        return own.union(*(formulas(item) for key, item in value.items() if key != "formulas"))
    return set().union(*map(formulas, value)) if isinstance(value, list) else set()


def test_every_formula_is_explained() -> None:
    for side in (seed_case(attempts=3), seed_case(attempts=3, tasks=1)):
        plain = detect_drift(*side).as_json()
        assert formulas(plain)
        assert formulas(plain) <= plain["formulas"].keys()


def test_drawn_assignments_never_give_a_p_of_zero() -> None:
    drawn = Relabelling(((10, 10),), draws=99)
    assert not drawn.exact
    assert drawn.p_value(5.0, np.zeros(99)) == pytest.approx(0.01) == drawn.smallest_p


def test_the_excess_takes_both_versions_for_what_they_are() -> None:
    # Baseline at 0 and 0, new version at 2 and 6: between 4, within 0 and 4, so 4 - (0 + 4) / 2.
    points = np.array([0.0, 0.0, 2.0, 6.0])
    assert excess(seen_mask((2, 2)), np.abs(points[:, None] - points[None, :])).tolist() == [2.0]


def test_only_what_decides_shares_the_level() -> None:
    shifts = detect_drift(*seed_case(attempts=3)).shifts
    gated = [shift for shift in shifts if shift.gated]
    assert 3 < len(gated) < len(shifts)
    assert [shift.p_adjusted for shift in gated] == pytest.approx(holm([shift.p for shift in gated]))
