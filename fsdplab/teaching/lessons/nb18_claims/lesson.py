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
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads.shapes import preset

from .claims import CLAIMS, VERDICTS, Finding, claim_of, memory, practice, speed, traffic

SUBJECTS = {"memory": memory, "traffic": traffic, "speed": speed, "practice": practice}
_COLOURS = dict(zip(VERDICTS, ("#3d9970", "#e0a030", "#c0392b"), strict=True))


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    """Load what the small runs came to; FileNotFoundError where the data of the course is missing."""
    return dict(json.loads((shared_folder("data") / "claims.json").read_text(encoding="utf-8")))


@lru_cache(maxsize=64)
def finding(number: str) -> Finding:
    """Return the verdict on a statement, with its figures: `finding("C8").verdict == "refuted"`."""
    return claim_of(number).find(measured())


def count(verdict: str) -> int:
    """Return how many of the statements have this verdict."""
    return sum(finding(claim.id).verdict == verdict for claim in CLAIMS)


def verdicts_figure() -> go.Figure:
    """Draw how many statements of each subject are confirmed, true under conditions, or refuted."""
    counts, ends, described = [], {}, []
    for name, module in SUBJECTS.items():
        by_verdict = Counter(finding(claim.id).verdict for claim in module.CLAIMS)
        counts.append(by_verdict)
        ends[name] = f"<b>{by_verdict.total()}</b>"
        numbers = [f"{by_verdict[verdict]} {verdict}" for verdict in VERDICTS]
        described.append(f"{name}: {', '.join(numbers)}")
    parts = []
    for verdict in VERDICTS:
        values = [by_verdict[verdict] for by_verdict in counts]
        parts.append(Part(verdict, _COLOURS[verdict], values))
    figure = stacked_bars(ends, parts, "statements", "%{x:.0f}")

    confirmed, conditional, refuted = map(count, VERDICTS)
    title = f"Of {len(CLAIMS)} statements about FSDP {confirmed} hold as they are said"
    subtitle = f"{conditional} hold under conditions, {refuted} do not; computed and measured"
    alt = f"Stacked bars of statements by subject. {'; '.join(described)}."
    return titled(figure, title, subtitle, alt, height=270)


# ---- one formula: C6


def ratio(parameter_bytes: float, reduce_bytes: float, ddp_bytes: float, root: float = 0.0) -> float:
    """Return the bytes that full sharding sends over those of DDP.

    Full sharding all-gathers `parameter_bytes` an element twice, those of the root once, and reduces `reduce_bytes`;
    DDP all-reduces `ddp_bytes` an element. `root` is the root's part of the parameters.

    >>> ratio(4, 4, 4), ratio(2, 4, 4), ratio(2, 4, 2)
    (1.5, 1.0, 2.0)
    """
    # 2 all-gathers of blocks, 1 of the root: of a root that holds everything (1.0) one is left
    gathered = (2 - root) * parameter_bytes
    return (gathered + reduce_bytes) / (2 * ddp_bytes)


def root_part(model: str) -> float:
    """Return the part of a preset's parameters that no block has."""
    shape = preset(model)
    of_a_block = sum(parameter.count for parameter in shape.block)
    return 1 - shape.layers * of_a_block / shape.parameters


