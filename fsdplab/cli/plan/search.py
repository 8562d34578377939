"""`fsdplab plan fit` and `plan sweep`: tables of many plans, and a figure of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.plan.provenance import provenance
from fsdplab.cli.plan.step import check_tokens
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.fit import Fit, fit, parse_sweep, sweep
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import Plan, plan_spec, shortfall


def fit_answer(settings: dict[str, Any], tokens: float | None) -> Answer:
    """Search strategies, checkpointing and micro-batches: what fits, the cheapest first."""
    check_tokens(tokens)
    spec = plan_spec(**settings)
    found = fit(spec)
    table = _table([(_words(each), each) for each in found.candidates])
    rows = [each.as_dict(tokens) | {"checkpointing": each.spec.checkpointing} for each in found.candidates]
    fewest = found.fewest.as_dict(tokens) | {"checkpointing": found.fewest.spec.checkpointing} if found.fewest else None
    parts: list[Part] = [table, *_choices(found, spec, tokens), provenance(found.candidates)]
    return Answer(parts, {"candidates": rows, "fewest_gpus": fewest})


def _words(found: Plan) -> str:
    return f"{found.spec.strategy}, checkpointing {found.spec.checkpointing}, micro-batch {found.spec.micro_batch}"


def _choices(found: Fit, spec: PlanSpec, tokens: float | None) -> Iterator[Line]:
    best, fewest = found.best, found.fewest
    if best is None:
        yield Line(f"nothing fits on {spec.gpus} GPUs with a micro-batch of 1", mood="bad")
    else:
        hours = best.hours(tokens) if tokens else None
        cost = f", {hours * spec.gpus:,.0f} GPU-hours for {tokens:,.0f} tokens" if hours else ""
        yield Line(f"{_words(best)}{cost}", "cheapest", "good")
    if fewest is None:
        unknown = f" in one node, and no network between nodes is known for {spec.gpu.name}"
        yield Line(f"no number of these GPUs holds it{'' if spec.fabric else unknown}")
    else:
        yield Line(f"{fewest.spec.gpus} with {_words(fewest)}", "fewest GPUs")


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
