"""The registry: every exercise of the course by its id; a notebook's are loaded when the first of them is asked for.

They are the files of its folder, `exercises/05/`. A teacher registers a folder of their own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, overload

from .exercise import Choice, Question, questions_of
from .exercise_file import Exercise, ExerciseError
from .workspace import checked_id

Item = Exercise | Question | Choice
Kind = TypeVar("Kind", bound=Item)
_EXERCISES = Path(__file__).resolve().parents[1] / "exercises"
_registered: dict[str, tuple[object, Item]] = {}  # id -> where it is from (a folder, or the item), and the item


def register(*things: Item | Path | str) -> None:
    """Add a folder of exercises and questions for a teacher's own notebooks, `register("my_course/21")`; or items.

    A folder's files are read anew where it was registered before. ValueError where it holds none, for an id that is
    taken, and for a file that lacks something.
    """
    for thing in things:
        if not isinstance(thing, (str, Path)):
            _add(thing, [thing])
            continue
        folder = Path(thing).resolve()
        items = list(items_in(folder))
        complaints = []
        for item in items:
            if isinstance(item, Exercise):
                complaints += item.complaints()
        if complaints:
            raise ExerciseError("\n".join(complaints))
        _add(folder, items)


def register_beside(notebooks: Path) -> None:
    """Register each folder `exercises/78` beside some notebooks, in place of one beside other notebooks."""
    for folder in sorted((notebooks / "exercises").glob("[0-9][0-9]")):
        for id, (source, _) in list(_registered.items()):
            # the package's own folder of this number stays
            is_teachers_folder = isinstance(source, Path) and source.parent != _EXERCISES
            if id.startswith(f"{folder.name}.") and is_teachers_folder:
                del _registered[id]
        register(folder)


def _add(source: object, items: list[Item]) -> None:
    """Register items in place of all that the source had registered before."""
    if not items:
        raise ValueError(f"{source} holds no exercise (name.py) and no questions.md; its name is a notebook's number")
    for item in items:
        items_of(item.id[:2])  # the package's own come first, if this is one of its notebooks
        if item.id in _registered and _registered[item.id][0] != source:
            raise ValueError(f"{item.id} is registered already; give the exercise of {source} an id of its own")
    # an exercise that was deleted from the folder goes, too
    for id, (earlier_source, _) in list(_registered.items()):
        if earlier_source == source:
            del _registered[id]
    for item in items:
        _registered[item.id] = (source, item)


def items_in(folder: Path) -> Iterator[Item]:
    """Yield the exercises (`shard.py`) and questions (`questions.md`) of a notebook's folder, `05`."""
    for path in sorted(folder.glob("*.py")):
        yield Exercise(path)
    questions = folder / "questions.md"
    if questions.is_file():
        yield from questions_of(questions)


def items_of(notebook: str) -> tuple[Item, ...]:
    """Return all items of a notebook, `items_of("01")`; empty where the course has none."""
    folder = _EXERCISES / notebook
    sources = [source for source, _ in _registered.values()]
    # the first question about this notebook reads its folder
    if folder.is_dir() and folder not in sources:
        for item in items_in(folder):
            _registered[item.id] = (folder, item)
    return tuple(item for _, item in _registered.values() if item.id.startswith(f"{notebook}."))


@overload
def find(exercise: str) -> Item: ...
@overload
def find(exercise: str, kind: type[Kind]) -> Kind: ...
def find(exercise: str, kind: type | None = None) -> Item:
    """Return the item of an id; LookupError's message lists the near ones.

    With `kind`, an item of another kind is an error too.
    """
    known = {item.id: item for item in items_of(checked_id(exercise)[:2])}
    if exercise not in known:
        near = difflib.get_close_matches(exercise, known, n=3, cutoff=0) or ["none in this notebook"]
        raise LookupError(f"there is no exercise {exercise!r}; near: {', '.join(near)}")
    item = known[exercise]
    if kind is not None and not isinstance(item, kind):
        verb, noun = ("check", "an exercise") if isinstance(item, Exercise) else ("answer", "a question")
        raise LookupError(f"{exercise} is {noun}: use {verb}({exercise!r}, ...)")
    return item
