"""Pages made of other people's notebooks and records, opened in a real browser: nothing that they bring runs there.

Each piece of hostile HTML calls `ran(name)`. A plain page shows first that the browser does run every piece of them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from fsdplab.figures.outlook import OutlookTable, outlook_of
from fsdplab.figures.plotly_go import PLOTLY
from fsdplab.figures.report.page import comparison_page
from fsdplab.records import RunRecord, comparison_json
from fsdplab.records.summary import Link, Predicted, Traces
from fsdplab.sessions.spec import RunSpec
from fsdplab.teaching.authoring.course import CourseError
from fsdplab.teaching.site.build import build_site
from fsdplab.teaching.site.foreign_html import without_scripts
from tests.browser import CHROMIUM, needs_chromium, patient
from tests.test_cli_fuzz import sound_record

RAN = "window.ran=(window.ran||[]).concat"
CLICK_LINKS = """
for (const link of document.querySelectorAll('a'))
  if (!/html/.test(link.getAttribute('href'))) link.dispatchEvent(new MouseEvent('click', {bubbles: true}));
"""
# what runs when the page is opened, by name
AT_ONCE = {
    "script": f"<script>{RAN}('script')</script>",
    "two scripts": f"<scr<script></script>ipt>0</script><script>{RAN}('two scripts')</script>",
    "onerror": f"<img src=nowhere onerror=\"{RAN}('onerror')\">",
    "slashes": f"<img/src='nowhere'/onerror={RAN}('slashes')>",
    "svg": f"<svg onload=\"{RAN}('svg')\"><circle r=5 /></svg>",
    "svg script": f"<svg><script>{RAN}('svg script')</script></svg>",
    "details": f"<details open ontoggle=\"{RAN}('details')\">x</details>",
    "frame": "<iframe srcdoc=\"<script>parent.ran = (parent.ran || []).concat('frame')</script>\"></iframe>",
    "style in math": f"<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror={RAN}('"
                     "style in math')&gt;\"></table></mtext></math>",
    "no script": f"<noscript><p title=\"</noscript><img src=nowhere onerror={RAN}('no script')>\"></noscript>",
}  # fmt: skip
# what runs when it is clicked
LINKS = {
    "javascript": f"<a href=\"javascript:{RAN}('javascript')\">one</a>",
    "entities": f"<a href=\"java&#10;scr&#x69;pt:{RAN}('entities')\">two</a>",
    "onclick": f'<a href="#" onclick="{RAN}(\'onclick\')">three</a>',
}
FIGURE = {"data": [{"type": "scatter", "x": [0, 1], "y": [0, 1], "name": "<script>ran</script>"}]}


def in_browser(look: Any, *pages: Path, **context: Any) -> list[Any]:
    """What `look(page)` returns for each page; no page may open a dialog."""
    from playwright.sync_api import sync_playwright

    dialogs: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = patient(browser.new_context(**context).new_page())
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        found = []
        for each in pages:
            page.goto(each.as_uri())
            page.wait_for_load_state("load")
            found.append(look(page))
        browser.close()
    assert not dialogs
    return found


def ran(page: Any) -> set[str]:
    """The names of the pieces that ran: at once, and when every link of theirs was clicked."""
    page.evaluate(CLICK_LINKS)
    page.wait_for_timeout(300)
    return set(page.evaluate("window.ran || []"))


def plotly(figure: Any, fallback: str) -> nbformat.NotebookNode:
    return new_output("display_data", {PLOTLY: figure, "text/html": fallback, "text/plain": "[figure] a rising line"})


def hostile_notebook() -> nbformat.NotebookNode:
    """Every piece in Markdown, in each kind of output, and in the texts of a figure."""
    pieces = "\n\n".join([*AT_ONCE.values(), *LINKS.values()])
    layout = {"title": {"text": f"<a href=\"javascript:{RAN}('title')\">title</a>{AT_ONCE['onerror']}"}, "height": "x"}
    image = f'<svg xmlns="http://www.w3.org/2000/svg" onload="{RAN}(1)"><script>{RAN}(1)</script></svg>'
    outputs = [
        new_output("display_data", {"text/html": pieces, "text/plain": "x"}),
        new_output("display_data", {"image/svg+xml": image, "text/plain": AT_ONCE["onerror"]}),
        new_output("display_data", {"application/javascript": f"{RAN}(1)", "text/plain": AT_ONCE["script"]}),
        new_output("display_data", {"text/markdown": pieces}),
        new_output("display_data", {"image/png": f'x" onerror="{RAN}(1)', "text/plain": "x"}),
        new_output("stream", name="stdout", text=pieces),
        new_output("error", ename="E", evalue=pieces, traceback=[pieces]),
        plotly({**FIGURE, "layout": layout}, f"<img src=nowhere onerror=\"{RAN}('still')\">"),
        plotly("no figure", pieces),
    ]
    code = new_code_cell(f"what_was_real({AT_ONCE['script']!r})", execution_count=1, outputs=outputs)
    heading = f"# 01 {AT_ONCE['script']}\n\n> **{AT_ONCE['onerror']}**\n"
    linked = f'## {AT_ONCE["svg"]}\n\n[four](javascript:{RAN}(1)) ![x](nowhere"onerror="{RAN}(1))'
    return new_notebook(cells=[new_markdown_cell(heading), new_markdown_cell(linked), new_markdown_cell(pieces), code])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "executed").mkdir()
    nbformat.write(hostile_notebook(), folder / "executed" / "01_hostile.ipynb")
    nbformat.write(hostile_notebook(), folder / "executed" / "javascript:ran(1)#.ipynb")
    build_site(folder / "executed", folder / "pages")
    return folder / "pages"


@needs_chromium
def test_the_pieces_do_run_where_nothing_stops_them(tmp_path: Path) -> None:
    page = tmp_path / "plain.html"
    page.write_text("<!doctype html><body>" + "\n".join([*AT_ONCE.values(), *LINKS.values()]), encoding="utf-8")
    (found,) = in_browser(ran, page)
    assert found >= {*AT_ONCE, *LINKS} - {"style in math", "no script"}  # those run only behind a weak cleaner


@needs_chromium
@pytest.mark.parametrize("policy", [True, False], ids=["with the page's policy", "where the browser has no policies"])
def test_nothing_runs_that_an_executed_notebook_brings(site: Path, policy: bool) -> None:
    names = ("01_hostile.html", "index.html", "javascript:ran(1)#.html")

    def look(page: Any) -> set[str]:
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        return ran(page)

    found = in_browser(look, *(site / name for name in names), bypass_csp=not policy)
    assert found == [set()] * len(names)


@needs_chromium
def test_the_figure_of_a_hostile_notebook_is_a_picture(site: Path) -> None:
    def look(page: Any) -> int:
        return int(page.get_by_alt_text("a rising line").first.evaluate("image => image.naturalWidth"))

    assert in_browser(look, site / "01_hostile.html") == [848]


@needs_chromium
def test_the_links_lead_to_pages_of_odd_names(site: Path) -> None:
    def look(page: Any) -> str:
        page.locator("main table a").last.click()
        page.locator("nav.turn").first.wait_for()
        return str(page.url)

    (found,) = in_browser(look, site / "index.html")
    assert found.endswith("javascript%3Aran%281%29%23.html")


@needs_chromium
def test_the_policy_stops_what_a_cleaner_would_let_through(site: Path) -> None:
    added = f'<img src=nowhere onerror="{RAN}(1)"><iframe srcdoc="<script>parent.ran=[1]</script>"></iframe>'

    def look(page: Any) -> set[str]:
        page.evaluate(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(added)})")
        return ran(page)

    assert in_browser(look, site / "01_hostile.html") == [set()]


@pytest.mark.parametrize(
    "foreign,kept",
    [
        ('<b onclick="x()">a</b>', "<b>a</b>"), ("<script>x()</script>a", "a"), ("<style>p {}</style>a", "a"),
        ("<table><tr><td style='text-align:right;behavior:url(x)'>1</td></tr></table>",
         '<table><tbody><tr><td style="text-align:right;">1</td></tr></tbody></table>'),
        ('<a href="JaVaScRiPt:x()">a</a>', "<a>a</a>"), ('<a href="da\tta:text/html,x">a</a>', "<a>a</a>"),
        ('<a href="02_next.html#part" title="t">a</a>', '<a href="02_next.html#part" title="t">a</a>'),
        ('<img src="data:image/png;base64,aGk=" onerror=x>', '<img src="data:image/png;base64,aGk=">'),
        ("<base href=//evil><meta http-equiv=refresh content=0><link rel=stylesheet href=x>a", "a"),
        ("<form action=//evil><input name=password><button>a</button></form>", "a"),
        ("$a &lt; b$ &amp; c", "$a &lt; b$ &amp; c"),
    ],
)  # fmt: skip
def test_what_is_kept_of_foreign_html(foreign: str, kept: str) -> None:
    assert without_scripts(foreign).strip() == kept


@pytest.mark.parametrize("name", ["a\u202eb", "a\x1b[2J", "index", "a\nb"])
def test_a_notebook_whose_name_no_page_can_have_is_refused(tmp_path: Path, name: str) -> None:
    nbformat.write(hostile_notebook(), tmp_path / f"{name}.ipynb")
    with pytest.raises(CourseError, match="no page can have that name; rename it") as refused:
        build_site(tmp_path, tmp_path / "out")
    assert "\n" not in str(refused.value) and "\x1b" not in str(refused.value)


# ---- reports and the lab


def hostile(text: str) -> str:
    return f"{text}</script></noscript></title>{AT_ONCE['script']}{AT_ONCE['onerror']}'\"><b>"


def with_hostile_names(row: dict[str, Any]) -> dict[str, Any]:
    return {key: hostile(value) if key in ("unit", "name") else value for key, value in row.items()}


def hostile_record(folder: Path) -> RunRecord:
    """A record whose every text is hostile: strategy, units, notes, failure, names of machines."""
    sound = RunRecord.load(sound_record(folder / "sound"))
    tables = {name: [with_hostile_names(row) for row in rows] for name, rows in sound.tables.items()}
    environment = {"device": "cpu", "cpu": {"model": hostile("cpu")}, hostile("key"): hostile("value")}
    summary = replace(
        sound.summary,
        traces=Traces(2, {}, notes=(hostile("note"),)),
        link=Link(name=hostile("link")),
        predicted=Predicted(why_not=hostile("why")),
    )
    spec = {**sound.spec, "strategy": hostile("strategy"), "link": hostile("link")}
    return RunRecord(folder / "hostile", spec, environment, summary=summary, tables=tables).save()


@needs_chromium
def test_nothing_runs_on_a_report_of_hostile_names(tmp_path: Path) -> None:
    record, other = hostile_record(tmp_path), RunRecord.load(sound_record(tmp_path / "other"))
    page = tmp_path / "page.html"
    comparison = comparison_json([record, other])
    page.write_text(comparison_page(comparison, [record, other]), encoding="utf-8")

    def look(page: Any) -> tuple[set[str], Any]:
        for tab in page.locator("button[role=tab]").all():
            tab.click()
            page.wait_for_timeout(150)
        held = page.evaluate("JSON.parse(document.getElementById('comparison').textContent)")
        return ran(page), held["runs"][0]["strategy"]

    assert in_browser(look, page) == [(set(), hostile("strategy"))]


@pytest.fixture
def outlook_page(tmp_path: Path) -> Path:
    """What predicted runs look like in a notebook, with a remark that is a hostile text."""
    (row,) = outlook_of([RunSpec(strategy="full_shard", model="gpt-tiny", device="cpu")])
    page = tmp_path / "outlook.html"
    held = OutlookTable((dataclasses.replace(row, remark=hostile("remark")),))._repr_html_()
    page.write_text(f"<!doctype html><body>{held}", encoding="utf-8")
    return page


@needs_chromium
def test_nothing_runs_in_an_outlook(outlook_page: Path) -> None:
    assert hostile("remark").split("<")[0] in outlook_page.read_text(encoding="utf-8")
    assert in_browser(ran, outlook_page) == [set()]
