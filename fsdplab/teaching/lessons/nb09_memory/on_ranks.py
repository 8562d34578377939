"""The part of lesson 09 that runs on the ranks: drivers that call the learner's function, or train with their
choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fsdplab.sessions import RunSpec
from fsdplab.teaching.core.training_on_ranks import Training, complaint

JOB = {"model": "gpt-20m", "batch_size": 2, "sequence_length": 64, "steps": 1, "device": "cpu"}
BLOCK_BYTES, ROOT_BYTES = 7_097_856, 1_182_720  # of gpt-20m in fp32: one block, and what no block holds
GATHERED_LIMIT = 2 * BLOCK_BYTES + ROOT_BYTES  # one copy less than with prefetch=2
PEAK_LIMIT = 206_000_000  # and no more in all than prefetch=2 holds
CHOICES = ("strategy", "prefetch", "units")


def drive_holding(holding: Callable[..., Any], life: Sequence[dict[str, Any]], at: int) -> Any:
    """The units' names in order of the alphabet, whatever collection they came in; a unit named twice stays twice."""
    got = holding([dict(row) for row in life], at)
    is_many = isinstance(got, Iterable) and not isinstance(got, (str, bytes))
    return sorted(map(str, got)) if is_many else got


def drive_slim(slim: Callable[..., Any]) -> dict[str, Any]:
    """Two steps with the chosen settings: gathered bytes and all bytes at the measured peak,
    beyond what was asked for.
    """
    choices = slim()
    refused = complaint(choices, JOB, CHOICES)
    if refused:
        return {
            "choices": refused,
            "bytes over the limit of the whole peak": None,
            "gathered bytes too many": None,
            "gathers set out ahead": None,
        }
    spec = RunSpec(**{**JOB, **choices})
    peak = Training(spec).measured()
    held = ", ".join(
        f"{name.replace('_', ' ')} {nbytes / 1e6:.1f} MB" for name, nbytes in peak.peak.items() if nbytes > 1e5
    )
    print(f"{peak.peak_total / 1e6:.1f} MB: {held}")
    return {
        "choices": "",
        "bytes over the limit of the whole peak": max(0, peak.peak_total - PEAK_LIMIT),
        "gathered bytes too many": max(0, peak.peak["gathered_parameters"] - GATHERED_LIMIT),
        "gathers set out ahead": spec.prefetch > 0 and spec.units != "model",
    }
