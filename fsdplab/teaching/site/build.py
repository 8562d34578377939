"""`build_site`: executed notebooks -> a folder of pages that needs no network and no server.

Every page is made before the first file is written. The folder keeps a list of the site's own files: building again
replaces these, and nothing that somebody else put beside them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fsdplab.common.files import write_whole
from fsdplab.figures.report.parts import in_script
from fsdplab.figures.style import DARK_TEXT, FONT, LANE_COLOURS, TEXT
from fsdplab.teaching.authoring.course import CourseError, notebooks_in, read
from fsdplab.teaching.core.glossary import terms
from fsdplab.teaching.site.foreign_html import mark_of
from fsdplab.teaching.site.lesson import Lesson, Section, code_colours, lesson_of
from fsdplab.teaching.site.live import NAMES, Pyodide, live_files

MOST_BYTES = 15_000_000
MANIFEST = "site.json"
_BESIDE_LESSONS = (
    "index.html", "glossary.html", "real.html", "site.css", "site.js", "search.js", "plotly.js", MANIFEST,
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A site that was written: its folder, its pages in order, and its size in bytes."""

    folder: Path
    pages: tuple[Path, ...]
    nbytes: int


def build_site(executed: Path | str, out: Path | str, where: str = "", live: Pyodide | None = None) -> Site:
    """Write the site of every executed notebook in a folder to `out`; `where` says on which machine they ran, and
    `live` from where the planner's page gets Python: without, there is no such page.

    Raises CourseError for notebooks that cannot be read, were not executed or have odd names, for a folder that holds
    files of somebody else's under the names of the site's, and for a site of more than 15 MB.
    """
    lessons = [_lesson(path) for path in notebooks_in(executed)]
    files = _files(lessons, where, live)
    nbytes = sum(len(content.encode() if isinstance(content, str) else content) for content in files.values())
    if nbytes - sum(map(len, live.files.values() if live else ())) > MOST_BYTES:
        heaviest = max(lessons, key=lambda lesson: len(lesson.body))
        raise CourseError(
            f"the site would take {nbytes / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f} MB; the heaviest page is"
            f" {heaviest.name} with {len(heaviest.body) / 1e6:.1f} MB: show fewer or smaller figures there"
        )
    folder = Path(out)
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
    return Site(folder, pages, nbytes)


def check_out(out: Path | str, sources: Path | str, live: bool = False) -> None:
    """CourseError where the site of a folder of notebooks could not be written to `out`: before they run for minutes.

    The folder is made. `live`: with the planner's page.
    """
    folder, own = Path(out), (*_BESIDE_LESSONS, *(NAMES if live else ()))
    _earlier(folder, [*(f"{path.stem}.html" for path in notebooks_in(sources)), *own])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CourseError(f"the site cannot be written to {folder} ({error.strerror or error})") from error


def _lesson(path: Path) -> Lesson:
    if not path.name.isprintable() or f"{path.stem}.html" in (*_BESIDE_LESSONS, *NAMES):
        raise CourseError(f"a notebook is named {path.name!r}, and no page can have that name; rename it")
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if code and not any(cell.get("execution_count") or cell.get("outputs") for cell in code):
        raise CourseError(
            f"{path.name} was not executed: its cells have no outputs; `fsdplab course site OUT` executes sources, and"
            " --executed takes a folder of notebooks that were run"
        )
    return lesson_of(path.stem, notebook)


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


def _files(lessons: Sequence[Lesson], where: str, live: Pyodide | None) -> dict[str, str | bytes]:
    """File name -> content."""
    from plotly.offline import get_plotlyjs

    mark = mark_of(f"{lesson.body}{lesson.origins}" for lesson in lessons)
    page = partial(_rendered, mark=mark, live=live is not None)
    files: dict[str, str | bytes] = {
        f"{lesson.name}.html": page(
            "lesson.html",
            lesson=lesson,
            lessons=lessons,
            before=lessons[place - 1] if place else None,
            after=lessons[place + 1] if place + 1 < len(lessons) else None,
            title=lesson.label,
        )
        for place, lesson in enumerate(lessons)
    }
    files["index.html"] = page("index.html", lessons=lessons, title="The course")
    files["glossary.html"] = page("glossary.html", terms=terms(), title="Glossary")
    files["real.html"] = page("real.html", lessons=lessons, where=where, title="What was real")
    files["site.css"] = str(_rendered("site.css", code_colours=Markup(code_colours())))
    files["site.js"] = _verbatim("plots.js") + _verbatim("site.js")
    files["search.js"] = f"const PAGES = {in_script(json.dumps(_index(lessons), separators=(',', ':')))};\n"
    files["plotly.js"] = get_plotlyjs()
    files |= live_files(live, page) if live else {}
    # the list comes first: what a full disk leaves half written is known as the site's own
    return {MANIFEST: json.dumps({"files": sorted([*files, MANIFEST])}, indent=1) + "\n", **files}


def _index(lessons: Sequence[Lesson]) -> list[dict[str, Any]]:
    """What the search looks through: every section of every page, and every term."""
    pages = [(lesson.page, lesson.label, lesson.sections) for lesson in lessons]
    pages += [("glossary.html", "Glossary", tuple(Section(term.anchor, term.word, term.meaning) for term in terms()))]
    return [
        {"page": page, "title": title, "sections": [vars(part) for part in sections]} for page, title, sections in pages
    ]


def _templates() -> Environment:
    """The site's own templates, and the report's, whose tables and figures it shares."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader("fsdplab.teaching.site"), PackageLoader("fsdplab.figures.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(verbatim=_verbatim, ink=TEXT, ink_on_dark=DARK_TEXT, font=Markup(FONT), lanes=LANE_COLOURS)
    return made


def _rendered(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(values) + "\n"


def _verbatim(file: str) -> Markup:
    made = _templates()
    assert made.loader is not None
    return Markup(made.loader.get_source(made, file)[0])
