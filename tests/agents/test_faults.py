"""Tools that fail on purpose: at the asked rate, by the seed, marked, and without touching the sandbox."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from scipy.stats import binomtest
from tests.agents.conftest import DirectoryBox

from proctor.agents.faults import FAULTS, ToolFaults, cut
from proctor.agents.limits import LimitGuard
from proctor.agents.room import BoundedRoom, RoomEvent
from proctor.common import ConfigError
from proctor.sandbox.contract import FileError, Output
from proctor.tasks.model import AgentLimits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


def test_calls_go_wrong_at_the_asked_rate_and_by_the_seed_alone() -> None:
    faults = ToolFaults(0.3)
    drawn = [faults.draw(seed, number) for seed in range(40) for number in range(1, 101)]
    assert drawn == [faults.draw(seed, number) for seed in range(40) for number in range(1, 101)]
    wrong = Counter(one for one in drawn if one is not None)
    assert binomtest(wrong.total(), len(drawn), 0.3).pvalue > 1e-4
    assert set(wrong) == set(FAULTS)
    assert all(binomtest(wrong[kind], wrong.total(), 1 / 3).pvalue > 1e-4 for kind in FAULTS)
    assert all(ToolFaults(1.0, ("fail",)).draw(7, number) == "fail" for number in range(50))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("much", "not a number"),
        ("0", "not in"),
        ("1.5", "not in"),
        ("nan", "not in"),
        ("0.1:boom", "no fault"),
        ("0.1:fail,fail", "twice"),
    ],
)
def test_what_cannot_be_meant_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolFaults.parse(text)


def test_as_text_and_as_json() -> None:
    assert ToolFaults.parse("0.2") == ToolFaults(0.2)
    assert ToolFaults.parse("1:fail, truncate") == ToolFaults(1.0, ("fail", "truncate"))
    assert ToolFaults.from_json(ToolFaults(0.2, ("timeout",)).as_json()) == ToolFaults(0.2, ("timeout",))


def room(tmp_path: Path, kind: str, events: list[RoomEvent]) -> BoundedRoom:
    guard = LimitGuard(AgentLimits(tool_call_s=0.2))
    faults = ToolFaults(1.0, (kind,))  # type: ignore[arg-type]
    return BoundedRoom(DirectoryBox(tmp_path), str(tmp_path), guard, on_event=events.append, faults=faults)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["fail", "timeout"])
async def test_a_call_that_is_not_made_touches_nothing_and_says_so(tmp_path: Path, kind: str) -> None:
    events: list[RoomEvent] = []
    inside = room(tmp_path, kind, events)
    result = await inside.bash("touch made")
    assert (result.ok, result.timed_out) == (False, kind == "timeout")
    with pytest.raises(TimeoutError if kind == "timeout" else FileError):
        await inside.write("made", b"x")
    with pytest.raises(TimeoutError if kind == "timeout" else FileError):
        await inside.list(".")
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240 - a tiny folder
    assert [event.injected for event in events] == [kind] * 3
    assert events[0].as_json()["injected"] == kind


async def test_a_truncated_command_is_made_and_says_how_much_is_missing(tmp_path: Path) -> None:
    events: list[RoomEvent] = []
    result = await room(tmp_path, "truncate", events).bash("touch made; seq 1 100")
    assert (tmp_path / "made").exists()
    whole = "".join(f"{number}\n" for number in range(1, 101)).encode()
    assert whole.startswith(result.stdout.head)
    assert (len(result.stdout.head), result.stdout.total) == (len(whole) // 5, len(whole))
    assert result.exit_code == 0
    assert events[0].injected == "truncate"


async def test_what_the_harness_itself_runs_is_no_tool_call(tmp_path: Path) -> None:
    events: list[RoomEvent] = []
    assert (await room(tmp_path, "fail", events).run(["touch", "made"])).ok
    assert (tmp_path / "made").exists()
    assert events[0].injected is None


async def test_what_the_harness_brings_and_takes_away_is_no_tool_call(tmp_path: Path) -> None:
    events: list[RoomEvent] = []
    inside = room(tmp_path, "fail", events)
    (tmp_path / "brought").mkdir()
    await inside.remove("brought")
    assert not (tmp_path / "brought").exists()
    assert [event.injected for event in events] == [None]


def test_a_cut_output_never_grows_and_counts_right() -> None:
    for output in (Output(), Output(b"x"), Output(b"abc" * 50), Output(b"a" * 10, 1000, b"b" * 10)):
        short = cut(output)
        assert short.total == output.total
        assert len(short.data) <= max(len(output.data), 60)
