"""The course as static pages: built from a notebook that a real kernel ran, opened in a real browser without network.

One small source stands for the course: text, a figure, a widget, an exercise with its stub, and the table of origins.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell

from fsdplab import figures
from fsdplab.figures.plotly_go import PLOTLY
from fsdplab.teaching import recorded
from fsdplab.teaching.__main__ import main
from fsdplab.teaching.authoring.course import CourseError
from fsdplab.teaching.core.glossary import terms
from fsdplab.teaching.site import build, stills
from fsdplab.teaching.site.build import MANIFEST, build_decks, build_site
from fsdplab.teaching.site.pages import WIDGET, WITHOUT_A_KERNEL, deck_of, lesson_of, page_of
from fsdplab.teaching.site.slides import SMALLEST, slides_of
from fsdplab.teaching.site.stills import add_stills
from tests.browser import CHROMIUM, needs_chromium, patient, pixel
from tests.live_site import Host

ROOT = Path(__file__).resolve().parents[1]
FIRST = "# 01 Small things\n\n*25 minutes. Before this: nothing.*\n\n> **Why is a page enough?**\n"
STUB, SOLUTION = 'answer("02.cards", ...)', 'answer("02.cards", 14)'  # of a lesson that imports no torch
RISING = """\
## A rising line

