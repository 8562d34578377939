"""Calibration: measures this machine in some seconds, and keeps the figures for predictions.

At the user's wish (`fsdplab doctor --calibrate`), and by itself before the first comparison that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from fsdplab.cli.errors import failed, refuse
from fsdplab.cli.outputs import Detail
from fsdplab.cli.plan.targets import Targets
from fsdplab.common.sizes import seconds, three_digits
from fsdplab.records import FORMAT
from fsdplab.sessions import RanksFailed
from fsdplab.sessions.calibrate import calibrate
from fsdplab.sessions.calibration import Calibration, calibration_file, find_calibration, keep
from fsdplab.sessions.prediction import needs_calibration
from fsdplab.sessions.spec import RunSpec

MOST_RANKS = 64


def calibrate_here(ranks: int, json_file: str | None) -> None:
    """Measure on so many ranks, keep the figures, and show them; nothing is kept where a rank fails."""
    if not 1 <= ranks <= MOST_RANKS:
        refuse(f"--world-size is {ranks}; expected a whole number of ranks from 1 to {MOST_RANKS}")
    targets, start = Targets(json_file).check(), time.monotonic()
    console = targets.console()
    with console.status(f"calibrating {ranks} ranks at once") as status:
        try:
            found = calibrate(ranks, lambda what: status.update(f"calibrating {ranks} ranks at once: {what}"))
        except RanksFailed as error:
            failed(f"the calibration did not end, and nothing is kept: {error}")
    path = calibration_file()
    try:
        keep(found, path)
    except OSError as error:
        refuse(f"{path} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a folder that can")
    targets.write({"format": FORMAT, "calibration": asdict(found)})
    console.print(_table(found))
    console.print(
        f"measured in {seconds(time.monotonic() - start)} on {ranks} ranks at once and kept in {path}; compare now"
        " predicts step times on as many ranks",
        highlight=False,
        markup=False,
    )


def calibrate_if_needed(specs: Sequence[RunSpec], console: Console, detail: Detail) -> None:
    """Calibrate this machine once for each number of ranks whose step times are predicted from a calibration.

    Behind a link the steady card tells the time, so nothing is needed then. Where it fails the runs go on without.
    """
    for ranks in sorted({spec.world_size for spec in specs if needs_calibration(spec)}):
        if find_calibration(ranks).calibration is not None or ranks > MOST_RANKS:
            continue
        if detail is not Detail.QUIET:
            console.print(f"calibrating {ranks} ranks of this machine for its predictions: 10 s, once", highlight=False)
        try:
            keep(calibrate(ranks))
        except (RanksFailed, OSError) as error:
            console.print(f"no step time is predicted: {' '.join(str(error).split())[:200]}", markup=False)


def _table(found: Calibration) -> Table:
    table = Table("one rank", "rate", box=None, pad_edge=False)
    for itemsize, name in (("4", "fp32"), ("2", "bf16")):
        for row in found.rates.products.get(itemsize, ()):
            speeds = f"{three_digits(row.forward / 1e9)} and {three_digits(row.backward / 1e9)} GFLOP/s"
            table.add_row(f"matrix products, {name}, {row.tokens} tokens", f"{speeds}, forward and backward")
    for kind, (each, a_byte) in found.rates.collectives.items():
        speed = f"{three_digits(1e-9 / a_byte)} GB/s" if a_byte else "no limit seen"
        table.add_row(kind, f"{seconds(each)} each, and {speed}")
    table.add_row("optimizer (AdamW)", f"{three_digits(1e-6 / found.rates.optimizer_element_s)} M elements/s")
    return table
