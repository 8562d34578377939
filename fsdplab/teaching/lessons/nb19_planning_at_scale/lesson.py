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

from fsdplab.common.names import STRATEGIES
from fsdplab.common.places import shared_folder
from fsdplab.common.sizes import size
from fsdplab.figures import lines
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, GRID, mark_level, titled
from fsdplab.planning.plan_spec import CHECKPOINTINGS, under_each_strategy
from fsdplab.planning.planner import Plan, fewest_gpus, largest_that_fits, plan_of, plan_spec, shortfall
from fsdplab.planning.published import FIT, HELD_OUT, SPEED
from fsdplab.planning.search import WHY, fit, in_short
from fsdplab.teaching.core.display import Note, Table, table

from .order import BUDGET, DAYS, MODEL, PRICES, SEQUENCE, STEP_TOKENS, TOKENS, days, dollars, ordered, reserved, roomy

VALIDATION = shared_folder("data") / "plan_validation.json"
_PLAIN, _CHOSEN = "#9fb4cc", "#0064c8"
_SEEN, _UNSEEN = "#b3bac4", "#b84a0a"
LADDER = (32, 64, 128, 256, 512, 768)  # GPUs


def told(found: Plan) -> Note:
    """What a plan says, in two lines."""
    spec, peak = found.spec, found.memory.peak
    what = f"{spec.model.name} on {spec.gpus} {spec.gpu.name}, {spec.strategy}, checkpointing {spec.checkpointing}"
    if not found.fits:
        return Note((f"{what}: does not fit.", f"{shortfall(found)}."))
    speed = f"{found.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, MFU {found.mfu:.0%}" if found.mfu else "unknown speed"
    card, likely = size(spec.gpu.memory_bytes), "which fits too" if roomy(found) else "which is too much"
    return Note(
        (
            f"{what}: {size(peak.total)} of {card} at the peak, in the {peak.name}.",
            f"The allocator is likely to reserve {size(reserved(found))} for it, {likely}.",
            speed,
        )
    )


def fewest(gpu: str) -> int:
    """The fewest GPUs of a kind on which the model trains, one sequence a rank, whatever the strategy."""
    found = fewest_gpus(plan_spec(MODEL, gpu, seq=SEQUENCE))
    assert found is not None and roomy(found), "some number of the lesson's cards holds the model, and its reserve"
    return found.spec.gpus


def strategies(gpus: int, gpu: str = "h100") -> Table:
    """Every strategy on so many GPUs with one sequence a rank: memory, speed, exposed share."""
    rows = []
    for name in STRATEGIES:
        found = ordered(gpu, gpus=gpus, strategy=name, checkpointing="selective")
        peak, time = found.memory.peak.total, found.time
        assert time is not None, "the lesson's cards have known FLOP/s"
        speed = [f"{found.tokens_per_s_per_gpu:,.0f}", f"{time.exposed_s / time.step_s:.1%}", f"{found.mfu:.0%}"]
        cells = [f"{each / 1e9:,.1f}" for each in (peak, reserved(found))]
        rows.append([name, *cells, *(speed if roomy(found) else ["does not fit", "-", "-"])])
    card = plan_spec(MODEL, gpu).gpu.memory_bytes
    job = f"{gpus} GPUs, cards of {size(card)}, sequences of {SEQUENCE:,} tokens, selective checkpointing"
    caption = f"Predicted: {job}."
    return table(["strategy", "in use, GB", "reserved, GB", "tokens/s a GPU", "exposed", "MFU"], rows, caption)


# ---- time and money


@lru_cache(maxsize=256)
def best(gpu: str, gpus: int) -> Plan | None:
    """The cheapest plan on so many GPUs with at most 4 million tokens a step, and room for what the allocator reserves;
    None where nothing fits.
    """
    most = STEP_TOKENS // (SEQUENCE * gpus)
    every = under_each_strategy(plan_spec(MODEL, gpu, gpus=gpus, seq=SEQUENCE))
    tried = [replace(each, checkpointing=checkpointing) for each in every for checkpointing in CHECKPOINTINGS]
    with_room = []  # each with as many sequences a rank as what is reserved has room for
    for each in tried:
        if count := largest_that_fits(lambda count: roomy(plan_of(replace(each, micro_batch=count))), most):
            with_room.append(plan_of(replace(each, micro_batch=count)))
    return min(with_room, key=lambda plan: dollars(plan, gpu), default=None)


