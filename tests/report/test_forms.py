"""The other forms of a report: Markdown, JSON, CSV, Parquet, JUnit; and the pictures by themselves."""

from __future__ import annotations

import csv
import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.made import MadeRun, make_run

from proctor.analysis.report import charts
from proctor.cli.main import main
from proctor.runs.frame import load_trials
from proctor.runs.reporting import Request, write_report

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "=cmd|'/c calc'!A1 <script>x</script> [a](javascript:1) @everyone | `x` \x1b[31m"


def write(tmp_path: Path, form: str, made: MadeRun | None = None) -> str:
    run = make_run(tmp_path / "run", made)
    path = write_report(Request((run,), tmp_path / f"r.{form}", form)).path  # type: ignore[arg-type]
    return path.read_text(encoding="utf-8")


def test_markdown_has_tables_of_equal_width(tmp_path: Path) -> None:
    lines = write(tmp_path, "md").splitlines()
    tables = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len(tables) > 20
    for above, line in pairwise(lines):
        if above.startswith("|") and line.startswith("|"):
            assert above.replace("\\|", "").count("|") == line.replace("\\|", "").count("|"), line


def test_markdown_shows_hostile_text_as_text(tmp_path: Path) -> None:
    text = write(tmp_path, "md", MadeRun(name=HOSTILE, dataset=HOSTILE, skill={HOSTILE: 0.5, "b": 0.5}))
    assert "<script" not in text
    assert "](javascript" not in text
    assert "\x1b" not in text
    assert "@everyone" not in text


def test_json_is_one_document_with_everything(tmp_path: Path) -> None:
    document = json.loads(write(tmp_path, "json"))
    assert document["version"] == 1
    assert document["trust"]["standing"] == "sound"
    assert document["aggregate"]["planned"] == 8
    assert document["comparison"]["claims"][0]["sentence"]
    assert sum(len(cell) for row in document["matrix"]["rows"] for cell in row["cells"]) == 8


def test_csv_has_a_row_for_each_planned_trial_and_no_formulas(tmp_path: Path) -> None:
    made = MadeRun(name=HOSTILE, text=HOSTILE, odd={0: "planned"})
    rows = list(csv.DictReader(write(tmp_path, "csv", made).splitlines()))
    assert len(rows) == 8
    assert rows[0]["task"].startswith("'=cmd")
    assert {row["outcome"] for row in rows} >= {"planned"}
    assert rows[0]["score"] == ""


def test_parquet_can_be_reported_on_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = write_report(Request((run,), tmp_path / "r.parquet", "parquet")).path
    assert load_trials([path]).inputs[0].trials == 8


def test_junit_tells_failures_from_errors_and_never_passes_what_was_not_graded(tmp_path: Path) -> None:
    made = MadeRun(text=HOSTILE + "\x00\ufffe", odd={0: "infra_error", 1: "planned", 2: "resolved", 3: "unresolved"})
    root = ElementTree.fromstring(write(tmp_path, "junit", made))
    cases = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert len(list(root.iter("testcase"))) == 8
    assert root.get("errors") == "1"
    assert root.get("skipped") == "1"
    kinds = [tag for tags in cases.values() for tag in tags] or []
    assert root.get("failures") == str(sum(1 for case in root.iter("testcase") if case.find("failure") is not None))
    assert set(kinds) <= {"failure", "error", "skipped"}


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e12))
def test_a_round_end_is_not_below_and_not_far_above(value: float) -> None:
    end = charts.nice(value)
    assert end == 0.0 if value == 0 else value * (1 - 1e-9) <= end <= value * 1.6 or value < 1e-300


@given(st.floats(), st.floats())
def test_a_picture_never_leaves_its_cell(value: float, other: float) -> None:
    if math.isnan(value):
        return
    assert 0 <= float(charts.UNIT.x(value).rstrip("%")) <= 100


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("<>&\"'\x00\ud800"), max_size=40))
def test_pictures_are_well_formed_whatever_the_names(name: str) -> None:
    spots = [charts.Spot(name, place, (0.3, 0.1, math.inf), (0.5, 0.2, 0.9)) for place in range(3)]
    drawn = charts.scatter(name, name, spots, name, charts.short)
    line = charts.Series(name, 1, ((1.0, 0.5, 0.2, 0.8), (2.0, 0.6, 0.3, 0.9)), dashed=True)
    for picture in (drawn, charts.curves(name, name, [line], [1, 2], name), charts.interval_bar(0.5, 0.2, 0.9)):
        ElementTree.fromstring(str(picture))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0042, "0.0042"), (12.34, "12.3"), (1234, "1,234"), (56_789, "56.8k"), (1.25e6, "1.25M"),
     (math.inf, "∞")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert charts.short(value) == text


def test_the_command_writes_by_the_name_of_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    for name, start in (
        ("a.html", "<!doctype"),
        ("a.md", "# "),
        ("a.json", "{"),
        ("a.xml", "<?xml"),
        ("a.csv", "run_id"),
    ):
        assert main(["report", str(run), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    assert main(["report", str(run), "-o", str(tmp_path / "x"), "--format", "md"]) == 0
    assert "report: " in capsys.readouterr().out
    assert main(["report", str(run), "-o", str(tmp_path / "x.docx")]) == 4
    assert not (tmp_path / "x.docx").exists()


def test_the_command_names_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere"), "-o", str(tmp_path / "r.html")]) == 4
    assert "nowhere" in capsys.readouterr().err


def test_the_command_warns_of_broken_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "trials" / "t0" / "diff.json").write_text("{}")
    assert main(["report", str(run), "-o", str(tmp_path / "r.html")]) == 0
    assert "records are not as the ledger has them" in capsys.readouterr().err
