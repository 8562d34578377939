"""Lesson 19 in the notebook's process: plans of a job of 70 billion parameters, its bill, and the planner's own record.

All of it is arithmetic: no rank is started. How far off such predictions are is read from `data/plan_validation.json`:
predictions of published measurements (`data/published.csv`), as `python -m tests.plan_validation` writes them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from fsdplab.common.places import shared_folder
from fsdplab.common.sizes import size
from fsdplab.figures import lines
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, GRID, mark_level, titled
from fsdplab.planning.as_flags import in_short
from fsdplab.planning.plan_spec import CHECKPOINTINGS, under_each_strategy
from fsdplab.planning.planner import Plan, fewest_gpus, largest_that_fits, plan_of, plan_spec
from fsdplab.planning.published import FIT, HELD_OUT, SPEED
from fsdplab.planning.remedies import shortfall
from fsdplab.planning.search import WHY, fit
from fsdplab.teaching.core.display import Note, Table, table
from fsdplab.teaching.core.functions_in_use import owner

from .order import BUDGET, DAYS, MODEL, PRICES, SEQUENCE, STEP_TOKENS, TOKENS, days, dollars, ordered, reserved, roomy

VALIDATION = shared_folder("data") / "plan_validation.json"
_PLAIN, _CHOSEN = "#9fb4cc", "#0064c8"
_SEEN, _UNSEEN = "#b3bac4", "#b84a0a"
LADDER = (32, 64, 128, 256, 512, 768)  # GPUs


def told(planned: Plan) -> Note:
    """Return a note of two or three lines on what a plan predicts: memory, and speed where it fits."""
    spec, peak = planned.spec, planned.memory.peak
    what = f"{spec.model.name} on {spec.gpus} {spec.gpu.name}, {spec.strategy}, checkpointing {spec.checkpointing}"
    if not planned.fits:
        return Note((f"{what}: does not fit.", f"{shortfall(planned)}."))
    speed = "unknown speed"
    if planned.mfu:
        speed = f"{planned.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, MFU {planned.mfu:.0%}"
    card = size(spec.gpu.memory_bytes)
    likely = "which fits too" if roomy(planned) else "which is too much"
    return Note(
        (
            f"{what}: {size(peak.total)} of {card} at the peak, in the {peak.name}.",
            f"The allocator is likely to reserve {size(reserved(planned))} for it, {likely}.",
            speed,
        )
    )


def fewest(gpu: str) -> int:
    """Return the fewest GPUs of a kind on which the model trains, one sequence a rank, whatever the strategy."""
    plan = fewest_gpus(plan_spec(MODEL, gpu, seq=SEQUENCE))
    assert plan is not None and roomy(plan), "some number of the lesson's cards holds the model, and its reserve"
    return plan.spec.gpus


# ---- time and money


@lru_cache(maxsize=256)
def best(gpu: str, gpus: int) -> Plan | None:
    """Return the cheapest plan on so many GPUs with at most 4 million tokens a step; None where nothing fits.

    It has room for what the allocator reserves.
    """
    # on 128 GPUs 4,000,000 // (4,096 x 128) = 7 sequences a rank
    most = STEP_TOKENS // (SEQUENCE * gpus)
    plans = []
    for strategy_spec in under_each_strategy(plan_spec(MODEL, gpu, gpus=gpus, seq=SEQUENCE)):
        for checkpointing in CHECKPOINTINGS:
            spec = replace(strategy_spec, checkpointing=checkpointing)
            # as many sequences a rank as what is reserved has room for
            count = largest_that_fits(lambda count: roomy(plan_of(replace(spec, micro_batch=count))), most)
            if count:
                plans.append(plan_of(replace(spec, micro_batch=count)))
    return min(plans, key=lambda plan: dollars(plan, gpu), default=None)


def ladder(gpu: str, tokens: float = TOKENS) -> dict[int, tuple[float, float]]:
    """Return (days, dollars) of the cheapest plan on each number of GPUs that has one."""
    steps = {}
    for gpus in LADDER:
        plan = best(gpu, gpus)
        if plan is not None:
            steps[gpus] = (days(plan, tokens), dollars(plan, gpu, tokens))
    return steps


def bill(gpu: str, gpus: int, billions_of_tokens: int) -> go.Figure:
    """Draw two panels of bars, days and thousands of dollars, over the number of GPUs; the chosen number stands out."""
    for other_gpu in PRICES:  # the other GPU's plans as well: its first move then answers as fast as the rest
        ladder(other_gpu)
    steps = ladder(gpu, billions_of_tokens * 1e9)
    names, spans, thousands, bars = [], [], [], []
    for count, (span, cost) in steps.items():
        names.append(f"{count:,}")
        spans.append(span)
        thousands.append(cost / 1e3)
        bars.append(f"{count} GPUs {span:.3g} days, ${cost:,.0f}")
    figure = go.Figure()
    chosen = f"{gpus:,}"
    span_texts = [f"{span:.3g}" for span in spans]
    _panel(figure, "", names, spans, span_texts, chosen, "days", [0.0, 0.46])
    cost_texts = [f"{cost:,.0f}" for cost in thousands]
    _panel(figure, "2", names, thousands, cost_texts, chosen, "bill, in 1,000 $", [0.54, 1.0])

    title = f"{gpus} {gpu.upper()} cannot hold the model; {names[0]} can"
    if gpus in steps:
        span, cost = steps[gpus]
        title = f"{gpus} {gpu.upper()}: {span:.3g} days for ${cost:,.0f}"
    # what the cheapest plan at the chosen number is
    here = "nothing fits"
    plan = best(gpu, gpus)
    if plan is not None:
        here = f"{plan.spec.strategy}, checkpointing {plan.spec.checkpointing}"
    job = f"Llama 3.1 70B, {billions_of_tokens} billion tokens"
    subtitle = f"Predicted: {job}, the cheapest plan at each number; here: {here}"
    return titled(figure, title, subtitle, f"Bars over the number of GPUs: {'; '.join(bars)}.", 310)


def _panel(
    figure: go.Figure,
    number: str,
    names: list[str],
    values: list[float],
    texts: list[str],
    chosen: str,
    words: str,
    span: list[float],
) -> None:
    """Add one panel; the bar of the chosen number in the strong colour, each with its value above."""
    # one strong bar, the others pale
    colours = [_CHOSEN if name == chosen else _PLAIN for name in names]
    figure.add_bar(
        x=names,
        y=values,
        xaxis=f"x{number}",
        yaxis=f"y{number}",
        showlegend=False,
        text=texts,
        textposition="outside",
        cliponaxis=False,
        marker=dict(color=colours, line=dict(color=EDGE, width=1)),
        hovertemplate="%{x} GPUs: %{y:.3g}<extra></extra>",
    )
    figure.add_annotation(
        x=span[0],
        y=1,
        xref="paper",
        yref="paper",
        text=f"<b>{words}</b>",
        showarrow=False,
        xanchor="left",
        yanchor="bottom",
        yshift=6,
    )
    across = dict(domain=span, anchor=f"y{number}", type="category", title="GPUs", showgrid=False)
    # room for the values above the bars
    up = dict(anchor=f"x{number}", range=[0, 1.15 * max(values)])
    figure.update_layout({f"xaxis{number}": across, f"yaxis{number}": up})


def weighed(order: dict[str, Any]) -> Table:
    """Return an order beside the cheapest plans of both cards that end in time."""
    rows = [[f"{owner('19.order')} order", *_row(ordered(**order), order["gpu"])]]
    for gpu in PRICES:
        in_time = []
        for gpus in LADDER:
            plan = best(gpu, gpus)
            if plan is not None and days(plan) <= DAYS:
                in_time.append(plan)
        cheapest = min(in_time, key=lambda plan: dollars(plan, gpu))
        rows.append([f"cheapest of these on {gpu}", *_row(cheapest, gpu)])
    header = ["", "GPUs", "strategy", "checkpointing", "micro-batch", "in use, GB", "days", "bill, $"]
    numbers = ", ".join(map(str, LADDER))
    return table(header, rows, f"Predicted; the cheapest of {numbers} GPUs. Budget ${BUDGET:,}, {DAYS} days.")


@lru_cache(maxsize=4)
def searched(gpu: str, gpus: int) -> Table:
    """Return what `fsdplab plan fit` answers on so many GPUs at the job's largest step, and why."""
    spec = plan_spec(MODEL, gpu, gpus=gpus, seq=SEQUENCE)
    sequences = STEP_TOKENS // (SEQUENCE * gpus) * gpus  # as many for each rank
    answers = fit(spec, sequences, keep=("world-size",))
    rows = []
    for name, why in WHY.items():
        answer = getattr(answers, name)
        rows.append(
            [
                name,
                in_short(answer.spec),
                f"{answer.peak / 1e9:.1f}",
                f"{days(answer.plan):.1f}",
                f"{dollars(answer.plan, gpu):,.0f}",
                why(answers, answer),
            ]
        )
    header = ["", "plan", "in use, GB", "days", "bill, $", "why"]
    caption = f"Predicted: {answers.planned:,} plans on {gpus} {gpu.upper()}, of which {answers.fitting:,} fit."
    return table(header, rows, caption)


