"""Seconds of a step: compute by a roofline, communication by the links, and what of it no compute hides.

Compute of a block: its matrix products at a fraction of the GPU's peak, plus the bytes that its element-wise operators
move at the memory's rate (Williams et al. 2009, Roofline). A backward is twice the forward; attention's is 2.5 times,
because flash attention computes its scores again (Dao 2023, section 4.1).

Overlap: operations come in the order of the engine's own program of a step (`planning/program/record.py`). Collectives
of the shard axis run one after the other, and so do those across replicas. Tensor and context parallelism's collectives
stand in the way of the next product, so no compute hides them; the others, on links of their own, go on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdplab.planning.program.duration import BLOCK, ROOT, program_of_blocks, seconds_of

from .efficiency import efficiency_of
from .hardware import Gpu
from .plan_spec import PlanError, PlanSpec
from .plan_traffic import AxisTraffic, inline_counts, plan_traffic, seconds_each
from .unit_bytes import adapters, all_units

# FLOP/s that flash attention reaches of the data sheet's: "only 35%" of an H100 (Shah et al. 2024, FlashAttention-3,
# abstract, of FlashAttention-2), 50 to 73% of an A100 (Dao 2023, FlashAttention-2, abstract)
_ATTENTION_EFFICIENCY = {"H100": 0.35, "H200": 0.35}
_USUAL_ATTENTION = 0.6
_HBM_EFFICIENCY = 0.85  # of the data sheet's rate, what streaming kernels reach
# the H100 of torchtitan's tables (500 W, HBM2e) has no data sheet: its efficiency is of the 80 GB model's rate
_ASSUMED_FLOPS = {"H100 SXM 96GB": 989e12}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of one rank, and its parts: compute; communication as if alone; what of it was waited for."""

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


def step_time(spec: PlanSpec, efficiency: float | None = None) -> StepTime:
    """The step's seconds; `efficiency` replaces the fitted one. Raises PlanError for a GPU of unknown FLOP/s."""
    compute = Compute(spec, efficiency)
    rows = plan_traffic(spec)
    through_s, micro_s = _micro_batches(spec, compute, rows)
    alone_s = sum(row.count * seconds_each(spec, row) for row in rows)
    compute_s = micro_s + compute.optimizer_s
    step_s = through_s + compute.optimizer_s
    return StepTime(step_s, compute_s, alone_s, step_s - compute_s)


def peak_flops(gpu: Gpu) -> float:
    """FLOP/s in bf16 that efficiencies refer to; raises PlanError where no figure is known."""
    found = gpu.bf16_flops or _ASSUMED_FLOPS.get(gpu.name)
    if found is None:
        raise PlanError(f"no bf16 FLOP/s are known for {gpu.name} ({gpu.source}); give another GPU")
    return found


def has_known_flops(gpu: Gpu) -> bool:
    """Whether times can be predicted for a GPU."""
    return bool(gpu.bf16_flops or _ASSUMED_FLOPS.get(gpu.name))


def model_flops(spec: PlanSpec) -> float:
    """Arithmetic of a step over all GPUs without any recomputation: 6 a parameter that is multiplied, and attention's
    12 x layers x width x context a token (Chowdhery et al. 2022, appendix B), causality not taken off. A frozen
    parameter has no gradient of its own, and so 4; adapters have their 6.
    """
    shape = spec.model
    multiplied = shape.layers * _multiplied(spec) * spec.tensor_parallel + shape.vocabulary * shape.width
    trained = shape.layers * _adapted(spec)
    a_token = 2 * _passes(spec) * multiplied + 6 * trained + 12 * shape.layers * shape.query_width * spec.seq
    return a_token * spec.step_tokens


def _passes(spec: PlanSpec) -> int:
    """Products of a matrix in a step: one forward, one for the gradient of its input, one for its own if it has one."""
    return 2 if spec.lora_rank else 3


def _adapted(spec: PlanSpec) -> int:
    """Elements of one block's adapters."""
    matrices = [each for each in spec.model.block if each.is_matrix]
    return sum(each.count for each in adapters(matrices, spec.lora_rank)) if spec.lora_rank else 0


def _multiplied(spec: PlanSpec) -> float:
    """Elements of one block's matrices on one tensor-parallel rank."""
    return sum(each.on(spec.tensor_parallel).count for each in spec.model.block if each.is_matrix)


