"""Answers `fsdplab doctor`: the capabilities of this machine, and what it is ready for.

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
from fsdplab.common.files import try_folder, try_output, write_output
from fsdplab.common.sizes import three_digits
from fsdplab.records import FORMAT
from fsdplab.sessions import RanksFailed
from fsdplab.sessions.calibration import Calibration, calibration_file, find_calibration, keep
from fsdplab.sessions.calibration import calibrate as measure
from fsdplab.sessions.capabilities import NEEDED_IN_A_ROOM, Capability, Readiness, capabilities, readiness, reality
from fsdplab.sessions.prediction import needs_calibration
from fsdplab.sessions.room import measure_room
from fsdplab.sessions.spec import RunSpec

MOST_RANKS = 64


def doctor(calibrate: bool, world_size: int, room: bool, outputs: Outputs) -> Answer:
    """Answer what this machine can do, how fast it is, or whether the course runs here."""
    if calibrate:
        begin_warm("auto")
        return calibrate_here(world_size, outputs)
    if room:
        return room_answer()
    return capabilities_answer()


def _verdict(items: Sequence[Capability]) -> list[Readiness]:
    present = {item.name: item.present for item in items}
    notes = {item.name: item.note for item in items}
    return readiness(present, notes)


def capabilities_answer() -> Answer:
    """List the capabilities and the verdict; as JSON `{"format": 2, "findings": [...], "real": ..., "emulated": ...,
    "simulated": ..., "verdict": [{"use": ..., "lacks": ..., "remedy": ...}, ...]}`.
    """
    items = capabilities()
    verdict, real = _verdict(items), reality(items)
    rows = []
    for item in items:
        there = "yes" if item.present else "no"
        rows.append((item.name, there, item.value, item.note))
    columns = ("", "there", "found", "note")
    parts: list[Part] = [Table(columns, rows, columns, folds=columns[1:])]
    for word, what in real.items():
        parts += [Line(""), Line(what, word)]
    parts += [Line(""), *verdict_lines(verdict)]
    data = {
        "format": FORMAT,
        "findings": [asdict(item) for item in items],
        **real,
        "verdict": [asdict(entry) for entry in verdict],
    }
    return Answer(parts, data)


def verdict_lines(verdict: Sequence[Readiness]) -> list[Line]:
    """Return `ready for: a; b`, then `not for: c: lacks d; do: e` for each use that this machine is not ready for."""
    ready = "; ".join(entry.use for entry in verdict if not entry.lacks)
    lines = [Line(ready or "nothing yet", "ready for")]
    for entry in verdict:
        if entry.lacks:  # unbroken, as it has a command to copy
            lines.append(Line(f"{entry.use}: lacks {entry.lacks}; do: {entry.remedy}", "not for", whole=True))
    return lines


def room_answer() -> Answer:
    """Train on two ranks for a moment; say in one line, and by the exit code, whether the course runs here, and how
    many ranks this machine carries at once.

    As JSON `{"format": 2, "ready": ..., "found": {...}, "lacks": [...], "seconds": ..., "room": {"cores": ...,
    "free_bytes": ..., "bytes_a_rank": ..., "ranks_by_memory": ..., "learners": ...}}`.
    """
    items = capabilities()
    lacks = []
    for entry in _verdict(items):
        if entry.use in NEEDED_IN_A_ROOM and entry.lacks:
            lacks.append(f"lacks {entry.lacks}; do: {entry.remedy}")
    values = {item.name: item.value for item in items}
    shown = {name: values[name] for name in ("cores", "memory", "torch", "bf16 on the CPU")}
    here = f"{shown['cores']} cores, {shown['memory']}, torch {shown['torch']}, bf16 {shown['bf16 on the CPU']}"
    seconds = carries = None
    if not lacks:
        began = time.monotonic()
        trained, room = measure_room()
        seconds = time.monotonic() - began
        here += f", two ranks trained in {seconds:.1f} s; {room.sentence}"
        # the fields, and the two numbers that follow from them
        carries = {**asdict(room), "ranks_by_memory": room.ranks_by_memory, "learners": room.learners}
        if trained.status != "finished":
            lacks.append(f"two ranks did not train: {trained.failure}")
    data = {"format": FORMAT, "ready": not lacks, "found": shown, "lacks": lacks, "seconds": seconds, "room": carries}
    if lacks:
        return Answer([Line("; ".join(lacks), "NOT READY", whole=True)], data, code=1)
    return Answer([Line(here, "READY", whole=True)], data)


# ---- how fast it is


def calibrate_here(ranks: int, outputs: Outputs) -> Answer:
    """Measure on `ranks` ranks, and keep the figures. Nothing is kept if a rank fails."""
    if not 1 <= ranks <= MOST_RANKS:
        refuse(f"--world-size is {ranks}; expected a whole number of ranks from 1 to {MOST_RANKS}")
    path = calibration_file()
    try:
        try_folder(path.parent)  # before the measurement, which takes its time
    except OSError as error:
        refuse(_not_kept(path, error))
    began = time.monotonic()
    what = f"calibrating {ranks} ranks at once"
    with outputs.console().status(what) as status:
        try:
            calibration = measure(ranks, lambda now: status.update(f"{what}: {now}"))
        except RanksFailed as error:
            raise RunError(f"the calibration did not end, and nothing is kept: {error}") from error
    try:
        keep(calibration, path)
    except OSError as error:
        refuse(_not_kept(path, error))
    took = sizes.seconds(time.monotonic() - began)
    where = (
        f"measured in {took} on {ranks} ranks at once and kept in {path}; compare"
        " now predicts step times on as many ranks"
    )
    return Answer((_table(calibration), Line(where)), {"format": FORMAT, "calibration": asdict(calibration)})


def _not_kept(path: Path, error: OSError) -> str:
    """Say why no calibration is kept, and what to do."""
    return f"{path} cannot be written ({error.strerror or error}); set XDG_CACHE_HOME to a folder that can"


def write_own_card(file: Path, seconds: float, outputs: Outputs) -> Answer:
    """Measure this machine's GPU, or its CPU, and write a file for `plan --gpu`."""
    from fsdplab.sessions.own_card import measure_card  # torch

    if file.suffix != ".json":
        refuse(f"{file} is no name for a plan's --gpu; expected one that ends in .json")
    if not 1 <= seconds <= 600:
        refuse(f"--seconds is {seconds:g}; expected 1 to 600")
    try:
        try_output(file)  # before the measurement
    except OSError as error:
        refuse(f"{file} cannot be written ({error.strerror or error}); give another file")
    with outputs.console().status("measuring") as status:
        card = measure_card(seconds, lambda now: status.update(f"measuring {now}"))
    try:
        write_output(file, json.dumps(card.as_file(), indent=1) + "\n")
    except OSError as error:
        refuse(f"{file} cannot be written ({error.strerror or error}); give another file")
    measured = [
        ("matrix products, bf16", card.products, "GFLOP/s"),
        ("memory, read and written", card.traffic, "GB/s"),
        ("link", card.link, "GB/s"),
    ]
    rows = []
    for name, rate, unit in measured:
        if rate is not None:  # one card has no link
            per_s = f"{three_digits(rate.per_s / 1e9)} {unit}"
            rows.append((name, per_s, f"{rate.spread:.0%}", str(rate.repetitions)))
    table = Table((card.name, "rate", "spread", "repetitions"), rows, words=(card.name,))
    doubts = [Line(doubt, "note") for doubt in card.doubts]
    use = Line(f"written to {file}: fsdplab plan --gpu {file}; for several nodes give --network too")
    return Answer((table, *doubts, use), {"format": FORMAT, **asdict(card), "file": card.as_file()})


