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
    """The faults that `inject` takes."""
    return [name for name in FAULTS if name != "none"]


def changed_line(name: str) -> str:
    """The lines of the job that a fault changes: `-` as they are, `+` what stands there instead."""
    sound, faulty = (FAULTS[each].source().splitlines() for each in ("none", name))
    return "\n".join(line for line in difflib.ndiff(sound, faulty) if line[:2] in ("- ", "+ "))


def out_of_memory() -> RunRecord:
    """A run of the lab that needs more than its emulated card: no_shard, where a card has room for full_shard."""
    return run(RunSpec(model="gpt-tiny", strategy="no_shard", batch_size=1, sequence_length=32, steps=2, card=_CARD))


def report(seen: Seen | RunRecord) -> Note:
    """The lab's report: the verdict, who found it, and what else was seen."""
    first, *others = _reports(seen)
    lines = [f"`{first.name}`, by {first.by}:", first.says]
    lines += [f"Also seen: {each.name}. {each.says}" for each in others]
    if isinstance(seen, Seen) and seen.stopped:
        lines.append(f"The job stopped: {seen.stopped.rpartition('] ')[2]}")
    return Note(tuple(lines))


_SOUND = Report("nothing", "Calls, values, weights, gradients, memory and times are as they should be.", "any check")


def _reports(seen: Seen | RunRecord) -> list[Report]:
    if isinstance(seen, RunRecord):
        return [job.of_record(seen) or _SOUND]
    return reports(seen) or [_SOUND]


def all_reports(cases: dict[str, Seen | RunRecord]) -> Table:
    """A row a fault: what was injected, what the lab calls it, how it found it, and after how many seconds."""
    rows = []
    for name, seen in cases.items():
        first = _reports(seen)[0]
        took = f"{seen.seconds:.1f}" if isinstance(seen, Seen) else ""
        rows.append([name, first.name, first.by, first.says, took])
    caption = "Measured on 2 live ranks, from their start to the report. The card is emulated."
    return table(["injected", "named", "by", "report", "s"], rows, caption)


# ---- what there is to read


def facts(seen: Seen) -> Table:
    """Figures of a case without a judgement."""
    whole = next((each for each in seen.ranks if each), {})
    off = job.drift(seen)
    rows: list[list[Any]] = [
        ["calls that each rank made", ", ".join(str(len(own)) for own in seen.calls)],
        ["came to the end", "no" if seen.stopped else "yes"],
    ]
    if whole:
        factors = [f"{factor:.3g}" for factor, _ in whole["ratios"]]
        rows += [
            ["loss differs from the twin's by", "no step" if off is None else f"{off:.1e}"],
            ["first gradient over the twin's, by unit", ", ".join(factors)],
            ["unsharded parameters held at once", size(whole["held"])],
            ["largest unit, unsharded", size(max(whole["units"]))],
            ["the optimizer's parameters", whole["dtype"]],
        ]
    return table(["", ""], rows, "Recorded on 2 ranks; losses and gradients beside the unsharded twin.")


def losses_figure(seen: Seen) -> go.Figure:
    """The loss of each rank, and the twin's, step by step."""
    figure = go.Figure()
    twin: list[float] = next((each["twin_losses"] for each in seen.ranks if each), [])
    means = [sum(step) / len(step) for step in zip(*(each.get("losses", ()) for each in seen.ranks))]
    finite: list[Any] = [value if value == value else None for value in means]  # a gap in the line
    figure.add_trace(line("the ranks' mean", "#0064c8", list(range(len(finite))), finite, mode="lines+markers"))
    figure.add_trace(line("the twin", "#d9b84a", list(range(len(twin))), twin, dash="dash"))
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss")
    shown = sum(value is not None for value in finite)
    off = job.drift(seen)
    title = f"{shown} of {len(twin) or job.STEPS} steps have a loss"
    if off is not None and off != float("inf"):
        title = f"Losses differ from the twin's by at most {off:.1e} of them"
    alt = f"Two lines over {len(twin)} steps: the ranks' mean loss, and the twin's. {title}."
    return titled(figure, title, "Measured on 2 ranks, beside the unsharded twin", alt, 240)


