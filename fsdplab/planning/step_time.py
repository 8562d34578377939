"""Seconds of a step: compute by a roofline, communication by the links, and what of it no compute hides.

Compute of a block: its matrix products at a fraction of the GPU's peak, plus the bytes that its element-wise operators
move at the memory's rate (Williams et al. 2009, Roofline). A backward is twice the forward; attention's is 2.5 times,
because flash attention computes its scores again (Dao 2023, section 4.1).

Where states rest in host memory the optimizer is the CPU's, and copies are operations of the step (host.py).

Overlap: operations come in the order of the engine's own program of a step (`planning/program.py`). Collectives
of the shard axis run one after the other, and so do those across replicas. Tensor and context parallelism's collectives
stand in the way of the next product, so no compute hides them; the others, on links of their own, go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from .efficiency import (
    EAGER_GPT,
    FP8_SPEEDUP,
    HBM_EFFICIENCY,
    LAUNCH_S,
    LAUNCHES,
    SLOWED_BY_BYTES,
    SLOWED_BY_SECONDS,
    attention_of,
    efficiency_of,
)
from .hardware import Gpu
from .host import copied_bytes, copies, host_optimizer_s
from .memory import adapters, all_units
from .plan_spec import BASE_BYTES, PlanError, PlanSpec
from .plan_traffic import (
    AXES,
    LINK_EFFICIENCY,
    OPTIMIZER,
    AxisTraffic,
    axis_link,
    owners_step,
    plan_traffic,
    sends_of,
    transfer_of,
)
from .program import BLOCK, ROOT, Holds, StepWork, Transfer, UnitWork, copies_seconds, step_seconds
from .stages import bubble, stages

MOST_PASSES = 10_000  # of a simulated step: each costs some milliseconds, and thousands of bytes of its record
_USUAL_ATTENTION = 0.6  # of an ideal card's FLOP/s, what flash attention is taken to reach
# the H100 of torchtitan's tables (500 W, HBM2e) has no data sheet: its efficiency is of the 80 GB model's rate
_ASSUMED_FLOPS = {"H100 SXM 96GB": 989e12}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of one rank, and its parts: compute, of which `host_optimizer_s` on the CPU; communication and
    copies from and to host memory, each as if alone; what of both was waited for, and how much of that without copies
    would not be. `slowed_s` of the compute are what collectives beside it take.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    host_optimizer_s: float = 0.0
    copies_s: float = 0.0
    exposed_copies_s: float = 0.0
    slowed_s: float = 0.0


def step_time(spec: PlanSpec) -> StepTime:
    """Predict the step's seconds; of a pipeline those of the slowest stage. PlanError for a GPU of unknown FLOP/s."""
    if spec.pipeline_parallel > 1:
        by_stage = (_of_stage(spec, index, stage) for index, stage in stages(spec))
        return max(by_stage, key=lambda time: time.step_s)
    rows = plan_traffic(spec)
    return time_of(spec, _work(spec, rows), rows)


def _of_stage(spec: PlanSpec, index: int, stage: PlanSpec) -> StepTime:
    """A stage's own step, the bubble around it, and what it sends to its neighbours, of which nothing is hidden.

    The bubble is filled with nothing: it counts as exposed.
    """
    rows = plan_traffic(stage)
    work = _work(stage, rows)
    own = time_of(stage, work, rows)
    # the collectives of `work`, not of `rows`: those that go on beside its products are no part of a pass
    idle_s = bubble(spec) * (work.compute_s - work.optimizer_s + work.inline_s)
    send = sends_of(spec, index)
    sent_s = send.count * transfer_of(spec, send).seconds
    return replace(
        own,
        step_s=own.step_s + idle_s + sent_s,
        communication_s=own.communication_s + sent_s,
        exposed_s=own.exposed_s + idle_s + sent_s,
    )


def time_of(spec: PlanSpec, work: StepWork, rows: Sequence[AxisTraffic]) -> StepTime:
    """Time a step of `work`, which sends `rows`."""
    step_s = step_seconds(work)
    alone_s = sum(row.count * transfer_of(spec, row).seconds for row in rows)
    time = StepTime(step_s, work.compute_s, alone_s, step_s - work.compute_s, slowed_s=work.slowed_s)
    if not spec.offload:
        return time
    return replace(
        time,
        host_optimizer_s=work.optimizer_s,
        copies_s=copies_seconds(work),
        exposed_copies_s=step_s - step_seconds(work.without_copies),
    )