def _row(plan: Plan, gpu: str) -> list[str]:
    """Return a plan's cells: GPUs, strategy, checkpointing, micro-batch, GB in use, days and dollars."""
    spec = plan.spec
    return [
        f"{spec.gpus} {gpu}",
        spec.strategy,
        spec.checkpointing,
        str(spec.micro_batch),
        f"{plan.memory.peak.total / 1e9:.1f}",
        f"{days(plan):.1f}",
        f"{dollars(plan, gpu):,.0f}",
    ]


# ---- predicted against published


@dataclass(frozen=True)
class Row:
    """A published run: tokens/s a GPU as predicted and as published, and whether the fit has seen its source."""

    id: str
    gpu: str
    predicted: float
    published: float
    part: str

    @property
    def ratio(self) -> float:
        """Return the predicted throughput over the published one."""
        return self.predicted / self.published


@lru_cache(maxsize=1)
def published() -> tuple[Row, ...]:
    """Return every published run with a throughput that is predicted; rates are fitted to the runs of two sources."""
    names = [field.name for field in fields(Row)]
    runs = []
    for row in json.loads(VALIDATION.read_text(encoding="utf-8"))["rows"]:
        if row["quantity"] == SPEED:
            runs.append(Row(**{name: row[name] for name in names}))
    return tuple(runs)


