"""Plans: the same request gives the same trials, and nothing that is asked for is lost or doubled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.conftest import make_plan, make_task

from proctor.common import ConfigError
from proctor.runs.plan import effective_limits, slug_all, trial_seed
from proctor.runs.request import load_agents, parse_limits

if TYPE_CHECKING:
    from pathlib import Path

NAMES = st.lists(st.text(min_size=1, max_size=200), unique=True, max_size=8)


@given(NAMES)
def test_slugs_are_unique_file_names(names: list[str]) -> None:
    slugs = slug_all(names)
    assert len({slug.lower() for slug in slugs.values()}) == len(names)
    for slug in slugs.values():
        assert 0 < len(slug.encode()) < 120
        assert not set(slug) & set("/@\0 ")
        assert not slug.startswith((".", "-"))


def test_the_same_plan_has_the_same_trials() -> None:
    one, two = make_plan(4, attempts=2).trials(), make_plan(4, attempts=2).trials()
    assert one == two
    assert len({trial.id for trial in one}) == 4 * 2 * 2
    assert one[0].id == "task-0@solver@1"


def test_agents_get_equal_seeds_and_attempts_different_ones() -> None:
    trials = make_plan(2, attempts=2).trials()
    seeds = {(trial.task.name, trial.attempt): set[int]() for trial in trials}
    for trial in trials:
        seeds[trial.task.name, trial.attempt].add(trial.seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len(set.union(*seeds.values())) == 4


@given(st.integers(), st.text(), st.integers(1, 10**6))
def test_seeds_fit_everywhere(seed: int, digest: str, attempt: int) -> None:
    assert 0 <= trial_seed(seed, digest, attempt) < 2**31


def test_limits_of_the_run_win_over_the_task() -> None:
    limits = effective_limits(make_task("t"), {"total_s": 5.0, "steps": 3})
    assert (limits.total_s, limits.steps, limits.tool_call_s) == (5.0, 3, 20.0)


@pytest.mark.parametrize(
    "text",
    ["steps", "steps=", "steps=x", "steps=1.5", "steps=0", "total_s=-1", "total_s=inf", "total_s=nan", "hours=1"],
)
def test_bad_limits_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--limit"):
        parse_limits([text])


def test_limits_have_their_own_types() -> None:
    assert parse_limits(["steps=3", "total_s=1.5"]) == {"steps": 3, "total_s": 1.5}


def test_labels_and_options_find_their_agents(tmp_path: Path) -> None:
    script = tmp_path / "a.json"
    script.write_text("[]")
    agents = load_agents(
        ["oracle", "good=scripted", "bad=scripted"], [], [f"good.script={script}", "stop_on_error=true"]
    )
    assert [agent.label for agent in agents] == ["oracle", "good", "bad"]
    assert [dict(agent.options) for agent in agents] == [
        {}, {"script": str(script), "stop_on_error": True}, {"stop_on_error": True}]  # fmt: skip
    assert list(agents[1].option_digests) == [str(script)]


@pytest.mark.parametrize(
    ("agents", "models", "options", "words"),
    [
        ([], [], [], "no agent"),
        (["nobody"], [], [], "no harness"),
        (["=oracle"], [], [], "LABEL=NAME"),
        (["tool-loop"], [], [], "needs a model"),
        (["oracle"], ["m@http://127.0.0.1:1/v1"], [], "uses a model"),
        (["oracle"], [], ["x"], "KEY=VALUE"),
        (["oracle", "scripted"], [], ["surprise=1"], "takes 'surprise'"),
        (["oracle", "scripted"], [], ["other.script=1"], "called 'other'"),
        (["scripted"], [], ["surprise=1"], "surprise"),
        (["scripted"], [], ["stop_on_error=perhaps"], "stop_on_error"),
        (["scripted"], [], ["script=a", "script=b"], "twice"),
        (["no.such.module:Class"], [], [], "cannot import"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_agents_is_said_before_anything_runs(
    agents: list[str], models: list[str], options: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_agents(agents, models, options)


def test_every_model_is_tried_with_every_harness_that_needs_one() -> None:
    agents = load_agents(["null", "tool-loop"], ["a@http://127.0.0.1:1/v1", "b@http://127.0.0.1:1/v1"], [])
    assert [(agent.label, agent.model.name if agent.model else None) for agent in agents] == [
        ("null", None), ("tool-loop+a", "a"), ("tool-loop+b", "b")]  # fmt: skip


def test_everything_that_the_room_exports_is_there_and_documented() -> None:
    import proctor.runs

    for name in proctor.runs.__all__:
        assert getattr(proctor.runs, name).__doc__, name
    with pytest.raises(AttributeError):
        proctor.runs.nothing  # noqa: B018
