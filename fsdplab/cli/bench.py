"""Runs `fsdplab bench`: engines take turns in one run, and their median steps are compared as ratios.

How far a ratio may be trusted is read from the rounds: an engine's step over the floor of the same round, where a
machine that becomes slower slows both. No engine is called faster than another within the spread of these.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.terminal import look_for_signals
from fsdplab.common.names import OVER_ALL_RANKS
from fsdplab.common.sizes import percent
from fsdplab.common.words import MISSING, plural
from fsdplab.records import FORMAT, Spread, known, race
from fsdplab.records.spread import FEWEST
from fsdplab.sessions import bf16_speed
from fsdplab.sessions.spec import ENGINES, PEERS

if TYPE_CHECKING:
    from fsdplab.sessions.bench_engines import Bench, Timing

_UNSTEADY = 0.05  # scatter of the floor, from which on it is told
BESIDE = ("alone", "torch-ddp", "torch-fsdp2")  # ratios are to the medians of these, where they took part


def bench_engines(
    strategies: list[str],
    engines: list[str],
    rounds: int,
    peer_transport: str,
    prefetch: list[int],
    settings: dict[str, Any],
    outputs: Outputs,
) -> Answer:
    """Run the lab's strategies and the other engines in turn, and compare their steps as ratios."""
    from fsdplab.sessions import RunSpec, bench

    common, note = _sized(settings | {"memory": False})
    transport = common.pop("transport")
    peers = []
    for engine in engines:
        for strategy in _strategies(engine):
            peers.append(RunSpec(engine=engine, strategy=strategy, transport=peer_transport, **common))
    specs = []
    for strategy in strategies:
        # a row for each strategy and each depth of prefetch
        for count in prefetch:
            specs.append(RunSpec(strategy=strategy, transport=transport, prefetch=count, **common))
    with Progress(console=outputs.console(), transient=True) as progress:
        task = progress.add_task("rounds", total=None)
        result = bench(
            [*specs, *peers],
            rounds=rounds,
            on_look=look_for_signals,
            on_round=lambda done, total: progress.update(task, completed=done, total=total),
        )
    return _answer(result, rounds, note)


