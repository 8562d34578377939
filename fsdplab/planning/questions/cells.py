"""The columns of answers: how each is written, and how it follows from a plan. And how to choose between rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsdplab.planning.links import HOST_LINK
from fsdplab.planning.memory import AS_PLANNED, Memory, Variant, host_bytes, host_crossing, memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import AxisTraffic, plan_traffic, transfer_of
from fsdplab.planning.program import StepWork
from fsdplab.planning.simulation import simulate_work
from fsdplab.planning.step_time import StepTime, has_known_flops, step_time
from fsdplab.planning.unit_bytes import all_units

from .answer import Cells, Row, Value

PEAK, SPEED, STEP, SENT, EXPOSED, FITS = "peak", "tokens/s a GPU", "step", "sent", "exposed", "fits"
ACTIVATIONS, GATHERED = "most activations", "most gathered"
ALIKE = 0.99  # less than a percent is no difference in speed


@dataclass(frozen=True)
class Case:
    """A row of an answer: what is varied, and the plan with that. `work` is that of a step which is simulated; `known`
    are cells that the variant itself gives.
    """

    label: Value
    spec: PlanSpec
    variant: Variant = AS_PLANNED
    blocks_per_unit: float = 1.0
    work: StepWork | None = None
    known: Row = field(default_factory=dict)

    def cells(self, columns: Sequence[str]) -> dict[str, Value]:
        """The row: the label, then these columns."""
        first, *others = columns
        return {first: self.label} | {
            name: self.known[name] if name in self.known else _CELLS[name](self) for name in others
        }

    @cached_property
    def memory(self) -> Memory:
        """Of a rank through the step."""
        return memory_of(self.spec, self.blocks_per_unit, self.variant)

    @cached_property
    def traffic(self) -> Sequence[AxisTraffic]:
        """Of a rank in the step."""
        return plan_traffic(self.spec)

    @cached_property
    def time(self) -> StepTime | None:
        """In closed form; None where no FLOP/s are known."""
        return step_time(self.spec) if has_known_flops(self.spec.gpu) else None

    @cached_property
    def step_s(self) -> float | None:
        """Seconds of the step."""
        if self.work:
            return simulate_work(self.work).step_s
        return self.time.step_s if self.time else None

    @property
    def states(self) -> float:
        """Bytes of the model's states at the peak."""
        held = self.memory.peak.by_category
        return held["sharded_parameters"] + held["sharded_gradients"] + held["optimizer_state"]

    def most(self, category: str) -> float:
        """Bytes of a category when it takes most."""
        return max(moment.by_category[category] for moment in self.memory.moments)

    @property
    def crossing(self) -> float:
        """Bytes over the host's link in a step. Of an optimizer there, the gradients of what a rank updates go to the
        CPU, and as many bytes of parameters come back: ZeRO-Offload's 4 bytes a parameter in 16 bits (Ren et al. 2021,
        section 3.2); nothing where there is no state.
        """
        spec = self.spec
        if spec.offload:
            return host_crossing(spec)
        if not self.variant.optimizer_on_cpu or not spec.optimizer_bytes:
            return 0.0
        return 2 * spec.rest_bytes * all_units(spec).optimizer_state / spec.optimizer_bytes


def _exposed_s(case: Case) -> float:
    """Seconds of a simulated step in which nothing is computed."""
    assert case.work is not None and case.step_s is not None, "it is asked of simulated steps"
    return max(0.0, case.step_s - case.work.compute_s)


def _block_gather_s(case: Case) -> float:
    rows = [row for row in case.traffic if (row.unit, row.axis, row.kind) == ("block", "shard", "all_gather")]
    return sum(transfer_of(case.spec, row).seconds for row in rows)


def _host(case: Case) -> float:
    if not case.variant.optimizer_on_cpu:
        return host_bytes(case.spec)
    return memory_of(case.spec).at("optimizer step").by_category["optimizer_state"]


_CELLS: dict[str, Callable[[Case], Value]] = {
    PEAK: lambda case: case.memory.peak.total,
    FITS: lambda case: case.memory.peak.total <= case.spec.gpu.memory_bytes,
    ACTIVATIONS: lambda case: case.most("activations"),
    GATHERED: lambda case: case.most("unsharded_parameters"),
    SENT: lambda case: sum(row.step_bytes for row in case.traffic),
    STEP: lambda case: case.step_s,
    EXPOSED: lambda case: max(0.0, case.time.exposed_s) / case.time.step_s if case.time else None,
    SPEED: lambda case: case.spec.step_tokens / case.step_s / case.spec.gpus if case.step_s else None,
    "units": lambda case: len(case.work.blocks) if case.work else None,
    "gathered at once": lambda case: case.memory.at("backward of the last block").by_category["unsharded_parameters"],
    "exposed time": _exposed_s,
    "states": lambda case: case.states,
    "all else": lambda case: case.memory.peak.total - case.states,
    "host memory of a rank": _host,
    "crosses a step": lambda case: case.crossing,
    "on the host's link": lambda case: case.crossing / HOST_LINK.bytes_per_s or None,
    "largest buffer": lambda case: case.most("communication_buffers"),
    "sent in reductions": lambda case: sum(
        row.step_bytes for row in case.traffic if row.axis in ("shard", "replicate") and row.kind != "all_gather"
    ),
    "gather of a block": _block_gather_s,
}


def near_the_fastest(best: Cells) -> str:
    """Among which rows the best was chosen, to be read in a sentence."""
    return f"{'of those that fit,' if best.fits else 'none fits, and'} within a percent of the fastest,"


def fastest(rows: Sequence[Cells]) -> Cells:
    """Of the rows that fit, or of all, those within a percent of the most tokens/s; of these the one with least
    memory.
    """
    found = [row for row in rows if row.fits] or rows
    most = max(row.number(SPEED) for row in found)
    return min((row for row in found if row.number(SPEED) >= ALIKE * most), key=lambda row: row.number(PEAK))