class Compute:
    """Seconds of compute of one micro-batch's parts on one rank; the simulation computes with the same."""

    def __init__(self, spec: PlanSpec, efficiency: float | None) -> None:
        reached = efficiency or efficiency_of(spec.gpu).part
        self.flops = reached * peak_flops(spec.gpu) * (1.0 if spec.param_bytes == 2 else 0.5)
        at_attention = _ATTENTION_EFFICIENCY.get(spec.gpu.name.split()[0], _USUAL_ATTENTION) if spec.flash else reached
        self.attention_flops = min(at_attention, reached) * self.flops / reached
        self.bytes_per_s = _HBM_EFFICIENCY * spec.gpu.hbm_bytes_per_s
        self.spec = spec
        products, attention = self._products_s(), self._attention_s()
        moved = _elementwise_bytes(spec) * spec.tokens / spec.tensor_parallel / self.bytes_per_s
        again = _recomputed_share(spec)
        self.forward_s = products + attention + moved
        backward_s = (_passes(spec) - 1) * products + (2.5 if spec.flash else 2.0) * attention + 2 * moved
        self.backward_s = backward_s + again * products + (spec.checkpointing == "full") * attention
        self.backward_s += (spec.checkpointing != "none") * moved
        self.head_forward_s, self.head_backward_s = self._head_s()
        self.optimizer_s = _optimizer_bytes(spec) / self.bytes_per_s

    def _products_s(self) -> float:
        return 2 * _multiplied(self.spec) * self.spec.tokens / self.flops

    def _attention_s(self) -> float:
        """Scores and their product with the values: 4 x width x context a token, half of it where flash attention
        leaves out what causality masks.
        """
        spec = self.spec
        pairs = spec.seq * (0.5 if spec.flash else 1.0)
        return 4 * spec.model.query_width * pairs * spec.tokens / spec.tensor_parallel / self.attention_flops

    def _head_s(self) -> tuple[float, float]:
        """The head's product, and the loss: some 16 bytes a logit forward and 24 backward in float32."""
        spec = self.spec
        logits = spec.tokens * spec.model.vocabulary / spec.tensor_parallel
        product = 2 * logits * spec.model.width / self.flops
        back = (_passes(spec) - 1) * product
        return product + 16 * logits / self.bytes_per_s, back + 24 * logits / self.bytes_per_s


def _elementwise_bytes(spec: PlanSpec) -> float:
    """Bytes a token that element-wise operators of one block's forward read and write, in 16-bit elements.

    Eager Llama: a norm in float32 steps 32 bytes a channel, rotary 20, SwiGLU 10, two residual sums 12; compiled: each
    fused into one pass. GPT: fused norms 4 each, GELU 4.
    """
    shape, scale = spec.model, spec.param_bytes / 2
    turned = shape.query_width + shape.kv_width
    if not shape.gated:
        moved = (8 if spec.compile else 20) * shape.width + 4 * shape.ffn
    elif spec.compile:
        moved = 16 * shape.width + 4 * turned + 6 * shape.ffn
    else:
        moved = (2 * 32 + 12) * shape.width + 20 * turned + 10 * shape.ffn
    return scale * moved


def _recomputed_share(spec: PlanSpec) -> float:
    """The part of a block's products that its backward computes again."""
    if spec.checkpointing != "selective":
        return float(spec.checkpointing in ("attention", "full"))
    matrices = [each.count for each in spec.model.block if each.is_matrix]
    return sum(matrices[1::2]) / sum(matrices)


def _optimizer_bytes(spec: PlanSpec) -> float:
    """Bytes that the optimizer moves for the elements that a rank updates: gradient, parameter and state read,
    parameter and state written; three times as much where its operators are not fused.
    """
    every = all_units(spec)
    once = 2 * every.optimizer_state + 3 * every.gradient_slices
    return 3 * once if spec.optimizer == "adamw-foreach" else once


def _micro_batches(spec: PlanSpec, compute: Compute, rows: list[AxisTraffic]) -> tuple[float, float]:
    """Seconds of all micro-batches, and those of their compute; micro-batches in the middle are alike."""
    seconds = _seconds(spec, compute, rows)
    count, layers = spec.grad_accum, spec.model.layers
    program = program_of_blocks(spec.sharing, layers, (not spec.lora_rank, True), spec.prefetch, min(count, 3))
    each = [seconds_of(operations, seconds) for operations in program]
    alone = compute.head_forward_s + compute.head_backward_s + layers * (compute.forward_s + compute.backward_s)
    return sum(each) + (count - len(each)) * each[len(each) // 2], count * alone


def _seconds(spec: PlanSpec, compute: Compute, rows: list[AxisTraffic]) -> dict[tuple[str, str], float]:
    """Seconds of each operation of the root and of a block. A forward or a backward has with it the collectives that
    stand between its products; what a unit sends in two parts (a frozen base, its adapters) travels as one.
    """
    found = {
        (ROOT, "forward"): compute.head_forward_s, (ROOT, "backward"): compute.head_backward_s,
        (BLOCK, "forward"): compute.forward_s, (BLOCK, "backward"): compute.backward_s,
    }  # fmt: skip
    for row in rows:
        once, inline = seconds_each(spec, row), inline_counts(spec, row)
        parts = zip(("forward", "backward"), inline) if row.axis not in ("shard", "replicate") else [(row.kind, 1)]
        for what, number in parts:
            found[row.unit, what] = found.get((row.unit, what), 0.0) + number * once
    return found