def calibrate_if_needed(specs: Sequence[RunSpec], outputs: Outputs) -> None:
    """Calibrate this machine once for each number of ranks whose step times are predicted from a calibration.

    Behind a link step times are simulated, so no calibration is needed. If it fails, runs have no predicted step time.
    """
    path = calibration_file()
    # rates depend on how many ranks share the cores, so each number is measured for itself
    for ranks in sorted({spec.world_size for spec in specs if needs_calibration(spec)}):
        if find_calibration(ranks).calibration is not None or ranks > MOST_RANKS:
            continue
        try:
            try_folder(path.parent)
        except OSError as error:  # measured again for each comparison, and lost
            outputs.show([Line(f"no step time is predicted: {_not_kept(path, error)}")])
            return
        if not outputs.quiet:
            outputs.show([Line(f"calibrating {ranks} ranks of this machine for its predictions: 10 s, once")])
        try:
            keep(measure(ranks))
        except (RanksFailed, OSError) as error:
            outputs.show([Line(f"no step time is predicted: {' '.join(str(error).split())[:200]}")])


def _table(calibration: Calibration) -> Table:
    """Tabulate the rates of one rank: products by precision and tokens, collectives by kind, and the optimizer."""
    rates = calibration.rates
    rows = []
    for itemsize, name in (("4", "fp32"), ("2", "bf16")):
        for row in rates.products.get(itemsize, ()):
            speeds = f"{three_digits(row.forward / 1e9)} and {three_digits(row.backward / 1e9)} GFLOP/s"
            rows.append((f"matrix products, {name}, {row.tokens} tokens", f"{speeds}, forward and backward"))
    for kind, (latency_s, byte_s) in rates.collectives.items():
        # seconds a byte -> GB/s; 0 where a large collective took no longer than a small one
        speed = f"{three_digits(1e-9 / byte_s)} GB/s" if byte_s else "no limit seen"
        rows.append((kind, f"{sizes.seconds(latency_s)} each, and {speed}"))
    rows.append(("optimizer (AdamW)", f"{three_digits(1e-6 / rates.optimizer_element_s)} M elements/s"))
    columns = ("one rank", "rate")
    return Table(columns, rows, words=columns, folds=columns)
