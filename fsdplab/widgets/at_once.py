"""What the page itself says while the kernel is busy: wrong values are marked, and Run says what it waits for.

A kernel that runs a cell reads no messages of widgets, or not all (ipykernel 7.4 hands a widget's first ones to the
loop of the cell that made it, also where it has subshells), so judging there comes after Run All. `lab.js` judges in
the browser with the rules below, which are necessary ones: what they refuse the kernel refuses too, with the same
words, and the rest it judges when it is free. The script is an output inside the lab: ipywidgets has no controls with
constraints, and a widget library of our own would be one more thing to install beside JupyterLab.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from fsdplab.planning.links import PRESETS as LINKS

from .choices import CARD_WORDS, MOST_STEPS, NOTHING_CHOSEN, STEPS_WORDS, TUNNEL_FORM, TUNNEL_WORDS

WAITING = "waiting for the kernel: it is running a cell, and does this when the cell has ended"
GONE = "this lab's kernel has ended: run its cell again, and the kept runs come back"
_LINK = r"\s*([0-9.]+(e[0-9]+)?\s*[kmgt]?b|nvlink|pcie|ib|infiniband|eth|ndr|hdr|[0-9]+\s*(g|ib|infiniband)).*"


@dataclass(frozen=True)
class Rule:
    """One typed choice: the form of all right values (a regular expression for Python and JavaScript, case ignored),
    bounds of a number, and the words for a wrong one, where `{got}` is what was typed.
    """

    form: str
    words: str
    least: float | None = None
    most: float | None = None


RULES = {
    "steps": Rule(r"\d+", STEPS_WORDS, 1, MOST_STEPS),
    "card": Rule(r"\s*(none\s*|\d[\d_]*(\.[\d_]+)?\s*([kmg]i?)?b?\s*)?", CARD_WORDS),
    "custom_link": Rule(
        _LINK, f"unknown link {{got}}; expected one of {', '.join(LINKS)}, or a rate such as 200mbit or 800MB/s,50us"
    ),
    "tunnel": Rule(TUNNEL_FORM, TUNNEL_WORDS),
}


@lru_cache
def style() -> str:
    """The lab's style sheet."""
    rules = Path(__file__).with_name("lab.css").read_text(encoding="utf-8")
    return f"<style>.fsdplab-lab {{ --fsdplab-gone: {json.dumps(GONE)}; }}\n{rules}</style>"


@lru_cache
def script() -> str:
    """The lab's script, called with the rules and the words."""
    rules = {name: asdict(rule) for name, rule in RULES.items()}
    words = {"waiting": WAITING, "gone": GONE, "nothing": NOTHING_CHOSEN}
    told = json.dumps({"rules": rules, **words, "after_ms": 400, "wide_px": 1500})
    return f"({Path(__file__).with_name('lab.js').read_text(encoding='utf-8').strip()})({told})"
