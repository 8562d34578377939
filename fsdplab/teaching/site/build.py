"""`build_site` and `build_decks`: executed notebooks -> a folder of pages or slides without a network or a server.

Every page is made before the first file is written. The folder keeps a list of the site's own files: building again
replaces these, and nothing that somebody else put beside them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from fsdplab.common.files import write_whole
from fsdplab.common.places import shared_folder
from fsdplab.common.words import plural
from fsdplab.teaching.authoring.course import CourseError, notebooks_in, read
from fsdplab.teaching.site.live import FIRST_PAGE, NAMES, Pyodide, live_files
from fsdplab.teaching.site.pages import Lesson, deck_of, lesson_of, page_of, styles, text_html, text_page
from fsdplab.teaching.site.stills import add_stills

MOST_BYTES = 40_000_000
MANIFEST = "site.json"
_BESIDE_LESSONS = (FIRST_PAGE, "glossary.html", "pages.css", MANIFEST)
_FIRST_PAGE = """# Fully sharded training, from one collective to a plan for thousands of GPUs

A course of {count} that run on any laptop with two CPU cores. Each one asks a question, lets you predict the
answer, and measures it on real processes. These pages are the notebooks after a run: text, code and figures.
{where}

{live}| lesson | question | minutes |
|---|---|---|
{rows}

## Run it yourself

In a clone of the project: the first command installs the lab, the second opens the notebooks with exercises to solve.

```
pip install -e ".[lab]"
fsdplab lab
```
"""


@dataclass(frozen=True)
class Site:
    """A site that was written: its folder, its pages in order, its size in bytes, and its figures without a picture."""

    folder: Path
    pages: tuple[Path, ...]
    nbytes: int
    without_picture: int


def build_site(executed: Path | str, out: Path | str, where: str = "", live: Pyodide | None = None) -> Site:
    """Write the site of every executed notebook in a folder to `out`; `where` says on which machine they ran, and
    `live` from where the pages that run in the browser get Python: without, there are none.

    Raises CourseError for notebooks that cannot be read, were not executed or have odd names, for a folder that holds
    files of somebody else's under the names of the site's, and for a site of more than 40 MB.
    """
    read_in = [_executed(path) for path in notebooks_in(executed)]
    without_picture = sum(add_stills(notebook) for _, notebook in read_in)
    files = _files(read_in, where, live)
    sizes = {name: len(content.encode() if isinstance(content, str) else content) for name, content in files.items()}
    copied = sum(map(len, live.files.values())) if live else 0
    if sum(sizes.values()) - copied > MOST_BYTES:
        heaviest = max(sizes, key=sizes.__getitem__)
        raise CourseError(
            f"the site would take {sum(sizes.values()) / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f} MB; the heaviest"
            f" page is {heaviest} with {sizes[heaviest] / 1e6:.1f} MB: show fewer or smaller figures there"
        )
    return _write(Path(out), files, without_picture)


def build_decks(executed: Path | str, out: Path | str) -> Site:
    """Write slides of every executed notebook in a folder to `out`, a file each that needs no other.

    Raises CourseError as `build_site` does.
    """
    read_in = [_executed(path) for path in notebooks_in(executed)]
    without_picture = sum(add_stills(notebook) for _, notebook in read_in)
    files = {f"{lesson.name}.slides.html": deck_of(notebook, lesson.title) for lesson, notebook in read_in}
    return _write(Path(out), _listed(files), without_picture)


def _write(folder: Path, files: Mapping[str, str | bytes], without_picture: int) -> Site:
    """Write the files, and delete those of an earlier build that are no longer among them."""
    earlier = _earlier(folder, files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in earlier - set(files):
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise CourseError(f"the site cannot be written to {folder} ({error.strerror or error})") from error
    pages = tuple(folder / name for name in files if name.endswith(".html"))
    return Site(folder, pages, sum((folder / name).stat().st_size for name in files), without_picture)


def _listed(files: Mapping[str, str | bytes]) -> dict[str, str | bytes]:
    """The files with their list, which is written first: what a full disk leaves half written is known by it."""
    return {MANIFEST: json.dumps({"files": sorted([*files, MANIFEST])}, indent=1) + "\n", **files}


def check_out(out: Path | str, sources: Path | str, live: bool = False) -> None:
    """CourseError where the site of a folder of notebooks could not be written to `out`: before they run for minutes.

    The folder is made. `live`: with the pages that run in the browser.
    """
    folder, own = Path(out), (*_BESIDE_LESSONS, *(NAMES if live else ()))
    _earlier(folder, [*(f"{path.stem}.html" for path in notebooks_in(sources)), *own])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CourseError(f"the site cannot be written to {folder} ({error.strerror or error})") from error


def _executed(path: Path) -> tuple[Lesson, NotebookNode]:
    """Read a notebook that was run; CourseError for any other."""
    if not path.name.isprintable() or f"{path.stem}.html" in (*_BESIDE_LESSONS, *NAMES):
        raise CourseError(f"a notebook is named {path.name!r}, and no page can have that name; rename it")
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if code and not any(cell.get("execution_count") or cell.get("outputs") for cell in code):
        raise CourseError(
            f"{path.name} was not executed: its cells have no outputs; `fsdplab course site OUT` executes sources, and"
            " --executed takes a folder of notebooks that were run"
        )
    return lesson_of(path.stem, notebook), notebook


def _earlier(folder: Path, files: Iterable[str]) -> set[str]:
    """The names that an earlier build left; CourseError where a file would replace somebody else's."""
    if folder.exists() and not folder.is_dir():
        raise CourseError(f"{folder} is a file; give a folder to write the site to")
    manifest = folder / MANIFEST
    own: set[str] = set()
    if manifest.is_file():
        try:
            listed = json.loads(manifest.read_text(encoding="utf-8"))["files"]
            own = {name for name in listed if isinstance(name, str) and name == Path(name).name}
        except (ValueError, KeyError, TypeError, OSError):
            raise CourseError(
                f"{manifest} is no list of a site's files; give an empty folder, or delete that file"
            ) from None
    foreign = sorted(name for name in files if name not in own and (folder / name).exists())
    if foreign:
        raise CourseError(
            f"{folder} already holds {', '.join(foreign[:5])}, not written by `fsdplab course site`; give an empty"
            " folder"
        )
    return own


