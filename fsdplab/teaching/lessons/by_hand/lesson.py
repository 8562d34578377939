"""What lessons 03 and 04 share in the notebook's process: a small GPT trained in several ways with the learner's
functions, in one launch, and the results: a Run for each way, as a table beside the twin, and as figures.

All ways start from the same weights, on the same bundled text, with the same optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fsdplab.common.sizes import size
from fsdplab.common.words import MISSING, plural
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import STRATEGY_COLOURS, mark_level, titled
from fsdplab.teaching.core.comm_log import bytes_sent
from fsdplab.teaching.core.display import HasTable, Table, table
from fsdplab.teaching.core.exercise import Call
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing

MODEL, FLOAT = "gpt-tiny", 4  # bytes


def way(kind: str, name: str, optimizer: str = "adamw", **needs: Any) -> dict[str, Any]:
    """Return one way of training, as the ranks take it.

    `kind` is one of `on_ranks.py`, `name` stands in tables, and `needs` is what the kind needs.
    """
    return {"kind": kind, "name": name, "optimizer": optimizer, **needs}


@doing("training the tiny GPT in several ways, and the twin beside each")
def trained(ways: Sequence[dict[str, Any]], steps: int, world_size: int) -> list[Run]:
    """Train in every way in one launch, on the same ranks; return one Run a way."""
    by_rank = LessonRanks(__file__)("train", world_size, model=MODEL, steps=steps, ways=list(ways))
    runs = []
    for index, way in enumerate(ways):
        runs.append(_run(way["name"], [results[index] for results in by_rank]))
    return runs


def _run(name: str, by_rank: Sequence[dict[str, Any]]) -> Run:
    """Return what rank 0 saw, and where ranks differ what all saw."""
    # bytes and messages are alike on all ranks, losses and moments are each rank's own
    values = dict(by_rank[0])
    del values["losses"]  # each rank has its own
    values["calls"] = [Call(*call) for call in values["calls"]]
    differing: dict[str, None] = {}  # names in order, each once
    for result in by_rank:
        differing.update(dict.fromkeys(result["differing"]))
    return Run(
        **{
            **values,
            "name": name,
            "losses_by_rank": [result["losses"] for result in by_rank],
            "differing": list(differing),
            "largest": max(result["largest"] for result in by_rank),
            "moments": tuple(result["moments"] for result in by_rank),
        }
    )


@dataclass(frozen=True)
class Run:
    """One way of training, measured: losses, distance from the twin, and what the last step sent and held, in bytes."""

    name: str
    losses_by_rank: Sequence[Sequence[float]]
    twin_losses: Sequence[float]
    differing: Sequence[str]
    largest: float
    calls: Sequence[Call]
    calls_in_backward: int
    lab: tuple[int, int]  # collectives and bytes that the lab's own ledger counted; zeros for other ways
    moments: Sequence[int]  # by rank
    parameters: int
    elements: int
    ratios: Mapping[str, float]
    held: Sequence[int]
    ready: Sequence[int]
    sent: Sequence[int]

    @property
    def ranks(self) -> int:
        return len(self.losses_by_rank)

    @property
    def losses(self) -> tuple[float, ...]:
        """Return the mean over ranks, step by step."""
        return tuple(fmean(step) for step in zip(*self.losses_by_rank, strict=True))

    @property
    def payload(self) -> int:
        """Return P: the bytes of all parameters."""
        return FLOAT * self.elements

    @property
    def collectives(self) -> int:
        """Return the collectives of one step on one rank."""
        return self.lab[0] or len(self.calls)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that one rank sends in one step."""
        return self.lab[1] or round(sum(bytes_sent(call, self.ranks) for call in self.calls))

    @property
    def moment_bytes(self) -> int:
        """Return the bytes of Adam's moments on the rank that has most."""
        return max(self.moments)

    @property
    def verdict(self) -> str:
        """Return `"equal in every bit"`, or how many parameters differ and by how much."""
        if not self.differing:
            return "equal in every bit"
        return f"{len(self.differing)} of {self.parameters} differ, by {self.largest:.1e} at most"


@dataclass(frozen=True, repr=False)
class Runs(HasTable):
    """Several ways to train the same thing; shows as one table. Iterates over its runs."""

    runs: tuple[Run, ...]

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, index: int) -> Run:
        return self.runs[index]

    @property
    def moment_bytes(self) -> int:
        """Return the bytes of Adam's moments on a rank of the first run, the learner's."""
        return self.runs[0].moment_bytes

    def table(self) -> Table:
        """Return losses of the first and last step, parameters beside the twin's, and one step's messages.

        The formula's bytes stand in the caption.
        """
        first = self.runs[0]
        twin = first.twin_losses
        # an all-reduce of P bytes, by the textbook
        expected = 2 * first.payload * (first.ranks - 1) // first.ranks
        rows = [["the unsharded twin", f"{twin[0]:.6f}", f"{twin[-1]:.6f}", "", "", "", f"{2 * first.payload:,}"]]
        for run in self.runs:
            messages, nbytes = MISSING, MISSING  # torch's DDP sends from C++, where nothing counts
            if run.collectives:
                messages, nbytes = f"{run.collectives}", f"{run.bytes_sent:,}"
            first_loss, last_loss = f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}"
            rows.append([run.name, first_loss, last_loss, run.verdict, messages, nbytes, f"{run.moment_bytes:,}"])
        header = [
            "",
            "loss, step 1",
            f"loss, step {len(twin)}",
            "parameters beside the twin's",
            "messages a step",
            "bytes sent",
            "moment bytes",
        ]
        caption = (
            f"Measured on {first.ranks} real ranks, bytes on one of them. Formula of the bytes sent: 2 P (n-1)/n ="
            f" {expected:,}."
        )
        return table(header, rows, caption)


