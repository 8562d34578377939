"""Packages whose names load when first used, so that importing one is cheap."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path


def names_of(
    package: str, sources: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package: `sources` says in which module each public name is, `modules`
    which module a public name stands for.

    `__getattr__, __dir__ = names_of(__name__, {"run": "fsdplab.sessions.run_and_record"})`. An unknown name is an
    AttributeError that lists the public ones.
    """
    whole = modules or {}
    public = [*sources, *whole]

    def load(name: str) -> object:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; public names: {', '.join(public)}")
        if name in whole:
            value: object = import_module(whole[name])
        else:
            value = getattr(import_module(sources[name]), name)
        setattr(sys.modules[package], name, value)  # so that the next use does not come here
        return value

    def names() -> list[str]:
        return sorted(public)

    return load, names


def names_of_stub(package: str, file: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Make `__all__`, `__getattr__` and `__dir__` of a package whose public names are the imports of the stub beside
    its file, where type checkers look for them, too.

    `__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)` in `__init__.py`, and in `__init__.pyi`
    `from fsdplab.profiling.exports import export_csv as export_csv`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    sources = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for imported in node.names:
                sources[imported.name] = str(node.module)
    return [*sources], *names_of(package, sources)


def loaded_files() -> Iterator[Path]:
    """Yield the files of all imported modules of this package, of the stubs that name what a package has, and of a
    module's own data: `presets.json` beside `presets.py`.
    """
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "fsdplab" and module.__file__:
            file = Path(module.__file__)
            yield file
            yield from filter(Path.exists, (file.with_suffix(".pyi"), file.with_suffix(".json")))
