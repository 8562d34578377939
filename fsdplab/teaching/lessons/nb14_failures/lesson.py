"""Lesson 14 in the notebook's process: faults injected into a job on live ranks, the reports that name them, recorded
cases to guess from, and what PyTorch's own tools print for the same.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from fsdplab.common.places import shared_folder
from fsdplab.common.sizes import size
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, titled
from fsdplab.records import RecordError, RunRecord
from fsdplab.sessions import RunSpec, run
from fsdplab.teaching.core.display import Note, Table, table
from fsdplab.teaching.lessons.faulty_job import lesson as job
from fsdplab.teaching.lessons.faulty_job.lesson import FAULTS, Report, Seen, inject, reports  # noqa: F401 (the notebook)

RECORDED = shared_folder("data") / "failures-14"
CARDS = {  # which recorded case is which card; the order says nothing
    "A": "bf16 masters",
    "B": "one slow rank",
    "C": "wrong divisor",
    "D": "mismatched order",
    "E": "NaN on one rank",
    "F": "no reshard",
}
_CARD = 1_400_000  # bytes


# ---- live ranks


def names() -> list[str]:
    """Return the faults that `inject` takes."""
    return [name for name in FAULTS if name != "none"]


def changed_line(name: str) -> str:
    """Return the lines of the job that a fault changes: `-` as they are, `+` what stands there instead."""
    sound = FAULTS["none"].source().splitlines()
    faulty = FAULTS[name].source().splitlines()
    return "\n".join(line for line in difflib.ndiff(sound, faulty) if line.startswith(("- ", "+ ")))


def out_of_memory() -> RunRecord:
    """Run the lab with more than its emulated card holds: no_shard, where a card has room for full_shard."""
    return run(RunSpec(model="gpt-tiny", strategy="no_shard", batch_size=1, sequence_length=32, steps=2, card=_CARD))


def report(seen: Seen | RunRecord) -> Note:
    """Return the lab's report: the verdict, who found it, and what else was seen."""
    first, *others = _reports(seen)
    lines = [f"`{first.name}`, by {first.by}:", first.says]
    for other in others:
        lines.append(f"Also seen: {other.name}. {other.says}")
    if isinstance(seen, Seen) and seen.stopped:
        lines.append(f"The job stopped: {seen.stopped.rpartition('] ')[2]}")
    return Note(tuple(lines))


_SOUND = Report("nothing", "Calls, values, weights, gradients, memory and times are as they should be.", "any check")


def _reports(seen: Seen | RunRecord) -> list[Report]:
    """Return the reports on a case, the verdict first; a sound case has one too."""
    if isinstance(seen, RunRecord):
        return [job.of_record(seen) or _SOUND]
    return reports(seen) or [_SOUND]


def all_reports(cases: dict[str, Seen | RunRecord]) -> Table:
    """Return a row a fault: what was injected, what the lab calls it, how it found it, and after how many seconds."""
    rows = []
    for name, seen in cases.items():
        first = _reports(seen)[0]
        took = f"{seen.seconds:.1f}" if isinstance(seen, Seen) else ""
        rows.append([name, first.name, first.by, first.says, took])
    caption = "Measured on 2 live ranks, from their start to the report. The card is emulated."
    return table(["injected", "named", "by", "report", "s"], rows, caption)


# ---- what there is to read


def facts(seen: Seen) -> Table:
    """Return figures of a case without a judgement."""
    numbers_of_calls = ", ".join(str(len(calls)) for calls in seen.calls)
    rows: list[list[Any]] = [
        ["calls that each rank made", numbers_of_calls],
        ["came to the end", "no" if seen.stopped else "yes"],
    ]
    # ranks that were ended returned nothing, and then there is nothing to compare with the twin
    rank = _ended_rank(seen)
    if rank:
        drift = job.drift(seen)
        factors = [f"{factor:.3g}" for factor, _ in rank["ratios"]]
        rows += [
            ["loss differs from the twin's by", "no step" if drift is None else f"{drift:.1e}"],
            ["first gradient over the twin's, by unit", ", ".join(factors)],
            ["unsharded parameters held at once", size(rank["held"])],
            ["largest unit, unsharded", size(max(rank["units"]))],
            ["the optimizer's parameters", rank["dtype"]],
        ]
    return table(["", ""], rows, "Recorded on 2 ranks; losses and gradients beside the unsharded twin.")