def work_of(spec: PlanSpec, efficiency: float | None = None, in_flight: int = 1) -> StepWork:
    """Return what the units of a plan's step compute and send.

    Raises PlanError for a GPU of unknown FLOP/s, for a pipeline, whose stages differ, and for a step of too many
    events.
    """
    if spec.pipeline_parallel > 1:
        raise PlanError("a pipeline is planned in closed form, and its step not unit by unit; leave --pp out")
    passes = spec.model.layers * spec.grad_accum
    if passes > MOST_PASSES:
        raise PlanError(
            f"a simulated step has {spec.model.layers:,} blocks x {spec.grad_accum:,} micro-batches = {passes:,}"
            f" passes; expected at most {MOST_PASSES:,}: give fewer --micro-batches: those in the middle are alike"
        )
    return replace(_work(spec, plan_traffic(spec), efficiency), in_flight=in_flight)


def _work(spec: PlanSpec, rows: Sequence[AxisTraffic], efficiency: float | None = None) -> StepWork:
    compute = Compute(spec, efficiency)
    has_root = bool(spec.model.root)  # a stage in the middle has no root of its own
    root_holds = Holds(has_root, has_root and not spec.lora_rank)
    root = unit_work(spec, rows, ROOT, compute.head_s, root_holds, _copies(spec, ROOT))
    block = unit_work(spec, rows, BLOCK, compute.block_s, Holds(), _copies(spec, BLOCK))
    longer_s = 0.0
    if compute.fitted:
        longer_s = slowed_s(spec, rows, root) + slowed_s(spec, rows, block, spec.model.layers)
    blocks = [replace(block, name=f"{BLOCK}s.{index}") for index in range(spec.model.layers)]
    return planned_work(spec, rows, [root, *blocks], compute.optimizer_s, longer_s)


def _copies(spec: PlanSpec, unit: str) -> Mapping[str, Transfer]:
    """The copies of the root or a block from and to host memory; none without offload."""
    if not spec.offload:
        return {}
    shard_bytes, gradient_bytes = copied_bytes(spec, unit)
    return copies(spec, shard_bytes, gradient_bytes)


def planned_work(
    spec: PlanSpec, rows: Sequence[AxisTraffic], units: Sequence[UnitWork], optimizer_s: float, slowed_s: float
) -> StepWork:
    """Join these units, the root first, into a step with the choices of `spec`.

    Nothing that the optimizer's step sends is taken as hidden.
    """
    root, *blocks = units
    exchange: list[Transfer] = []
    for row in rows:
        if row.unit == OPTIMIZER:
            exchange += [transfer_of(spec, row)] * round(row.count)
    return StepWork(
        root,
        tuple(blocks),
        optimizer_s,
        tuple(exchange),
        spec.prefetch,
        spec.grad_accum,
        sharing=spec.sharing,
        shards=spec.shards,
        replicas=spec.replicas,
        slowed_s=slowed_s,
    )


def unit_work(
    spec: PlanSpec,
    rows: Sequence[AxisTraffic],
    unit: str,
    computes_s: tuple[float, float],
    holds: Holds,
    copied: Mapping[str, Transfer] = MappingProxyType({}),
) -> UnitWork:
    """Make a unit from the seconds of its forward and backward, what it sends of `rows`, and its copies."""
    sent = dict(copied)
    forward_s, backward_s = computes_s
    in_forward: list[Transfer] = []
    in_backward: list[Transfer] = []
    for row in rows:
        if row.unit != unit:
            continue
        transfer = transfer_of(spec, row)
        if any(row.inline):  # they stand between the products
            forwards, backwards = row.inline
            in_forward += [transfer] * forwards
            in_backward += [transfer] * backwards
        elif row.kind in sent:
            sent[row.kind] = sent[row.kind].followed_by(transfer)
        else:
            sent[row.kind] = transfer
    if spec.async_tensor:
        in_forward = _beside_products(forward_s, in_forward)
        in_backward = _beside_products(backward_s, in_backward)
    return UnitWork(unit, forward_s, backward_s, sent, tuple(in_forward), tuple(in_backward), holds)


