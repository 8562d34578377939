"""Lesson 19 in the notebook's process: plans of a job of 70 billion parameters, its bill, and the planner's own record.

All of it is arithmetic: no rank is started. How far off such predictions are is computed from published measurements
(`data/published.csv`), as `fsdplab plan validate` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdplab.common.names import STRATEGIES
from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go
from fsdplab.planning.fit import fit
from fsdplab.planning.planner import Plan, plan_of, plan_spec, shortfall
from fsdplab.planning.validate import HELD_OUT, NOT_FITTED, Row, Validation, validate
from fsdplab.teaching.core.display import Note, Table, table

from .figures import bill_figure, ratio_figure
from .order import BUDGET, DAYS, MODEL, PRICES, SEQUENCE, STEP_TOKENS, TOKENS, days, dollars, ordered

__all__ = [
    "BUDGET", "DAYS", "PRICES", "STEP_TOKENS", "TOKENS", "best", "bill", "bill_factor", "error", "fewest", "ladder",
    "ordered", "points", "published", "published_rows", "ratios", "strategies", "told", "weighed",
]  # fmt: skip

PUBLISHED = Path(__file__).resolve().parents[4] / "data" / "published.csv"
LADDER = (32, 64, 128, 256, 512, 768)  # GPUs


def told(found: Plan) -> Note:
    """What a plan says, in two lines."""
    spec, peak = found.spec, found.memory.peak
    what = f"{spec.model.name} on {spec.gpus} {spec.gpu.name}, {spec.strategy}, checkpointing {spec.checkpointing}"
    if not found.fits:
        return Note((f"{what}: does not fit.", f"{shortfall(found)}."))
    speed = f"{found.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, MFU {found.mfu:.0%}" if found.mfu else "unknown speed"
    return Note(
        (f"{what}: {size(peak.total)} of {size(spec.gpu.memory_bytes)} at the peak, in the {peak.name}.", speed)
    )


def fewest(gpu: str) -> int:
    """The fewest GPUs of a kind on which the model trains, one sequence a rank, whatever the strategy."""
    found = fit(plan_spec(MODEL, gpu, seq=SEQUENCE)).fewest
    assert found is not None, "some number of the lesson's cards holds the model"
    return found.spec.gpus


def strategies(gpus: int, gpu: str = "h100") -> Table:
    """Every strategy on so many GPUs with one sequence a rank: memory, speed, exposed share."""
    rows = []
    for name in STRATEGIES:
        found = ordered(gpu, gpus=gpus, strategy=name, checkpointing="selective")
        peak, time = found.memory.peak.total, found.time
        assert time is not None, "the lesson's cards have known FLOP/s"
        speed = [f"{found.tokens_per_s_per_gpu:,.0f}", f"{time.exposed_s / time.step_s:.1%}", f"{found.mfu:.0%}"]
        rows.append([name, f"{peak / 1e9:,.1f}", *(speed if found.fits else ["does not fit", "-", "-"])])
    card = plan_spec(MODEL, gpu).gpu.memory_bytes
    caption = (
        f"Predicted: {gpus} GPUs, cards of {size(card)}, sequences of {SEQUENCE:,} tokens, selective checkpointing."
    )
    return table(["strategy", "peak, GB", "tokens/s a GPU", "exposed", "MFU"], rows, caption)


# ---- time and money


@lru_cache(maxsize=256)
def best(gpu: str, gpus: int) -> Plan | None:
    """The cheapest plan on so many GPUs with at most 4 million tokens a step; None where nothing fits."""
    most = STEP_TOKENS // (SEQUENCE * gpus)
    found = fit(plan_spec(MODEL, gpu, gpus=gpus, seq=SEQUENCE)).candidates if most else ()
    capped = [plan_of(replace(each.spec, micro_batch=min(each.spec.micro_batch, most))) for each in found]
    return min(capped, key=lambda each: dollars(each, gpu), default=None)


def ladder(gpu: str, tokens: float = TOKENS) -> dict[int, tuple[float, float]]:
    """GPUs -> (days, dollars) of the cheapest plan there."""
    found = {gpus: best(gpu, gpus) for gpus in LADDER}
    return {gpus: (days(each, tokens), dollars(each, gpu, tokens)) for gpus, each in found.items() if each is not None}


def bill_factor(gpu: str = "h100", few: int = 64, many: int = 512) -> float:
    """The bill on `many` GPUs over that on `few`."""
    steps = ladder(gpu)
    return steps[many][1] / steps[few][1]


def bill(gpu: str, gpus: int, billions_of_tokens: int) -> go.Figure:
    """Days and bill over the number of GPUs, with one number chosen."""
    for each in PRICES:  # the other GPU's plans as well: its first move then answers as fast as the rest
        ladder(each)
    found = best(gpu, gpus)
    chosen = "nothing fits" if found is None else f"{found.spec.strategy}, checkpointing {found.spec.checkpointing}"
    return bill_figure(ladder(gpu, billions_of_tokens * 1e9), gpus, gpu.upper(), billions_of_tokens, chosen)


def weighed(order: dict[str, Any]) -> Table:
    """An order beside the cheapest plans of both cards that end in time."""
    rows = [["your order", *_row(ordered(**order), order["gpu"])]]
    for gpu in PRICES:
        plans = [each for gpus in LADDER if (each := best(gpu, gpus)) is not None and days(each) <= DAYS]
        cheapest = min(plans, key=lambda each: dollars(each, gpu))
        rows.append([f"cheapest of these on {gpu}", *_row(cheapest, gpu)])
    header = ["", "GPUs", "strategy", "checkpointing", "micro-batch", "peak, GB", "days", "bill, $"]
    numbers = ", ".join(map(str, LADDER))
    return table(header, rows, f"Predicted; the cheapest of {numbers} GPUs. Budget ${BUDGET:,}, {DAYS} days.")


def _row(found: Plan, gpu: str) -> list[str]:
    spec = found.spec
    chosen = [f"{spec.gpus} {gpu}", spec.strategy, spec.checkpointing, str(spec.micro_batch)]
    return [*chosen, f"{found.memory.peak.total / 1e9:.1f}", f"{days(found):.1f}", f"{dollars(found, gpu):,.0f}"]


# ---- predicted against published


@lru_cache(maxsize=1)
def published() -> Validation:
    """Every usable published measurement, predicted; one efficiency a GPU type is fitted on every other row."""
    return validate(PUBLISHED)


def points(found: Validation) -> list[Row]:
    """The rows with a throughput."""
    return [row for row in found.rows if row.quantity == "tokens/s"]


def error(found: Validation) -> float:
    """The median error of throughput in %, of the rows that the fit has not seen."""
    return 100 * found.errors("tokens/s", HELD_OUT, NOT_FITTED)[1]


def ratios(found: Validation) -> go.Figure:
    """Predicted over published throughput of every row, by GPU."""
    return ratio_figure(points(found), error(found))


def published_rows(found: Validation, gpu: str = "H100 SXM 80GB") -> Table:
    """The held-out rows of one GPU, the most optimistic prediction first."""
    rows = sorted(_unseen(found, gpu), key=lambda row: -row.ratio)
    cells = [[_short(row.id), f"{row.predicted:,.0f}", f"{row.published:,.0f}", f"{row.ratio:.2f}"] for row in rows]
    caption = (
        "Tokens/s a GPU of rows that the fit has not seen. Published by MosaicML (llm-foundry); g is the number of"
        " GPUs, s the tokens of a sequence, mb the micro-batch."
    )
    return table([f"row, on {gpu}", "predicted", "published", "predicted / published"], cells, caption)


def _unseen(found: Validation, gpu: str) -> Sequence[Row]:
    return [row for row in points(found) if row.gpu == gpu and row.part in (HELD_OUT, NOT_FITTED)]


def _short(name: str) -> str:
    """`mosaic-h100_80gb-amp_bf16-7b-s2048-g8-mb6x1` -> `7b-s2048-g8-mb6x1`."""
    return name.partition("bf16-")[2] or name


def worst_ratio(found: Validation, gpu: str = "H100 SXM 80GB") -> float:
    """The largest predicted over published among the held-out rows of a GPU."""
    return max(row.ratio for row in _unseen(found, gpu))