def points(runs: Sequence[Row]) -> Sequence[Row]:
    """Return the rows with a throughput."""
    return runs


def error(runs: Sequence[Row]) -> float:
    """Return the median error of throughput in %, of the sources that the fit has not seen."""
    return 100 * statistics.median(abs(row.ratio - 1) for row in runs if row.part == HELD_OUT)


def ratios(runs: Sequence[Row]) -> go.Figure:
    """Draw a point a published row: predicted over published throughput, on a line for each GPU; 1 is right."""
    rows = points(runs)
    gpus = list(dict.fromkeys(row.gpu for row in rows))
    figure = go.Figure()
    # the two kinds stand a little below and above the GPU's line
    for name, is_fitted, colour, beside in (
        ("the fit has seen it", True, _SEEN, 0.15),
        ("held out", False, _UNSEEN, -0.15),
    ):
        shown = [row for row in rows if (row.part == FIT) == is_fitted]
        # a line a GPU, numbered from the top
        places = [gpus.index(row.gpu) + beside for row in shown]
        dots = lines.points(name, colour, [row.ratio for row in shown], places, text=[row.id for row in shown])
        figure.add_trace(dots.update(hovertemplate="%{text}: %{x:.2f}<extra></extra>"))
    mark_level(figure, 1, "")
    figure.update_xaxes(title_text="predicted / published tokens a second", range=[0.5, 2.4])
    ticks = dict(tickvals=list(range(len(gpus))), ticktext=gpus)
    figure.update_yaxes(range=[len(gpus) - 0.5, -0.5], gridcolor=GRID, **ticks)

    title = f"Throughput of published runs: median error {error(runs):.1f} % on held-out sources"
    subtitle = f"{len(rows)} runs of data/published.csv; rates are fitted to two of its sources"
    values = [row.ratio for row in rows]
    spread = f"from {min(values):.2f} to {max(values):.2f}"
    alt = f"Points of predicted over published throughput by GPU, {spread}. {title}."
    return titled(figure, title, subtitle, alt, 300)


def published_rows(runs: Sequence[Row], gpu: str = "H100 SXM 80GB") -> Table:
    """Return the held-out rows of one GPU, the most optimistic prediction first."""
    cells = []
    for row in sorted(_unseen(runs, gpu), key=lambda row: -row.ratio):
        cells.append([row.id, f"{row.predicted:,.0f}", f"{row.published:,.0f}", f"{row.ratio:.2f}"])
    caption = (
        "Tokens/s a GPU of runs of sources that the fit has not seen. fms and ptblog: IBM's and PyTorch's, with (c) and"
        " without compiling; nemo and mbridge: NVIDIA's, in 8 bits; qlora: a frozen base in 4 bits."
    )
    return table([f"row, on {gpu}", "predicted", "published", "predicted / published"], cells, caption)


def _unseen(runs: Sequence[Row], gpu: str) -> Sequence[Row]:
    """Return the rows of a GPU whose sources the fit has not seen."""
    return [row for row in runs if row.part == HELD_OUT and row.gpu == gpu]


def worst_ratio(runs: Sequence[Row], gpu: str = "H100 SXM 80GB") -> float:
    """Return the largest predicted over published among the held-out rows of a GPU."""
    return max(row.ratio for row in _unseen(runs, gpu))


def other_ratios(runs: Sequence[Row], gpu: str = "H100 SXM 80GB") -> list[float]:
    """Return predicted over published of the other held-out rows of a GPU, the largest first."""
    return sorted((row.ratio for row in _unseen(runs, gpu)), reverse=True)[1:]
