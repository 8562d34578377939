"""The registry: every exercise of the course by its id.
One module a notebook, loaded when its first id is asked for.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar, overload

from fsdplab.teaching.exercise import Choice, Exercise, Question
from fsdplab.teaching.home import checked_id

Item = Exercise | Question | Choice
Kind = TypeVar("Kind", bound=Item)
_registered: dict[str, Item] = {}


def register(*items: Item) -> None:
    """Add exercises, questions or choices, for a teacher's own notebooks too; an id may be registered once."""
    for item in items:
        if _registered.get(item.id, item) is not item:
            raise ValueError(f"{item.id} is registered already; give the new exercise an id of its own")
        _registered[item.id] = item


def items_of(notebook: str) -> tuple[Item, ...]:
    """All items of a notebook, `items_of("01")`; empty where the course has none."""
    if find_spec(f"{__name__}.nb{notebook}"):
        register(*import_module(f"{__name__}.nb{notebook}").ITEMS)
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
    if kind is not None and not isinstance(item, kind):
        verb = "check" if isinstance(item, Exercise) else "answer"
        raise LookupError(f"{exercise} is a {type(item).__name__.lower()}: use {verb}({exercise!r}, ...)")
    return item
