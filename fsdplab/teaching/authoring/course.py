"""Editions: one tagged source notebook gives a teacher and a learner edition.

The sources in `notebooks/` are the teacher edition as they stand: CI and teachers run them unchanged. Tags say what
differs. `solution` cells are for the teacher only; so are `teacher` cells (remarks, extra checks). A `stub` is what the
learner gets in place of the solution that follows it; in the source it is a *raw* cell, which no runner executes, and
the learner edition turns it into code. An exercise's cell holds its name only, `%%exercise 05.shard`, and a comment:
`read` puts the stub and the reference of the exercise's file in its place. The start cell says `edition="teacher"`,
and the build rewrites that one word.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_raw_cell
from nbformat.validator import normalize

from fsdplab.common.files import read_file, try_folder, write_whole
from fsdplab.teaching.core.course_state import EDITIONS
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.registry import find, register_beside
from fsdplab.teaching.core.workspace import WorkspaceError, has_code

DROPPED = {"learner": ("solution", "teacher"), "teacher": ("stub",)}
EDITION_TAGS = ("solution", "stub", "teacher")
OTHER_TAGS = (
    "raises-exception",
    "hide-input",
    "hide-output",
    "hide-cell",
    "remove-input",
    "remove-output",
    "remove-cell",
    "nbval-skip",
    "nbval-ignore-output",
    "nbval-check-output",
    "nbval-raises-exception",
    "nbval-test-listed",
)
STARTS = 'edition="teacher"'
MOST_BYTES = 300_000
_LARGEST_FILE = 10**8  # bytes of an executed notebook
AUTHORS_ONLY = ("conftest.py", "README.md")
HELPERS = (".txt", ".csv", ".json", ".png", ".svg", ".py", ".md")  # what goes along with the notebooks


class CourseError(ValueError):
    """The sources cannot be built as asked; the message names notebooks and cells."""


@dataclass(frozen=True)
class Built:
    """The result of a build: the edition and its notebooks, in order."""

    edition: str
    notebooks: tuple[Path, ...]


def build_course(
    source_dir: Path | str,
    out_dir: Path | str,
    edition: str = "learner",
    change: Callable[[str, NotebookNode], NotebookNode] | None = None,
) -> Built:
    """Write one edition of every notebook in `source_dir` to `out_dir`, outputs stripped.

    `change(file name, notebook)` returns what is written instead of a notebook. CourseError lists every wrong tag by
    notebook and cell, and is raised too where a file would be overwritten: a learner's work may be in it.
    """
    if edition not in EDITIONS:
        raise CourseError(f"unknown edition {edition!r}; expected one of: {', '.join(EDITIONS)}")
    sources, target = sources_in(source_dir), Path(out_dir)
    try_folder(target)
    present = [path.name for path, _ in sources if (target / path.name).exists()]
    if present:
        others = f" and {len(present) - 1} more" if len(present) > 1 else ""
        raise CourseError(
            f"{target} already holds {present[0]}{others}, perhaps a learner's work; give an empty folder"
        )
    built = {}
    for path, notebook in sources:
        written = edition_of(notebook, edition)
        built[path.name] = change(path.name, written) if change else written
    target.mkdir(parents=True, exist_ok=True)
    _copy_helpers(Path(source_dir), target)
    _write(built, target)
    return Built(edition, tuple(target / name for name in built))


def _write(notebooks: Mapping[str, NotebookNode], target: Path) -> None:
    """Write every notebook to a folder, or none: on a full disk, and after Ctrl-C, those that were written go again.

    Some of them would pass for the course of a learner who comes back.
    """
    written = []
    try:
        for name, notebook in notebooks.items():
            path = target / name
            write_whole(path, nbformat.writes(notebook) + "\n")
            written.append(path)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def sources_in(directory: Path | str) -> list[tuple[Path, NotebookNode]]:
    """Read the notebooks of a folder in order of name, and register its exercises.

    CourseError where there are none, and for errors in their tags and exercises.
    """
    register_beside(Path(directory))
    sources, complaints = [], []
    for path in notebooks_in(directory):
        notebook = read(path)
        sources.append((path, notebook))
        complaints += structure_complaints(path.name, notebook)
    if complaints:
        raise CourseError("\n".join(complaints))
    return sources


def notebooks_in(directory: Path | str) -> list[Path]:
    """Return the notebooks of a folder in order of name; CourseError where there are none."""
    notebooks = sorted(path for path in Path(directory).glob("*.ipynb") if not path.name.startswith("."))
    if not notebooks:
        raise CourseError(f"{directory} holds no notebook (*.ipynb); give the folder of the course's sources")
    return notebooks


def _copy_helpers(source: Path, target: Path) -> None:
    """Copy small files that a teacher put beside the notebooks: a text, a picture, a folder of exercises."""
    if (source / "exercises").is_dir():
        shutil.copytree(source / "exercises", target / "exercises", dirs_exist_ok=True)
    for path in source.iterdir():
        is_helper = path.suffix in HELPERS and path.name not in AUTHORS_ONLY
        if is_helper and path.is_file():
            shutil.copy2(path, target / path.name)


def read(path: Path) -> NotebookNode:
    """Read a notebook in the present format; CourseError where the file is no notebook."""
    try:
        content = json.loads(read_file(path, _LARGEST_FILE), parse_constant=_no_number)
        _check_format(content)
        # before it is made a notebook: the library's errors on one of another shape say nothing of the file
        _, sound = normalize(content)
        nbformat.validate(sound)
        text = json.dumps(sound, ensure_ascii=False)
        text.encode()  # ValueError for halves of signs, which could not be written again
        notebook = nbformat.reads(text, as_version=4)
    except (nbformat.ValidationError, OSError, RecursionError, ValueError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise CourseError(f"{path.name} is not a valid notebook: {why:.200}") from error
    cells = []
    for cell in notebook.cells:
        cells += _with_exercise(cell)
    notebook.cells = cells
    return notebook


def _with_exercise(cell: NotebookNode) -> list[NotebookNode]:
    """Return an exercise's cell as its stub and its solution; any other cell as it is.

    A cell of an unknown exercise stays as it is too.
    """
    if cell.cell_type != "code":
        return [cell]
    solution_source = solved(cell.source)
    if solution_source == cell.source:
        return [cell]
    head = cell.source.partition("\n")[0]
    stub_source = find(exercise_named(cell.source), Exercise).stub.rstrip()
    stub = new_raw_cell(f"{head}\n{stub_source}")
    stub.update(id=f"{cell.id[:50]}-stub", metadata={**cell.metadata, "tags": ["stub"]})
    solution = nbformat.from_dict(cell)
    solution.update(source=solution_source, metadata={**cell.metadata, "tags": ["solution"]})
    return [stub, solution]


def solved(source: str) -> str:
    """Return the source of a cell that names an exercise and holds comments only, with the reference in their place.

    Any other source is returned as it is.
    """
    head = source.partition("\n")[0]
    try:
        reference = find(exercise_named(source), Exercise).reference
    except (WorkspaceError, LookupError):
        return source
    return f"{head}\n{reference.rstrip()}"


def exercise_named(source: str) -> str:
    """Return the id of the exercise that a cell of comments names; LookupError for any other cell."""
    head, _, body = source.partition("\n")
    if not head.startswith("%%exercise") or has_code(body):
        raise LookupError("this cell names no exercise, or holds code of its own")
    return head.removeprefix("%%exercise").strip()


def _no_number(name: str) -> None:
    """Refuse NaN and infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def _check_format(content: object) -> None:
    """Raise ValueError unless this is a notebook of a format that the library reads, and its cells have a kind each."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, a notebook is an object")
    major, minor = content.get("nbformat", 0), content.get("nbformat_minor", 0)
    are_numbers = type(major) is int and type(minor) is int
    if not are_numbers or major != 4 or not 0 <= minor <= 100:
        raise ValueError(f"its format is {major!r:.40}.{minor!r:.40}, expected 4.x: save it again in JupyterLab")
    cells = content.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError("it holds no list of cells")
    if not all(isinstance(cell.get("id", ""), str) for cell in cells):
        raise ValueError("the id of a cell is no text")
    for cell in cells:
        kind = cell.get("cell_type")
        if kind not in ("code", "markdown", "raw"):
            raise ValueError(f"a cell is of the kind {kind!r:.40}, expected code, markdown or raw")


def tags_of(cell: NotebookNode) -> tuple[str, ...]:
    """Return a cell's tags."""
    return tuple(cell.metadata.get("tags", ()))