def _beside_products(seconds: float, inline: Sequence[Transfer]) -> list[Transfer]:
    """Return what a phase waits for where its tensor-parallel collectives go on beside the products that they feed: of
    these the part that its `seconds` do not hide, and all others.

    Products of 3 s hide three quarters of collectives of 4 s.
    """
    tensor_s = sum(transfer.seconds for transfer in inline if transfer.axis == "tensor")
    exposed_s = max(0.0, tensor_s - seconds)
    waited_for = []
    for transfer in inline:
        if transfer.axis != "tensor":
            waited_for.append(transfer)
        elif exposed_s:
            part = exposed_s / tensor_s
            # no link is named: with which other axis an exposed part shares it is not known, and is left out
            rest = replace(
                transfer, wire_bytes=part * transfer.wire_bytes, latency_s=part * transfer.latency_s, link=""
            )
            waited_for.append(rest)
    return waited_for


def slowed_s(spec: PlanSpec, rows: Sequence[AxisTraffic], unit: UnitWork, alike: int = 1) -> float:
    """Predict by how many seconds a step is longer since collectives run beside the compute of so many units like
    `unit`.

    They slow down no more than what computes meanwhile, and what they expose anyway is not counted again. A plan adds
    these seconds behind the step as a whole.
    """
    rate = LINK_EFFICIENCY * spec.gpu.link.bytes_per_s
    passes = spec.grad_accum * alike
    # seconds of a pass, and seconds of its bytes on the GPU's own link
    gathers_s = gathered_bytes_s = others_s = other_bytes_s = 0.0
    for row in rows:
        if row.unit != unit.name or any(row.inline):
            continue
        count = row.count / passes
        alone_s, bytes_s = count * transfer_of(spec, row).seconds, count * row.wire_bytes / rate
        if row.kind == "all_gather":
            gathers_s += alone_s
            gathered_bytes_s += bytes_s
        else:
            others_s += alone_s
            other_bytes_s += bytes_s
    first = 0.5 if spec.row.reshards_after_forward else 1.0  # the part of the gathers that is for forwards
    in_forward_s = _longer_s(unit.forward_s, first * gathers_s, first * gathered_bytes_s)
    in_backward_s = _longer_s(
        unit.backward_s, (1 - first) * gathers_s + others_s, (1 - first) * gathered_bytes_s + other_bytes_s
    )
    return passes * (in_forward_s + in_backward_s)


def _longer_s(compute_s: float, alone_s: float, bytes_s: float) -> float:
    slower_s = SLOWED_BY_SECONDS * min(alone_s, compute_s) + SLOWED_BY_BYTES * min(bytes_s, compute_s)
    return max(compute_s + slower_s, alone_s) - max(compute_s, alone_s)


def launch_s(parameters: int) -> float:
    """Return the least seconds of a forward of a unit with so many parameters: its host needs them to launch it."""
    return LAUNCH_S * LAUNCHES * parameters


def on_links_of(spec: PlanSpec, work: StepWork) -> StepWork:
    """Return the same work with the bandwidths of `spec`, which may differ from the work's own plan in these alone."""
    rates = {axis: axis_link(spec, axis).bytes_per_s for axis in AXES}

    def at_new_rate(transfer: Transfer) -> Transfer:
        return replace(transfer, bytes_per_s=rates.get(transfer.axis, transfer.bytes_per_s))

    return work.on_links(at_new_rate)


def peak_flops(gpu: Gpu) -> float:
    """Return the FLOP/s in bf16 that efficiencies refer to; raises PlanError where no figure is known."""
    flops = gpu.bf16_flops or _ASSUMED_FLOPS.get(gpu.name)
    if flops is None:
        raise PlanError(f"no bf16 FLOP/s are known for {gpu.name} ({gpu.source}); give another GPU")
    return flops


def has_known_flops(gpu: Gpu) -> bool:
    """Return whether times can be predicted for a GPU."""
    return bool(gpu.bf16_flops or _ASSUMED_FLOPS.get(gpu.name))


def model_flops(spec: PlanSpec) -> float:
    """Count the arithmetic of a step over all GPUs without any recomputation.

    It is 6 a parameter that is multiplied, and attention's 12 x layers x width x context a token (Chowdhery et al.
    2022, appendix B), causality not taken off. A frozen parameter has no gradient of its own, and so 4; adapters have
    their 6.
    """
    shape = spec.model
    multiplied = shape.layers * _multiplied(spec) * spec.tensor_parallel + shape.vocabulary * shape.width
    trained = 0  # parameters of adapters
    if spec.lora_rank:
        trained = shape.layers * sum(factor.count for factor in adapters(shape.block, spec.lora_rank))
    attention = 12 * shape.layers * shape.query_width * spec.seq
    a_token = 2 * _passes(spec) * multiplied + 6 * trained + attention
    return a_token * spec.step_tokens


