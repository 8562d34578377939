"""`fsdplab plan fit` and `plan sweep`: tables of many plans, and a figure of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdplab.cli.plan.targets import Targets, grid, print_provenance, refusals
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.fit import Fit, fit, parse_sweep, sweep
from fsdplab.planning.hardware import Gpu
from fsdplab.planning.planner import Plan, plan_spec, shortfall


def show_fit(settings: dict[str, Any], tokens: float | None, json_file: str | None) -> None:
    """Search strategies, checkpointing and micro-batches; print what fits, the cheapest first."""
    targets = Targets(json_file).check()
    with refusals():
        spec = plan_spec(**settings)
        found = fit(spec)
    console = targets.console()
    console.print(_table([_words(each) for each in found.candidates], list(found.candidates), spec.gpu.memory_bytes))
    _print_choice(console, found, spec.gpus, spec.gpu, tokens)
    print_provenance(console, found.candidates)
    rows = [each.as_dict(tokens) | {"checkpointing": each.spec.checkpointing} for each in found.candidates]
    fewest = found.fewest.as_dict(tokens) | {"checkpointing": found.fewest.spec.checkpointing} if found.fewest else None
    targets.write({"candidates": rows, "fewest_gpus": fewest})


def _words(found: Plan) -> str:
    return f"{found.spec.strategy}, checkpointing {found.spec.checkpointing}, micro-batch {found.spec.micro_batch}"


def _print_choice(console: Console, found: Fit, gpus: int, gpu: Gpu, tokens: float | None) -> None:
    best, fewest = found.best, found.fewest
    if best is None:
        console.print(f"[bold red]nothing fits[/] on {gpus} GPUs with a micro-batch of 1", highlight=False)
    else:
        hours = best.hours(tokens) if tokens else None
        cost = f", {hours * gpus:,.0f} GPU-hours for {tokens:,.0f} tokens" if hours else ""
        console.print(f"[bold green]cheapest[/]: {_words(best)}{cost}", highlight=False)
    if fewest is None:
        known = "" if gpu.nic_bytes_per_s else f" in one node, and no network between nodes is known for {gpu.name}"
        console.print(f"no number of these GPUs holds it{known}", highlight=False)
    else:
        console.print(f"[bold]fewest GPUs[/]: {fewest.spec.gpus} with {_words(fewest)}", highlight=False)


def show_sweep(settings: dict[str, Any], text: str, json_file: str | None, figure: Path | None) -> None:
    """Plan for each value of one choice; a figure of memory and throughput if asked."""
    targets = Targets(json_file, figure).check()
    with refusals():
        name, values = parse_sweep(text)
        if name == "gpus":
            settings = settings | {"gpus": values[0]}
        plans = sweep(plan_spec(**settings), name, values)
    console = targets.console()
    labels = [f"{name} {value:,}" for value in values]
    console.print(_table(labels, plans, plans[0].spec.gpu.memory_bytes))
    for label, each in zip(labels, plans):
        if missing := shortfall(each):
            console.print(f"{label}: [bold red]does not fit[/]: {escape(missing)}", highlight=False)
    print_provenance(console, plans)
    rows = [{name: value} | each.as_dict() for value, each in zip(values, plans)]
    targets.write({"sweep": name, "rows": rows}, lambda: _figure(name, values, plans))


def _figure(name: str, values: Sequence[int], plans: Sequence[Plan]) -> Any:
    from fsdplab.cli.plan.figures import sweep_figure

    return sweep_figure(name, values, plans)


def _table(labels: list[str], plans: list[Plan], card: int) -> Table:
    columns = ("plan", "peak", "of the card", "sent", "step", "exposed", "tokens/s a GPU", "MFU")
    return grid(columns, (_row(label, each, card) for label, each in zip(labels, plans)), words=("plan",))


def _row(label: str, found: Plan, card: int) -> Sequence[str]:
    time, speed, mfu = found.time, found.tokens_per_s_per_gpu, found.mfu
    return (
        label, size(found.memory.peak.total), f"{found.memory.peak.total / card:.0%}",
        size(sum(found.as_dict()["comm_bytes_per_step"].values())), seconds(time.step_s if time else None),
        f"{time.exposed_s / time.step_s:.0%}" if time else MISSING, three_digits(speed) if speed else MISSING,
        f"{mfu:.1%}" if mfu else MISSING,
    )  # fmt: skip