def calls_figure(seen: Seen, step: int | None = None) -> go.Figure:
    """The calls of one step on one clock, a row a rank and kind; a bar lasts from the call to its result."""
    last = min(own[-1]["step"] for own in seen.calls)
    step = last if step is None else step
    there = [[call for call in own if call["step"] == step] for own in seen.calls]
    begin = min(call["issued"] for own in there for call in own)
    end = max(int(call["done"] if "done" in call else call["issued"]) for own in there for call in own)
    figure = go.Figure()
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        chosen = [(rank, call) for rank, own in enumerate(there) for call in own if call["kind"] == kind]
        if chosen:
            figure.add_trace(
                go.Bar(
                    name=kind,
                    orientation="h",
                    marker_color=COLLECTIVE_COLOURS[kind],
                    marker_line=dict(color="rgba(20,22,26,0.65)", width=1),
                    y=[f"rank {rank}, {kind}" for rank, _ in chosen],
                    base=[(call["issued"] - begin) / 1e6 for _, call in chosen],
                    x=[max((call.get("done", end) - call["issued"]) / 1e6, 0.05) for _, call in chosen],
                    text=[size(call["nbytes"]) for _, call in chosen],
                    textposition="none",
                    customdata=[["" if "done" in call else ", no result"] for _, call in chosen],
                    hovertemplate="%{text}, %{x:.2f} ms%{customdata[0]}<extra></extra>",
                )
            )
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="ms since the first call of the step")
    firsts = [(own[0]["issued"] - begin) / 1e6 for own in there]
    title = f"Step {step}: the last rank comes {max(firsts):.1f} ms after the first"
    counts = ", ".join(f"rank {rank} makes {len(own)}" for rank, own in enumerate(there))
    alt = f"Bars of the collectives of step {step} on one clock. Of the calls {counts}; the step's calls take"
    alt += f" {(end - begin) / 1e6:.1f} ms."
    return titled(figure, title, "Measured on 2 ranks of this machine's clock; from each call to its result", alt, 220)


def sequences(seen: Seen, around: int = 2) -> Table:
    """The calls of each rank side by side, around the first place at which they differ; else the first ones."""
    place = job.place_of_difference(seen.calls)
    first = max(0, (place or 0) - around)
    rows = []
    for number in range(first, first + 2 * around + 1):
        there = [own[number] if number < len(own) else None for own in seen.calls]
        cells = [f"{each['kind']} of {size(each['nbytes'])}, line {each['line']}" if each else "" for each in there]
        if any(cells):
            rows.append([number + 1, *cells])
    header = ["call", *(f"rank {rank}" for rank in range(len(seen.calls)))]
    return table(header, rows, "" if place is None else f"The first calls that do not fit are number {place + 1}.")


def late_times(seen: Seen) -> list[list[float]]:
    """When each rank made the first call of each step, in ms since the first rank did: [step][rank]."""
    steps = range(1, 1 + min(own[-1]["step"] for own in seen.calls))
    firsts = [[next(c["issued"] for c in own if c["step"] == step) for own in seen.calls] for step in steps]
    return [[(each - min(row)) / 1e6 for each in row] for row in firsts]


# ---- recorded cases


def card(letter: str) -> Seen:
    """A recorded case. RecordError where it is missing."""
    return Seen.load(_recorded("case", f"{CARDS[letter].replace(' ', '_')}.json.gz"))


def _recorded(what: str, name: str) -> Path:
    path = RECORDED / name
    if not path.exists():
        raise RecordError(f"the recorded {what} is not in {path}; install fsdplab again, from a wheel or a clone")
    return path


def key() -> Table:
    """The lab's report of each card."""
    return all_reports({f"card {letter}": card(letter) for letter in CARDS})


def pairs(seen: Seen) -> list[list[tuple[str, int]]]:
    """The calls of each rank as (kind, bytes)."""
    return [[(call["kind"], call["nbytes"]) for call in own] for own in seen.calls]


def _torchrun() -> dict[str, Any]:
    return dict(json.loads(printed("torchrun", ".json")))


def silent() -> int:
    """How many of the recorded jobs ended with exit code 0."""
    return sum(row["exit"] == 0 for row in _torchrun()["faults"].values())


def torchrun_table() -> Table:
    """How each job ended under torchrun, and what it said."""
    made = _torchrun()
    said = {name: row["says"] for name, row in made["faults"].items()}
    short = {name: text if len(text) <= 100 else f"{text[:97]}..." for name, text in said.items()}
    rows = [[name, row["exit"], short[name]] for name, row in made["faults"].items()]
    where = f"{made['ranks']} ranks over {made['backend']}, torch {made['torch']}"
    caption = f"Recorded on {where}, with TORCH_DISTRIBUTED_DEBUG=DETAIL."
    return table(["fault", "exit code", "what it prints"], rows, caption)


def printed(name: str, ending: str = ".txt") -> str:
    """A text that PyTorch's own tools printed for a fault, as recorded."""
    return _recorded("text", f"{name}{ending}").read_text(encoding="utf-8")
