"""Measures how fast this machine computes and communicates, and keeps the figures for predictions of step times.

`fsdplab doctor --calibrate` does it, and so does the first comparison that needs the figures. It takes 10 seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from fsdplab.cli.answer import Answer, Line, Table
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import Detail, Outputs
from fsdplab.cli.render import show
from fsdplab.common.errors import RunError
from fsdplab.common.files import write_whole
from fsdplab.common.sizes import seconds, three_digits
from fsdplab.records import FORMAT
from fsdplab.sessions import RanksFailed
from fsdplab.sessions.calibration import Calibration, calibrate, calibration_file, find_calibration, keep
from fsdplab.sessions.prediction import needs_calibration
from fsdplab.sessions.spec import RunSpec

MOST_RANKS = 64


def calibrate_here(ranks: int, outputs: Outputs) -> None:
    """Measure on `ranks` ranks, keep the figures, and show them. Nothing is kept if a rank fails."""
    if not 1 <= ranks <= MOST_RANKS:
        refuse(f"--world-size is {ranks}; expected a whole number of ranks from 1 to {MOST_RANKS}")
    start, what = time.monotonic(), f"calibrating {ranks} ranks at once"
    with outputs.console().status(what) as status:
        try:
            found = calibrate(ranks, lambda now: status.update(f"{what}: {now}"))
        except RanksFailed as error:
            raise RunError(f"the calibration did not end, and nothing is kept: {error}") from error
    path = calibration_file()
    try:
        keep(found, path)
    except OSError as error:
        refuse(f"{path} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a folder that can")
    kept = (
        f"measured in {seconds(time.monotonic() - start)} on {ranks} ranks at once and kept in {path}; compare now"
        " predicts step times on as many ranks"
    )
    outputs.give(Answer((_table(found), Line(kept)), {"format": FORMAT, "calibration": asdict(found)}))


def write_own_card(path: Path, seconds_in_all: float, outputs: Outputs) -> None:
    """Measure this machine's GPU, or its CPU, and write a file for `plan --gpu`."""
    from fsdplab.sessions.own_card import measure_card  # torch

    if path.suffix != ".json":
        refuse(f"{path} is no name for a plan's --gpu; expected one that ends in .json")
    if not 1 <= seconds_in_all <= 600:
        refuse(f"--seconds is {seconds_in_all:g}; expected 1 to 600")
    with outputs.console().status("measuring") as status:
        found = measure_card(seconds_in_all, lambda now: status.update(f"measuring {now}"))
    try:
        write_whole(path, json.dumps(found.as_file(), indent=1) + "\n")
    except OSError as error:
        refuse(f"{path} cannot be written ({error.strerror or error}); give another file")
    rows = [
        ("matrix products, bf16", f"{three_digits(found.products.per_s / 1e9)} GFLOP/s", found.products),
        ("memory, read and written", f"{three_digits(found.traffic.per_s / 1e9)} GB/s", found.traffic),
        *([("link", f"{three_digits(found.link.per_s / 1e9)} GB/s", found.link)] if found.link else []),
    ]
    table = Table(
        (found.name, "rate", "spread", "repetitions"),
        [(name, rate, f"{each.spread:.0%}", str(each.repetitions)) for name, rate, each in rows],
        words=(found.name,),
    )  # fmt: skip
    doubts = [Line(each, "note") for each in found.doubts]
    use = Line(f"written to {path}: fsdplab plan --gpu {path}; for several nodes give --network too")
    outputs.give(Answer((table, *doubts, use), {"format": FORMAT, **asdict(found), "file": found.as_file()}))


def calibrate_if_needed(specs: Sequence[RunSpec], console: Console, detail: Detail) -> None:
    """Calibrate this machine once for each number of ranks whose step times are predicted from a calibration.

    Behind a link step times are simulated, so no calibration is needed. If it fails, runs have no predicted step time.
    """
    for ranks in sorted({spec.world_size for spec in specs if needs_calibration(spec)}):
        if find_calibration(ranks).calibration is not None or ranks > MOST_RANKS:
            continue
        if detail is not Detail.QUIET:
            show(console, [Line(f"calibrating {ranks} ranks of this machine for its predictions: 10 s, once")])
        try:
            keep(calibrate(ranks))
        except (RanksFailed, OSError) as error:
            show(console, [Line(f"no step time is predicted: {' '.join(str(error).split())[:200]}")])


def _table(found: Calibration) -> Table:
    rows = []
    for itemsize, name in (("4", "fp32"), ("2", "bf16")):
        for row in found.rates.products.get(itemsize, ()):
            speeds = f"{three_digits(row.forward / 1e9)} and {three_digits(row.backward / 1e9)} GFLOP/s"
            rows.append((f"matrix products, {name}, {row.tokens} tokens", f"{speeds}, forward and backward"))
    for kind, (each, a_byte) in found.rates.collectives.items():
        speed = f"{three_digits(1e-9 / a_byte)} GB/s" if a_byte else "no limit seen"
        rows.append((kind, f"{seconds(each)} each, and {speed}"))
    rows.append(("optimizer (AdamW)", f"{three_digits(1e-6 / found.rates.optimizer_element_s)} M elements/s"))
    columns = ("one rank", "rate")
    return Table(columns, rows, words=columns, folds=columns)
