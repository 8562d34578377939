"""Packages whose names load when first used, so that importing one is cheap."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def names_of(
    package: str, sources: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: `sources` says in which module each public name is, `modules` which
    module a public name stands for.

    `__getattr__, __dir__ = names_of(__name__, {"run": "fsdplab.sessions.run_and_record"})`. An unknown name is an
    AttributeError that lists the public ones.
    """
    whole = modules or {}
    public = [*sources, *whole]

    def load(name: str) -> object:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; public names: {', '.join(public)}")
        value = import_module(whole[name]) if name in whole else getattr(import_module(sources[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(public)
