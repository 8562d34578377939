"""`fsdplab plan sweep`: a table of many plans, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdplab.cli.answer import Answer, Line, Table
from fsdplab.cli.plan.provenance import provenance
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.fit import parse_sweep, sweep
from fsdplab.planning.planner import Plan, plan_spec, shortfall


def sweep_answer(settings: dict[str, Any], text: str) -> Answer:
    """Plan for each value of one choice; the figure shows memory and throughput."""
    name, values = parse_sweep(text)
    if name == "gpus":
        settings = settings | {"gpus": values[0]}
    plans = sweep(plan_spec(**settings), name, values)
    labelled = [(f"{name} {value:,}", each) for value, each in zip(values, plans)]
    lacking = [(label, shortfall(each)) for label, each in labelled]
    missing = [Line(words, f"{label}: does not fit", "bad") for label, words in lacking if words]
    rows = [{name: value} | each.as_dict() for value, each in zip(values, plans)]

    def page() -> str:
        from fsdplab.figures.plots.plans import page_of, sweep_figure

        return page_of(sweep_figure(name, values, plans))

    return Answer((_table(labelled), *missing, provenance(plans)), {"sweep": name, "rows": rows}, page)


def _table(labelled: Sequence[tuple[str, Plan]]) -> Table:
    columns = ("plan", "peak", "of the card", "sent", "step", "exposed", "tokens/s a GPU", "MFU")
    return Table(columns, [_row(label, each) for label, each in labelled], words=("plan",))


def _row(label: str, found: Plan) -> Sequence[str]:
    time, speed, mfu = found.time, found.tokens_per_s_per_gpu, found.mfu
    peak, card = found.memory.peak.total, found.spec.gpu.memory_bytes
    return (
        label, size(peak), f"{peak / card:.0%}",
        size(sum(found.as_dict()["comm_bytes_per_step"].values())), seconds(time.step_s if time else None),
        f"{time.exposed_s / time.step_s:.0%}" if time else MISSING, three_digits(speed) if speed else MISSING,
        f"{mfu:.1%}" if mfu else MISSING,
    )  # fmt: skip
