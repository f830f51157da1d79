"""The HTML report: hostile text stays text, numbers have denominators, links lead somewhere, trust is told by rules."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.report.made import MadeRun, make_run

from proctor.analysis.report.model import Block, Story, StoryStep, StoryTest
from proctor.analysis.report.page import render_trial
from proctor.common import ConfigError
from proctor.runs.formats import FindingEntry, RunLock
from proctor.runs.frame import load_trials, save_trials
from proctor.runs.lock import relock
from proctor.runs.reporting import Request, write_report

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "\"><svg onload='window.pwned=1'>",
    "'><a href=javascript:window.pwned=1>x</a>",
    "</style><style>*{display:none}</style>",
    "--><!--</pre></details></table>",
    "{{ 7*7 }}{% raw %}${7*7}",
    "&lt;script&gt;&#60;script&#62;",
    "]]><![CDATA[<x>",
    "http://example.invalid/track.png",
)


class Outline(HTMLParser):
    """Tags with their attributes' names, ids and addresses: what a text must not be able to change."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.shape: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shape.append(f"{tag} {' '.join(name for name, _ in attrs)}")
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("href", "src", "srcset", "action", "data", "poster", "xlink:href"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def report(tmp_path: Path, made: MadeRun | None = None, *, pages: str = "auto", name: str = "run") -> Path:
    run = make_run(tmp_path / name, made)
    return write_report(Request((run,), tmp_path / f"{name}.html", "html", pages)).path  # type: ignore[arg-type]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_a_record_never_becomes_markup(tmp_path: Path, text: str) -> None:
    finding = [FindingEntry(kind=text, detail=text, severity="note")]
    calm = [FindingEntry(kind="calm", detail="calm", severity="note")]
    skill = {text: 0.5, f"{text}2": 0.5}
    hostile = MadeRun(text=text, dataset=text, name=text, findings=finding, skill=skill, tasks=2)
    plain = MadeRun(text="calm > /etc/x", findings=calm, skill={"calm": 0.5, "calm2": 0.5}, tasks=2)
    page = report(tmp_path, hostile, name="hostile").read_text(encoding="utf-8")
    reference = report(tmp_path, plain, name="plain").read_text(encoding="utf-8")
    shape = Outline(page).shape
    # What is said may call for another row or table, but never for an element that we do not make.
    assert set(shape) <= set(Outline(reference).shape)
    assert (shape.count("script "), shape.count("style ")) == (1, 1)


texts = st.text(st.characters(codec="utf-8") | st.sampled_from("<>&\"'`={}%\x00\x1b\u202e\u2028\ud800\r"), max_size=60)


def a_story(text: str) -> Story:
    return Story(
        trial_id=text, run_id=text, task=text, agent=text, attempt=1, outcome="resolved", detail=f"d{text}",
        facts=((text, text),), steps=(StoryStep(1, "agent", f"a{text}", (Block("output", text, f"l{text}"),)),),
        left_out=0, changes=(text,), verdict=text, verdict_facts=(text,), findings=((text, text, text),),
        tests=(StoryTest(text, text, text, True, "n"),), rooms=((text, ((text, text),)),), intact=True,
    )  # fmt: skip


@given(texts)
@settings(max_examples=150)
def test_the_page_of_a_trial_has_one_shape_whatever_it_says(text: str) -> None:
    page = render_trial(a_story(text), "report.html")
    page.encode("utf-8")
    assert Outline(page).shape == Outline(render_trial(a_story("calm"), "report.html")).shape
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)


