"""Packages whose names load when they are first used, so that importing one costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def names_of(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package; `modules` says in which module each public name is.

    `__getattr__, __dir__ = names_of(__name__, {"run": "fsdplab.sessions.recording"})`. An unknown name is an
    AttributeError that lists the public ones.
    """

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; public names: {', '.join(modules)}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(modules)
