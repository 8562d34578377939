"""`fsdplab plan --fit` and `--sweep`: tables of many plans, and a figure of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdplab.cli.console import console_beside
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import WIDTH, check_file
from fsdplab.cli.plan import print_provenance, refusals, write_json
from fsdplab.common.files import write_output
from fsdplab.common.places import how_to_install
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.fit import Fit, fit, parse_sweep, sweep
from fsdplab.planning.hardware import Gpu
from fsdplab.planning.planner import Plan, plan_spec, shortfall


def show_fit(model: str, gpu: str, choices: dict[str, Any], tokens: float | None, json_file: str | None) -> None:
    """Search strategies, checkpointing and micro-batches; print what fits, the cheapest first."""
    with refusals():
        spec = plan_spec(model, gpu, **choices)
        found = fit(spec)
    console = console_beside(json_file, WIDTH)
    console.print(_table([_words(each) for each in found.candidates], list(found.candidates), spec.gpu.memory_bytes))
    _print_choice(console, found, spec.gpus, spec.gpu, tokens)
    print_provenance(console, found.candidates)
    rows = [each.as_dict(tokens) | {"checkpointing": each.spec.checkpointing} for each in found.candidates]
    fewest = found.fewest.as_dict(tokens) | {"checkpointing": found.fewest.spec.checkpointing} if found.fewest else None
    write_json(json_file, json.dumps({"candidates": rows, "fewest_gpus": fewest}, indent=1))


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


def show_sweep(
    model: str, gpu: str, choices: dict[str, Any], text: str, json_file: str | None, figure: Path | None
) -> None:
    """Plan for each value of one choice; a figure of memory and throughput if asked."""
    if figure is not None:
        check_figure(figure)
    with refusals():
        name, values = parse_sweep(text)
        if name == "gpus":
            choices = choices | {"gpus": values[0]}
        plans = sweep(plan_spec(model, gpu, **choices), name, values)
    console = console_beside(json_file, WIDTH)
    labels = [f"{name} {value:,}" for value in values]
    console.print(_table(labels, plans, plans[0].spec.gpu.memory_bytes))
    for label, each in zip(labels, plans):
        if missing := shortfall(each):
            console.print(f"{label}: [bold red]does not fit[/]: {escape(missing)}", highlight=False)
    print_provenance(console, plans)
    rows = [{name: value} | each.as_dict() for value, each in zip(values, plans)]
    write_json(json_file, json.dumps({"sweep": name, "rows": rows}, indent=1))
    if figure is not None:
        from fsdplab.cli.plan_figures import sweep_figure

        write_figure(figure, sweep_figure(name, values, plans))


def check_figure(path: Path) -> None:
    """Refuse a figure of another kind, or one that cannot be written, before anything is computed."""
    import importlib.util

    if path.suffix != ".html":
        refuse(f"--figure is {str(path)!r}; expected a file name that ends in .html: its camera button saves an SVG")
    if importlib.util.find_spec("plotly") is None:
        refuse(f"--figure needs plotly; run: {how_to_install('lab')}")
    check_file("--figure", path)


def write_figure(path: Path, figure: Any) -> None:
    """As a page of its own, whose camera button saves the figure as SVG."""
    from fsdplab.figures.style import CAMERA

    write_output(path, figure.to_html(include_plotlyjs="cdn", config=CAMERA))


def _table(labels: list[str], plans: list[Plan], card: int) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("plan", "peak", "of the card", "sent", "step", "exposed", "tokens/s a GPU", "MFU"):
        table.add_column(column, justify="left" if column == "plan" else "right", no_wrap=True)
    for label, each in zip(labels, plans):
        time, speed, mfu = each.time, each.tokens_per_s_per_gpu, each.mfu
        sent = sum(each.as_dict()["comm_bytes_per_step"].values())
        table.add_row(
            label, size(each.memory.peak.total), f"{each.memory.peak.total / card:.0%}", size(sent),
            seconds(time.step_s if time else None), f"{time.exposed_s / time.step_s:.0%}" if time else MISSING,
            three_digits(speed) if speed else MISSING, f"{mfu:.1%}" if mfu else MISSING,
        )  # fmt: skip
    return table
