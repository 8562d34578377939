"""`fsdplab bench`: engines take turns in one run, and their median steps are compared as ratios.

How far a ratio may be trusted is read from the rounds: an engine's step over the floor of the same round, where a
machine that becomes slower slows both. No engine is called faster than another within the spread of these.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from fsdplab.cli.answer import Answer, Line, Table
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
    """Run the lab's strategies and the other engines in turn; their ratios."""
    from fsdplab.sessions import RunSpec, bench

    common, told = _sized(settings | {"memory": False})
    transport = common.pop("transport")
    peers = [
        RunSpec(engine=name, strategy=strategy, transport=peer_transport, **common)
        for name in engines
        for strategy in _strategies(name)
    ]
    ours = [
        RunSpec(strategy=name, transport=transport, prefetch=count, **common)
        for name in strategies
        for count in prefetch
    ]
    with Progress(console=outputs.console(), transient=True) as progress:
        task = progress.add_task("rounds", total=None)
        result = bench(
            [*ours, *peers],
            rounds=rounds,
            on_look=look_for_signals,
            on_round=lambda done, total: progress.update(task, completed=done, total=total),
        )
    return _answer(result, rounds, told)


def _sized(common: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The settings with a batch that bf16 can compute on this CPU, and what to say of that ("" where nothing)."""
    if common["precision"] != "bf16" or common["device"] == "cuda":
        return common, ""
    asked = common["batch_size"], common["sequence_length"]
    batch, length = bf16_speed.smaller_batch(*asked)
    if (batch, length) == asked:
        return common, ""
    told = (
        f"bf16 takes {bf16_speed.bf16_slowdown():.0f} times as long as fp32 on this processor, so batches of {batch} x"
        f" {length} tokens were timed, not of {asked[0]} x {asked[1]}"
    )
    return common | {"batch_size": batch, "sequence_length": length}, told


def _strategies(name: str) -> tuple[str, ...]:
    if name not in PEERS:
        refuse(f"--engines has {name!r}; expected some of {', '.join(PEERS)}")
    able = [strategy for strategy in ENGINES[name] if strategy in OVER_ALL_RANKS]
    return tuple(able[:1]) if name.startswith("deepspeed") else tuple(able)


def _answer(result: Bench, rounds: int, told: str = "") -> Answer:
    waits = result.spec.linked or any(timing.prefetch != 1 for timing in result.timings)
    rows = [_cells(result, timing) for timing in result.timings]
    hidden = set() if waits else {"prefetch", "blocked", "overlap"}
    hidden |= set() if result.spec.optimizer == "muon" else {"optimizer"}
    columns = [name for name in rows[0] if name not in hidden and any(row[name] != MISSING for row in rows)]
    compiled = "compiled blocks, " if result.spec.compile == "blocks" else ""
    how = (
        f"median of {rounds} rounds, engines in turn, {compiled}{result.spec.optimizer} optimizer; alone: no"
        f" communication at all; floor: forward + backward + optimizer / {result.spec.world_size} ="
        f" {result.floor * 1e3:.0f} ms"
    )
    if "±" in columns:
        how += "; ±: half the spread of the middle half of steps over the floors of their rounds"
    table = Table(columns, [[row[name] for name in columns] for row in rows], words=("engine", "strategy"))
    said = [Line(told, "smaller")] if told else []
    return Answer((table, *_judged(result), Line(how, "measured"), *said), _as_dict(result))


def _judged(result: Bench) -> list[Line]:
    """Which engine is fastest, where the rounds tell, and whether the machine's own speed changed between them."""
    engines = [timing for timing in result.timings if timing.engine != BESIDE[0]]
    found = race([result.beside_floor(timing) for timing in engines])
    leaders = [_name(engines[place], engines) for place in found.leaders]
    rounds = plural(len(result.floors), "round")
    if len(engines) == 1:
        said = []
    elif found.winner is not None:
        said = [f"{leaders[0]} is fastest."]
    elif found.within is None:
        said = [f"No engine is called fastest, as too few rounds were timed ({FEWEST} are needed)."]
    else:
        needed = f"their ratios to the floor would have to differ by {percent(found.within)}"
        said = [f"No difference between {', '.join(leaders[:-1])} and {leaders[-1]} is seen in {rounds} ({needed})."]
    floor = Spread.of(result.floors)
    if (floor.scatter or 0) > _UNSTEADY:
        low, high = (f"{known(each) * 1e3:,.0f}" for each in (floor.min, floor.max))
        said += [f"The floor itself took {low} to {high} ms: other work used the machine, or it changed its speed."]
    return [Line(each) for each in said]


def _name(timing: Timing, among: Sequence[Timing]) -> str:
    """What sentences call a row of the table."""
    several = len({each.prefetch for each in among if each.engine == timing.engine}) > 1
    return f"{timing.engine} {timing.strategy}" + (f" with prefetch {timing.prefetch}" if several else "")


def _cells(result: Bench, timing: Timing) -> dict[str, str]:
    scatter = result.beside_floor(timing).scatter
    ratios = {f"/ {name.removeprefix('torch-')}": result.ratio(timing, name) for name in BESIDE[1:]}
    return {
        "engine": timing.engine,
        "strategy": timing.strategy,
        "step": f"{timing.median * 1e3:.0f} ms",
        "optimizer": f"{statistics.median(timing.optimizing) * 1e3:.0f} ms" if timing.optimizing else MISSING,
        "prefetch": str(timing.prefetch) if timing.engine == "lab" else MISSING,
        "blocked": f"{statistics.median(timing.blocked) * 1e3:.0f} ms" if timing.blocked else MISSING,
        "overlap": MISSING if timing.overlap is None else f"{timing.overlap:.0%}",
        "/ floor": f"{timing.median / result.floor:.3f}",
        "±": MISSING if scatter is None else f"{100 * scatter:.1f} %",
        **{name: MISSING if ratio is None else f"{ratio:.3f}" for name, ratio in ratios.items()},
        "loss": f"{timing.loss:.4f}",
    }


def _as_dict(result: Bench) -> dict[str, Any]:
    rows = [
        {
            **asdict(timing),
            "median": timing.median,
            "overlap": timing.overlap,
            "over_floor": timing.median / result.floor,
            "over_floor_by_round": asdict(result.beside_floor(timing)),
            **{f"over_{name}": result.ratio(timing, name) for name in BESIDE},
        }
        for timing in result.timings
    ]
    return {
        "format": FORMAT,
        "spec": result.spec.as_dict(),
        "floor_s": result.floor,
        "floors_s": result.floors,
        "rows": rows,
    }
