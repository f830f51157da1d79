"""The compat verdict agrees with published logs, status maps and reports, test by test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor.common import ConfigError
from proctor.grading import compat

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "swe"
INSTANCES = sorted(p.parent.name for p in DATA.glob("*/observed.json")) or ["none"]


def row(name: str) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    folder = DATA / name
    return tuple(json.loads((folder / f).read_text()) for f in ("instance.json", "env.json", "observed.json"))  # type: ignore[return-value]


@pytest.mark.data
@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_status_map_of_every_log_is_the_observed_one(name: str, when: str) -> None:
    _, env, observed = row(name)
    log = (DATA / name / "logs" / f"{when}.log").read_text()
    assert compat.parse_log(compat.format_for(str(env["log_format"]), name), log) == observed[f"status_{when}"]


@pytest.mark.data
@pytest.mark.parametrize("name", INSTANCES)
def test_gold_resolves_and_base_does_not(name: str) -> None:
    instance, env, observed = row(name)
    f2p, p2p = (json.loads(str(instance[k])) for k in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    verdicts = {}
    for when in ("before", "after"):
        log = (DATA / name / "logs" / f"{when}.log").read_text()
        gated = compat.gate_log(
            compat.format_for(str(env["log_format"]), name), log, exit_code=int(str(observed[f"rc_{when}"]))
        )
        verdicts[when] = compat.verdict_of(gated.statuses, f2p, p2p, graded=gated.graded)
    assert verdicts["after"].status == "RESOLVED_FULL"
    assert verdicts["before"].status == "RESOLVED_NO"


@pytest.mark.data
@pytest.mark.parametrize("name", [n for n in INSTANCES if (DATA / n / "published_report.json").is_file()])
def test_model_patch_verdict_is_the_published_one(name: str) -> None:
    instance, env, _ = row(name)
    published = json.loads((DATA / name / "published_report.json").read_text())
    f2p, p2p = (json.loads(str(instance[k])) for k in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    log = (DATA / name / "logs" / "model.log").read_text()
    verdict = compat.verdict_of(compat.parse_log(compat.format_for(str(env["log_format"]), name), log), f2p, p2p)
    assert verdict.resolved == published["resolved"]
    for group in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        for side in ("success", "failure"):
            assert sorted(verdict.tests[group][side]) == sorted(published["tests_status"][group][side])


@pytest.mark.parametrize(
    ("status", "f2p_ok", "p2p_ok"),
    [
        ("PASSED", True, True),
        ("XFAIL", True, True),
        ("SKIPPED", False, True),
        ("FAILED", False, False),
        ("ERROR", False, False),
        (None, False, False),
    ],
)
def test_status_table(status: str | None, f2p_ok: bool, p2p_ok: bool) -> None:
    statuses = {"t::x": status} if status else {}
    assert compat.verdict_of(statuses, ["t::x"], []).resolved is f2p_ok
    assert compat.verdict_of(statuses, [], ["t::x"]).resolved is p2p_ok


def test_cut_id_matches_by_prefix_only_when_all_agree() -> None:
    agree = {"t::x[(1,a]": "PASSED", "t::x[(1,b]": "XFAIL"}
    differ = {"t::x[(1,a]": "PASSED", "t::x[(1,b]": "FAILED"}
    assert compat.verdict_of(agree, ["t::x[(1,"], []).resolved
    assert not compat.verdict_of(differ, ["t::x[(1,"], []).resolved
    assert not compat.verdict_of({"t::xy": "PASSED"}, ["t::x"], []).resolved


def test_last_line_wins() -> None:
    assert compat.parse_pytest("PASSED a\nFAILED a - x\n") == {"a": "FAILED"}


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (f"{compat.APPLY_FAILED}\nPASSED a", 0),
        (f"{compat.TESTS_TIMEOUT}\nPASSED a", 0),
        (f"{compat.START}\nPASSED a\n", 0),
        ("nothing ran", 0),
        ("PASSED a", 1),
    ],
)
def test_logs_that_must_not_be_graded(log: str, code: int) -> None:
    assert not compat.gate_log("pytest-rA", log, exit_code=code).graded


def test_partial() -> None:
    verdict = compat.verdict_of({"a": "PASSED", "b": "FAILED", "c": "PASSED"}, ["a", "b"], ["c"])
    assert (verdict.status, verdict.resolved) == ("RESOLVED_PARTIAL", False)


def test_fail_only_counts_absence_as_success() -> None:
    assert compat.verdict_of({}, ["a"], ["b"], eval_type="fail_only").resolved
    assert not compat.verdict_of({"a": "FAILED"}, ["a"], [], eval_type="fail_only").resolved


def test_unknown_format_is_named() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        compat.parse_log("nosuch", "")


@given(st.text())
def test_parsers_never_raise(log: str) -> None:
    for name in compat.PARSERS:
        compat.parse_log(name, log)
