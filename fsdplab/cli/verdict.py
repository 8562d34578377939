"""Which uses of fsdplab a machine is ready for, given its capabilities, and how to make it ready for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdplab.cli.answer import Line
from fsdplab.common.places import how_to_install, shared_folder

_COURSE = "the course (lab, course)"
# a use, the capabilities that it needs, and the extra that installs them; without one their notes say what to do
_USES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("plans and recorded runs (plan, report)", (), ""),
    ("training on CPU ranks (compare, run, bench)", ("gloo",), ""),
    ("pages and figures (--html, --figure)", ("plotly",), "lab"),
    (_COURSE, ("jupyterlab", "ipywidgets", "plotly", "pandas"), "lab"),
    ("DeepSpeed beside our engine (--engines lab,deepspeed-3)", ("deepspeed",), "peers"),
    ("training on GPUs (gpu-check, --device cuda)", ("GPUs",), ""),
)


@dataclass(frozen=True)
class Readiness:
    """One use of fsdplab; what it lacks here ("" for nothing), and what to do then."""

    use: str
    lacks: str = ""
    remedy: str = ""


def readiness(present: Mapping[str, bool], notes: Mapping[str, str]) -> list[Readiness]:
    """Each use with what it lacks: `present` and `notes` of the capabilities, by name."""
    found, notebooks = [], shared_folder("notebooks")
    for use, needs, extra in _USES:
        lacks = [name for name in needs if not present[name]]
        remedy = (how_to_install(extra) if extra else notes[lacks[0]]) if lacks else ""
        if use == _COURSE and not lacks and not any(notebooks.glob("*.ipynb")):  # a copied package may lack them
            lacks, remedy = [f"notebooks in {notebooks}"], "install fsdplab again, from a wheel or a whole clone"
        found.append(Readiness(use, ", ".join(lacks), remedy))
    return found


def verdict_lines(found: list[Readiness]) -> list[Line]:
    """`ready for: a; b`, then `not for: c: lacks d; do: e` for each that is not ready, unbroken as it has a command."""
    ready = "; ".join(each.use for each in found if not each.lacks)
    absent = [(f"{each.use}: lacks {each.lacks}; do: {each.remedy}") for each in found if each.lacks]
    return [Line(ready or "nothing yet", "ready for"), *(Line(text, "not for", whole=True) for text in absent)]
