"""What to plan: a model, GPUs, a strategy and the choices of a training step, frozen and checked once.

The GPUs form a mesh of up to six axes: `tensor` (innermost, inside a node), `context` (cuts the sequence), `expert`
(shares a block's experts), `shard` (over which states are cut; context- and expert-parallel ranks cut them too),
`replicate` (hybrid_shard's groups) and `pipeline` (outermost: a stage is neighbouring GPUs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import cached_property
from typing import Any

from fsdplab.common.errors import UserError
from fsdplab.common.fields import option, refusal
from fsdplab.common.names import IN_GROUPS, STRATEGIES, STRATEGIES_IN_WORDS, STRATEGY_ROWS, StrategyRow, strategies_that
from fsdplab.common.words import did_you_mean
from fsdplab.workloads.shapes import ModelShape, Parameter

from .hardware import Fabric, Gpu
from .program import Sharing

ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Bytes of a frozen base's weight. nf4: 4 bits and the scales of QLoRA's double quantisation, 0.127 bits a weight
# (Dettmers et al. 2023, section 3); int8: with one fp32 scale a row of a matrix, which is left out.
BASE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "nf4": 4.127 / 8}
CHECKPOINTINGS = ("none", "selective", "full")
# What a block keeps of its forward, most first; the engine has those above, PyTorch's own selective checkpointing all.
POLICIES = ("none", "products", "selective", "attention", "full")
MASTERS = ("slices", "separate")
LOSSES = ("eager", "fused", "chunked")
# bytes of optimizer state a parameter, beside masters: as multiples of the master dtype, or in bytes
OPTIMIZERS = {"adamw": 2.0, "adamw-foreach": 2.0, "adamw-8bit": 0.5, "muon": 2.0, "sgd": 0.0, "sgd-momentum": 1.0}
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
# fields that are the same thing as a field of a run, whose name their flags have
AS_IN_A_RUN = {
    "gpus": "world_size",
    "seq": "sequence_length",
    "micro_batch": "batch_size",
    "grad_accum": "micro_batches",
    "param_dtype": "precision",
    "checkpointing": "checkpoint",
}
_SHORT = {"tensor_parallel": "tp", "context_parallel": "cp", "pipeline_parallel": "pp", "expert_parallel": "ep"}


class PlanError(UserError, ValueError):
    """An invalid plan; the message is one line: what happened, got, expected, what to do."""


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """One training step of `model` on `gpus` GPUs; a contradiction raises PlanError.

    `masters`: "slices" where the optimizer updates the slices themselves and a low-precision copy is made for each
    gather (FSDP2's and this engine's mixed precision); "separate" where slices and gradients have `param_dtype` and the
    optimizer keeps masters beside its moments (ZeRO, Rajbhandari et al. 2020, section 3.1).
    """

    model: ModelShape
    gpu: Gpu
    gpus: int = option(8, "GPUs in all.", least=1, most=10**6)
    gpus_per_node: int = option(8, "GPUs of a node.", least=1, most=10**6)
    network: str | None = option(
        None,
        "Network between nodes: ib400, roce200, eth100 or a card's rate such as 100gbit; default: the GPU's usual.",
    )
    nics: int | None = option(None, "Network cards of a node; default: one a GPU.", least=1, most=10**4)
    oversubscription: float = option(1.0, "Of the network's leaf switches: 2 where half of their bytes can leave.")
    strategy: str = option("full_shard", f"{STRATEGIES_IN_WORDS}.", one_of=STRATEGIES)
    shard_size: int | None = option(
        None, "Of hybrid_shard: GPUs of a group; default: those of a node.", least=1, most=10**6
    )
    seq: int = option(4096, "Tokens of a sequence; default: 4096, or the model's context.", least=1, most=10**8)
    micro_batch: int = option(1, "Sequences of a rank's micro-batch.", least=1, most=10**6)
    grad_accum: int = option(1, "Micro-batches of a step.", least=1, most=10**6)
    checkpointing: str = option(
        "none",
        "none, selective or full recomputation; products or attention: keep the results of these.",
        one_of=POLICIES,
    )
    param_dtype: str = option(
        "bf16", "Dtype of all-gathers and of computing: fp32, bf16 or fp16.", one_of=tuple(ITEMSIZES)
    )
    reduce_dtype: str = option("fp32", "Dtype of gradients while they are reduced.", one_of=tuple(ITEMSIZES))
    master_dtype: str = option(
        "fp32", "Dtype of what the optimizer updates, and of its state.", one_of=tuple(ITEMSIZES)
    )
    masters: str = option(
        "slices",
        "slices: the optimizer updates the slices (FSDP); separate: a copy beside them (ZeRO).",
        one_of=MASTERS,
    )
    optimizer: str = option(
        "adamw",
        "adamw, adamw-foreach, adamw-8bit, muon (the blocks' matrices; adamw the rest), sgd or sgd-momentum.",
        one_of=tuple(OPTIMIZERS),
    )
    tensor_parallel: int = option(1, "GPUs of a tensor-parallel group.", least=1, most=10**4)
    context_parallel: int = option(1, "GPUs that share each sequence (context parallelism).", least=1, most=10**4)
    pipeline_parallel: int = option(
        1, "Stages of a pipeline: groups of GPUs that hold a part of the blocks each.", least=1, most=10**4
    )
    schedule: str = option(
        "1f1b", "Of a pipeline: 1f1b, interleaved (with --virtual-stages) or zero-bubble.", one_of=SCHEDULES
    )
    virtual_stages: int = option(
        1, "Parts of the model that a stage holds, of the interleaved schedule.", least=1, most=10**3
    )
    expert_parallel: int = option(
        1, "GPUs that share a block's experts, of those that share its states.", least=1, most=10**4
    )
    compile: bool = option(False, "Blocks are compiled.")
    loss: str = option(
        "eager",
        "eager: PyTorch's cross-entropy on all logits in float32; fused: one kernel on 16-bit logits; chunked: the head"
        " and the loss on a part of the tokens at a time.",
        one_of=LOSSES,
    )
    fp8: bool = option(False, "The blocks' matrix products are in 8-bit floats.")
    flash: bool = option(True, "Use flash attention, which keeps no matrix of scores.")
    fused_norms: bool = True  # RMSNorm is one operator, as on GPUs today; else steps in float32, as on the CPU
    no_sync: bool = option(
        False, "Reduce gradients in the last micro-batch only (no_sync), and keep them unsharded until then."
    )
    prefetch: int = option(1, "Units gathered ahead of the one that computes.", least=0, most=100)
    offload: bool = option(False, "Keep shards, gradients and optimizer state in host memory.")
    host_memory: int | None = option(
        None,
        "Memory of a node's host, such as 512GB; default: that of the usual node of the GPU, where one is known.",
        least=1,
        most=10**18,
    )
    storage: int | None = option(
        None,
        "Bytes that a node writes to storage in a second, such as 5GB, for checkpoints; default: 2GB, assumed.",
        least=1,
        most=10**18,
    )
    lora_rank: int = option(
        0, "Train adapters of this rank on a frozen base; 0: train all parameters.", least=0, most=10**5
    )
    base_dtype: str | None = option(
        None, "Dtype of a frozen base: bf16, int8 or nf4; default: that of computing.", one_of=(None, *BASE_BYTES)
    )
    flash_1: bool = False  # flash attention is the first version's, in Triton
    float_logits: bool = True  # whether an eager loss converts 16-bit logits to float32
    whole_logits: bool = False  # whether tensor-parallel ranks gather the logits before the loss
    keeps_logits: bool = False  # whether the training loop holds the logits until its backward has ended
    keeps_outputs: bool = False  # whether it holds them until the next step's forward has ended
    shifts_logits: bool = False  # whether the loss is of a copy of the logits without the last token (transformers)
    async_tensor: bool = False  # whether tensor parallelism's collectives go on beside its products
    autocast: bool = False  # under torch.autocast, no mixed precision of the sharding engine
    recomputed_blocks: int | None = None  # how many of the first blocks are checkpointed; None: all
    ranks_after_forward: int | None = None  # that a block stays cut over until its backward; 1: gathered; None: usual

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field, getattr(self, field.name))
        self._check_nodes()
        self._check_mesh()
        self._check_model()
        self._check_stages()
        self._check_experts()
        if self.base_dtype is not None and not self.lora_rank:
            raise PlanError(
                f"--base-dtype {self.base_dtype} needs a frozen base, and all parameters are trained; give --lora-rank"
            )
        if self.optimizer == "muon" and (self.lora_rank or self.tensor_parallel > 1):
            raise PlanError("--optimizer muon steps whole matrices that are trained; leave --lora-rank and --tp out")
        if self.offload and not self.row.can_offload:
            raise PlanError(
                f"--offload moves sharded slices, but {self.strategy} keeps parameters whole; give --strategy"
                f" {' or '.join(strategies_that(lambda row: row.can_offload))}"
            )

    def _check_nodes(self) -> None:
        per_node = min(self.gpus, self.gpus_per_node)
        if self.gpus % per_node:
            raise PlanError(
                f"{self.gpus} GPUs do not fill nodes of {per_node}; give a multiple of {per_node}, or other"
                " --gpus-per-node"
            )
        if self.nics is not None and self.network is None:
            raise PlanError("--nics counts the cards of a network; name it with --network, such as ib400")
        if not 1e-6 <= self.oversubscription <= 1e6:  # below 1: a faster network, for questions
            raise PlanError(
                f"--oversubscription is {self.oversubscription!r}; expected 1, or a number above it such as 2"
            )
        if self.gpus > per_node and self.fabric is None:
            raise PlanError(
                f"no network between nodes is known for {self.gpu.name}; name one with --network, or give at most"
                f" {per_node} GPUs, in one node"
            )

    def _check_mesh(self) -> None:
        inner = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        if self.gpus % inner:
            stages = f" in {self.pipeline_parallel} stages" if self.pipeline_parallel > 1 else ""
            raise PlanError(
                f"{self.gpus} GPUs cannot be cut into tensor x context groups of {self.tensor_parallel} x"
                f" {self.context_parallel}{stages}; give a multiple of {inner} GPUs"
            )
        if self.shard_size is None:
            if self._ranks % self.shards:
                raise PlanError(
                    f"groups of {self.shards}, those of a node, do not divide the {self._ranks} ranks that are left"
                    f" beside tensor parallelism; give --shard-size, a divisor of {self._ranks}"
                )
            return
        if not self.row.in_groups:
            raise PlanError(
                f"--shard-size is {' and '.join(IN_GROUPS)}'s, and the strategy is {self.strategy}; leave it out"
            )
        if self._ranks % self.shard_size:
            raise PlanError(
                f"groups of {self.shard_size} do not divide the {self._ranks} ranks that are left beside tensor"
                f" parallelism; give a divisor of {self._ranks}"
            )

    def _check_model(self) -> None:
        shape, cut = self.model, self.tensor_parallel
        if shape.heads % cut or shape.kv_heads % cut:
            common = math.gcd(shape.kv_heads, shape.heads)
            divisor = max(ranks for ranks in range(1, cut + 1) if common % ranks == 0)
            raise PlanError(
                f"{shape.name} has {shape.heads} heads and {shape.kv_heads} key/value heads, not divisible by --tp"
                f" {cut}; give a common divisor such as {divisor}"
            )
        if self.seq > shape.context:
            raise PlanError(
                f"a sequence of {self.seq} tokens is longer than the {shape.context} positions of {shape.name}; give"
                " a shorter --sequence-length"
            )
        if self.seq % self.context_parallel:
            raise PlanError(
                f"--cp {self.context_parallel} does not divide a sequence of {self.seq} tokens; give a divisor of it"
            )

    def _check_stages(self) -> None:
        parts, held = self.pipeline_parallel, self.virtual_stages
        if (held > 1) != (self.schedule == "interleaved"):
            raise PlanError(
                f"--schedule {self.schedule} with {held} parts of the model a stage; expected --virtual-stages of 2 or"
                " more with interleaved, and none with the others"
            )
        if parts * held > self.model.layers:
            raise PlanError(
                f"{self.model.name} has {self.model.layers} blocks, which do not fill {parts * held} parts of a"
                " pipeline; give a smaller --pp or --virtual-stages"
            )
        if parts > 1 and self.offload:
            raise PlanError("--offload is not planned together with a pipeline; leave --offload or --pp out")

    def _check_experts(self) -> None:
        cut, experts = self.expert_parallel, self.model.mixture
        if experts and self.optimizer == "muon":
            raise PlanError("--optimizer muon is planned for whole matrices, and experts are stacked; give another")
        if cut == 1:
            return
        if experts is None:
            raise PlanError(f"--ep {cut} shares experts, and {self.model.name} has none; leave it out")
        sharing = self.shards if self.row.cuts else self._ranks
        if experts.count % cut or sharing % cut:
            raise PlanError(
                f"--ep {cut} does not divide {experts.count} experts and the {sharing} GPUs that share states; give a"
                " divisor of both"
            )

    # ---- the strategy and its mesh

    @cached_property
    def fabric(self) -> Fabric | None:
        """What joins nodes; None where nothing is known. Raises LinkError for an unknown network."""
        return Fabric.of(self.gpu, self.network, self.nics, self.oversubscription, self.gpus_per_node)

    @property
    def row(self) -> StrategyRow:
        """The strategy's row."""
        return STRATEGY_ROWS[self.strategy]

    def under(self, strategy: str) -> PlanSpec:
        """Return this plan under another strategy; only one with groups of ranks keeps their size."""
        size = self.shard_size if STRATEGY_ROWS[strategy].in_groups else None
        return replace(self, strategy=strategy, shard_size=size)

    @property
    def _ranks(self) -> int:
        """Ranks that share states: all of a stage but tensor parallelism's."""
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel)

    @cached_property
    def shards(self) -> int:
        """Ranks over which states are cut, where the strategy cuts them."""
        if not self.row.in_groups:
            return self._ranks
        if self.shard_size is not None:
            return self.shard_size
        return min(self._ranks, max(1, self.gpus_per_node // self.tensor_parallel))

    def held(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Return what one rank holds of parameters before states are cut: its part of matrices, and its experts."""
        return [parameter.on(self.tensor_parallel).of_experts(self.expert_parallel) for parameter in parameters]

    @property
    def replicas(self) -> int:
        """Groups that hold the same slices."""
        return self._ranks // self.shards

    @cached_property
    def sharing(self) -> Sharing:
        """What the order of a step depends on."""
        shards, replicas = self.shards, self.replicas
        if not self.row.cuts:  # all ranks hold everything
            shards, replicas = 1, self.shards
        sharing = Sharing.of(
            self.strategy,
            shards,
            replicas,
            casts=self.mixed,
            offloads=self.offload,
            streams=True,
            no_sync=self.no_sync and self.grad_accum > 1,
        )
        few = self.ranks_after_forward
        if few is None or not sharing.reshards_after_forward:
            return sharing
        return replace(sharing, fewer=few > 1, reshards_after_forward=few > 1)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data."""
        return self._ranks // self.context_parallel

    # ---- sizes

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that one rank holds activations for, before tensor parallelism cuts them."""
        return self.micro_batch * self.seq // self.context_parallel

    @property
    def step_tokens(self) -> int:
        """Tokens of a step over all GPUs."""
        return self.micro_batch * self.seq * self.grad_accum * self.data_ranks

    @property
    def logits(self) -> float:
        """Of a micro-batch, on one rank."""
        cut = 1 if self.whole_logits else self.tensor_parallel
        return self.tokens * self.model.logits_per_token / cut

    @property
    def param_bytes(self) -> int:
        """Of an element that is computed with."""
        return ITEMSIZES[self.param_dtype]

    @property
    def gather_bytes(self) -> int:
        """Of an element that is gathered: under autocast weights are gathered as they rest, and cast by operators."""
        return self.rest_bytes if self.autocast else self.param_bytes

    @property
    def stream_bytes(self) -> int:
        """Of an element of the residual stream: under autocast the sum of embeddings and blocks stays in float32."""
        return 4 if self.autocast else self.param_bytes

    @property
    def reduce_bytes(self) -> int:
        """Of an element of a reduction."""
        return ITEMSIZES[self.reduce_dtype]

    @property
    def rest_bytes(self) -> int:
        """Of an element of the slices at rest, and of their gradients."""
        if self.masters == "separate":
            return ITEMSIZES[self.param_dtype]
        return ITEMSIZES[self.master_dtype]

    @property
    def optimizer_bytes(self) -> float:
        """Of optimizer state a trained element: moments in the master dtype, and masters where they are separate."""
        master = ITEMSIZES[self.master_dtype]
        moments = OPTIMIZERS[self.optimizer] * master
        return moments + master if self.masters == "separate" else moments

    @property
    def mixed(self) -> bool:
        """Whether what rests has another dtype than what is computed with."""
        return self.rest_bytes != self.gather_bytes


def under_each_strategy(spec: PlanSpec) -> list[PlanSpec]:
    """Return the plan under every strategy that can do it; in groups of ranks where there is more than one group."""
    plans = []
    for name, row in STRATEGY_ROWS.items():
        if spec.offload and not row.can_offload:
            continue
        under = spec.under(name)
        if not row.in_groups or under.replicas > 1:
            plans.append(under)
    return plans


def changed(spec: PlanSpec, **changes: Any) -> PlanSpec | None:
    """Return the plan with other choices; None where they contradict the rest: heads or GPUs that are not to be cut."""
    try:
        return replace(spec, **changes)
    except PlanError:
        return None


def flag_of(name: str) -> str:
    """Return the flag of a field: `flag_of("seq") == "--sequence-length"`."""
    in_a_run = AS_IN_A_RUN.get(name, name)
    words = _SHORT.get(in_a_run, in_a_run).replace("_", "-")
    return f"--{words}"


def _check(field: Field[Any], value: object) -> None:
    """Raise PlanError unless a field's value is what the field expects."""
    wanted = refusal(value, field.default, **field.metadata)
    if not wanted:
        return
    words = [word for word in field.metadata.get("one_of", ()) if word]
    if not words:
        raise PlanError(f"{flag_of(field.name)} is {str(value)[:30]}; expected {wanted}")
    raise PlanError(f"{flag_of(field.name)} is {value!r}{did_you_mean(value, words)}; expected {wanted}")