def _ended_rank(seen: Seen) -> dict[str, Any]:
    """Return what the first rank saw that came to its end; {} where none did."""
    for rank in seen.ranks:
        if rank:
            return rank
    return {}


def losses_figure(seen: Seen) -> go.Figure:
    """Draw the mean loss of the ranks, and the twin's, step by step."""
    losses_of_ranks = [rank.get("losses", ()) for rank in seen.ranks]
    means: list[Any] = []
    for losses in zip(*losses_of_ranks):
        mean = sum(losses) / len(losses)
        means.append(mean if mean == mean else None)  # NaN: a gap in the line
    twin: list[float] = _ended_rank(seen).get("twin_losses", [])
    figure = go.Figure()
    mean_steps, twin_steps = list(range(len(means))), list(range(len(twin)))
    figure.add_trace(line("the ranks' mean", "#0064c8", mean_steps, means, mode="lines+markers"))
    figure.add_trace(line("the twin", "#d9b84a", twin_steps, twin, dash="dash"))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss")

    with_a_loss = len(means) - means.count(None)
    title = f"{with_a_loss} of {len(twin) or job.STEPS} steps have a loss"
    drift = job.drift(seen)
    # infinite where a loss is not finite, and then the number of losses is the title
    if drift is not None and drift != float("inf"):
        title = f"Losses differ from the twin's by at most {drift:.1e} of them"
    alt = f"Two lines over {len(twin)} steps: the ranks' mean loss, and the twin's. {title}."
    return titled(figure, title, "Measured on 2 ranks, beside the unsharded twin", alt, 240)


def calls_figure(seen: Seen, step: int | None = None) -> go.Figure:
    """Draw the calls of one step on one clock, a row a rank and kind; a bar lasts from the call to its result."""
    if step is None:
        step = min(calls[-1]["step"] for calls in seen.calls)
    # the calls of the step by rank, and all instants, for the ends of the axis
    by_rank, times = [], []
    for calls in seen.calls:
        of_step = [call for call in calls if call["step"] == step]
        by_rank.append(of_step)
        for call in of_step:
            times.append(int(call["issued"]))
            if "done" in call:
                times.append(int(call["done"]))
    begin, end = min(times), max(times)
    figure = go.Figure()
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        bars = _bars_of(kind, by_rank, begin, end)
        if bars is not None:
            figure.add_trace(bars)
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="ms since the first call of the step")
    last_begin = max((calls[0]["issued"] - begin) / 1e6 for calls in by_rank)
    title = f"Step {step}: the last rank comes {last_begin:.1f} ms after the first"
    counts = ", ".join(f"rank {rank} makes {len(calls)}" for rank, calls in enumerate(by_rank))
    alt = (
        f"Bars of the collectives of step {step} on one clock. Of the calls {counts}; the step's calls take"
        f" {(end - begin) / 1e6:.1f} ms."
    )
    return titled(figure, title, "Measured on 2 ranks of this machine's clock; from each call to its result", alt, 220)


