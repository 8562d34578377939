"""When does communication hide? T_comm / T_compute of one block against the tokens of a rank.

Collectives of a block carry parameters and gradients, whose bytes do not depend on the batch; its compute grows with
it. So the ratio falls as 1 / tokens, a line of slope -1 on logarithmic axes (a roofline of overlap, after Williams et
al. 2009, Roofline), and the batch at which it is 1 is the crossover: from there on, a gather one block ahead is hidden
by compute. A forward hides one gather. A backward hides a gather and a reduction, and behind replicas an all-reduce on
a link of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdplab.common.names import IN_GROUPS
from fsdplab.records import RunRecord
from fsdplab.workloads.shapes import model

from .hardware import parse_cluster
from .links import LinkSpec, ring_steps, transfer_s
from .plan_spec import PlanSpec
from .plan_traffic import LINK_EFFICIENCY
from .program import ROOT
from .step_time import Compute, work_of
from .windtunnel import TARGET_TOKENS, wind_tunnel

PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Overlap:
    """Seconds of one block on a rank with a micro-batch of `tokens`: compute and communication of each phase."""

    tokens: int
    compute_s: dict[str, float]
    communication_s: dict[str, float]

    def ratio(self, phase: str, tokens: float | None = None) -> float:
        """Return T_comm / T_compute at so many tokens of a micro-batch, those of the spec by default."""
        at_spec = self.communication_s[phase] / self.compute_s[phase]
        if tokens is None:
            return at_spec
        return at_spec * self.tokens / tokens

    def crossover(self, phase: str) -> float:
        """Return the tokens of a micro-batch at which communication takes as long as compute; 0 where none travels."""
        return self.ratio(phase) * self.tokens

    @property
    def crossover_tokens(self) -> float:
        """Tokens from which on both phases hide theirs."""
        return max(self.crossover(phase) for phase in PHASES)


def overlap_of(spec: PlanSpec, link: LinkSpec | None = None) -> Overlap:
    """Predict the overlap of a block of `spec`; `link` replaces the links of all axes, at the rate given.

    Sequences keep their length: more tokens are more sequences. Raises PlanError for a GPU of unknown FLOP/s.

    >>> from fsdplab.planning.planner import plan_spec
    >>> found = overlap_of(plan_spec("llama-3.1-8b", "h100", gpus=8, micro_batch=2))
    >>> round(found.ratio("forward"), 2), round(found.ratio("backward"), 2), round(found.crossover_tokens)
    (0.14, 0.2, 1666)
    """
    if link is not None:
        spec = _on_link(spec, link)
    few = replace(spec, grad_accum=min(spec.grad_accum, 2))  # all micro-batches of a block are alike
    block, compute = work_of(few).blocks[0], Compute(spec, None)
    seconds = {kind: transfer.seconds for kind, transfer in block.sent.items()}
    gather_s = seconds.get("all_gather", 0.0)
    across_s = seconds.get("all_reduce", 0.0)
    in_backward_s = gather_s if spec.row.reshards_after_forward else 0.0
    in_backward_s += seconds.get("reduce_scatter", 0.0)
    return Overlap(
        spec.tokens,
        {"forward": compute.forward_s, "backward": compute.backward_s},
        {"forward": gather_s, "backward": max(in_backward_s, across_s)},
    )


def _on_link(spec: PlanSpec, link: LinkSpec) -> PlanSpec:
    """The spec with all its GPUs on one link: as in one node, whose link reaches the rate that was asked for."""
    asked = replace(link, bytes_per_s=link.bytes_per_s / LINK_EFFICIENCY)
    shard_size = spec.shards if spec.row.in_groups else None
    return replace(spec, gpu=replace(spec.gpu, link=asked), gpus_per_node=spec.gpus, shard_size=shard_size)


@dataclass(frozen=True)
class OverlapPoint:
    """A recorded run: tokens a rank, T_comm / T_compute, and what was predicted for it, by `source`; None where nothing
    was: no link was emulated.
    """

    tokens: int
    measured: float
    predicted: float | None
    source: str = "its link's formula"


def overlap_point(record: RunRecord) -> OverlapPoint:
    """Return the point of a profiled run; ValueError with the remedy where it has no profile or no collectives.

    It is of blocks, at the run's own tokens. A run in the wind tunnel stands for another job: its point is at the job's
    tokens, beside the target's ratio under full sharding, and is the whole step's, for which that ratio is defined.
    """
    machine, name = record.spec.get("emulate"), record.spec.get("as_model")
    sent, computed_ns = _profiled(record, without=() if machine and name else (ROOT, ""))
    measured = sum(row["end_ns"] - row["start_ns"] for row in sent) / computed_ns
    if machine and name:
        shape = model(name)
        target = wind_tunnel(
            parse_cluster(machine),
            target_parameters=shape.parameters,
            target_layers=shape.layers,
            tokens_per_gpu=TARGET_TOKENS,
        )
        return OverlapPoint(TARGET_TOKENS, measured, target.ratio, f"wind tunnel's target, {name} on {machine}")
    tokens = int(record.spec["batch_size"]) * int(record.spec["sequence_length"])
    predicted_s = _by_formula(record, [(row["kind"], row["wire_bytes"]) for row in sent])
    return OverlapPoint(tokens, measured, predicted_s and predicted_s * 1e9 / computed_ns)


def _profiled(record: RunRecord, without: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """The collectives of the profiled steps, and the nanoseconds of compute; `without` some units."""
    steps = {row["step"] for row in record.table("breakdown")}

    def rows_of(table: str) -> Iterator[dict[str, Any]]:
        for row in record.table(table):
            if row["step"] in steps and row["unit"] not in without:
                yield row

    sent = list(rows_of("ledger"))
    computed_ns = sum(row["end_ns"] - row["start_ns"] for row in rows_of("timeline") if row["lane"] == "compute")
    if not sent or not computed_ns:
        raise ValueError(
            f"{record.path} has no profiled compute and collectives of blocks; run it again with --profile 2 and"
            " --world-size 2 or more"
        )
    return sent, computed_ns


def _by_formula(record: RunRecord, sent: Iterable[tuple[str, int]]) -> float | None:
    """Seconds that the record's emulated link needs for what was sent; None without one, or with groups of ranks."""
    link = record.summary.link
    if link is None or not link.bytes_per_s or record.spec["strategy"] in IN_GROUPS:
        return None
    emulated = LinkSpec(link.name, link.bytes_per_s, link.latency_s or 0.0)
    ranks = record.spec["world_size"]
    return sum(transfer_s(emulated, wire_bytes, ring_steps(kind, ranks)) for kind, wire_bytes in sent)
