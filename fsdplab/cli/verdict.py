"""What a machine is ready for, from what `fsdplab doctor` found on it, and what to do about the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdplab.cli.answer import Line
from fsdplab.common.places import how_to_install, shared_folder


@dataclass(frozen=True)
class Readiness:
    """One use of fsdplab; what it lacks here ("" for nothing), and what to do then."""

    use: str
    lacks: str = ""
    remedy: str = ""

    @property
    def ready(self) -> bool:
        """Whether nothing is lacking."""
        return not self.lacks


@dataclass(frozen=True)
class _Use:
    """A use, the capabilities that it needs, and the remedy where one is absent, made when it is asked for."""

    name: str
    needs: tuple[str, ...]
    remedy: Callable[[Mapping[str, str]], str]


def _install(extra: str) -> Callable[[Mapping[str, str]], str]:
    return lambda notes: how_to_install(extra)


_USES = (
    _Use("plans and recorded runs (plan, report)", (), lambda notes: ""),
    _Use("training on CPU ranks (compare, run, bench)", ("gloo",), lambda notes: notes["gloo"]),
    _Use("pages and figures (--html, --figure)", ("plotly",), _install("lab")),
    _Use("the course (lab, course)", ("jupyterlab", "ipywidgets", "plotly", "pandas"), _install("lab")),
    _Use("DeepSpeed beside our engine (--engines deepspeed-3)", ("deepspeed",), _install("peers")),
    _Use("training on GPUs (gpu-check, --device cuda)", ("GPUs",), lambda notes: notes["GPUs"]),
)


def readiness(present: Mapping[str, bool], notes: Mapping[str, str]) -> list[Readiness]:
    """Each use with what it lacks: `present` and `notes` of the capabilities, by name."""
    found = []
    for use in _USES:
        lacks = [name for name in use.needs if not present[name]]
        found.append(Readiness(use.name, ", ".join(lacks), use.remedy(notes) if lacks else ""))
    return [_with_notebooks(each) if each.use.startswith("the course") else each for each in found]


def _with_notebooks(course: Readiness) -> Readiness:
    """The course also needs its notebooks, which a copied package may lack."""
    folder = shared_folder("notebooks")
    if not course.ready or any(folder.glob("*.ipynb")):
        return course
    return Readiness(course.use, f"notebooks in {folder}", "install fsdplab again, from a wheel or a whole clone")


def verdict_lines(found: list[Readiness]) -> list[Line]:
    """`ready for: a; b`, then `not for: c: lacks d; do: e` for each that is not ready, unbroken as it has a command."""
    ready = "; ".join(each.use for each in found if each.ready)
    absent = [
        Line(f"{each.use}: lacks {each.lacks}; do: {each.remedy}", "not for", whole=True)
        for each in found
        if not each.ready
    ]
    return [Line(ready or "nothing yet", "ready for"), *absent]
