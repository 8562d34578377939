"""The page that plans a job in the browser: its sources as an archive, Pyodide's files, and the page itself.

The page runs the library's own planner, in CPython compiled to WebAssembly (Pyodide). Its archive holds the modules
that answering needs, and nothing else. Until Python has started, and where it cannot, the page shows the plan of the
default choice, which was made by the same code when the site was built.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fsdplab
from fsdplab.common.files import read_file
from fsdplab.common.pythons import run_of
from fsdplab.figures.live.answer import answer
from fsdplab.figures.live.controls import controls
from fsdplab.teaching.authoring.course import CourseError

VERSION = "314.0.7"
CDN = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full/"
PAGE, SOURCES, CACHE = "planner.html", "planner-sources.zip", "planner-cache.js"
_PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
NAMES = (PAGE, "planner.js", "planner.css", SOURCES, CACHE, *_PYODIDE)
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


def live_files(source: Pyodide, page: Callable[..., str]) -> dict[str, str | bytes]:
    """File name -> content of all that the page needs; `page` renders a template of the site."""
    archive = _archive()
    setup = {"pyodide": source.address, "sources": SOURCES, "bytes": source.counted_bytes + len(archive)}
    files: dict[str, str | bytes] = {
        PAGE: page(
            "planner.html", title="Plan a job", controls=controls(), shown=answer({}, _STILL), setup=json.dumps(setup)
        ),
        "planner.js": page("planner.js"),
        "planner.css": page("planner.css"),
        SOURCES: archive,
        **source.files,
    }
    kept = [*files, "site.css", "site.js", "search.js", "./"]
    kept += [] if source.files else [f"{source.address}{name}" for name in _PYODIDE]
    digest = hashlib.sha256(b"".join(each.encode() if isinstance(each, str) else each for each in files.values()))
    return files | {CACHE: page(CACHE, version=digest.hexdigest()[:16], kept=json.dumps(kept))}


def _archive() -> bytes:
    """The sources as they lie beside the package's folder."""
    listed = subprocess.run(run_of("fsdplab.figures.live.loaded"), capture_output=True, text=True, check=True).stdout
    root, content = Path(fsdplab.__file__).parents[1], io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in map(Path, listed.splitlines()):
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix(), _DAY)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()
