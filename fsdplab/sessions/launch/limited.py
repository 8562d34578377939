"""Runs a module in a separate process within a time limit: its output is in a log, and its processes end with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdplab.common.processes import name_of
from fsdplab.common.pythons import run_of, with_this_checkout
from fsdplab.sessions.launch.parent_death import children, end_children

TOO_LONG = 124  # the exit code of what is ended at its limit, as that of `timeout`
_JSON = re.compile(r"^\[?\{", re.MULTILINE)


def run_within(words: Sequence[str], limit_s: float, log: Path, folder: Path | None = None) -> tuple[int, str]:
    """Run `python -m` with these words, in `folder` or else beside the log; its exit code, and why it is not 0."""
    tied = ("fsdplab.sessions.launch.parent_death", str(os.getpid()))  # it ends with this process
    others = children()
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                run_of(*tied, *words),
                env=with_this_checkout(os.environ) | {"PYTHONUNBUFFERED": "1"},
                cwd=folder or log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=limit_s,
            ).returncode
    except subprocess.TimeoutExpired:
        return TOO_LONG, f"ended at its limit of {limit_s:.0f} s"
    finally:
        end_children(others)
    return code, why_it_ended(code, log.read_text(errors="replace"))


def why_it_ended(code: int, printed: str) -> str:
    """By the exit code: the signal, what a rank said that failed, or the last line, in a traceback the error."""
    if code <= 0:
        return f"by {name_of(-code)}" if code else ""
    lines = without_paths(printed).strip().splitlines()
    # what the launcher says of a rank, else the last line of the output
    lines = [line for line in lines if re.search(r"\bRank \d+ ", line)][:1] or lines[-1:]
    return lines[0][:400] if lines else f"exit code {code}, nothing printed"


def without_paths(text: str) -> str:
    """Return the text without the folders of this machine: a result is made to be handed on."""
    for place, word in ((str(Path(__file__).resolve().parents[3]), "(checkout)"), (sys.prefix, "(python)")):
        text = text.replace(place, word)
    return text


def answer_in(file: Path) -> Any:
    """Return the last JSON in a file whose first line begins with `{` or `[{`: that of a log, or all of a file of JSON.

    ValueError where there is none.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    starts = [found.start() for found in _JSON.finditer(text)]
    # the last place where JSON begins; without one the end of the text, which raises ValueError
    return json.JSONDecoder().raw_decode(text, starts[-1] if starts else len(text))[0]