def _passes(spec: PlanSpec) -> int:
    """Products of a matrix in a step: one forward, one for the gradient of its input, one for its own if it has one."""
    return 2 if spec.lora_rank else 3


def _multiplied(spec: PlanSpec) -> float:
    """Elements of one block's matrices on one tensor-parallel rank that a token is multiplied by: of experts those of
    the ones that it takes, wherever they are.
    """
    mixture = spec.model.mixture
    elements: float = 0
    for parameter in spec.model.block:
        if parameter.is_matrix:
            held = parameter.on(spec.tensor_parallel)
            if held.experts and mixture:
                elements += held.count * mixture.per_token / held.experts
            else:
                elements += held.count
    return elements


class GpuRates(NamedTuple):
    """FLOP/s that matrix products reach, and bytes/s that other operators do."""

    flops: float
    bytes_per_s: float


def rates_of(spec: PlanSpec, efficiency: float | None = None) -> GpuRates:
    """Return those of the spec's GPU and dtype: float32 at half of bf16's; PlanError for a GPU of unknown FLOP/s.

    Half is TF32's rate by the data sheets. PyTorch's default is plain float32, 67 TFLOP/s in place of 495 on an H100.
    """
    reached = efficiency or efficiency_of(spec.gpu).part
    flops = reached * peak_flops(spec.gpu) * (1.0 if spec.param_bytes == 2 else 0.5)
    return GpuRates(flops, HBM_EFFICIENCY * spec.gpu.hbm_bytes_per_s)


class Compute:
    """Seconds of compute of one micro-batch's parts on one rank; the simulation computes with the same.

    With an `efficiency` of its own a card is ideal: all products reach it, and nothing that was fitted to real GPUs is
    added.
    """

    def __init__(self, spec: PlanSpec, efficiency: float | None) -> None:
        reached = efficiency or efficiency_of(spec.gpu).part
        self.flops, self.bytes_per_s = rates_of(spec, reached)
        self.spec, self.fitted = spec, efficiency is None
        products_s = self._products_s()
        attention_s, attention_backward_s = self._attention_s(reached)
        moved = _elementwise_bytes(spec, EAGER_GPT if self.fitted else 1.0)
        moved_s = moved * spec.tokens / spec.tensor_parallel / self.bytes_per_s
        restored_s = _restored_bytes(spec) / self.bytes_per_s
        self.forward_s = products_s + attention_s + moved_s + restored_s
        # each operator twice, for the gradients of its input and of its parameters; then what is recomputed
        backward_s = (_passes(spec) - 1) * products_s + attention_backward_s + 2 * moved_s
        backward_s += _recomputed_share(spec) * products_s
        if spec.checkpointing == "full":
            backward_s += attention_s
        if spec.checkpointing == "none":
            backward_s += restored_s
        else:
            backward_s += moved_s + restored_s + restored_s
        self.backward_s = backward_s
        self.head_s = self._head_s()
        self.optimizer_s = self._optimizer_s(reached)

    @property
    def block_s(self) -> tuple[float, float]:
        """Seconds of a block's forward and backward: those of its kernels, or of their launches where these are more.

        A compiled block launches few.
        """
        if not self.fitted or self.spec.compile:
            return self.forward_s, self.backward_s
        # each expert that a rank holds has products of its own
        kernels = sum(max(1, parameter.experts) for parameter in self.spec.held(self.spec.model.block))
        least_s = launch_s(kernels)
        return max(self.forward_s, least_s), max(self.backward_s, 2 * least_s)

    def _products_s(self) -> float:
        faster = FP8_SPEEDUP if self.spec.fp8 else 1.0
        return 2 * _multiplied(self.spec) * self.spec.tokens / (faster * self.flops)

    def _attention_s(self, reached: float) -> tuple[float, float]:
        """Forward and backward of scores and their product with the values: 4 x width x context a token, half of it
        where flash attention leaves out what causality masks, and 2 to 2.5 times as much in the backward.
        """
        spec = self.spec
        flops = 4 * spec.model.query_width * spec.seq * spec.tokens / spec.tensor_parallel
        if not spec.flash:
            return flops / self.flops, 2 * flops / self.flops
        if self.fitted:
            forward, backward = attention_of(spec.gpu, reached, spec.flash_1)
        else:
            forward = backward = min(_USUAL_ATTENTION, reached)
        forward_rate, backward_rate = forward / reached * self.flops, backward / reached * self.flops
        return 0.5 * flops / forward_rate, 2.5 * 0.5 * flops / backward_rate

    def _head_s(self) -> tuple[float, float]:
        """The head's product, and the loss: some 16 bytes a logit forward and 24 backward in float32; a fused kernel
        reads 16-bit logits, and reads them again and writes their gradient.
        """
        spec = self.spec
        logits = spec.tokens * spec.model.logits_per_token / spec.tensor_parallel
        product_s = 2 * logits * spec.model.width / self.flops
        backward_s = (_passes(spec) - 1) * product_s
        in_forward, in_backward = spec.param_bytes, 2 * spec.param_bytes  # bytes a logit of the loss
        if spec.loss == "eager":
            in_forward, in_backward = 16, 24
        return (
            product_s + in_forward * spec.logits / self.bytes_per_s,
            backward_s + in_backward * spec.logits / self.bytes_per_s,
        )

    def _optimizer_s(self, reached: float) -> float:
        spec = self.spec
        moved = _optimizer_bytes(spec)
        seconds = moved / self.bytes_per_s
        if spec.offload:
            seconds = host_optimizer_s(spec, moved)
        if spec.optimizer == "muon":  # Newton-Schulz in bfloat16
            seconds += owners_step(spec).flops / rates_of(replace(spec, param_dtype="bf16"), reached).flops
        return seconds


