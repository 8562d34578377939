"""Where the figures of plans are from, as every command of `fsdplab plan` says it."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.cli.answer import Line
from fsdplab.planning.planner import Plan
from fsdplab.planning.step_time import peak_flops

PREDICTED = "all figures are predicted, in closed form"


def reached_words(found: Plan) -> str:
    """`0.485 of 989 TFLOP/s: fitted on 5 published runs`: what all predicted times rest on."""
    return found.efficiency.of(peak_flops(found.spec.gpu)) if found.efficiency else "unknown"


def provenance(plans: Sequence[Plan], what: str = PREDICTED) -> Line:
    """Where the figures of plans on one kind of GPU are from."""
    reached = f"; matrix products reach {reached_words(plans[0])}" if plans and plans[0].efficiency else ""
    return Line(f"{what}{reached}", "provenance")
