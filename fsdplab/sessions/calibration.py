"""Measures once how fast this machine computes, moves memory and sends, and saves it for predictions of step times.

`fsdplab doctor --calibrate` measures on as many ranks at once as a run has, because ranks share cores and memory. The
figures are kept in the user's cache folder with the machine they are of; those of another processor or another torch
are not used.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdplab.common.files import write_whole
from fsdplab.common.machine import cores, cpu_model
from fsdplab.planning.lab_step_time import Rates

FORMAT = 1
HOW = "fsdplab doctor --calibrate"
TIME_LIMIT = 120.0  # seconds after which ranks that calibrate are ended
PATIENCE_S = 0.2  # for each of some twenty quantities


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
    """Return what a calibration is of: processor, cores that may be used, torch. No name of a host or a user."""
    return {"cpu": cpu_model(), "cores": cores(), "system": platform.system(), "torch": version("torch")}


def calibration_file() -> Path:
    """Return where calibrations are kept: `calibration.json` in `$XDG_CACHE_HOME/fsdplab`, or in `~/.cache/fsdplab`."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "fsdplab" / "calibration.json"


def find_calibration(ranks: int, path: Path | None = None) -> Found:
    """Return the kept calibration of this machine for so many ranks."""
    path = path or calibration_file()
    again = f"run: {HOW} --world-size {ranks}"
    try:
        calibrations = _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return Found(None, f"no step time is predicted before this machine is measured (10 s, once); {again}")
    except OSError as error:  # the cache folder of another user, whose HOME this process has
        why = f"{path} cannot be read ({error.strerror}); set XDG_CACHE_HOME to a folder that can"
        return Found(None, f"no step time is predicted: {why}, and {again}")
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:80]
        return Found(None, f"no step time is predicted: the calibration in {path} is damaged ({reason}); {again}")
    machine = this_machine()
    of_this_machine = [calibration for calibration in calibrations if calibration.machine == machine]
    if not of_this_machine:
        differ = _difference(calibrations, machine)
        return Found(None, f"no step time is predicted: the calibration is of another machine ({differ}); {again}")
    for calibration in of_this_machine:
        if calibration.ranks == ranks:
            return Found(calibration, f"step times are predicted from the calibration of {calibration.date} ({HOW})")
    counts = ", ".join(str(calibration.ranks) for calibration in of_this_machine)
    return Found(None, f"no step time is predicted: calibrated for {counts} ranks, not for {ranks}; {again}")


def _difference(calibrations: list[Calibration], machine: dict[str, Any]) -> str:
    """Say in what the machine of the first calibration differs from this one: `torch 2.12, here 2.13`."""
    if not calibrations:
        return "it is empty"
    other = calibrations[0].machine
    differences = []
    for name, value in machine.items():
        if other.get(name) != value:
            differences.append(f"{name} {other.get(name)}, here {value}")
    return "; ".join(differences) or "it is empty"


def _read(path: Path) -> list[Calibration]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, expected {FORMAT}")
    calibrations = []
    for row in content["calibrations"]:
        rates = Rates.of(row["rates"])
        calibrations.append(Calibration(int(row["ranks"]), rates, dict(row["machine"]), str(row["date"])))
    return calibrations


def calibrate(
    ranks: int, on_progress: Callable[[str], None] = lambda what: None, patience_s: float = PATIENCE_S
) -> Calibration:
    """Measure on so many warm ranks at once, each quantity for about `patience_s`; `on_progress` gets what is being
    measured.

    Raises RanksFailed when a rank does not end, and ValueError for less than one rank.
    """
    from fsdplab.sessions.remote_call import call_on_ranks  # which imports torch
    from fsdplab.sessions.worker import calibrating

    def on_output(rank: int, line: str) -> None:
        if rank == 0:
            on_progress(line)

    values = call_on_ranks(
        Path(str(calibrating.__file__)),
        "measure",
        world_size=ranks,
        payload=patience_s,
        time_limit=TIME_LIMIT,
        on_output=on_output,
    )
    # ranks measured at the same time, as they compute in a run, and share what the machine has
    rates = Rates.mean_of([Rates.of(of_rank) for of_rank in values])
    return Calibration(ranks, rates, this_machine(), str(date.today()))


def keep(calibration: Calibration, path: Path | None = None) -> Path:
    """Keep a calibration, beside those of this machine for other numbers of ranks; returns the file."""
    path = path or calibration_file()
    try:
        earlier = _read(path)
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or a damaged one: it is replaced
        earlier = []
    rows = []
    for other in earlier:
        # figures of another machine or another torch are dropped with this
        if other.machine == calibration.machine and other.ranks != calibration.ranks:
            rows.append(asdict(other))
    rows.append(asdict(calibration))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"format": FORMAT, "calibrations": rows}, indent=1) + "\n")
    return path
