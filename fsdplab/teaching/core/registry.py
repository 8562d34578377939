"""The registry: every exercise of the course by its id; a notebook's are loaded when the first of them is asked for.

They are the `ITEMS` of `exercises.py` in the notebook's lesson, or of `exercises_04.py` where a lesson serves two.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TypeVar, overload

from .exercise import Choice, Exercise, Question
from .exercise_file import Exercise as ExerciseFile
from .questions_file import questions_of
from .workspace import checked_id

Item = Exercise | ExerciseFile | Question | Choice
Kind = TypeVar("Kind", bound=Item)
_LESSONS = Path(__file__).resolve().parents[1] / "lessons"
_EXERCISES = _LESSONS.with_name("exercises")
_registered: dict[str, Item] = {}
_read: set[str] = set()


def register(*items: Item | Path | str) -> None:
    """Add a folder of exercises, `register("my_course/21")`, for a teacher's own notebooks; or single items.

    An id may be registered once; ValueError where a folder holds none.
    """
    for item in _each(items):
        if _registered.get(item.id, item) is not item:
            raise ValueError(f"{item.id} is registered already; give the new exercise an id of its own")
        _registered[item.id] = item


def _each(items: Iterable[Item | Path | str]) -> Iterator[Item]:
    for item in items:
        if not isinstance(item, (str, Path)):
            yield item
            continue
        found = list(items_in(Path(item)))
        if not found:
            raise ValueError(f"{item} holds no exercise (name.py) and no questions.md; its name is a notebook's number")
        yield from found


def items_in(folder: Path) -> Iterator[Item]:
    """The exercises (`shard.py`) and questions (`questions.md`) of a notebook's folder, `05`."""
    for path in sorted(folder.glob("*.py")):
        yield ExerciseFile(path)
    questions = folder / "questions.md"
    if questions.is_file():
        yield from questions_of(questions)


def items_of(notebook: str) -> tuple[Item, ...]:
    """All items of a notebook, `items_of("01")`; empty where the course has none."""
    if notebook not in _read:
        _read.add(notebook)
        register(*items_in(_EXERCISES / notebook))
    for file in (*_LESSONS.glob(f"nb{notebook}_*/exercises.py"), *_LESSONS.glob(f"nb*/exercises_{notebook}.py")):
        items = import_module(f"fsdplab.teaching.lessons.{file.parent.name}.{file.stem}").ITEMS
        register(*(item for item in items if not isinstance(_registered.get(item.id), ExerciseFile)))
    return tuple(item for item in _registered.values() if item.id.startswith(f"{notebook}."))


@overload
def find(exercise: str) -> Item: ...
@overload
def find(exercise: str, kind: type[Kind]) -> Kind: ...
def find(exercise: str, kind: type | None = None) -> Item:
    """The item of an id; KeyError's message lists the near ones.
    With `kind`, an item of another kind is an error too.
    """
    known = {item.id: item for item in items_of(checked_id(exercise)[:2])}
    if exercise not in known:
        near = difflib.get_close_matches(exercise, known, n=3, cutoff=0) or ["none in this notebook"]
        raise LookupError(f"there is no exercise {exercise!r}; near: {', '.join(near)}")
    item = known[exercise]
    kinds = (Exercise, ExerciseFile) if kind is Exercise else kind
    if kinds is not None and not isinstance(item, kinds):
        verb, noun = (
            ("check", "an exercise") if isinstance(item, (Exercise, ExerciseFile)) else ("answer", "a question")
        )
        raise LookupError(f"{exercise} is {noun}: use {verb}({exercise!r}, ...)")
    return item
