"""Lesson 18 in the notebook's process: statements about FSDP, the verdicts that follow from figures, and one formula.

What small runs came to is read from `data/claims.json` (tests/claims made it); everything else is computed when it is
shown. `again` runs a part of the measurements on this machine and compares.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from typing import Any

from fsdplab.common.places import shared_folder
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import titled
from fsdplab.sessions import RunSpec, run
from fsdplab.teaching.core.display import Note, Table, table
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads.shapes import preset

from .claims import CLAIMS, VERDICTS, Finding, claim_of, memory, practice, speed, traffic

SUBJECTS = {"memory": memory, "traffic": traffic, "speed": speed, "practice": practice}
_COLOURS = dict(zip(VERDICTS, ("#3d9970", "#e0a030", "#c0392b"), strict=True))


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    """What the small runs came to; FileNotFoundError where the data of the course is missing."""
    return dict(json.loads((shared_folder("data") / "claims.json").read_text(encoding="utf-8")))


@lru_cache(maxsize=64)
def finding(number: str) -> Finding:
    """The verdict on a statement, with its figures: `finding("C8").verdict == "refuted"`."""
    return claim_of(number).find(measured())


def statements(*numbers: str) -> Table:
    """Statements as they are made, without a verdict."""
    rows = [[number, claim_of(number).statement] for number in numbers]
    return table(["", "statement"], rows)


def judged(subject: str) -> Table:
    """The statements of a subject (memory, traffic, speed, practice), each with its verdict and the figures."""
    found = {each: finding(each.id) for each in SUBJECTS[subject].CLAIMS}
    rows = [
        [each.id, each.statement, said.verdict, said.text, each.origin, each.seen_in[:2]]
        for each, said in found.items()
    ]
    return table(["", "statement", "verdict", "because", "figures", "see"], rows)


def count(verdict: str) -> int:
    """How many of the statements have this verdict."""
    return sum(finding(each.id).verdict == verdict for each in CLAIMS)


def about() -> Note:
    """How the measured figures were made."""
    by = measured()["made_by"]
    return Note((f"{len(CLAIMS)} statements. Measured with torch {by['torch']}, {by['ranks']}, by", by["command"]))


def verdicts_figure() -> go.Figure:
    """How many statements of each subject are confirmed, true under conditions, or refuted."""
    counted = {name: Counter(finding(each.id).verdict for each in module.CLAIMS) for name, module in SUBJECTS.items()}
    parts = [Part(verdict, _COLOURS[verdict], [each[verdict] for each in counted.values()]) for verdict in VERDICTS]
    ends = {name: f"<b>{each.total()}</b>" for name, each in counted.items()}
    figure = stacked_bars(ends, parts, "statements", "%{x:.0f}")
    plain = count(VERDICTS[0])
    title = f"Of {len(CLAIMS)} statements about FSDP {plain} hold as they are said"
    subtitle = f"{count(VERDICTS[1])} hold under conditions, {count(VERDICTS[2])} do not; computed and measured"
    said = "; ".join(
        f"{name}: {', '.join(f'{each[verdict]} {verdict}' for verdict in VERDICTS)}" for name, each in counted.items()
    )
    return titled(figure, title, subtitle, f"Stacked bars of statements by subject. {said}.", height=270)


# ---- one formula: C6


def ratio(parameter_bytes: float, reduce_bytes: float, ddp_bytes: float, root: float = 0.0) -> float:
    """Bytes that full sharding sends over those of DDP: all-gathers of `parameter_bytes` an element twice, of the root
    once, and a reduction of `reduce_bytes`; DDP all-reduces `ddp_bytes` an element. `root`: its part of the parameters.

    >>> ratio(4, 4, 4), ratio(2, 4, 4), ratio(2, 4, 2)
    (1.5, 1.0, 2.0)
    """
    return ((2 - root) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes)


def root_part(model: str) -> float:
    """The part of a preset's parameters that no block has."""
    shape = preset(model)
    return 1 - shape.layers * sum(each.count for each in shape.block) / shape.parameters


