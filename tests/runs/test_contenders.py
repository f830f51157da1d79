"""From runs on disk to the sides of a comparison: which agent, which record, and what is not comparable."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

import polars as pl
import pytest
from tests.runs.conftest import DeskExaminer, make_plan

from proctor.analysis.claims import compare
from proctor.common import ConfigError, RefusedError
from proctor.runs.contenders import select
from proctor.runs.engine import execute
from proctor.runs.frame import load_trials, save_trials
from proctor.runs.lock import make_lock, write_lock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def make_run(folder: Path, *, version: str = "1", **plan: object) -> Path:
    """A finished run of solver and idler below `folder`."""
    (folder / "desk").mkdir(parents=True)
    (folder / "run").mkdir()
    made = make_plan(**plan)  # type: ignore[arg-type]
    lock = make_lock(made, {}).model_copy(update={"proctor_version": version})
    write_lock(folder / "run", lock)
    await execute(made, folder / "run", DeskExaminer(folder / "desk"), concurrency=2)
    return folder / "run"


async def test_agents_of_one_run_and_of_two(tmp_path: Path) -> None:
    one, other = await make_run(tmp_path / "a", tasks=7), await make_run(tmp_path / "b", tasks=7)
    assert list(select([str(one)]).sides) == ["solver", "idler"]
    assert list(select([f"{one}::idler", f"{other}::solver"]).sides) == ["idler", "solver"]
    assert list(select([f"{one}::idler", f"{other}::idler"]).sides) == [f"{one}::idler", f"{other}::idler"]
    result = compare(select([f"{one}::solver", f"{other}::solver"]).sides)
    assert result.claims[0].word == "not distinguishable"
    assert compare(select([f"{one}::solver", f"{other}::idler"]).sides).claims[0].word == "worse"
    with pytest.raises(ConfigError, match="no agent 'nobody'"):
        select([f"{one}::nobody"])
    copied = shutil.copytree(one, tmp_path / "copied")  # a run is not no worse than itself
    with pytest.raises(ConfigError, match="solver is given twice"):
        select([f"{one}::solver", f"{copied}::solver"])


async def test_every_input_is_named_by_its_digest(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a")
    (digest,) = select([str(run)]).inputs.values()
    assert digest in (run / "ledger.head").read_text()


async def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    run = await make_run(tmp_path / "a")
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RefusedError, match="the ledger is damaged"):
        select([str(run)])


async def test_trials_that_no_number_comes_from_are_refused(tmp_path: Path) -> None:
    trials = load_trials([await make_run(tmp_path / "a")]).trials.collect()
    graded = pl.col("score").is_not_null()
    spoilt = {
        "without a score in": [
            trials.with_columns(score=pl.when(graded).then(pl.lit(wrong, pl.Float64))) for wrong in (math.nan, 7, None)
        ],
        "with a score and no verdict": [trials.with_columns(outcome=pl.lit("infra_error"))],
        "not on the list": [trials.with_columns(outcome=pl.lit("splendid"))],
        "occurs 2 times": [pl.concat([trials, trials])],
        "no trials": [trials.head(0)],
    }
    file = tmp_path / "spoilt.parquet"
    for message, frames in spoilt.items():
        for frame in frames:
            save_trials(frame, file)
            with pytest.raises(ConfigError, match=message):
                select([str(file)])
    save_trials(trials, file)
    with pytest.raises(ConfigError, match="occurs 2 times"):  # as two runs, put together by agent
        select([str(tmp_path / "a" / "run"), str(file)], conditions=True)


async def test_other_limits_are_refused(tmp_path: Path) -> None:
    one, other = await make_run(tmp_path / "a"), await make_run(tmp_path / "b", limits={"steps": 3})
    with pytest.raises(RefusedError, match="other limits at task-0, task-1, task-2"):
        compare(select([f"{one}::solver", f"{other}::solver"]).sides)


async def test_another_version_of_proctor_is_noted(tmp_path: Path) -> None:
    one, other = await make_run(tmp_path / "a"), await make_run(tmp_path / "b", version="2")
    assert select([str(one)]).notes == ()
    (note,) = select([str(one), str(other)]).notes
    assert note.startswith("the runs were made by different versions of Proctor: 1 (")
