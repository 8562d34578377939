"""The two pages that run the library in the browser: their sources as archives, Pyodide's files, and the pages.

One plans a job; the other, the site's first page, begins with the strategy lab. Both run the library's own modules in
CPython compiled to WebAssembly (Pyodide). An archive holds the modules that answering needs, and nothing else. Until
Python has started, and where it cannot, a page shows the answer to its first choice, which was made by the same code
when the site was built.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup

import fsdplab
from fsdplab.common.files import read_file
from fsdplab.common.pythons import run_of
from fsdplab.figures import lab
from fsdplab.figures.lab.page import first_values
from fsdplab.figures.live.answer import answer
from fsdplab.figures.live.controls import controls
from fsdplab.figures.report.parts import in_script
from fsdplab.figures.style import ALARM, DARK_TEXT, FONT, LANE_COLOURS, TEXT
from fsdplab.teaching.authoring.course import CourseError

VERSION = "314.0.7"
CDN = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full/"
PAGE, SOURCES, CACHE = "planner.html", "planner-sources.zip", "planner-cache.js"
FIRST_PAGE, LAB_SOURCES = "index.html", "lab-sources.zip"
_PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
_OF_THE_PLANNER = ("planner.js", "planner.css")
_OF_THE_LAB = ("lab-worker.js", "lab.css")
_OF_BOTH = ("site.css",)
# beside the first page, which a site without these has, too
NAMES = (PAGE, *_OF_THE_PLANNER, *_OF_THE_LAB, *_OF_BOTH, SOURCES, LAB_SOURCES, CACHE, *_PYODIDE)
_LOADED_BYTES = 13_400_000  # of the pinned version's wasm and standard library, as the page counts them
_LARGEST_FILE = 10**8
_STILL = 760  # pixels of the drawings that are shown until Python has started
_DAY = (2020, 1, 1, 0, 0, 0)  # of every file in the archive, so that equal sources make equal archives


@dataclass(frozen=True)
class Pyodide:
    """Where the page gets Pyodide: an address that ends with a slash, or the files that are copied beside the page."""

    address: str
    files: dict[str, bytes]

    @property
    def counted_bytes(self) -> int:
        """How many bytes the page will have fetched when it is ready."""
        counted = (self.files.get(name, b"") for name in ("pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"))
        return sum(map(len, counted)) or _LOADED_BYTES


def pyodide(where: str | None = None) -> Pyodide:
    """Pyodide at an address, in a folder that has its files, or (None) the pinned version at its own CDN.

    Raises CourseError for a folder that lacks one.
    """
    if where is None or where.startswith(("https://", "http://")):
        return Pyodide(f"{(where or CDN).rstrip('/')}/", {})
    folder = Path(where)
    missing = [name for name in _PYODIDE if not (folder / name).is_file()]
    if missing:
        raise CourseError(
            f"--pyodide {where}: {missing[0]} is not there; give the folder of the npm package pyodide {VERSION}, or"
            " the address of such files"
        )
    try:
        return Pyodide("./", {name: read_file(folder / name, _LARGEST_FILE) for name in _PYODIDE})
    except OSError as error:
        raise CourseError(f"--pyodide {error.filename}: {error.strerror or error}") from error


def live_files(source: Pyodide, course: str) -> dict[str, str | bytes]:
    """File name -> content of all that the two pages need; `course` is the HTML of what the first page has below the
    strategy lab.
    """
    planner_archive, lab_archive = _archive("fsdplab.figures.live.loaded"), _archive("fsdplab.figures.lab.loaded")
    page = partial(_rendered, mark=hashlib.sha256(_verbatim("planner.js").encode()).hexdigest()[:32])
    first = first_values()
    files: dict[str, str | bytes] = {
        FIRST_PAGE: page(
            "lab.html",
            title="The course",
            course=course,
            first=first,
            first_json=in_script(json.dumps(first)),
            setup=_setup(source, LAB_SOURCES, lab_archive),
        ),
        PAGE: page(
            "planner.html",
            title="Plan a job",
            controls=controls(),
            shown=answer({}, _STILL),
            setup=_setup(source, SOURCES, planner_archive),
        ),
        SOURCES: planner_archive,
        LAB_SOURCES: lab_archive,
        **{name: page(name) for name in (*_OF_THE_PLANNER, *_OF_THE_LAB, *_OF_BOTH)},
        **source.files,
    }
    kept = [*files, "./"]
    kept += [] if source.files else [f"{source.address}{name}" for name in _PYODIDE]
    digest = hashlib.sha256(b"".join(each.encode() if isinstance(each, str) else each for each in files.values()))
    return files | {CACHE: page(CACHE, version=digest.hexdigest()[:16], kept=json.dumps(kept))}


def _setup(source: Pyodide, sources: str, archive: bytes) -> str:
    """What a page's script has to know: where Python and the archive are, and how many bytes both have."""
    return json.dumps(
        {"pyodide": source.address, "sources": sources, "bytes": source.counted_bytes + len(archive), "cache": CACHE}
    )


def _archive(lists_files: str) -> bytes:
    """The sources that a module lists when it is run, as they lie beside the package's folder."""
    listed = subprocess.run(run_of(lists_files), capture_output=True, text=True, check=True).stdout
    root, content = Path(fsdplab.__file__).parents[1], io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in map(Path, listed.splitlines()):
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix(), _DAY)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _templates() -> Environment:
    """The pages' own templates, the report's, whose style they share, and the instrument's script."""
    folders = [PackageLoader("fsdplab.teaching.site"), PackageLoader("fsdplab.figures.report")]
    made = Environment(
        loader=ChoiceLoader([*folders, FileSystemLoader(Path(lab.__file__).parent)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(
        verbatim=_verbatim, ink=TEXT, ink_on_dark=DARK_TEXT, font=Markup(FONT), lanes=LANE_COLOURS, alarm=ALARM
    )
    return made


def _rendered(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(values) + "\n"


def _verbatim(file: str) -> Markup:
    made = _templates()
    assert made.loader is not None
    return Markup(made.loader.get_source(made, file)[0])
