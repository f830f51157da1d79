"""`proctor compare` and `proctor plan` as a person or a pipeline calls them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from tests.analysis.sides import single

from proctor.cli.main import main
from proctor.runs.frame import save_trials

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW, SAME, WORSE = "-" * 8 + "+" * 92, "+" * 100, "-" * 8 + "+" * 92, "-" * 40 + "+" * 60
HEAVY = {"scipy", "statsmodels", "polars", "numpy", "pydantic", "rich", "jinja2"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, marks in (("old", OLD), ("new", NEW), ("same", SAME), ("worse", WORSE)):
        save_trials(single("bot", marks), tmp_path / f"{name}.parquet")
    save_trials(pl.concat([single("a", OLD), single("b", NEW)]), tmp_path / "both.parquet")
    save_trials(single("bot", NEW, limits="{}"), tmp_path / "other-limits.parquet")
    (tmp_path / "words.txt").write_text("no trials\n")
    return tmp_path


def say(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(list(arguments)) == code
    found = capsys.readouterr()
    return found.out or found.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    return json.loads(say(capsys, *arguments, "--json", code=code))


def test_two_files_of_one_agent_are_told_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = say(capsys, "compare", "old.parquet", "new.parquet")
    assert "new.parquet::bot is better than old.parquet::bot (+8.0 points" in text
    assert "only new.parquet::bot 8" in text
    assert re.search(r"old\.parquet::bot\s+bot 1\s+-\s+100\s+100\s+100\s+0\.920\s+-", text), "denominators are shown"


def test_no_word_that_was_not_earned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = say(capsys, "compare", "old.parquet", "same.parquet")
    assert "not distinguishable at this size" in text
    assert "to tell a difference of 5.0 points 80 % of the time it takes" in text
    assert not re.search(r"\b(better|worse)\b", text)


def test_two_agents_of_one_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "b is better than a" in say(capsys, "compare", "both.parquet")
    assert "a is worse than b" in say(capsys, "compare", "both.parquet::b", "both.parquet::a")


def test_runs_of_one_name_are_told_apart_by_their_paths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "deep").mkdir()
    save_trials(single("bot", NEW), folder / "deep" / "old.parquet")
    text = say(capsys, "compare", "old.parquet", "deep/old.parquet")
    assert f"{folder / 'deep' / 'old.parquet'}::bot is better than {folder / 'old.parquet'}::bot" in text
    assert "given twice" in say(capsys, "compare", "old.parquet", "./old.parquet", code=4)


def test_json_holds_what_is_needed_to_compute_it_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "compare", "both.parquet", "--seed", "7")
    assert (found["version"], found["seed"], found["level"], found["multiplicity"]) == (1, 7, 0.95, "none")
    assert found["inputs"]["both.parquet"].startswith("sha256:")
    (claim,) = found["claims"]
    assert claim["tests"][0]["formula"] == "mcnemar-exact"
    assert claim["difference"]["formula"] == "tango-score"
    assert claim["discordance"] == {"both": 92, "contender_only": 8, "baseline_only": 0, "neither": 0}
    assert claim["sentence"].startswith("b is better than a")
    assert found == as_json(capsys, "compare", "both.parquet", "--seed", "7")


@pytest.mark.parametrize(
    ("new", "margin", "code", "word"),
    [("new", "0.02", 0, "PASS"), ("worse", "0.02", 1, "FAIL"), ("same", "0.02", 3, "INCONCLUSIVE"),
     ("same", "0.05", 0, "PASS")],
)  # fmt: skip
def test_the_gate_is_an_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str], new: str, margin: str, code: int, word: str
) -> None:
    arguments = ("compare", "old.parquet", f"{new}.parquet", "--gate", f"margin={margin}")
    assert f"gate: {word}" in say(capsys, *arguments, code=code)
    assert as_json(capsys, *arguments, code=code)["gate"]["verdict"] == word.lower()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["old.parquet", "other-limits.parquet"], 5, "not comparable: other limits at task-000"),
        (["old.parquet"], 4, "nothing to compare with"),
        (["old.parquet", "old.parquet"], 4, "given twice"),
        (["old.parquet::nobody", "new.parquet"], 4, "there is no agent 'nobody'"),
        (["nowhere", "new.parquet"], 4, "no such file"),
        (["words.txt", "new.parquet"], 4, "not a Parquet file"),
        (["old.parquet", "new.parquet", "--gate", "2 points"], 4, "--gate"),
        (["old.parquet", "new.parquet", "--level", "95"], 4, "--level"),
        (["old.parquet", "new.parquet", "same.parquet", "--gate", "margin=0.1"], 4, "between two"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_compared(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert words in say(capsys, "compare", *arguments, code=code)


@pytest.mark.parametrize("verb", ["compare", "plan"])
def test_help_imports_nothing_heavy(verb: str) -> None:
    code = (
        f"import sys; from proctor.cli.main import main; main(['{verb}', '--help']);"
        f"print('HEAVY', sorted(set({sorted(HEAVY)!r}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in result.stdout


def test_a_missing_extra_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    text = say(capsys, "compare", "old.parquet", "new.parquet", code=5)
    assert text == "proctor: polars is not installed (pip install 'proctor[analysis]')\n"


def test_plan_in_all_directions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "3,876" in say(capsys, "plan", "--effect", "0.03")
    assert "13.2 points" in say(capsys, "plan", "--tasks", "200", "--cost-per-trial", "0.4")
    assert "audit 59 trials" in say(capsys, "plan", "--prevalence", "0.05")
    found = as_json(capsys, "plan", "both.parquet", "--effect", "0.05")
    assert [option["attempts"] for option in found["options"]] == [1]
    assert found["options"][0]["cost_usd"] is None, "no cost is on record"
    assert found["assumptions"]["source"].startswith("the records of a and b")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give --effect"),
        (["--budget", "100"], 4, "--cost-per-trial"),
        (["--effect", "2"], 4, "--effect"),
        (["--prevalence", "1"], 4, "--prevalence"),
        (["old.parquet", "--effect", "0.05"], 4, "1 agents are given"),
    ],
)
def test_what_cannot_be_planned(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert words in say(capsys, "plan", *arguments, code=code)