def _elementwise_bytes(spec: PlanSpec, eager_gpt: float) -> float:
    """Bytes a token that element-wise operators of one block's forward read and write, in 16-bit elements.

    Eager Llama: a norm in float32 steps 32 bytes a channel, rotary 20, SwiGLU 10, two residual sums 12; compiled: each
    fused into one pass. GPT: fused norms 4 each, GELU 4.
    """
    shape = spec.model
    turned, inner = shape.query_width + shape.kv_width, shape.ffn_per_token
    moved: float
    if shape.gated and spec.compile:
        moved = 16 * shape.width + 4 * turned + 6 * inner
    elif shape.gated:
        moved = (2 * 32 + 12) * shape.width + 20 * turned + 10 * inner
    elif spec.compile:
        moved = 8 * shape.width + 4 * inner
    else:
        moved = eager_gpt * (20 * shape.width + 4 * inner)
    routed = 0
    if shape.mixture:
        # a token's copies are sorted by expert, sorted back, and weighted: each read and written
        routed = 12 * shape.mixture.per_token * shape.width + 12 * shape.mixture.count
    scale = spec.param_bytes / 2
    return scale * (moved + routed + _adapter_channels(spec))


def _adapter_channels(spec: PlanSpec) -> float:
    """Bytes a token that adapters of a block add: each reads its matrix's input, writes its own result, and adds it."""
    if not spec.lora_rank:
        return 0.0
    channels = 0
    for parameter in spec.model.block:
        if parameter.is_matrix:
            width_out, width_in = parameter.shape
            channels += width_in + 3 * width_out
    return 2 * channels


def _restored_bytes(spec: PlanSpec) -> float:
    """Bytes that are read and written to restore a quantised block once, for a forward or a backward."""
    base = BASE_BYTES[spec.base_dtype or spec.param_dtype]
    if base == spec.param_bytes:
        return 0.0
    return (base + spec.param_bytes) * _multiplied(spec)


def _recomputed_share(spec: PlanSpec) -> float:
    """The part of a block's products that its backward computes again."""
    if spec.checkpointing != "selective":
        return float(spec.checkpointing in ("attention", "full"))
    matrices = [parameter.count for parameter in spec.model.block if parameter.is_matrix]
    return sum(matrices[1::2]) / sum(matrices)


def _optimizer_bytes(spec: PlanSpec) -> float:
    """Bytes that the optimizer moves for the elements that a rank updates: gradient, parameter and state read,
    parameter and state written; three times as much where its operators are not fused.
    """
    states = all_units(spec)
    once = 2 * states.optimizer_state + 3 * states.sharded_gradients
    return 3 * once if spec.optimizer == "adamw-foreach" else once
