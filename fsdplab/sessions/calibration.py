"""How fast this machine computes, moves memory and sends: measured once, kept, read by predictions of step times.

`fsdplab doctor --calibrate` measures on as many ranks at once as a run has, because ranks share cores and memory. The
figures are kept in the user's cache folder with the machine they are of; those of another processor or another torch
are not used.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdplab.common.files import write_whole
from fsdplab.common.machine import cores, cpu_model
from fsdplab.planning.lab_step_time import Rates

FORMAT = 1
HOW = "fsdplab doctor --calibrate"


@dataclass(frozen=True)
class Calibration:
    """The rates of one rank while `ranks` ranks work at once, each on one thread; where and when they were measured."""

    ranks: int
    rates: Rates
    machine: dict[str, Any]
    date: str


@dataclass(frozen=True)
class Found:
    """The calibration to use, or None and in one line why there is none and how to get it."""

    calibration: Calibration | None
    remark: str


def this_machine() -> dict[str, Any]:
    """What a calibration is of: processor, cores that may be used, torch. No name of a host or a user."""
    return {"cpu": cpu_model(), "cores": cores(), "system": platform.system(), "torch": version("torch")}


def calibration_file() -> Path:
    """Where calibrations are kept: `calibration.json` in `$XDG_CACHE_HOME/fsdplab`, or in `~/.cache/fsdplab`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "fsdplab" / "calibration.json"


def find_calibration(ranks: int, path: Path | None = None) -> Found:
    """The kept calibration of this machine for so many ranks."""
    path, again = path or calibration_file(), f"run: {HOW} --world-size {ranks}"
    if not path.is_file():
        return Found(None, f"no step time is predicted before this machine is measured (10 s, once); {again}")
    try:
        kept = _read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = " ".join(str(error).split())[:80]
        return Found(None, f"no step time is predicted: the calibration in {path} is damaged ({said}); {again}")
    machine = this_machine()
    fitting = [each for each in kept if each.machine == machine]
    if not fitting:
        differ = _difference(kept[0].machine, machine) if kept else "it is empty"
        return Found(None, f"no step time is predicted: the calibration is of another machine ({differ}); {again}")
    for each in fitting:
        if each.ranks == ranks:
            return Found(each, f"step times are predicted from the calibration of {each.date} ({HOW})")
    counts = ", ".join(str(each.ranks) for each in fitting)
    return Found(None, f"no step time is predicted: calibrated for {counts} ranks, not for {ranks}; {again}")


def _difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    return "; ".join(f"{name} {theirs.get(name)}, here {ours[name]}" for name in ours if theirs.get(name) != ours[name])


def _read(path: Path) -> list[Calibration]:
    held = json.loads(path.read_text(encoding="utf-8"))
    if held["format"] != FORMAT:
        raise ValueError(f"format {held['format']}, expected {FORMAT}")
    return [
        Calibration(int(each["ranks"]), Rates.of(each["rates"]), dict(each["machine"]), str(each["date"]))
        for each in held["calibrations"]
    ]


def keep(calibration: Calibration, path: Path | None = None) -> Path:
    """Keep a calibration, beside those of this machine for other numbers of ranks; returns the file."""
    path = path or calibration_file()
    try:
        others = [each for each in _read(path) if each.machine == calibration.machine]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or a damaged one: it is replaced
        others = []
    kept = [each for each in others if each.ranks != calibration.ranks] + [calibration]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"format": FORMAT, "calibrations": [asdict(each) for each in kept]}, indent=1) + "\n")
    return path