def ladder(gpu: str, tokens: float = TOKENS) -> dict[int, tuple[float, float]]:
    """GPUs -> (days, dollars) of the cheapest plan there."""
    found = {gpus: best(gpu, gpus) for gpus in LADDER}
    return {gpus: (days(each, tokens), dollars(each, gpu, tokens)) for gpus, each in found.items() if each is not None}


def bill_factor(gpu: str = "h100", few: int = 64, many: int = 512) -> float:
    """The bill on `many` GPUs over that on `few`."""
    steps = ladder(gpu)
    return steps[many][1] / steps[few][1]


def bill(gpu: str, gpus: int, billions_of_tokens: int) -> go.Figure:
    """Two panels of bars, days and thousands of dollars, over the number of GPUs; the chosen number stands out."""
    for each in PRICES:  # the other GPU's plans as well: its first move then answers as fast as the rest
        ladder(each)
    found, steps = best(gpu, gpus), ladder(gpu, billions_of_tokens * 1e9)
    chosen = "nothing fits" if found is None else f"{found.spec.strategy}, checkpointing {found.spec.checkpointing}"
    names = [f"{count:,}" for count in steps]
    spans, bills = ([pair[place] for pair in steps.values()] for place in (0, 1))
    figure = go.Figure()
    _panel(figure, "", names, spans, [f"{span:.3g}" for span in spans], f"{gpus:,}", "days", [0.0, 0.46])
    _panel(
        figure,
        "2",
        names,
        [each / 1e3 for each in bills],
        [f"{each / 1e3:,.0f}" for each in bills],
        f"{gpus:,}",
        "bill, in 1,000 $",
        [0.54, 1.0],
    )
    if gpus in steps:
        span, cost = steps[gpus]
        title = f"{gpus} {gpu.upper()}: {span:.3g} days for ${cost:,.0f}"
    else:
        title = f"{gpus} {gpu.upper()} cannot hold the model; {names[0]} can"
    job = f"Llama 3.1 70B, {billions_of_tokens} billion tokens"
    subtitle = f"Predicted: {job}, the cheapest plan at each number; here: {chosen}"
    said = "; ".join(f"{count} GPUs {span:.3g} days, ${cost:,.0f}" for count, (span, cost) in steps.items())
    return titled(figure, title, subtitle, f"Bars over the number of GPUs: {said}.", 310)


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
    """One panel; the bar of the chosen number in the strong colour, each with its value above."""
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
    figure.update_layout(
        {
            f"xaxis{number}": dict(domain=span, anchor=f"y{number}", type="category", title="GPUs", showgrid=False),
            f"yaxis{number}": dict(anchor=f"x{number}", range=[0, 1.15 * max(values)]),
        }
    )


def weighed(order: dict[str, Any]) -> Table:
    """An order beside the cheapest plans of both cards that end in time."""
    rows = [["your order", *_row(ordered(**order), order["gpu"])]]
    for gpu in PRICES:
        plans = [each for gpus in LADDER if (each := best(gpu, gpus)) is not None and days(each) <= DAYS]
        cheapest = min(plans, key=lambda each: dollars(each, gpu))
        rows.append([f"cheapest of these on {gpu}", *_row(cheapest, gpu)])
    header = ["", "GPUs", "strategy", "checkpointing", "micro-batch", "in use, GB", "days", "bill, $"]
    numbers = ", ".join(map(str, LADDER))
    return table(header, rows, f"Predicted; the cheapest of {numbers} GPUs. Budget ${BUDGET:,}, {DAYS} days.")


