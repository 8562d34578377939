"""`fsdplab bench`: engines taking turns in one run, shown as ratios of medians."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from rich.table import Table

from fsdplab.cli.errors import refusals, refuse
from fsdplab.cli.plan.targets import Targets
from fsdplab.cli.terminal import look_for_signals
from fsdplab.common.names import OVER_ALL_RANKS
from fsdplab.records import FORMAT
from fsdplab.sessions.spec import ENGINES, PEERS

if TYPE_CHECKING:
    from fsdplab.sessions.bench_engines import Bench

BESIDE = ("alone", "torch-ddp", "torch-fsdp2")  # ratios are to the medians of these, where they took part


def bench_engines(
    strategies: list[str], engines: list[str], common: dict[str, Any], rounds: int, json_file: str | None,
    peer_transport: str = "auto", prefetches: Sequence[str] = ("1",),
) -> None:  # fmt: skip
    """Run the lab's strategies and the other engines in turn, print the ratios, and write them as JSON if asked."""
    from fsdplab.sessions import RunSpec, bench

    targets = Targets(json_file)
    console = targets.console()
    with refusals():
        transport = common.pop("transport")
        pairs = [(name, strategy) for name in engines for strategy in _strategies(name)]
        peers = [
            RunSpec(engine=name, strategy=strategy, transport=peer_transport, **common) for name, strategy in pairs
        ]
        ours = [
            RunSpec(strategy=name, transport=transport, prefetch=_count(text), **common)
            for name in strategies
            for text in prefetches
        ]
        targets.check()
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("rounds", total=None)
            result = bench(
                [*ours, *peers],
                rounds=rounds,
                on_look=look_for_signals,
                on_round=lambda done, total: progress.update(task, completed=done, total=total),
            )
    console.print(_table(result))
    compiled = "compiled blocks, " if result.spec.compile == "blocks" else ""
    console.print(
        f"measured: median of {rounds} rounds, engines in turn, {compiled}{result.spec.optimizer} optimizer; alone: no"
        f" communication at all; floor: forward + backward + optimizer / {result.spec.world_size} ="
        f" {result.floor * 1e3:.0f} ms",
        highlight=False,
    )
    targets.write(_as_dict(result))


def _strategies(name: str) -> tuple[str, ...]:
    if name not in PEERS:
        refuse(f"--engines has {name!r}; expected some of {', '.join(PEERS)}")
    able = [strategy for strategy in ENGINES[name] if strategy in OVER_ALL_RANKS]
    return tuple(able[:1]) if name.startswith("deepspeed") else tuple(able)


def _count(text: str) -> int:
    if not text.isdigit():
        refuse(f"--prefetch has {text!r}; expected whole numbers of at least 0, such as 0,1,2")
    return int(text)


def _table(result: Bench) -> Table:
    table = Table(box=None, header_style="bold")
    ratios_to = [f"/ {name.removeprefix('torch-')}" for name in BESIDE]
    waits = (
        ("prefetch", "blocked", "overlap")
        if any(timing.prefetch != 1 for timing in result.timings) or result.spec.linked
        else ()
    )
    for name in ("engine", "strategy", "step", *waits, "/ floor", *ratios_to, "loss"):
        table.add_column(name, justify="left" if name in ("engine", "strategy") else "right", no_wrap=True)
    for timing in result.timings:
        ratios = [timing.median / result.floor, *(result.ratio(timing, name) for name in BESIDE)]
        shown = ["-" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        blocked = f"{statistics.median(timing.blocked) * 1e3:.0f} ms" if timing.blocked else "-"
        overlap = "-" if timing.overlap is None else f"{timing.overlap:.0%}"
        prefetch = str(timing.prefetch) if timing.engine == "lab" else "-"
        hidden = (prefetch, blocked, overlap)[: len(waits)]
        table.add_row(
            timing.engine, timing.strategy, f"{timing.median * 1e3:.0f} ms", *hidden, *shown, f"{timing.loss:.4f}"
        )
    return table


def _as_dict(result: Bench) -> dict[str, Any]:
    rows = [
        {
            **asdict(timing),
            "median": timing.median,
            "overlap": timing.overlap,
            "over_floor": timing.median / result.floor,
            **{f"over_{name}": result.ratio(timing, name) for name in BESIDE},
        }
        for timing in result.timings
    ]
    return {"format": FORMAT, "spec": result.spec.as_dict(), "floor_s": result.floor, "rows": rows}
