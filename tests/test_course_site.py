"""The course as static pages: built from a notebook that a real kernel ran, opened in a real browser without network.

One small source stands for the course: text, a figure, a widget, an exercise with its stub, and the table of origins.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell

from fsdplab.teaching.__main__ import main
from fsdplab.teaching.authoring.course import CourseError
from fsdplab.teaching.site import build
from fsdplab.teaching.site.build import MANIFEST, build_site
from fsdplab.teaching.site.lesson import lesson_of
from fsdplab.teaching.site.outputs import WITHOUT_A_KERNEL, plain, shown
from tests.browser import CHROMIUM, needs_chromium, patient

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
    assert re.search(r"01_small.ipynb \(teacher\): ran to its end.*index.html: 5 pages, \d\.\d MB", done.stdout, re.S)
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
    assert page.index("stub") < page.index('<details class="solution">')
    assert re.search(
        r'<details class="solution">.*?<span class="mi">14</span>.*?02.cards: passed.*?</details>', page, re.DOTALL
    )
    assert "edition=</span>" not in page and "learner" in page
    assert "my_fsdp" not in page, "the folder of the run that made the page says nothing to its readers"


def test_links_between_notebooks_lead_to_pages(made):
    page = (made[0] / "01_small.html").read_text(encoding="utf-8")
    assert '<a href="glossary.html#root" title="what?">root</a>' in page and '<a href="02_next.html">02</a>' in page
    assert '<dt id="root">root</dt>' in (made[0] / "glossary.html").read_text(encoding="utf-8")


def test_a_figure_is_drawn_once_by_the_shared_script(made):
    pages, _ = made
    page = (pages / "01_small.html").read_text(encoding="utf-8")
    assert page.count('src="plotly.js"></script>') == 1 and len(page) < 100_000
    drawn = re.search(r'<div class="plot".*?<script type="application/json">(.*?)</script>', page, re.DOTALL)
    figure = json.loads(drawn.group(1))
    assert figure["layout"]["title"]["text"] == "a < b </script> c" and len(figure["frames"]) == 1
    assert 'aria-label="a line that rises"' in page and "<noscript>a line that rises</noscript>" in page
    assert "plotly.js" not in (pages / "02_next.html").read_text(encoding="utf-8")


def test_what_was_real_is_collected(made):
    page = plain((made[0] / "real.html").read_text(encoding="utf-8"))
    assert "01 Small things origin what measured losses" in page and "emulated card" in page
    assert re.search(r"ran on \d+ CPU cores.*PyTorch 2\.", page)


def test_executed_notebooks_give_the_same_pages_without_a_kernel(made, tmp_path):
    pages, executed = made
    build_site(executed, tmp_path)
    for name in ("01_small.html", "index.html", "search.js"):
        assert (tmp_path / name).read_bytes() == (pages / name).read_bytes()


@needs_chromium
def test_a_browser_shows_the_site_without_a_network(made):
    from playwright.sync_api import sync_playwright

    wrong, asked = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = patient(browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto((made[0] / "index.html").as_uri())
        page.get_by_role("link", name="01 Small things").click()
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        assert page.evaluate("document.querySelector('.plot')._transitionData._frames.length") == 1
        assert not page.get_by_text("02.cards: passed.").is_visible()
        page.locator("summary").click()
        assert page.locator("details.solution").inner_text().count("14")
        page.get_by_role("button", name="dark page").click()
        page.keyboard.press("/")
        page.keyboard.type("marsupial only")
        assert page.locator("#hits a").inner_text().startswith("01 Small things: A rising line")
        page.keyboard.press("Enter")
        page.wait_for_url("**/01_small.html#*")
        page.get_by_role("link", name="02 What follows →").first.click()
        page.wait_for_url("**/02_next.html")
        page.wait_for_function("document.documentElement.classList.contains('dark')")  # the choice of paper is kept
        page.get_by_label("Search the course").fill("<b>nothing")
        assert page.locator("#hits").inner_text() == "Nothing holds all of these words."
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        browser.close()
    assert not wrong
    assert all(address.startswith(("file:", "data:", "blob:")) for address in asked)


# ---- outputs


def _shown(kind: str, **content: object) -> str:
    return str(shown([new_output(kind, **content)]))


def test_a_stream_is_what_a_terminal_shows_in_the_end():
    pieces = [
        new_output("stream", name="stdout", text=text) for text in ("10 %\r50", " %\r100 %\nd\x1b[31mone\x1b[0m\n")
    ]
    notebook = new_notebook(cells=[new_markdown_cell("# A title"), new_code_cell("train()", outputs=pieces)])
    assert '<pre class="stream">100 %\ndone</pre>' in lesson_of("a_title", notebook).body
    assert "&lt;b&gt;" in _shown("stream", name="stderr", text="<b>")


@pytest.mark.parametrize(
    "data,expected",
    [
        ({"text/html": "<b>x</b><script>evil()</script>", "text/plain": "x"}, '<div class="rich"><b>x</b></div>'),
        ({"image/png": "aGk=\n", "text/plain": "a <plot>"}, 'src="data:image/png;base64,aGk=" alt="a &lt;plot&gt;"'),
        ({"image/svg+xml": "<svg/>"}, 'src="data:image/svg+xml;base64,PHN2Zy8+"'),
        ({"application/vnd.jupyter.widget-view+json": {}, "text/plain": "VBox()"}, WITHOUT_A_KERNEL),
        ({"text/plain": "  "}, ""),
        ({"application/x-unknown": "?"}, ""),
    ],
)
def test_a_bundle_is_shown_in_its_richest_form(data, expected):
    made = _shown("display_data", data=data)
    assert expected in made if expected else made == ""


def test_an_error_is_its_traceback_without_colours():
    assert _shown("error", ename="E", evalue="v", traceback=["\x1b[31mE\x1b[0m: <v>"]) == (
        '<pre class="error">E: &lt;v&gt;</pre>'
    )


def test_sections_are_what_stands_below_each_heading():
    texts = ("# Only a title\n\nAbove.", "## A & B\n\nBelow.", "## A & B\n\nAgain.")
    lesson = lesson_of("x", new_notebook(cells=[new_markdown_cell(text) for text in texts]))
    assert (lesson.number, lesson.title, lesson.minutes) == ("", "Only a title", "")
    found = [(part.heading, part.words.split()[-1], part.anchor) for part in lesson.sections]
    assert found == [("Only a title", "Above.", ""), ("A & B", "Below.", "a-b"), ("A & B", "Again.", "a-b-2")]
    assert '<h2 id="a-b-2">' in lesson.body and html.escape("A & B") in lesson.body


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
    with pytest.raises(CourseError, match="more than 0 MB; the heaviest page is 01_small"):
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
        if path.name == "search.js":
            raise OSError(28, "No space left on device")
        written(path, content)

    monkeypatch.setattr(build, "write_whole", full)
    with pytest.raises(CourseError, match="cannot be written to .*No space left on device"):
        build_site(executed, out)
    monkeypatch.undo()
    build_site(executed, out)
    assert (out / "search.js").exists()


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