def is_tagged(notebook: NotebookNode) -> bool:
    """Return whether this is a source: some cell carries an edition's tag, and it was not built as an edition."""
    if "edition" in notebook.metadata.get("fsdplab", {}):
        return False
    return any(set(EDITION_TAGS) & set(tags_of(cell)) for cell in notebook.cells)


def edition_of(notebook: NotebookNode, edition: str) -> NotebookNode:
    """Return one edition of a source notebook: the cells that stay, stubs as code, outputs and widget state gone."""
    dropped_tags = set(DROPPED[edition])
    built = nbformat.from_dict(notebook)
    built.cells = []
    for cell in notebook.cells:
        if not dropped_tags & set(tags_of(cell)):
            built.cells.append(_in_edition(cell, edition))
    built.metadata.pop("widgets", None)
    built.metadata["fsdplab"] = {"edition": edition}
    return built


def _in_edition(cell: NotebookNode, edition: str) -> NotebookNode:
    """Return a copy of a cell as the edition has it."""
    copied = nbformat.from_dict(cell)
    if "stub" in tags_of(cell) and cell.cell_type == "raw":
        copied.cell_type = "code"
    copied.metadata["slideshow"] = {"slide_type": _slide_of(copied)}
    if copied.cell_type == "code":
        source = copied.source.replace(STARTS, f'edition="{edition}"')
        copied.update(outputs=[], execution_count=None, source=source)
    return copied