def ratio_figure(gathers: str, reductions: str, ddp: str, root_percent: int) -> go.Figure:
    """A bar for each: what DDP and full sharding send of an element, by collective."""
    sizes = {"fp32": 4, "bf16": 2}
    root = root_percent / 100
    gathered, reduced, plain = (2 - root) * sizes[gathers], sizes[reductions], 2 * sizes[ddp]
    parts = [
        Part("all_reduce", "#7f868f", [plain, 0]),
        Part("all_gather", "#4c8ed9", [0, gathered]),
        Part("reduce_scatter", "#d98b4c", [0, reduced]),
    ]
    factor = ratio(sizes[gathers], reduced, sizes[ddp], root)
    ends = {"DDP": f"<b>{plain:g}</b>", "full sharding": f"<b>{gathered + reduced:g}</b>"}
    figure = stacked_bars(ends, parts, "bytes sent of an element, times (n - 1)/n", "%{x:.2g}")
    title = f"Full sharding sends {factor:.2f} times as many bytes as DDP"
    subtitle = f"Computed: all-gathers in {gathers}, reductions in {reductions}, DDP in {ddp}"
    said = f"DDP {plain:g}, full sharding {gathered:g} unsharded and {reduced:g} reduced"
    return titled(figure, title, subtitle, f"Stacked bars of bytes: {said}. {title}.", height=230)


# ---- on this machine


def told(**choices: Any) -> dict[str, Any]:
    """What a run of gpt-tiny came to: peak by category, bytes sent, collectives of a step by phase, losses."""
    record = run(RunSpec(**{"model": "gpt-tiny", "steps": 2, "device": "cpu", **choices}))
    rows = [row for row in record.table("ledger") if row["rank"] == 0]
    last = max((row["step"] for row in rows), default=0)
    summary = record.summary
    return {
        "peak": dict(summary.peak_memory_bytes.split),
        "bytes": summary.comm.bytes_per_step,
        "collectives": dict(Counter(f"{row['phase']} {row['kind']}" for row in rows if row["step"] == last)),
        "losses": list(summary.losses),
    }


@doing("two strategies on 2 ranks")
def again() -> Table:
    """Bytes and collectives of DDP and full sharding on this machine's ranks, beside the record's."""
    rows = []
    for name in ("no_shard", "full_shard"):
        here, there = told(strategy=name), measured()["strategies"][name]
        issued = [(*each.split(), number) for each, number in here["collectives"].items()]
        kinds = [f"{number} {kind}s in the {phase}" for phase, kind, number in issued]
        same = all(here[what] == there[what] for what in ("bytes", "collectives"))
        rows.append([name, f"{here['bytes'] / 1e6:.2f}", ", ".join(kinds), "the same" if same else "other"])
    header = ["strategy", "MB sent", "collectives", "as in the record"]
    return table(header, rows, "Measured on 2 ranks, one step of gpt-tiny.")


# ---- the learner's verdicts

AS_FIGURES_SAY = "each as the figures say"
ASKED = ("C6", "C8", "C9", "C10", "C16", "C21", "C22", "C31", "C36", "C37")


def complaint(verdicts: Any) -> str:
    """What is wrong with the verdicts on the ten statements, the first with its figures; or `AS_FIGURES_SAY`."""
    if not isinstance(verdicts, dict):
        return f"expected a dict, got {type(verdicts).__name__}"
    odd = [*(name for name in ASKED if name not in verdicts), *(str(name) for name in verdicts if name not in ASKED)]
    if odd:
        return f"expected {', '.join(ASKED)}; missing or unknown: {', '.join(odd)}"
    return next((said for number in ASKED if (said := _compared(number, verdicts[number]))), AS_FIGURES_SAY)


def _compared(number: str, verdict: Any) -> str:
    found, of = finding(number), claim_of(number)
    verdict = " ".join(verdict.lower().split()) if isinstance(verdict, str) else verdict
    if verdict not in VERDICTS:
        return f"{number} is {verdict!r}; expected {', '.join(VERDICTS[:-1])} or {VERDICTS[-1]}"
    if verdict == found.verdict:
        return ""
    return f"{number} is not {verdict!r}: {found.text} (notebook {of.seen_in[:2]})"
