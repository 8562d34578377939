"""Predictions beside published measurements: the ratio of every figure, and the median and worst error.

No row is tuned. One number a GPU type is fitted, the part of its data sheet's FLOP/s that matrix products reach: on
every other row with a throughput, in the order of the file, beginning with the first; errors are reported on the
others, which the fit has not seen. Memory has no fitted number: bytes that were reserved are those in use times one
stated factor (memory.py), which is the ratio of two figures of one row (torchtitan PR #165, FSDP2, eager). Published
figures that are arithmetic themselves (ZeRO's table 1) are no evidence, and counted apart.

What is known of the rows that are furthest off; nothing is set for them, since each reason rests on the row itself:

- DeepSpeed's 6.86 B model without checkpointing peaks 15.5 and 17.0 GiB above its states, with checkpointing 5.6 and
  2.8. All weights in bf16 are 12.8 GiB, and what autograd saves of 512 tokens without flash attention 3 to 4
  (Korthikanti et al. 2022, equation 2). So gathered weights seem to live there until their backward, and are predicted
  to be dropped (ratios 0.55 and 0.67). No source says so.
- MPT-7b at 65,536 tokens spends three quarters of its time in attention. Its tokens/s follow from causal attention at
  20% of an H100's FLOP/s; predicted are the 35% of FlashAttention-2 (ratio 1.50). Which kernel ran is not published,
  and no second row of long sequences could test a lower rate.
- MPT-70b on 64 A100 of 40 GB (ratio 1.35): 128 of them with twice the micro-batch are predicted within 1%. Both rows
  would follow from a network with a sixth of the printed rate, which the larger micro-batch hides; nothing else
  says that it was so slow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .memory import FRAMEWORK_BYTES, fits_card, memory_of
from .published import Case, read_published
from .step_time import step_time

_EFFICIENCIES = [number / 200 for number in range(40, 191)]  # 0.2 to 0.95
FITTED, HELD_OUT, NOT_FITTED = "fitted", "held out", "no fit"


@dataclass(frozen=True)
class Row:
    """One figure: predicted and published in the same unit; `part` says what the fit has seen of it."""

    id: str
    source: str
    quantity: str
    gpu: str
    predicted: float
    published: float
    part: str

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published

    @property
    def error(self) -> float:
        """Distance of the ratio from 1."""
        return abs(self.ratio - 1)


@dataclass(frozen=True)
class Validation:
    """All rows, what was fitted, what was left out and why, and the runs that took place but are predicted not to fit.

    `rows` with a published throughput took place: their micro-batches fitted.
    """

    rows: tuple[Row, ...]
    efficiencies: dict[str, float]
    left_out: tuple[tuple[str, str], ...]
    ran: int
    too_large: tuple[str, ...]

    def errors(self, quantity: str, *parts: str) -> tuple[int, float, float]:
        """How many figures of a quantity, their median and their worst error; 0 and NaN for none."""
        found = [row.error for row in self.rows if row.quantity == quantity and (not parts or row.part in parts)]
        return (len(found), statistics.median(found), max(found)) if found else (0, math.nan, math.nan)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "rows": [{**asdict(row), "ratio": row.ratio} for row in self.rows],
            "memory": self._summary("memory"),
            "memory_of_arithmetic": self._summary("memory (arithmetic)"),
            "tokens_per_s": self._summary("tokens/s"),
            "tokens_per_s_held_out": self._summary("tokens/s", HELD_OUT, NOT_FITTED),
            "tokens_per_s_fitted": self._summary("tokens/s", FITTED),
            "efficiency": self.efficiencies,
            "left_out": [{"id": name, "reason": reason} for name, reason in self.left_out],
            "ran": self.ran,
            "predicted_not_to_fit": list(self.too_large),
        }

    def _summary(self, quantity: str, *parts: str) -> dict[str, Any]:
        count, median, worst = self.errors(quantity, *parts)
        return {"count": count, "median_error": median if count else None, "worst_error": worst if count else None}


def validate(path: Path) -> Validation:
    """Predict every usable row of a file; raises PublishedError, one line."""
    cases, left_out = read_published(path)
    timed = [case for case in cases if case.tokens_per_s is not None and not case.without_time]
    unpredicted = [(case.id, f"no tokens/s: {case.without_time}") for case in cases if _has_unused_speed(case)]
    parts = _parts(timed)
    efficiencies = _fitted(timed, parts)
    rows = [row for case in cases for row in _memory_rows(case)]
    rows += [_time_row(case, parts[case.id], efficiencies.get(case.spec.gpu.name)) for case in timed]
    large = [case.id for case in timed if not fits_card(case.spec)]
    return Validation(tuple(rows), efficiencies, (*left_out, *unpredicted), len(timed), tuple(large))


def _has_unused_speed(case: Case) -> bool:
    return case.tokens_per_s is not None and bool(case.without_time)


def _parts(timed: Sequence[Case]) -> dict[str, str]:
    """Every other row of each GPU type is fitted, the first among them; a type with one row is not fitted."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(case.spec.gpu.name for case in timed):
        of_it = [case.id for case in timed if case.spec.gpu.name == name]
        for number, each in enumerate(of_it):
            found[each] = NOT_FITTED if len(of_it) < 2 else HELD_OUT if number % 2 else FITTED
    return found


def _fitted(timed: Sequence[Case], parts: dict[str, str]) -> dict[str, float]:
    """GPU type -> the efficiency with the smallest mean error, as a logarithm, over the rows to fit."""
    found = {}
    for name in dict.fromkeys(case.spec.gpu.name for case in timed):
        cases = [case for case in timed if case.spec.gpu.name == name and parts[case.id] == FITTED]
        if cases:
            found[name] = min(_EFFICIENCIES, key=lambda each, cases=cases: _distance(cases, each))  # type: ignore[misc]
    return found


def _distance(cases: Sequence[Case], efficiency: float) -> float:
    return sum(abs(math.log(_tokens_per_s(case, efficiency) / (case.tokens_per_s or 1.0))) for case in cases)


def _tokens_per_s(case: Case, efficiency: float | None) -> float:
    spec = case.spec
    return spec.step_tokens / step_time(spec, efficiency).step_s / spec.gpus


def _time_row(case: Case, part: str, efficiency: float | None) -> Row:
    predicted = _tokens_per_s(case, efficiency)
    return Row(case.id, case.source, "tokens/s", case.spec.gpu.name, predicted, case.tokens_per_s or math.nan, part)


def _memory_rows(case: Case) -> list[Row]:
    memory = memory_of(case.spec)
    stepping = memory.at("optimizer step")
    passing = ("unsharded_parameters", "activations", "communication_buffers")
    states = stepping.total - FRAMEWORK_BYTES - sum(stepping.by_category[name] for name in passing)
    measured = {"reserved": memory.reserved_bytes, "used": memory.used_bytes, "states": states}
    predicted = measured | {"arithmetic": states * case.scale}
    quantities = dict.fromkeys(measured, "memory") | {"arithmetic": "memory (arithmetic)"}
    source, gpu = case.source, case.spec.gpu.name
    return [
        Row(
            f"{case.id}, {each.kind}", source, quantities[each.kind], gpu, predicted[each.kind], each.nbytes, NOT_FITTED
        )
        for each in case.memory
    ]