def _sized(common: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the settings with a batch that bf16 can compute on this CPU, and a note ("" for the batch as given)."""
    if common["precision"] != "bf16" or common["device"] == "cuda":
        return common, ""
    given = common["batch_size"], common["sequence_length"]
    batch, length = bf16_speed.smaller_batch(*given)
    if (batch, length) == given:
        return common, ""
    note = (
        f"bf16 takes {bf16_speed.bf16_slowdown():.0f} times as long as fp32 on this processor, so batches of {batch} x"
        f" {length} tokens were timed, not of {given[0]} x {given[1]}"
    )
    return common | {"batch_size": batch, "sequence_length": length}, note


def _strategies(engine: str) -> list[str]:
    """Return the strategies over all ranks that another engine does; of DeepSpeed's engines the first alone."""
    if engine not in PEERS:
        refuse(f"--engines has {engine!r}; expected some of {', '.join(PEERS)}")
    able = [strategy for strategy in ENGINES[engine] if strategy in OVER_ALL_RANKS]
    if engine.startswith("deepspeed"):
        return able[:1]
    return able


def _answer(result: Bench, rounds: int, note: str = "") -> Answer:
    spec = result.spec
    rows = [_cells(result, timing) for timing in result.timings]
    columns = _columns(result, rows)
    compiled = "compiled blocks, " if spec.compile == "blocks" else ""
    how = (
        f"median of {rounds} rounds, engines in turn, {compiled}{spec.optimizer} optimizer; alone: no"
        f" communication at all; floor: forward + backward + optimizer / {spec.world_size} ="
        f" {result.floor * 1e3:.0f} ms"
    )
    if "±" in columns:
        how += "; ±: half the spread of the middle half of steps over the floors of their rounds"
    cells = [[row[name] for name in columns] for row in rows]
    table = Table(columns, cells, words=("engine", "strategy"))
    parts: list[Part] = [table, *_judged(result), Line(how, "measured")]
    if note:
        parts.append(Line(note, "smaller"))
    return Answer(parts, _as_dict(result))


def _columns(result: Bench, rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the columns that hold a value and say something of this bench."""
    hidden = set()
    # without a link, and with the same prefetch in all rows, no row waits longer than another
    if not result.spec.linked and all(timing.prefetch == 1 for timing in result.timings):
        hidden |= {"prefetch", "blocked", "overlap"}
    if result.spec.optimizer != "muon":
        hidden.add("optimizer")
    return [name for name in rows[0] if name not in hidden and any(row[name] != MISSING for row in rows)]


def _judged(result: Bench) -> list[Line]:
    """Say which engine is fastest, where the rounds tell, and whether the machine's speed changed between them."""
    # the limit without communication is no engine
    engines = [timing for timing in result.timings if timing.engine != BESIDE[0]]
    # steps over the floors of their own rounds, so that a slow round slows nobody's ratio
    outcome = race([result.beside_floor(timing) for timing in engines])
    leaders = [_name(engines[place], engines) for place in outcome.leaders]
    lines = []
    if len(engines) > 1:
        if outcome.winner is not None:
            verdict = f"{leaders[0]} is fastest."
        elif outcome.within is None:
            verdict = f"No engine is called fastest, as too few rounds were timed ({FEWEST} are needed)."
        else:
            pair = f"{', '.join(leaders[:-1])} and {leaders[-1]}"
            rounds = plural(len(result.floors), "round")
            needed = f"their ratios to the floor would have to differ by {percent(outcome.within)}"
            verdict = f"No difference between {pair} is seen in {rounds} ({needed})."
        lines.append(Line(verdict))
    floor = Spread.of(result.floors)
    if (floor.scatter or 0) > _UNSTEADY:
        low = f"{known(floor.min) * 1e3:,.0f}"
        high = f"{known(floor.max) * 1e3:,.0f}"
        lines.append(
            Line(f"The floor itself took {low} to {high} ms: other work used the machine, or it changed its speed.")
        )
    return lines


def _name(timing: Timing, among: Sequence[Timing]) -> str:
    """Return what sentences call a row of the table."""
    name = f"{timing.engine} {timing.strategy}"
    # named only where rows of one engine differ in it
    prefetches = {row.prefetch for row in among if row.engine == timing.engine}
    if len(prefetches) > 1:
        name += f" with prefetch {timing.prefetch}"
    return name


def _cells(result: Bench, timing: Timing) -> dict[str, str]:
    """Return the cells of one row by column; what was not measured is missing."""
    row = {
        "engine": timing.engine,
        "strategy": timing.strategy,
        "step": f"{timing.median * 1e3:.0f} ms",
        "optimizer": _median_ms(timing.optimizing),
        "prefetch": str(timing.prefetch) if timing.engine == "lab" else MISSING,
        "blocked": _median_ms(timing.blocked),
        "overlap": MISSING if timing.overlap is None else f"{timing.overlap:.0%}",
        "/ floor": f"{timing.median / result.floor:.3f}",
    }
    scatter = result.beside_floor(timing).scatter
    row["±"] = MISSING if scatter is None else f"{100 * scatter:.1f} %"
    # `alone` gets no column of ratios: the limit that is shown is the floor
    for name in BESIDE[1:]:
        ratio = result.ratio(timing, name)
        row[f"/ {name.removeprefix('torch-')}"] = MISSING if ratio is None else f"{ratio:.3f}"
    row["loss"] = f"{timing.loss:.4f}"
    return row


def _median_ms(times_s: Sequence[float]) -> str:
    if not times_s:
        return MISSING
    return f"{statistics.median(times_s) * 1e3:.0f} ms"


def _as_dict(result: Bench) -> dict[str, Any]:
    rows = []
    for timing in result.timings:
        row = asdict(timing)
        row["median"] = timing.median
        row["overlap"] = timing.overlap
        row["over_floor"] = timing.median / result.floor
        row["over_floor_by_round"] = asdict(result.beside_floor(timing))
        for name in BESIDE:
            row[f"over_{name}"] = result.ratio(timing, name)
        rows.append(row)
    return {
        "format": FORMAT,
        "spec": result.spec.as_dict(),
        "floor_s": result.floor,
        "floors_s": result.floors,
        "rows": rows,
    }
