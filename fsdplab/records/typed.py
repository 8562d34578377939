"""Reads JSON into frozen dataclasses. The annotations are the only description of what the JSON may hold.

A damaged record is refused when it is read, in one line that names the field, and never becomes a wrong figure or an
error far from its cause. Fields that a dataclass lacks are passed over: a later version may write more. Null stands for
a field's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")
Scalar = str | float | bool | None  # a setting
Size = Annotated[int, "at least 0"]
Amount = Annotated[float, "at least 0"]
_MOST, _MOST_FLOAT = 2**63, 1e100  # a loss that diverges is large, but a whole number counts something
_LONGEST = 10_000  # characters of a text
_MOST_SHOWN = 60  # characters of a value in an error


class WrongType(ValueError):
    """A value is not of its field's type; one line: `summary.losses[2]: expected a number or null, got 'x'`."""


class LongText(str):
    """A text of any length, such as a traceback."""


def read(kind: type[Kind], value: Any, where: str) -> Kind:
    """Read `value`, out of JSON, as a `kind`: a dataclass, or what annotations of one say; WrongType names `where`.

    >>> read(tuple[float, ...], [5.7, 5.6], "losses")
    (5.7, 5.6)
    """
    typed: Kind = _read(kind, value, where)
    return typed


def plain(value: Any) -> Any:
    """Turn a dataclass and all inside it into what JSON holds: dicts, lists, texts, numbers."""
    if is_dataclass(value):
        return {_key(field): plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


def shown(value: Any) -> str:
    """Show a value in an error's one line."""
    words = repr(value)
    if len(words) <= _MOST_SHOWN:
        return words
    return f"{words[:_MOST_SHOWN]}..."


def _read(kind: Any, value: Any, where: str) -> Any:
    is_union = get_origin(kind) in (Union, UnionType)
    choices = get_args(kind) if is_union else (kind,)
    for choice in choices:
        if choice is Any or choice in _PLAIN and _PLAIN[choice][1](value):
            return value
    for choice in choices:
        origin, inside = get_origin(choice), get_args(choice)
        if is_dataclass(choice) and isinstance(value, dict):
            return _dataclass(choice, value, where)
        if origin is tuple and isinstance(value, list):
            return tuple(_read(inside[0], part, f"{where}[{place}]") for place, part in enumerate(value))
        if origin is Mapping and isinstance(value, dict):
            return _mapping(inside[0], inside[1], value, where)
    raise WrongType(f"{where}: expected {' or '.join(map(_words, choices))}, got {shown(value)}")


def _mapping(kind_of_name: Any, kind: Any, value: dict[str, Any], where: str) -> dict[str | int, Any]:
    names = [_name(kind_of_name, name, where) for name in value]  # wrong names are said before wrong values
    parts = [_read(kind, part, f"{where}[{shown(name)}]") for name, part in value.items()]
    return dict(zip(names, parts))


def _dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    types = _types(kind)
    typed = {}
    for field in fields(kind):
        key = _key(field)
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if value.get(key) is None and has_default:
            continue
        if key not in value:
            raise WrongType(f"{where}: expected an object with {key}, got {shown(value)}")
        typed[field.name] = _read(types[field.name], value[key], f"{where}.{key}" if where else key)
    return kind(**typed)


def _name(kind: Any, name: str, where: str) -> str | int:
    """A key of an object; JSON has whole numbers as texts there."""
    if kind is not int:
        return name
    if not (name.isascii() and name.isdecimal() and len(name) < 20):
        raise WrongType(f"{where}: expected whole numbers as names, got {shown(name)}")
    return int(name)


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _key(field: Field[Any]) -> str:
    """A field's name in JSON: `as_` is `as`, which is no name in Python."""
    return field.name.rstrip("_")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_MOST <= value < _MOST


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float) and abs(value) < _MOST_FLOAT


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", _is_whole),
    float: ("a number", _is_number),
    Size: ("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0),
    Amount: ("a number of at least 0", lambda value: _is_number(value) and value >= 0),
    str: ("a text", lambda value: isinstance(value, str) and len(value) <= _LONGEST),
    LongText: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    NoneType: ("null", lambda value: value is None),
}


def _words(kind: Any) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind][0]
    return "a list" if get_origin(kind) is tuple else "an object"