def ratio_figure(gathers: str, reductions: str, ddp: str, root_percent: int) -> go.Figure:
    """Draw a bar for each of DDP and full sharding: what it sends of an element, by collective."""
    element = {"fp32": 4, "bf16": 2}  # bytes
    root = root_percent / 100
    gathered = (2 - root) * element[gathers]
    reduced, plain = element[reductions], 2 * element[ddp]
    parts = [
        Part("all_reduce", "#7f868f", [plain, 0]),
        Part("all_gather", "#4c8ed9", [0, gathered]),
        Part("reduce_scatter", "#d98b4c", [0, reduced]),
    ]
    ends = {"DDP": f"<b>{plain:g}</b>", "full sharding": f"<b>{gathered + reduced:g}</b>"}
    figure = stacked_bars(ends, parts, "bytes sent of an element, times (n - 1)/n", "%{x:.2g}")
    factor = ratio(element[gathers], reduced, element[ddp], root)
    title = f"Full sharding sends {factor:.2f} times as many bytes as DDP"
    subtitle = f"Computed: all-gathers in {gathers}, reductions in {reductions}, DDP in {ddp}"
    bars = f"DDP {plain:g}, full sharding {gathered:g} unsharded and {reduced:g} reduced"
    return titled(figure, title, subtitle, f"Stacked bars of bytes: {bars}. {title}.", height=230)


# ---- on this machine


def told(**choices: Any) -> dict[str, Any]:
    """Run gpt-tiny and return its peak by category, bytes sent, collectives of a step by phase, and losses."""
    record = run(RunSpec(**{"model": "gpt-tiny", "steps": 2, "device": "cpu", **choices}))
    rows = [row for row in record.table("ledger") if row["rank"] == 0]
    last = max((row["step"] for row in rows), default=0)
    collectives = Counter(f"{row['phase']} {row['kind']}" for row in rows if row["step"] == last)
    summary = record.summary
    return {
        "peak": dict(summary.peak_memory_bytes.split),
        "bytes": summary.comm.bytes_per_step,
        "collectives": dict(collectives),
        "losses": list(summary.losses),
    }


@doing("two strategies on 2 ranks")
def again() -> Table:
    """Return the bytes and collectives of DDP and full sharding on this machine's ranks, beside the record's."""
    rows = []
    for name in ("no_shard", "full_shard"):
        here, recorded = told(strategy=name), measured()["strategies"][name]
        kinds = []
        for phase_and_kind, number in here["collectives"].items():
            phase, kind = phase_and_kind.split()
            kinds.append(f"{number} {kind}s in the {phase}")
        # bytes and collectives follow from the code, and are the same on every machine
        is_same = all(here[what] == recorded[what] for what in ("bytes", "collectives"))
        rows.append([name, f"{here['bytes'] / 1e6:.2f}", ", ".join(kinds), "the same" if is_same else "other"])
    header = ["strategy", "MB sent", "collectives", "as in the record"]
    return table(header, rows, "Measured on 2 ranks, one step of gpt-tiny.")


# ---- the learner's verdicts

AS_FIGURES_SAY = "each as the figures say"
ASKED = ("C6", "C8", "C9", "C10", "C16", "C21", "C22", "C31", "C36", "C37")


def complaint(verdicts: Any) -> str:
    """Return what is wrong with the verdicts on the ten statements, the first with its figures; or `AS_FIGURES_SAY`."""
    if not isinstance(verdicts, dict):
        return f"expected a dict, got {type(verdicts).__name__}"
    missing = [name for name in ASKED if name not in verdicts]
    unknown = [str(name) for name in verdicts if name not in ASKED]
    if missing or unknown:
        return f"expected {', '.join(ASKED)}; missing or unknown: {', '.join([*missing, *unknown])}"
    for number in ASKED:
        difference = _compared(number, verdicts[number])
        if difference:
            return difference
    return AS_FIGURES_SAY


def _compared(number: str, verdict: Any) -> str:
    """Return what is wrong with one verdict, with the figures; nothing where it is right."""
    if isinstance(verdict, str):
        # upper case and blanks are no mistake
        verdict = " ".join(verdict.lower().split())
    if verdict not in VERDICTS:
        return f"{number} is {verdict!r}; expected {', '.join(VERDICTS[:-1])} or {VERDICTS[-1]}"
    judgement = finding(number)
    if verdict == judgement.verdict:
        return ""
    return f"{number} is not {verdict!r}: {judgement.text} (notebook {claim_of(number).seen_in[:2]})"