The word marsupial stands here only. See [root](GLOSSARY.md#root "what?"), [02](02_next.ipynb).
"""
DRAW = """\
from fsdplab.figures.plotly_go import go

figure = go.Figure(go.Scatter(x=[0, 1], y=[0, 1]), layout={"title": "a < b </script> c"})
figure.frames = [go.Frame(data=[go.Scatter(x=[0, 1], y=[1, 0])], name="turned")]
show(figure, alt="a line that rises")
"""


def source(number: str = "01", *cells: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A tagged source with one of everything."""
    solution, stub = new_code_cell(SOLUTION), new_raw_cell(STUB)
    solution.metadata.tags, stub.metadata.tags = ["solution"], ["stub"]
    teacher = new_markdown_cell("A remark for teachers only.")
    teacher.metadata.tags = ["teacher"]
    start = (
        "from fsdplab import teaching\nfrom fsdplab.teaching import answer, explore, show\n\n"
        'teaching.start(edition="teacher")'
    )
    return new_notebook(
        cells=[
            new_markdown_cell(FIRST.replace("01", number)),
            new_code_cell(start),
            new_markdown_cell(RISING),
            new_code_cell(DRAW),
            new_code_cell('explore(lambda ranks: f"{ranks} ranks", ranks=[1, 2])'),
            stub,
            solution,
            teacher,
            *cells,
            new_code_cell('teaching.what_was_real(losses="measured", card="emulated")'),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )


def write(folder: Path, **notebooks: nbformat.NotebookNode) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, notebook in notebooks.items():
        nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fsdplab", "course", "site", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the site of two lessons that the command ran, the executed notebooks)."""
    folder = tmp_path_factory.mktemp("site")
    sources = write(folder / "sources", **{"01_small": source(), "02_next": new_notebook(cells=[])})
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 02 What follows\n\nNothing.")]), sources / "02_next.ipynb")
    done = command(folder / "pages", "--source", sources, "--keep", folder / "executed")
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert re.search(r"01_small.ipynb \(teacher\): ran to its end.*index.html: 4 pages, \d\.\d MB", done.stdout, re.S)
    return folder / "pages", folder / "executed"


class Links(HTMLParser):
    """Every address that a page names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("href", "src")]


def test_every_address_of_every_page_is_a_file_of_the_site(made):
    pages, _ = made
    for page in pages.glob("*.html"):
        for address in Links(page.read_text(encoding="utf-8")).addresses:
            if not address.startswith(("data:", "#", "https:")):  # https: papers and documentation, to be followed
                assert (pages / address.partition("#")[0]).is_file(), (page.name, address)


def test_readers_see_the_learners_side(made):
    page = (made[0] / "01_small.html").read_text(encoding="utf-8")
    assert "A remark for teachers only" not in page
    assert page.index("...") < page.index('<details class="solution">')
    assert re.search(r'<details class="solution">.*?02.cards: passed.*?</details>', page, re.DOTALL)
    assert "teacher" not in page and "learner" in page and WITHOUT_A_KERNEL in page
    assert "my_fsdp" not in page, "the folder of the run that made the page says nothing to its readers"


def test_links_between_notebooks_lead_to_pages(made):
    page = (made[0] / "01_small.html").read_text(encoding="utf-8")
    assert '<a href="glossary.html#root" title="what?">root</a>' in page and '<a href="02_next.html">02</a>' in page
    glossary = (made[0] / "glossary.html").read_text(encoding="utf-8")
    assert all(f' id="{term.anchor}"' in glossary for term in terms())


def test_the_first_page_lists_the_lessons_and_where_they_ran(made):
    page = (made[0] / "index.html").read_text(encoding="utf-8")
    assert '<a href="01_small.html">01 Small things</a>' in page and "Why is a page enough?" in page
    assert re.search(r"ran on \d+ CPU cores.*PyTorch 2\.", page)


@needs_chromium
def test_a_figure_is_a_picture_of_the_page_and_of_the_kept_notebook(made):
    pages, executed = made
    page = (pages / "01_small.html").read_text(encoding="utf-8")
    assert page.count('alt="a line that rises"') == 1
    kept = nbformat.read(executed / "01_small.ipynb", as_version=4)
    (bundle,) = [
        output.data for cell in kept.cells for output in cell.get("outputs", ()) if PLOTLY in output.get("data", ())
    ]
    assert bundle["image/svg+xml"].startswith("<svg") and len(bundle[PLOTLY]["frames"]) == 1


def test_executed_notebooks_give_the_same_pages_without_a_kernel(made, tmp_path):
    pages, executed = made
    build_site(executed, tmp_path)
    for name in ("01_small.html", "glossary.html", "pages.css"):
        assert (tmp_path / name).read_bytes() == (pages / name).read_bytes()


@needs_chromium
def test_a_browser_shows_pages_and_slides_without_a_network_in_light_and_dark(made, tmp_path):
    from playwright.sync_api import sync_playwright

    build_decks(made[1], tmp_path)
    wrong, asked = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(17, 17, 17)")):
            page = patient(browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
            page.on("request", lambda request: asked.append(request.url))
            page.goto((made[0] / "index.html").as_uri())
            page.get_by_role("link", name="01 Small things").click()
            assert page.get_by_alt_text("a line that rises").evaluate("image => image.naturalWidth") > 800
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
            assert not page.get_by_text("02.cards: passed.").is_visible()
            page.locator("summary").click()
            assert page.get_by_text("02.cards: passed.").is_visible()
            page.get_by_role("link", name="02 What follows →").first.click()
            page.wait_for_url("**/02_next.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= 1280
            page.goto((tmp_path / "01_small.slides.html").as_uri())
            assert page.get_by_alt_text("a line that rises").evaluate("image => image.naturalWidth") > 800
            assert page.locator("section.slide").count() == 3
            heights = "[...document.querySelectorAll('.slide')].map(slide => slide.getBoundingClientRect().height)"
            assert page.evaluate(heights) == 3 * [800], "a screen each"
        browser.close()
    assert not wrong
    assert all(address.startswith(("file:", "data:")) for address in asked)


def test_a_page_allows_its_switch_and_no_other_script_and_slides_allow_none(made, tmp_path):
    build_decks(made[1], tmp_path)
    for page in made[0].glob("*.html"):
        text = page.read_text(encoding="utf-8")
        (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in text and text.count("<script") == 1 and "fsdplab-paper" in script
    for deck in tmp_path.glob("*.html"):
        assert "script-src 'none';" in deck.read_text(encoding="utf-8") and "<script" not in deck.read_text("utf-8")


LIGHT, DARK = "rgb(255, 255, 255)", "rgb(17, 17, 17)"
GROUND = "getComputedStyle(document.body).backgroundColor"


@needs_chromium
@pytest.mark.parametrize(("scheme", "first", "then"), [("light", LIGHT, DARK), ("dark", DARK, LIGHT)])
def test_the_switch_holds_for_all_pages_and_print_stays_light(made, browser, scheme, first, then):
    host, wrong = Host(made[0]), []
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    context.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page, other_tab = patient(context.new_page()), patient(context.new_page())
    other_tab.goto(f"{host.address}/02_next.html")
    page.goto(f"{host.address}/01_small.html")
    assert page.evaluate(GROUND) == first and page.evaluate("document.documentElement.scrollWidth") == 390
    page.get_by_role("button", name="dark page" if scheme == "light" else "light page").click()
    ground = tuple(map(int, re.findall(r"\d+", then)))
    assert page.evaluate(GROUND) == then and pixel(page.get_by_alt_text("a line that rises").screenshot()) == ground
    other_tab.wait_for_function(f"{GROUND} === '{then}'")
    for name in ("02_next.html", "glossary.html", "index.html"):
        page.goto(f"{host.address}/{name}")
        assert page.evaluate(GROUND) == then, name
    other_tab.get_by_role("button").click()
    page.go_back()
    page.wait_for_function(f"{GROUND} === '{first}'")
    for dark in (True, False):
        page.evaluate("dark => document.documentElement.className = dark ? 'dark' : 'light'", dark)
        page.emulate_media(media="print")
        assert page.evaluate(GROUND) == LIGHT
        page.emulate_media(media="screen")
    assert not wrong
    host.stop()


# ---- outputs


def _shown(kind: str, **content: object) -> str:
    cells = [new_markdown_cell("# A title"), new_code_cell("train()", outputs=[new_output(kind, **content)])]
    return page_of(new_notebook(cells=cells), "A title").partition("train")[2]


def test_a_stream_is_what_a_terminal_shows_in_the_end():
    pieces = [
        new_output("stream", name="stdout", text=text) for text in ("10 %\r50", " %\r100 %\nd\x1b[31mone\x1b[0m\n")
    ]
    page = page_of(new_notebook(cells=[new_code_cell("train()", outputs=pieces)]), "A title")
    assert "100 %\nd" in page and "50 %" not in page and "\x1b" not in page
    assert "&lt;b&gt;" in _shown("stream", name="stderr", text="<b>")


@pytest.mark.parametrize(
    "data,expected",
    [
        ({"text/html": "<b>x</b><script>evil()</script>", "text/plain": "x"}, "<b>x</b>"),
        ({"image/png": "aGk=", "text/plain": "a <plot>"}, 'alt="a &lt;plot&gt;" src="data:image/png;base64,aGk="'),
        (
            {PLOTLY: {}, "image/svg+xml": "<svg/>", "text/plain": "[figure] a line"},
            'alt="a line" src="data:image/svg+xml;base64,PHN2Zy8+"',
        ),
        ({PLOTLY: {}, "text/plain": "[figure] a line"}, "[figure] a line"),
        ({WIDGET: {}, "text/plain": "VBox()"}, WITHOUT_A_KERNEL),
    ],
)
def test_a_bundle_is_shown_in_its_richest_form_without_scripts(data, expected):
    made = _shown("display_data", data=data)
    assert expected in made and "evil" not in made


def test_what_does_not_fit_below_its_text_has_a_slide_of_its_own_and_is_drawn_smaller():
    """At 1280 x 720: a table of 60 rows was three screens high, of which two were below the edge."""
    text, long = new_markdown_cell("# A title\n\nWords."), new_markdown_cell("Words of a text. " * 40)

    def told(rows: int) -> nbformat.NotebookNode:
        table = f"<table>{rows * '<tr><td>1</td></tr>'}</table>"
        return new_code_cell("show(table)", outputs=[new_output("display_data", {"text/html": table})])

    def cut(*cells: nbformat.NotebookNode) -> list[int]:
        return [len(slide.cells) for slide in slides_of(cells)]

    assert cut(text, told(5)) == [2] and cut(text, told(60)) == [1, 1] and cut(long, told(5), told(12)) == [2, 1]
    assert [slide.scale for slide in slides_of([text, told(60)])] == [1.0, SMALLEST]
    (slide,) = slides_of([long, told(10)])
    assert SMALLEST < slide.scale < 1


def test_a_deck_has_a_slide_for_each_text_and_no_exercise():
    figure = new_output("display_data", {"image/svg+xml": "<svg/>", "text/plain": "[figure] a line"})
    notebook = source("01", new_markdown_cell("## Another\n\nText."), new_code_cell("draw()", outputs=[figure]))
    notebook.cells += [new_markdown_cell("A second text."), new_code_cell('check("02.cards")'), new_code_cell("last()")]
    deck = deck_of(notebook, "Small things")
    assert deck.count('<section class="slide"') == deck.count("</section>") == 4 and deck.count("<img") == 1
    assert "02.cards" not in deck and "teaching.start" not in deck and not re.search("(src|href)=.http", deck)


# ---- pictures of figures


def a_figure(**more: object) -> nbformat.NotebookNode:
    data = {PLOTLY: figures.step_time([recorded("lesson-07/early")])._repr_mimebundle_()[PLOTLY]} | more
    return new_notebook(cells=[new_code_cell("draw()", outputs=[new_output("display_data", data)])])


@needs_chromium
def test_a_figure_gets_an_svg_with_its_words_and_the_colours_of_light_and_dark_pages():
    notebook = a_figure(**{"text/plain": "[figure] bars of <step>"})
    assert add_stills(notebook) == 0
    svg = notebook.cells[0].outputs[0].data["image/svg+xml"]
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == "bars of <step>" and "prefers-color-scheme: dark" in svg
    assert "416 ms a step" in "".join(root.itertext())
    before = str(notebook)
    assert add_stills(notebook) == 0 and str(notebook) == before, "it is drawn once"


def test_a_figure_that_has_a_picture_keeps_it():
    notebook = a_figure(**{"image/png": "aGk="})
    assert add_stills(notebook) == 0 and "image/svg+xml" not in notebook.cells[0].outputs[0].data


def test_without_a_browser_or_with_one_that_fails_figures_are_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(stills, "browser", lambda: None)
    assert add_stills(a_figure()) == 1
    for script in ("exit 1", "echo nothing", "echo '<pre id=\"made\">[]</pre>'"):
        fails = tmp_path / "fails"
        fails.write_text(f"#!/bin/sh\n{script}\n")
        fails.chmod(0o755)
        monkeypatch.setattr(stills, "browser", lambda: str(fails))
        assert add_stills(a_figure()) == 1, script


def test_the_command_says_that_pictures_are_missing(tmp_path, monkeypatch, capsys):
    notebook = a_figure()
    notebook.cells.insert(0, new_markdown_cell("# 01 A title"))
    executed = write(tmp_path / "executed", **{"01_a": notebook})
    monkeypatch.setattr(stills, "browser", lambda: None)
    for command_name in ("site", "slides"):
        assert main([command_name, str(tmp_path / command_name), "--source", str(executed), "--executed"]) == 0
        assert "1 figures have no picture: no Chromium or Chrome was found" in capsys.readouterr().err


def test_title_minutes_and_question_are_read_from_the_first_text():
    lesson = lesson_of("x", new_notebook(cells=[new_markdown_cell("# Only a title\n\nAbove.")]))
    assert (lesson.title, lesson.minutes, lesson.question) == ("Only a title", "", "")
    with pytest.raises(CourseError, match="x.ipynb holds no text"):
        lesson_of("x", new_notebook(cells=[new_code_cell("1")]))


# ---- what is refused


def executed_source(number: str = "01") -> nbformat.NotebookNode:
    notebook = source(number)
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    return notebook


@pytest.fixture
def executed(tmp_path: Path) -> Iterator[Path]:
    yield write(tmp_path / "executed", **{"01_small": executed_source()})


def test_building_again_replaces_the_sites_own_files_and_no_other(executed, tmp_path):
    out = tmp_path / "out"
    build_site(executed, out)
    (out / "mine.html").write_text("mine")
    (executed / "01_small.ipynb").rename(executed / "03_renamed.ipynb")
    build_site(executed, out)
    assert (out / "mine.html").read_text() == "mine"
    assert (out / "03_renamed.html").exists() and not (out / "01_small.html").exists()


def test_a_file_of_somebody_elses_is_not_replaced(executed, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.html").write_text("mine")
    with pytest.raises(CourseError, match="already holds index.html, not written by `fsdplab course site`"):
        build_site(executed, out)
    assert [path.name for path in out.iterdir()] == ["index.html"] and (out / "index.html").read_text() == "mine"


@pytest.mark.parametrize("manifest", ["{", "[]", '{"files": 3}', '{"filed": []}'])
def test_a_damaged_list_of_files_is_refused(executed, tmp_path, manifest):
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST).write_text(manifest)
    with pytest.raises(CourseError, match="is no list of a site's files"):
        build_site(executed, out)


def test_a_list_of_files_that_names_others_folders_deletes_nothing(executed, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other.txt"
    out.mkdir()
    other.write_text("mine")
    (out / MANIFEST).write_text(json.dumps({"files": ["../other.txt", str(other), MANIFEST]}))
    build_site(executed, out)
    assert other.read_text() == "mine"


def test_a_site_that_is_too_large_says_which_page_is_the_heaviest(executed, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "MOST_BYTES", 1000)
    with pytest.raises(CourseError, match="more than 0 MB; the heaviest page is pages.css"):
        build_site(executed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_where_no_site_can_be_written_nothing_is_run(tmp_path, capsys):
    """Running the course takes minutes: the folder is looked at before."""
    sources = write(tmp_path / "sources", a=source("01", new_code_cell("open('ran', 'w')")))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.html").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out, reason in (("mine", "already holds a.html"), ("file", "is a file"), ("file/x", "Not a directory")):
        code, said = main(["site", str(tmp_path / out), "--source", str(sources)]), capsys.readouterr().err
        assert (code, said.count("\n")) == (2, 1) and reason in said, said
    assert not (sources / "ran").exists()


def test_a_full_disk_leaves_one_line_and_a_folder_that_can_be_built_again(executed, tmp_path, monkeypatch):
    out, written = tmp_path / "out", build.write_whole

    def full(path: Path, content: str) -> None:
        if path.name == "pages.css":
            raise OSError(28, "No space left on device")
        written(path, content)

    monkeypatch.setattr(build, "write_whole", full)
    with pytest.raises(CourseError, match="cannot be written to .*No space left on device"):
        build_site(executed, out)
    monkeypatch.undo()
    build_site(executed, out)
    assert (out / "pages.css").exists()


def test_the_files_that_are_looked_for_are_those_that_are_written(executed, tmp_path):
    site = build_site(executed, tmp_path / "out")
    assert {path.name for path in site.folder.iterdir()} == {"01_small.html", *build._BESIDE_LESSONS}


def test_sources_that_were_not_run_are_refused(tmp_path, capsys):
    sources = write(tmp_path / "sources", a=source())
    assert main(["site", str(tmp_path / "out"), "--source", str(sources), "--executed"]) == 2
    assert "a.ipynb was not executed" in capsys.readouterr().err
    out = tmp_path / "file"
    out.write_text("mine")
    with pytest.raises(CourseError, match="is a file; give a folder"):
        build_site(write(tmp_path / "executed", a=executed_source()), out)


def test_a_notebook_that_fails_leaves_no_site(tmp_path):
    failing = new_notebook(cells=[new_markdown_cell(FIRST), new_code_cell("1 / 0")], metadata=source().metadata)
    done = command(tmp_path / "out", "--source", write(tmp_path / "sources", a=failing))
    assert done.returncode == 1 and "ZeroDivisionError" in done.stdout and not any((tmp_path / "out").iterdir())