def _files(read_in: Sequence[tuple[Lesson, NotebookNode]], where: str, live: Pyodide | None) -> dict[str, str | bytes]:
    """File name -> content."""
    lessons, files = [lesson for lesson, _ in read_in], dict[str, str | bytes]()
    for place, (lesson, notebook) in enumerate(read_in):
        before = lessons[place - 1] if place else None
        after = lessons[place + 1] if place + 1 < len(lessons) else None
        beside = {"before": before, "after": after, "live": live is not None}
        files[f"{lesson.name}.html"] = page_of(notebook, lesson.title, **beside)
    first = _first_page(lessons, where, live is not None)
    files[FIRST_PAGE] = text_page(first, "The course", live=live is not None)
    glossary = (shared_folder("notebooks") / "GLOSSARY.md").read_text(encoding="utf-8")
    files["glossary.html"] = text_page(glossary, "Glossary", live=live is not None)
    files["pages.css"] = styles()
    if live:
        files |= live_files(live, text_html(f"#{first}"))  # a section below the strategy lab
    return _listed(files)


def _first_page(lessons: Sequence[Lesson], where: str, live: bool) -> str:
    """The Markdown of the first page: what the course is, and its lessons."""
    rows = []
    for lesson in lessons:
        link = f"[{_cell(lesson.title)}]({lesson.address})"
        rows.append(f"| {link} | {_cell(lesson.question)} | {lesson.minutes} |")
    planner = "[Plan a job](planner.html) in this browser: does a model fit, and how long does a step take?\n\n"
    return _FIRST_PAGE.format(
        count=plural(len(lessons), "notebook"), where=where, live=planner if live else "", rows="\n".join(rows)
    )


def _cell(text: str) -> str:
    """A text in a cell of a Markdown table, without signs that would end the cell or the link."""
    return "".join(f"\\{sign}" if sign in "|[]" else sign for sign in text)