@dataclass(frozen=True, repr=False)
class Faulty:
    """A faulty version trained with AdamW and with SGD; its gradients show the error, its losses may not."""

    runs: tuple[Run, Run]

    def losses(self) -> Table:
        """Return loss by loss beside the twin's, for both optimizers."""
        adamw, sgd = self.runs
        last = len(adamw.losses) - 1
        columns = (adamw.twin_losses, adamw.losses, sgd.twin_losses, sgd.losses)
        rows = []
        # the first two, the middle one and the last
        for step in sorted({0, 1, last // 2, last}):
            rows.append([step + 1, *(f"{losses[step]:.4f}" for losses in columns)])
        header = ["step", "AdamW: twin", "AdamW: this version", "SGD: twin", "SGD: this version"]
        return table(header, rows, f"Measured: mean loss over {adamw.ranks} real ranks.")

    def gradients(self) -> Table:
        """Return the first step's gradients, grouped by how many times the twin's they are."""
        groups: dict[str, list[str]] = {}
        for name, ratio in self.runs[0].ratios.items():
            # gradients whose factor rounds to the same two digits
            groups.setdefault(f"{ratio:.2f}", []).append(name)
        rows = [[f"{ratio} x", len(names), _some(names)] for ratio, names in sorted(groups.items())]
        caption = "Measured in the first step: the gradient's norm over that of the twin's."
        return table(["size beside the twin's", "how many", "parameters"], rows, caption)


def _some(names: list[str], most: int = 9) -> str:
    """Return names of the model's outside and of block 0; the other blocks repeat them."""
    shown = []
    for name in names:
        if not name.startswith("blocks.") or name.startswith("blocks.0."):
            shown.append(name.removeprefix("blocks."))
    text = ", ".join(shown[:most])
    if len(names) > most:
        text = f"{text} ..."
    return text


# ---- backward, gradient by gradient

KB = 1e3
READY, SENT = "#d0d4d9", ("#6cc4f0", "#0064c8")  # by a hook, in buckets
HELD = (STRATEGY_COLOURS["no_shard"], "#f09a1a", "#b84a0a")
ORDER = "gradients ready so far, from the head to the embeddings"


def bucket_figure(runs: Sequence[Run]) -> go.Figure:
    """Draw the bytes of gradients ready, and the bytes sent by each run, after every gradient of one backward.

    The ready bytes are those of the first run. A run that counts nothing, as torch's DDP, has no line.
    """
    one = runs[0]
    gradients, most = len(one.ready), one.ready[-1] / KB
    # one place more than gradients: what is sent after backward
    ready = _steps("ready", (*one.ready, one.ready[-1]), READY)
    ready.update(stackgroup="ready", fillcolor=READY, line=dict(width=0))  # filled, to stand behind the others
    figure = go.Figure([ready])
    senders = [run for run in runs if run.sent]
    for run, colour in zip(senders, SENT):
        # behind the last gradient all has been sent: P bytes
        figure.add_trace(_steps(f"sent: {run.name}", (*run.sent, run.payload), colour))
    figure.add_annotation(
        x=gradients + 1, y=0, text="after backward", showarrow=False, xanchor="right", yanchor="bottom", xshift=-4
    )
    figure.update_xaxes(title=ORDER, range=[0, gradients + 2])
    figure.update_yaxes(title="kB", range=[0, 1.12 * most])

    first, last = senders[0], senders[-1]
    # what the last run sends only after backward
    unsent = last.payload - last.sent[-1]
    rest = size(unsent) if unsent else "nothing"
    title = f"{last.collectives} messages instead of {first.collectives}; {rest} left after backward"
    subtitle = f"Measured on {one.ranks} CPU ranks, one backward; {size(one.payload)} of gradients"
    messages = [f"{run.name} {plural(run.collectives, 'message')}" for run in senders]
    alt = f"Staircases of bytes over the gradients of one backward. {'; '.join(messages)}. {title}."
    return titled(figure, title, subtitle, alt, height=310)


def gradient_figure(runs: Sequence[Run]) -> go.Figure:
    """Draw the bytes of gradients that one rank holds, before and after the hooks of every gradient in one backward."""
    figure = go.Figure()
    for run, colour in zip(runs, HELD[1:]):
        figure.add_trace(_steps(run.name, run.held, colour, 0.5))
    first = runs[0]
    whole = first.payload
    mark_level(figure, whole / KB, f"all gradients whole: {size(whole)}", "y", colour=HELD[0])
    gradients = len(first.held) / 2  # two levels each
    figure.update_xaxes(title=ORDER, range=[0, gradients + 0.5])
    figure.update_yaxes(title="gradients held by one rank (kB)", range=[0, 1.18 * whole / KB])

    peaks = [f"{run.name} {size(max(run.held))}" for run in runs]
    title = f"Most gradients held: {', '.join(peaks)}"
    subtitle = f"Measured on {first.ranks} CPU ranks, one backward; each tooth is a gradient before it is cut"
    return titled(figure, title, subtitle, f"Gradient bytes held through one backward. {title}.", height=310)


def _steps(name: str, levels: Sequence[int], colour: str, width: float = 1.0) -> go.Scatter:
    """Return a staircase over the gradients; `width` 0.5 where there are two levels a gradient."""
    places, heights = [0.0], [0.0]
    for number, level in enumerate(levels, 1):
        places.append(width * number)
        heights.append(level / KB)
    hover = f"{name}: %{{y:.0f}} kB<extra></extra>"
    return line(name, colour, places, heights, line_shape="hv", hovertemplate=hover)
