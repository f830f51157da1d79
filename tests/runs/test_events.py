"""The event log: exact, whole after a crash, and read by range however long it is."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.conftest import DeskExaminer, make_plan

from proctor.agents.contract import Step, ToolCall
from proctor.common import ConfigError
from proctor.models.contract import Usage
from proctor.runs.engine import execute
from proctor.runs.events import EVENTS, INDEX, STRIDE, EventLog, EventWriter, step_data, step_of
from proctor.runs.export import export_atif
from proctor.runs.formats import dump_json, plain
from proctor.trajectories.atif import read_trajectory

if TYPE_CHECKING:
    from pathlib import Path

TIME = "2026-01-01T00:00:00Z"


def write_log(directory: Path, count: int, text: str = "x") -> None:
    files = {name: (directory / name).open("ab") for name in (EVENTS, INDEX)}
    writer = EventWriter(
        lambda name, content: files[name].write(content) and None, clock=lambda: "2026-01-01T00:00:00Z"
    )
    for number in range(1, count + 1):
        writer.write("log", {"text": f"{text}{number}"})
    for file in files.values():
        file.close()


@given(st.integers(0, 300), st.integers(1, 320), st.integers(0, 320))
def test_any_range_is_what_reading_all_and_cutting_gives(
    tmp_path_factory: pytest.TempPathFactory, count: int, first: int, last: int
) -> None:
    directory = tmp_path_factory.mktemp("log")
    write_log(directory, count)
    log = EventLog(directory)
    assert len(log) == count
    assert [event.seq for event in log.read(first, last)] == [n for n in range(1, count + 1) if first <= n <= last]


def test_a_range_of_a_million_events_is_read_without_the_rest(tmp_path: Path) -> None:
    write_log(tmp_path, 1_000_000, "a line of an ordinary length, as a harness may log it: ")
    assert (tmp_path / EVENTS).stat().st_size > 100_000_000
    tracemalloc.start()
    try:
        log = EventLog(tmp_path)
        assert len(log) == 1_000_000
        found = [event.data["text"].rpartition(" ")[2] for event in log.read(777_777, 777_787)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [str(number) for number in range(777_777, 777_788)]
    assert peak < 4 << 20, "memory does not grow with the log"


@pytest.mark.parametrize("index", [None, b"", b"\x07" * 24, b"\x00" * 80, b"junk"])
def test_an_index_that_is_missing_or_wrong_is_made_anew(tmp_path: Path, index: bytes | None) -> None:
    write_log(tmp_path, 5 * STRIDE)
    if index is None:
        (tmp_path / INDEX).unlink()
    else:
        (tmp_path / INDEX).write_bytes(index)
    assert [event.seq for event in EventLog(tmp_path).read(200, 203)] == [200, 201, 202, 203]


def test_a_torn_last_line_is_left_out_and_a_foreign_one_is_named(tmp_path: Path) -> None:
    write_log(tmp_path, 3)
    path = tmp_path / EVENTS
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert [event.seq for event in EventLog(tmp_path).read()] == [1, 2]
    assert len(EventLog(tmp_path)) == 2
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(ConfigError, match="event 3 is where 2 belongs"):
        list(EventLog(tmp_path).read())
    path.write_bytes(lines[0] + b'{"v":2}\n')
    with pytest.raises(ConfigError, match=r"events\.jsonl"):
        list(EventLog(tmp_path).read())


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)
tables: st.SearchStrategy[dict[str, Any]] = st.dictionaries(st.text(max_size=4), values, max_size=3)
calls = st.builds(
    ToolCall, st.text(max_size=4), st.text(max_size=4), tables, st.text(max_size=9), st.none() | st.text(max_size=9),
    st.none() | st.text(max_size=9), st.none() | st.floats(0, 9), tables,
)  # fmt: skip
counts = st.none() | st.integers(0, 99)
steps = st.builds(
    Step, st.sampled_from(["system", "user", "agent"]), st.text(max_size=9), st.just(TIME),
    st.none() | st.text(max_size=4), st.none() | st.text(max_size=9), st.lists(calls, max_size=3),
    st.none() | st.builds(Usage, counts, counts, counts, counts, st.none() | st.floats(0, 1)), st.integers(0, 3),
    tables,
)  # fmt: skip


@given(steps)
def test_a_step_comes_out_of_the_log_as_it_went_in(step: Step) -> None:
    import json

    assert step_of(json.loads(dump_json(plain(step_data(step))))) == step


async def test_the_trajectory_is_what_the_log_exports(desk: DeskExaminer, run_dir: Path) -> None:
    execution = await execute(make_plan(tasks=1), run_dir, desk, concurrency=2)
    for trial in execution.results:
        directory = run_dir / "trials" / trial
        assert export_atif(directory) == read_trajectory(directory / "trajectory.json")
        kinds = [event.kind for event in EventLog(directory).read()]
        assert kinds[0] == "start"
        assert kinds[-1] == "end"
        assert kinds.count("stage") == 7


def test_what_is_no_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a step"):
        step_of({"surprise": 1, "tool_calls": [{"x": 1}]})
