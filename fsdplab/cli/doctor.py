"""`fsdplab doctor` shows the capabilities of this machine, and what it is ready for.

`doctor --calibrate` measures how fast it computes and communicates, and keeps the figures for predictions of step
times; so does the first comparison that needs them. It takes 10 seconds. `fsdplab calibrate` writes a file for
`plan --gpu`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.errors import refuse
from fsdplab.cli.options import begin_warm
from fsdplab.cli.outputs import Outputs
from fsdplab.common import sizes
from fsdplab.common.errors import RunError
from fsdplab.common.files import write_whole
from fsdplab.common.sizes import three_digits
from fsdplab.common.temporary import temporary_folder
from fsdplab.records import FORMAT
from fsdplab.sessions import RanksFailed
from fsdplab.sessions.calibration import Calibration, calibration_file, find_calibration, keep
from fsdplab.sessions.calibration import calibrate as measure
from fsdplab.sessions.capabilities import NEEDED_IN_A_ROOM, Capability, Readiness, capabilities, readiness, reality
from fsdplab.sessions.prediction import needs_calibration
from fsdplab.sessions.spec import RunSpec

MOST_RANKS = 64


def doctor(calibrate: bool, world_size: int, room: bool, outputs: Outputs) -> Answer:
    """What this machine can do, how fast it is, or whether the course runs here."""
    if calibrate:
        begin_warm("auto")
        return calibrate_here(world_size, outputs)
    return room_answer() if room else capabilities_answer()


def _verdict(found: Sequence[Capability]) -> list[Readiness]:
    return readiness({item.name: item.present for item in found}, {item.name: item.note for item in found})


def capabilities_answer() -> Answer:
    """The findings and the verdict; as JSON `{"format": 2, "findings": [...], "real": ..., "emulated": ...,
    "simulated": ..., "verdict": [{"use": ..., "lacks": ..., "remedy": ...}, ...]}`.
    """
    found = capabilities()
    verdict, real = _verdict(found), reality(found)
    columns = ("", "there", "found", "note")
    rows = [(item.name, "yes" if item.present else "no", item.value, item.note) for item in found]
    parts: list[Part] = [Table(columns, rows, columns, folds=columns[1:])]
    parts += [part for word, what in real.items() for part in (Line(""), Line(what, word))]
    parts += [Line(""), *verdict_lines(verdict)]
    said = {"findings": [asdict(item) for item in found], **real}
    return Answer(parts, {"format": FORMAT, **said, "verdict": [asdict(each) for each in verdict]})


def verdict_lines(found: Sequence[Readiness]) -> list[Line]:
    """`ready for: a; b`, then `not for: c: lacks d; do: e` for each that is not ready, unbroken as it has a command."""
    ready = "; ".join(each.use for each in found if not each.lacks)
    absent = [f"{each.use}: lacks {each.lacks}; do: {each.remedy}" for each in found if each.lacks]
    return [Line(ready or "nothing yet", "ready for"), *(Line(text, "not for", whole=True) for text in absent)]


def room_answer() -> Answer:
    """One line that says whether the course runs here, as the exit code does: a tiny training on two ranks is tried.

    As JSON `{"format": 2, "ready": ..., "found": {...}, "lacks": [...], "seconds": ...}`.
    """
    from fsdplab.sessions import run

    found = capabilities()
    lacks = [
        f"lacks {each.lacks}; do: {each.remedy}"
        for each in _verdict(found)
        if each.use in NEEDED_IN_A_ROOM and each.lacks
    ]
    seconds = None
    if not lacks:
        began = time.monotonic()
        tried = run(RunSpec(model="gpt-tiny", steps=1, device="cpu"), directory=temporary_folder("room"))
        seconds = time.monotonic() - began
        lacks = [] if tried.status == "finished" else [f"two ranks did not train: {tried.failure}"]
    values = {item.name: item.value for item in found}
    what = {name: values[name] for name in ("cores", "memory", "torch", "bf16 on the CPU")}
    here = f"{what['cores']} cores, {what['memory']}, torch {what['torch']}, bf16 {what['bf16 on the CPU']}"
    trained = "" if seconds is None else f", two ranks trained in {seconds:.1f} s"
    line = Line("; ".join(lacks), "NOT READY", whole=True) if lacks else Line(f"{here}{trained}", "READY", whole=True)
    said = {"format": FORMAT, "ready": not lacks, "found": what, "lacks": lacks, "seconds": seconds}
    return Answer([line], said, code=1 if lacks else 0)


# ---- how fast it is


def calibrate_here(ranks: int, outputs: Outputs) -> Answer:
    """Measure on `ranks` ranks, and keep the figures. Nothing is kept if a rank fails."""
    if not 1 <= ranks <= MOST_RANKS:
        refuse(f"--world-size is {ranks}; expected a whole number of ranks from 1 to {MOST_RANKS}")
    start, what = time.monotonic(), f"calibrating {ranks} ranks at once"
    with outputs.console().status(what) as status:
        try:
            found = measure(ranks, lambda now: status.update(f"{what}: {now}"))
        except RanksFailed as error:
            raise RunError(f"the calibration did not end, and nothing is kept: {error}") from error
    path = calibration_file()
    try:
        keep(found, path)
    except OSError as error:
        refuse(f"{path} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a folder that can")
    kept = (
        f"measured in {sizes.seconds(time.monotonic() - start)} on {ranks} ranks at once and kept in {path}; compare"
        " now predicts step times on as many ranks"
    )
    return Answer((_table(found), Line(kept)), {"format": FORMAT, "calibration": asdict(found)})


def write_own_card(file: Path, seconds: float, outputs: Outputs) -> Answer:
    """Measure this machine's GPU, or its CPU, and write a file for `plan --gpu`."""
    from fsdplab.sessions.own_card import measure_card  # torch

    if file.suffix != ".json":
        refuse(f"{file} is no name for a plan's --gpu; expected one that ends in .json")
    if not 1 <= seconds <= 600:
        refuse(f"--seconds is {seconds:g}; expected 1 to 600")
    with outputs.console().status("measuring") as status:
        found = measure_card(seconds, lambda now: status.update(f"measuring {now}"))
    try:
        write_whole(file, json.dumps(found.as_file(), indent=1) + "\n")
    except OSError as error:
        refuse(f"{file} cannot be written ({error.strerror or error}); give another file")
    rows = [
        ("matrix products, bf16", f"{three_digits(found.products.per_s / 1e9)} GFLOP/s", found.products),
        ("memory, read and written", f"{three_digits(found.traffic.per_s / 1e9)} GB/s", found.traffic),
        *([("link", f"{three_digits(found.link.per_s / 1e9)} GB/s", found.link)] if found.link else []),
    ]
    table = Table(
        (found.name, "rate", "spread", "repetitions"),
        [(name, rate, f"{each.spread:.0%}", str(each.repetitions)) for name, rate, each in rows],
        words=(found.name,),
    )
    doubts = [Line(each, "note") for each in found.doubts]
    use = Line(f"written to {file}: fsdplab plan --gpu {file}; for several nodes give --network too")
    return Answer((table, *doubts, use), {"format": FORMAT, **asdict(found), "file": found.as_file()})