def _bars_of(kind: str, by_rank: list[list[dict[str, Any]]], begin: int, end: int) -> go.Bar | None:
    """Return the calls of a kind as bars, in ms since `begin`; None where there are none.

    A call without a result lasts until `end`.
    """
    rows, starts, lengths, sizes, notes = [], [], [], [], []
    for rank, calls in enumerate(by_rank):
        for call in calls:
            if call["kind"] != kind:
                continue
            rows.append(f"rank {rank}, {kind}")
            starts.append((call["issued"] - begin) / 1e6)
            lengths.append(max((call.get("done", end) - call["issued"]) / 1e6, 0.05))  # a shorter bar is not seen
            sizes.append(size(call["nbytes"]))
            notes.append(["" if "done" in call else ", no result"])
    if not rows:
        return None
    return go.Bar(
        name=kind,
        orientation="h",
        marker_color=COLLECTIVE_COLOURS[kind],
        marker_line=dict(color="rgba(20,22,26,0.65)", width=1),
        y=rows,
        base=starts,
        x=lengths,
        text=sizes,
        textposition="none",
        customdata=notes,
        hovertemplate="%{text}, %{x:.2f} ms%{customdata[0]}<extra></extra>",
    )


def sequences(seen: Seen, around: int = 2) -> Table:
    """Return the calls of each rank side by side, around the first place at which they differ; else the first ones."""
    place = job.place_of_difference(seen.calls)
    # two calls before the place, the place itself, and two after it
    first = max(0, (place or 0) - around)
    rows = []
    for number in range(first, first + 2 * around + 1):
        cells = []
        for calls in seen.calls:
            cell = ""
            if number < len(calls):
                call = calls[number]
                cell = f"{call['kind']} of {size(call['nbytes'])}, line {call['line']}"
            cells.append(cell)
        if any(cells):
            rows.append([number + 1, *cells])
    header = ["call", *(f"rank {rank}" for rank in range(len(seen.calls)))]
    caption = "" if place is None else f"The first calls that do not fit are number {place + 1}."
    return table(header, rows, caption)


def late_times(seen: Seen) -> list[list[float]]:
    """Return when each rank made the first call of each step, in ms since the first rank did: [step][rank]."""
    last_step = min(calls[-1]["step"] for calls in seen.calls)
    times = []
    for step in range(1, 1 + last_step):
        firsts = []
        for calls in seen.calls:
            # of step `step` the first call of this rank
            firsts.append(next(call["issued"] for call in calls if call["step"] == step))
        times.append([(issued - min(firsts)) / 1e6 for issued in firsts])
    return times


# ---- recorded cases


def card(letter: str) -> Seen:
    """Load a recorded case. RecordError where it is missing."""
    return Seen.load(_recorded("case", f"{CARDS[letter].replace(' ', '_')}.json.gz"))


def _recorded(what: str, name: str) -> Path:
    """Return the path of a recorded file. RecordError where it is missing."""
    path = RECORDED / name
    if not path.exists():
        raise RecordError(f"the recorded {what} is not in {path}; install fsdplab again, from a wheel or a clone")
    return path


def key() -> Table:
    """Return the lab's report of each card."""
    return all_reports({f"card {letter}": card(letter) for letter in CARDS})


def pairs(seen: Seen) -> list[list[tuple[str, int]]]:
    """Return the calls of each rank as (kind, bytes)."""
    return [[(call["kind"], call["nbytes"]) for call in calls] for calls in seen.calls]


def _torchrun() -> dict[str, Any]:
    """Load what torchrun said of each fault."""
    return dict(json.loads(printed("torchrun", ".json")))


def silent() -> int:
    """Return how many of the recorded jobs ended with exit code 0."""
    return sum(row["exit"] == 0 for row in _torchrun()["faults"].values())


def torchrun_table() -> Table:
    """Return how each job ended under torchrun, and what it said."""
    recorded = _torchrun()
    rows = []
    for name, row in recorded["faults"].items():
        text = row["says"]
        if len(text) > 100:
            text = f"{text[:97]}..."
        rows.append([name, row["exit"], text])
    where = f"{recorded['ranks']} ranks over {recorded['backend']}, torch {recorded['torch']}"
    caption = f"Recorded on {where}, with TORCH_DISTRIBUTED_DEBUG=DETAIL."
    return table(["fault", "exit code", "what it prints"], rows, caption)


def printed(name: str, ending: str = ".txt") -> str:
    """Return a text that PyTorch's own tools printed for a fault, as recorded."""
    return _recorded("text", f"{name}{ending}").read_text(encoding="utf-8")