def _slide_of(cell: NotebookNode) -> str:
    """Return what `jupyter nbconvert --to slides` makes of a cell.

    A heading begins a slide, other text one below it; code stands below its text.
    """
    if cell.cell_type != "markdown":
        return "-"
    has_heading = re.search(r"^#{1,2} ", cell.source, re.MULTILINE)
    return "slide" if has_heading else "subslide"


def structure_complaints(name: str, notebook: NotebookNode) -> list[str]:
    """Return the errors in a source's tags and exercises, one line each; empty if it can be built."""
    complaints = [f"{name}, cell {number}: {line}" for number, line in _cell_complaints(notebook.cells)]
    starts = sum(cell.source.count(STARTS) for cell in notebook.cells if cell.cell_type == "code")
    if is_tagged(notebook) and starts != 1:
        complaints.append(
            f"{name}: expected one start cell with {STARTS}, found {starts}; the build rewrites it for learners"
        )
    return complaints


def _cell_complaints(cells: Sequence[NotebookNode]) -> Iterator[tuple[int, str]]:
    """Yield (number of the cell, complaint) for the errors in tags and exercises."""
    known_tags = (*EDITION_TAGS, *OTHER_TAGS)
    following_cells = [*cells, None][1:]
    for number, (cell, following) in enumerate(zip(cells, following_cells, strict=True), 1):
        tags = tags_of(cell)
        for tag in tags:
            if tag not in known_tags:
                yield number, f"unknown tag {tag!r}; expected one of: {', '.join(known_tags)}"
        if len(set(tags) & set(EDITION_TAGS)) > 1:
            yield number, f"has the tags {', '.join(tags)}; a cell has at most one of: {', '.join(EDITION_TAGS)}"
        if "stub" in tags and cell.cell_type != "raw":
            yield (
                number,
                f"a stub is a raw cell, so that the source runs as the teacher edition; this one is {cell.cell_type}",
            )
        if "stub" in tags and (following is None or "solution" not in tags_of(following)):
            yield number, "a stub without its solution; put the cell tagged solution right after it"
        for complaint in _exercise_complaints(cell):
            yield number, complaint


def _exercise_complaints(cell: NotebookNode) -> Iterator[str]:
    """Yield a complaint where an exercise's cell names one that there is not."""
    first = cell.source.partition("\n")[0]
    if cell.cell_type == "markdown" or not first.startswith("%%exercise"):
        return
    try:
        find(first.split(maxsplit=1)[-1].strip(), Exercise)
    except (WorkspaceError, LookupError) as error:
        yield str(error)


def check_sources(source_dir: Path | str) -> list[str]:
    """Return every complaint about a folder of sources: tags and exercises, and what must not be kept in them."""
    complaints = []
    register_beside(Path(source_dir))
    for path in notebooks_in(source_dir):
        notebook = read(path)
        complaints += structure_complaints(path.name, notebook)
        complaints += _weight_complaints(path, notebook)
    return complaints


def _weight_complaints(path: Path, notebook: NotebookNode) -> Iterator[str]:
    """Yield a complaint about outputs, widget state or size: a source is kept without them."""
    nbytes = path.stat().st_size
    if nbytes > MOST_BYTES:
        yield f"{path.name}: {nbytes:,} bytes; a source stays under {MOST_BYTES:,}"
    if "widgets" in notebook.metadata:
        yield f"{path.name}: holds saved widget state; clear it (Settings, Save Widget State Automatically: off)"
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count):
            yield f"{path.name}, cell {number}: holds outputs; clear all outputs before saving a source"