def test_nothing_is_loaded_and_only_our_own_script_and_style_may_run(tmp_path: Path) -> None:
    page = report(tmp_path).read_text(encoding="utf-8")
    outline = Outline(page)
    assert all(link.startswith(("#", "data:,")) for link in outline.links)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    for tag in ("script", "style"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(inside) == 1
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1].replace("&#39;", "'")


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    one, two = (write_report(Request((run,), tmp_path / name / "r.html", "html")).path for name in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_several_processes_make_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.runs.reading.PARALLEL_FROM", 1)
    made = MadeRun(
        tasks=5, odd={2: "infra_error", 3: "planned"}, findings=(FindingEntry(kind="k", detail="d", severity="review"),)
    )
    run = make_run(tmp_path / "run", made)
    (run / "trials" / sorted(one.name for one in (run / "trials").iterdir())[1] / "trajectory.json").write_text("{")
    found = []
    for workers in (1, 2):
        written = write_report(Request((run,), tmp_path / "r.html", "html", "beside", workers=workers))
        assert written.folder is not None
        found.append((written.path.read_bytes(), {one.name: one.read_bytes() for one in written.folder.iterdir()}))
    assert found[0] == found[1]
    assert len(found[0][1]) == 8
    assert b"cannot be read" in found[0][0]


def test_the_headline_has_interval_and_denominators(tmp_path: Path) -> None:
    text = Outline(report(tmp_path, MadeRun(odd={0: "infra_error", 1: "planned"})).read_text(encoding="utf-8")).text
    assert "1 of 4" in text
    assert "1 infra_error" in text
    assert "1 planned" in text
    assert re.search(r"\d+\.\d to \d+\.\d %", text)
    assert "rate if all excluded had failed, or had been resolved" in text


@pytest.mark.parametrize("pages", ["embed", "beside"])
def test_every_mark_of_the_matrix_leads_to_its_trial(tmp_path: Path, pages: str) -> None:
    page = report(tmp_path, pages=pages)
    outline = Outline(page.read_text(encoding="utf-8"))
    trials = [link for link in outline.links if re.search(r"#t\d+$|_trials/", link)]
    assert len(set(trials)) == 8
    for link in trials:
        assert outline.ids[link[1:]] == 1 if link.startswith("#") else (page.parent / link).is_file()
    assert max(outline.ids.values()) == 1


def test_links_between_sections_lead_somewhere(tmp_path: Path) -> None:
    outline = Outline(report(tmp_path).read_text(encoding="utf-8"))
    for link in outline.links:
        assert not link.startswith("#") or link[1:] in outline.ids, link


def test_without_trials_nothing_leads_nowhere(tmp_path: Path) -> None:
    page = report(tmp_path, pages="none")
    assert not (tmp_path / "run_trials").exists()
    assert "all is well" not in Outline(page.read_text(encoding="utf-8")).text.replace("all is well: ", "")


def test_a_folder_with_foreign_files_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "run_trials").mkdir()
    keep = tmp_path / "run_trials" / "thesis.html"
    keep.write_text("years of work")
    with pytest.raises(ConfigError, match="thesis"):
        report(tmp_path, pages="beside")
    assert keep.exists()


def test_pages_of_an_earlier_report_are_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request = Request((run,), tmp_path / "r.html", "html", "beside")
    write_report(request)
    (tmp_path / "r_trials" / "00099.html").write_text("old")
    assert write_report(request).told == 8
    assert not (tmp_path / "r_trials" / "00099.html").exists()


def trust_of(tmp_path: Path, made: MadeRun | None = None) -> tuple[str, str]:
    run = make_run(tmp_path / "run", made)
    written = write_report(Request((run,), tmp_path / "r.json", "json"))
    assert written.report is not None
    trust = json.loads(written.path.read_text())["trust"]
    return trust["standing"], " ".join([*trust["broken"], *trust["reservations"]])


def test_whole_records_are_sound(tmp_path: Path) -> None:
    assert trust_of(tmp_path) == ("sound", "")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (MadeRun(in_place=True), "in the candidate's own room"),
        (MadeRun(network="open"), "open network"),
        (MadeRun(findings=[FindingEntry(kind="k", detail="d", severity="review")]), "ask for a review"),
        (MadeRun(odd={0: "infra_error"}), "are in no rate"),
    ],
)
def test_what_weakens_the_numbers_is_a_reservation(tmp_path: Path, made: MadeRun, why: str) -> None:
    standing, said = trust_of(tmp_path, made)
    assert standing == "reservations"
    assert why in said


