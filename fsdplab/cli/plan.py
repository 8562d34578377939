"""`fsdplab plan`: memory by category with the card, traffic, step time and throughput of a job, as a table or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdplab.cli.console import console_beside
from fsdplab.cli.errors import refuse
from fsdplab.common.files import write_output
from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.planning import HardwareError, ModelError, PlanError
from fsdplab.planning.links import HOST_LINK
from fsdplab.planning.memory import host_crossing
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import latency_s
from fsdplab.planning.planner import Plan, plan_of, plan_spec, shortfall
from fsdplab.planning.step_time import StepTime, peak_flops

_WIDTH = 110
_BAR = 30  # columns of a whole card
_NOTHING_S = 1e-9  # what is exposed below this is a rounding error
_MUCH = 0.1  # part of all communication from which on latency is told
_PREDICTED = "all figures are predicted, in closed form"


def check_tokens(tokens: float | None) -> None:
    """Refuse a number of tokens that no training has."""
    if tokens is not None and not 1 <= tokens <= 1e18:
        refuse(f"--tokens is {tokens!r}; expected a number from 1 to 1e18, such as 15e12")


_TAKES = {  # what only some of the command's forms take, and how to give it
    "FILE": (("--validate", "--ask"), "--validate before a file of measurements, or --ask before a question's name"),
    "--figure": (("--sweep", "--validate", "--ask"), "it with --sweep, --validate or --ask"),
    "--html": (("--simulate",), "it with --simulate"),
}


def check_modes(modes: Sequence[str], file: Path | None, figure: Path | None, html_file: Path | None) -> None:
    """Refuse two forms of the command at once, and what the form asked for does not take."""
    if len(modes) > 1:
        refuse(f"{' and '.join(modes)} were given; expected one of them, or none for the plan itself")
    for name, given in (("FILE", file), ("--figure", figure), ("--html", html_file)):
        taking, words = _TAKES[name]
        if given is not None and not set(modes) & set(taking):
            refuse(f"plan takes no {name} ({str(given)!r}) here; give {words}, or leave it out")


@contextmanager
def refusals() -> Iterator[None]:
    """An invalid plan becomes one line and exit code 2."""
    try:
        yield
    except (ModelError, HardwareError, PlanError) as error:
        refuse(str(error))


def show_plan(model: str, gpu: str, choices: dict[str, Any], tokens: float | None, json_file: str | None) -> None:
    """Plan one step, print the table, and write JSON if asked."""
    with refusals():
        found = plan_of(plan_spec(model, gpu, **choices))
        text = json.dumps(found.as_dict(tokens), indent=1)
        missing = shortfall(found)
    console = console_beside(json_file, _WIDTH)
    console.print(f"[bold]{escape(_headline(found))}[/]", highlight=False)
    console.print(_memory_table(found))
    _print_card(console, found, missing)
    console.print(_times_table(found, tokens))
    write_json(json_file, text)


def write_json(json_file: str | None, text: str) -> None:
    """To the file, to stdout for `-`, nowhere for None."""
    if json_file == "-":
        sys.stdout.write(text + "\n")
    elif json_file is not None:
        write_output(Path(json_file), text + "\n")


def reached_words(found: Plan) -> str:
    """`0.485 of 989 TFLOP/s: fitted on 5 published runs`: what all predicted times rest on."""
    return found.efficiency.of(peak_flops(found.spec.gpu)) if found.efficiency else "unknown"


def print_provenance(console: Console, plans: Sequence[Plan], what: str = _PREDICTED) -> None:
    """Where the figures of plans on one kind of GPU are from, beneath their table."""
    reached = f"; matrix products reach {reached_words(plans[0])}" if plans and plans[0].efficiency else ""
    console.print(f"provenance: {what}{reached}", highlight=False, markup=False)


def _headline(found: Plan) -> str:
    spec = found.spec
    mesh = f", {spec.tensor_parallel}-way tensor parallel" if spec.tensor_parallel > 1 else ""
    groups = f" in {spec.replicas} groups of {spec.shards}" if spec.strategy == "hybrid_shard" else ""
    return (
        f"{spec.model.name}, {spec.model.parameters / 1e9:.3f} B parameters, {spec.strategy}{groups} on {spec.gpus} x"
        f" {spec.gpu.name}{mesh}: {spec.micro_batch} x {spec.seq} tokens a micro-batch, {spec.grad_accum} a step;"
        f" gathers in {spec.param_dtype}, reductions in {spec.reduce_dtype}"
    )


def _memory_table(found: Plan) -> Table:
    """Categories at the peak and between steps."""
    table = Table(box=None, header_style="bold")
    for name in ("memory of a rank", "between steps", "at the peak"):
        table.add_column(name, justify="left" if name == "memory of a rank" else "right", no_wrap=True)
    table.add_column("of the card", no_wrap=True)
    peak, resting, card = found.memory.peak, found.memory.resting, found.spec.gpu.memory_bytes
    for name, row in CATEGORY_ROWS.items():
        here, rests = peak.by_category[name], resting.by_category[name]
        bar = "#" * min(_BAR, round(_BAR * here / card))
        table.add_row(row.words, size(rests) if rests else "-", size(here) if here else "-", bar)
    table.add_row("total", size(resting.total), size(peak.total), f"{peak.total / card:.0%}", style="bold")
    return table


def _print_card(console: Console, found: Plan, missing: str | None) -> None:
    memory, card = found.memory, found.spec.gpu.memory_bytes
    if missing:
        console.print(f"[bold red]does not fit[/]: {escape(missing)}", highlight=False)
        return
    left = card - memory.peak.total
    tight = "" if memory.reserved_bytes <= card else "; tight: fragments of the allocator may take more than is left"
    console.print(
        f"[bold green]fits[/]: {size(left)} of {size(card)} are left at the peak, in the {memory.peak.name}{tight}",
        highlight=False,
    )


def _times_table(found: Plan, tokens: float | None) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in _times(found, tokens):
        table.add_row(name, value)
    return table


def _times(found: Plan, tokens: float | None) -> Iterator[tuple[str, str]]:
    sent = found.as_dict()["comm_bytes_per_step"]
    yield "sent by a rank a step", ", ".join(f"{axis} {size(nbytes)}" for axis, nbytes in sent.items()) or "nothing"
    time = found.time
    if time is None:
        yield "step time", f"unknown: no bf16 FLOP/s are known for {found.spec.gpu.name}"
        yield "provenance", _PREDICTED
        return
    least = "at least " if found.spec.offload else ""
    exposed = seconds(time.exposed_s) if time.exposed_s > _NOTHING_S else "none"
    yield "step", f"{least}{seconds(time.step_s)}: compute {seconds(time.compute_s)}, exposed {exposed}"
    yield "communication alone", _communication(found, time)
    if found.spec.offload:
        yield "not in the step", _host(found.spec)
    speed, mfu = found.tokens_per_s_per_gpu or 0.0, found.mfu or 0.0
    yield "tokens/s a GPU", f"{'at most ' * bool(least)}{three_digits(speed)} (MFU {mfu:.1%})"
    hours = found.hours(tokens) if tokens else None
    if hours:
        yield f"{tokens:,.0f} tokens", f"{least}{hours:,.1f} hours, {hours * found.spec.gpus:,.0f} GPU-hours"
    yield "matrix products reach", reached_words(found)
    yield "provenance", _PREDICTED


def _communication(found: Plan, time: StepTime) -> str:
    """All of it as if alone, with the part that no bandwidth shortens where that is large, and what is exposed."""
    if not found.traffic:
        return "none: no rank sends anything"
    latency = latency_s(found.spec, found.traffic)
    rings = f" ({seconds(latency)} of it the latency of rings)" if latency > _MUCH * time.communication_s else ""
    return f"{seconds(time.communication_s)}{rings}, exposed {max(0.0, time.exposed_s) / time.step_s:.1%} of a step"


def _host(spec: PlanSpec) -> str:
    crossing = host_crossing(spec)
    took, rate = seconds(crossing / HOST_LINK.bytes_per_s), size(HOST_LINK.bytes_per_s)
    return f"{size(crossing)} over the host's link, {took} at {rate}/s (PCIe 4, assumed); the CPU's optimizer"
