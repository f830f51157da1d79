"""The report in a real browser: nothing runs or loads that should not, it fits a phone, and everybody can read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.report.chromium import BROWSER, Page, browser
from tests.report.made import MadeRun, make_run
from tests.report.test_page import HOSTILE

from proctor.runs.formats import FindingEntry
from proctor.runs.reporting import Request, write_report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (the page is looked at in a real browser)"),
]

FAINT = """(() => {
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const bright = ([r, g, b]) => [r, g, b].map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const rgba = (text) => { const v = text.match(/[\\d.]+/g).map(Number); return v.length > 3 ? v : [...v, 1]; };
  const behind = (node) => { for (; node; node = node.parentElement) {
    const c = rgba(getComputedStyle(node).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255]; };
  const faint = [];
  for (const node of document.querySelectorAll('body *')) {
    const words = [...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
    if (!words || node.closest('script,style,title,desc') || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), ink = node.closest('svg') ? style.fill : style.color;
    const [light, dark] = [bright(rgba(ink)), bright(behind(node))].sort((a, b) => b - a);
    const ratio = (light + .05) / (dark + .05);
    if (ratio < 4.5) faint.push(`${node.tagName} ${node.className.baseVal ?? node.className}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(faint)];
})()"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    odd = {0: "infra_error", 1: "planned", 2: "agent_limit", 3: "disqualified", 4: "verifier_error"}
    found = [FindingEntry(kind="restored", detail="a file was put back", severity="note")]
    run = make_run(
        folder / "run", MadeRun(tasks=8, attempts=3, skill={"one": 0.8, "two": 0.5}, odd=odd, findings=found)
    )
    return write_report(Request((run,), folder / "report.html", "html", "embed")).path


@pytest.mark.parametrize("pages", ["embed", "beside"])
def test_hostile_records_run_nothing_and_load_nothing(tmp_path: Path, tab: Page, pages: str) -> None:
    text = " ".join(HOSTILE)
    run = make_run(tmp_path / "run", MadeRun(text=text, dataset=text, name=text, tasks=2))
    path = write_report(Request((run,), tmp_path / "r.html", "html", pages)).path  # type: ignore[arg-type]
    seen = [path, *sorted(tmp_path.glob("r_trials/*.html"))[:2]]
    assert len(seen) == (3 if pages == "beside" else 1)
    for one in seen:
        tab.open(one)
        assert tab.value("typeof window.pwned") == "undefined"
        assert tab.requests() == []
        assert tab.complaints() == []
        assert tab.value("document.body.innerText.includes('onerror=')")


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_the_page_is_no_wider_than_the_screen(tab: Page, page: Path, width: int) -> None:
    tab.open(page, width=width)
    assert tab.value("document.documentElement.scrollWidth") <= width


def test_links_and_captions_have_room_on_a_phone(tab: Page, page: Path) -> None:
    tab.open(page, width=390)
    squeezed = "[...document.querySelectorAll('.stacks td a')].filter((one) => one.getBoundingClientRect().height > 60)"
    assert tab.value("document.querySelectorAll('.stacks td a').length") > 2
    assert tab.value(f"{squeezed}.length") == 0, "a link on more than two lines has been squeezed into a column"
    wide = "[...document.querySelectorAll('caption')].filter((one) => one.getBoundingClientRect().right > 390)"
    assert tab.value(f"{wide}.length") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_all_words_stand_out_enough(tab: Page, page: Path, dark: bool) -> None:
    tab.open(page, dark=dark)
    tab.value("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert tab.value(FAINT) == []


def test_print_is_light_and_leaves_out_what_is_of_no_use_on_paper(tab: Page, page: Path) -> None:
    tab.open(page, dark=True, media="print")
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert tab.value("document.querySelector('table.matrix').getClientRects().length") == 1


@pytest.mark.parametrize("script", [True, False])
def test_a_link_opens_the_trial_with_or_without_script(tab: Page, page: Path, script: bool) -> None:
    tab.open(page, fragment="#t7", script=script)
    assert tab.value("document.getElementById('t7').getClientRects().length") == 1


def test_the_filter_leaves_the_tasks_that_fit(tab: Page, page: Path) -> None:
    tab.open(page)
    tab.value("document.forms[0].text.value = '0003'")
    tab.value("document.forms[0].text.dispatchEvent(new Event('input', {bubbles: true}))")
    shown = "[...document.querySelectorAll('table.matrix tbody tr')].filter((row) => !row.hidden).length"
    assert tab.value(shown) == 1
    assert tab.value("document.querySelector('.filter output').textContent") == "1 of 8 tasks"


def test_without_script_there_is_no_filter_that_does_nothing(tab: Page, page: Path) -> None:
    tab.open(page, script=False)
    assert tab.value("document.querySelector('.filter').getClientRects().length") == 0


def test_the_first_stop_of_the_keyboard_skips_to_the_result(tab: Page, page: Path) -> None:
    tab.open(page)
    tab.send("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert tab.value("document.activeElement.className") == "skip"


def test_a_screen_reader_finds_tables_with_names_and_pictures_with_words(tab: Page, page: Path) -> None:
    tab.open(page, width=390)
    tab.send("Accessibility.enable")
    nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            roles.setdefault(node["role"]["value"], []).append((node.get("name") or {}).get("value", ""))
    assert len(roles["table"]) > 8
    assert all(roles["table"])
    assert len(roles["rowheader"]) > 20
    assert all(name for name in roles.get("image", []) + roles.get("img", []))
    assert [name for name in roles["link"] if "attempt 1: resolved" in name]
    headings = [node for node in nodes if node.get("role", {}).get("value") == "heading" and not node.get("ignored")]
    assert len(headings) > 8