def test_a_changed_record_breaks_trust(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    findings = run / "trials" / "t0" / "findings.json"
    findings.write_bytes(findings.read_bytes() + b"\n")
    page = write_report(Request((run,), tmp_path / "r.html", "html")).path.read_text(encoding="utf-8")
    assert "Not to be trusted" in page
    assert "t0" in page


def test_a_damaged_ledger_breaks_trust(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"attempt":1', '"attempt":2', 1))
    with pytest.raises(ConfigError, match="ledger"):
        write_report(Request((run,), tmp_path / "r.html", "html"))


def test_an_unreadable_record_breaks_trust_and_stays_in_the_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "trials" / "t0" / "trajectory.json").write_text("{")
    written = write_report(Request((run,), tmp_path / "r.html", "html"))
    assert written.report is not None
    assert written.report.trust.standing == "broken"
    assert written.report.aggregate.planned == 8


def test_parquet_alone_is_reported_with_a_reservation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    save_trials(load_trials([run]).trials, tmp_path / "trials.parquet")
    written = write_report(Request((tmp_path / "trials.parquet",), tmp_path / "r.html", "html"))
    assert written.report is not None
    assert written.report.trust.standing == "reservations"
    assert written.report.causes is None
    assert "no records to judge trials by" in written.path.read_text(encoding="utf-8")


def test_two_agents_are_compared_in_outcome_and_behaviour(tmp_path: Path) -> None:
    outline = Outline(report(tmp_path, MadeRun(tasks=12, attempts=2)).read_text(encoding="utf-8"))
    assert "Change of behaviour" in outline.text
    assert "against one" in outline.text
    assert "pass^k" in outline.text


def test_behaviour_is_compared_between_versions_of_one_harness_only(tmp_path: Path) -> None:
    made = MadeRun(tasks=4, harnesses={"two": "other"})
    outline = Outline(report(tmp_path, made).read_text(encoding="utf-8"))
    assert "between versions of one harness; these are loop and other" in outline.text
    assert "Measures of behaviour" not in outline.text


def test_why_models_and_harnesses_cannot_be_told_apart_is_said(tmp_path: Path) -> None:
    skill = {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5}
    folders = [
        make_run(tmp_path / name, MadeRun(tasks=3, skill=skill, run_id=name, harnesses={"b": "x", "d": "x"}))
        for name in "pq"
    ]
    for folder, model, digest in ((folders[0], "m", "sha256:1"), (folders[1], "m", "sha256:2")):
        lock = json.loads((folder / "run.json").read_text())
        for agent in lock["agents"]:
            agent["model"]["name"] = model if agent["label"] in "ab" else "n"
        lock["tasks"][0]["image_digest"] = digest
        relock(folder, RunLock.model_validate(lock))
    written = write_report(Request(tuple(folders), tmp_path / "r.html", "html", "none"))
    assert "cannot be told apart here: trials: not comparable" in written.path.read_text()


def test_an_unknown_baseline_is_refused_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="one, two"):
        write_report(Request((run,), tmp_path / "r.html", "html", baseline="three"))


def test_the_baseline_is_the_one_asked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    written = write_report(Request((run,), tmp_path / "r.html", "html", baseline="two"))
    assert written.report is not None
    assert written.report.comparison is not None
    assert written.report.comparison.claims[0].baseline == "two"


def test_conditions_have_columns_of_their_own(tmp_path: Path) -> None:
    from tests.analysis.frames import frame, trial

    from proctor.analysis.aggregate import aggregate
    from proctor.analysis.report.matrix import build_matrix

    rows = [trial(f"t{number}", "resolved", agent=agent) for number in range(3) for agent in ("a", "b")]
    rows += [trial(f"t{number}", "unresolved", condition="hard") for number in range(2)]
    trials = frame(rows)
    matrix = build_matrix(trials.lazy(), aggregate(trials.lazy()))
    assert matrix.agents[:3] == ("a", "b", "a, hard")
    first, _, last = matrix.rows
    assert [[mark.condition for mark in cell] for cell in first.cells[:3]] == [["plain"], ["plain"], ["hard"]]
    assert [len(cell) for cell in last.cells[:3]] == [1, 1, 0]
    assert not first.differs, "a condition is no agent"
    assert not first.unsolved