@lru_cache(maxsize=4)
def searched(gpu: str, gpus: int) -> Table:
    """What `fsdplab plan fit` answers on so many GPUs at the job's largest step, and why."""
    spec = plan_spec(MODEL, gpu, gpus=gpus, seq=SEQUENCE)
    found = fit(spec, STEP_TOKENS // (SEQUENCE * gpus) * gpus, keep=("world-size",))
    rows = []
    for name, why in WHY.items():
        chosen = getattr(found, name)
        words = [in_short(chosen.spec), f"{chosen.peak / 1e9:.1f}", f"{days(chosen.plan):.1f}"]
        rows.append([name, *words, f"{dollars(chosen.plan, gpu):,.0f}", why(found, chosen)])
    header = ["", "plan", "in use, GB", "days", "bill, $", "why"]
    caption = f"Predicted: {found.planned:,} plans on {gpus} {gpu.upper()}, of which {found.fitting:,} fit."
    return table(header, rows, caption)


def _row(found: Plan, gpu: str) -> list[str]:
    spec = found.spec
    chosen = [f"{spec.gpus} {gpu}", spec.strategy, spec.checkpointing, str(spec.micro_batch)]
    return [*chosen, f"{found.memory.peak.total / 1e9:.1f}", f"{days(found):.1f}", f"{dollars(found, gpu):,.0f}"]


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
        """Predicted over published."""
        return self.predicted / self.published


@lru_cache(maxsize=1)
def published() -> tuple[Row, ...]:
    """Every published run with a throughput that is predicted; rates are fitted to the runs of two sources."""
    rows = json.loads(VALIDATION.read_text(encoding="utf-8"))["rows"]
    names = [field.name for field in fields(Row)]
    return tuple(Row(**{name: row[name] for name in names}) for row in rows if row["quantity"] == SPEED)


def points(found: Sequence[Row]) -> Sequence[Row]:
    """The rows with a throughput."""
    return found


def error(found: Sequence[Row]) -> float:
    """The median error of throughput in %, of the sources that the fit has not seen."""
    return 100 * statistics.median(abs(row.ratio - 1) for row in found if row.part == HELD_OUT)


def ratios(found: Sequence[Row]) -> go.Figure:
    """A point a published row: predicted over published throughput, on a line for each GPU; 1 is right."""
    rows = points(found)
    gpus = list(dict.fromkeys(row.gpu for row in rows))
    figure = go.Figure()
    for name, seen, colour in (("the fit has seen it", True, _SEEN), ("held out", False, _UNSEEN)):
        shown = [row for row in rows if (row.part == FIT) == seen]
        places = [gpus.index(row.gpu) + (0.15 if seen else -0.15) for row in shown]
        dots = lines.points(name, colour, [row.ratio for row in shown], places, text=[row.id for row in shown])
        figure.add_trace(dots.update(hovertemplate="%{text}: %{x:.2f}<extra></extra>"))
    mark_level(figure, 1, "")
    figure.update_xaxes(title_text="predicted / published tokens a second", range=[0.5, 2.4])
    ticks = dict(tickvals=list(range(len(gpus))), ticktext=gpus)
    figure.update_yaxes(range=[len(gpus) - 0.5, -0.5], gridcolor=GRID, **ticks)
    title = f"Throughput of published runs: median error {error(found):.1f} % on held-out sources"
    subtitle = f"{len(rows)} runs of data/published.csv; rates are fitted to two of its sources"
    low, high = min(row.ratio for row in rows), max(row.ratio for row in rows)
    alt = f"Points of predicted over published throughput by GPU, from {low:.2f} to {high:.2f}. {title}."
    return titled(figure, title, subtitle, alt, 300)


def published_rows(found: Sequence[Row], gpu: str = "H100 SXM 80GB") -> Table:
    """The held-out rows of one GPU, the most optimistic prediction first."""
    rows = sorted(_unseen(found, gpu), key=lambda row: -row.ratio)
    cells = [[row.id, f"{row.predicted:,.0f}", f"{row.published:,.0f}", f"{row.ratio:.2f}"] for row in rows]
    caption = (
        "Tokens/s a GPU of runs of sources that the fit has not seen. fms and ptblog: IBM's and PyTorch's, with (c) and"
        " without compiling; nemo and mbridge: NVIDIA's, in 8 bits; qlora: a frozen base in 4 bits."
    )
    return table([f"row, on {gpu}", "predicted", "published", "predicted / published"], cells, caption)


def _unseen(found: Sequence[Row], gpu: str) -> Sequence[Row]:
    return [row for row in found if row.part == HELD_OUT and row.gpu == gpu]


def worst_ratio(found: Sequence[Row], gpu: str = "H100 SXM 80GB") -> float:
    """The largest predicted over published among the held-out rows of a GPU."""
    return max(row.ratio for row in _unseen(found, gpu))


def other_ratios(found: Sequence[Row], gpu: str = "H100 SXM 80GB") -> list[float]:
    """Predicted over published of the other held-out rows of a GPU, the largest first."""
    return sorted((row.ratio for row in _unseen(found, gpu)), reverse=True)[1:]