def calibrate_if_needed(specs: Sequence[RunSpec], outputs: Outputs) -> None:
    """Calibrate this machine once for each number of ranks whose step times are predicted from a calibration.

    Behind a link step times are simulated, so no calibration is needed. If it fails, runs have no predicted step time.
    """
    for ranks in sorted({spec.world_size for spec in specs if needs_calibration(spec)}):
        if find_calibration(ranks).calibration is not None or ranks > MOST_RANKS:
            continue
        if not outputs.quiet:
            outputs.show([Line(f"calibrating {ranks} ranks of this machine for its predictions: 10 s, once")])
        try:
            keep(measure(ranks))
        except (RanksFailed, OSError) as error:
            outputs.show([Line(f"no step time is predicted: {' '.join(str(error).split())[:200]}")])


def _table(found: Calibration) -> Table:
    rows = []
    for itemsize, name in (("4", "fp32"), ("2", "bf16")):
        for row in found.rates.products.get(itemsize, ()):
            speeds = f"{three_digits(row.forward / 1e9)} and {three_digits(row.backward / 1e9)} GFLOP/s"
            rows.append((f"matrix products, {name}, {row.tokens} tokens", f"{speeds}, forward and backward"))
    for kind, (each, a_byte) in found.rates.collectives.items():
        speed = f"{three_digits(1e-9 / a_byte)} GB/s" if a_byte else "no limit seen"
        rows.append((kind, f"{sizes.seconds(each)} each, and {speed}"))
    rows.append(("optimizer (AdamW)", f"{three_digits(1e-6 / found.rates.optimizer_element_s)} M elements/s"))
    columns = ("one rank", "rate")
    return Table(columns, rows, words=columns, folds=columns)
