"""What autograd keeps of a token between its forward and its backward, operator by operator.

Korthikanti et al. 2022 (arXiv 2205.05198), equation 2, counts s b h (34 + 5 a s / h) bytes a GPT block in 16 bits: 32
of the 34 are the tensors below, 2 are the masks of dropout, which today's models leave out; 5 a s / h is attention
without flash attention, with dropout (2 without). Llama's blocks are counted alike, with their own operators. The bytes
are those that PyTorch's autograd saves: what two operators read is kept once.

Under tensor parallelism, with the sequence cut between the products (their equation 4), what is read by the products
that are cut by rows is gathered before, and so kept whole; all other tensors are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdplab.workloads.shapes import ModelShape

from .plan_spec import PlanSpec

BATCH_PER_TOKEN = 2 * 8  # bytes: a rank keeps tokens and targets as 64-bit numbers
_STATISTIC = 4  # bytes: norms keep their statistics, attention its log-sum-exp, in float32


@dataclass(frozen=True)
class Saved:
    """A tensor that a block's forward keeps: channels a token, bytes of each, and what can be done about it.

    `whole`: tensor parallelism does not cut it. `fusible`: a compiler makes it again in the backward from what it keeps
    anyway: an element-wise operator's result that no matrix product reads (torch._functorch.config,
    `ban_recompute_materialized_backward`: what a product of the backward reads is kept).
    """

    name: str
    channels: float
    itemsize: int
    whole: bool = False
    fusible: bool = False


def block_tensors(spec: PlanSpec) -> list[Saved]:
    """List what one block keeps without checkpointing: Llama's 4C + 2HD + 2KD + 4F channels, GPT's with 2F."""
    shape, itemsize = spec.model, spec.param_bytes
    tensors = [
        *_norm_reads("input", spec),
        Saved("first norm", shape.width, itemsize, whole=True),
        Saved("query, key, value", shape.query_width + 2 * shape.kv_width, itemsize),
        *_attention(spec),
        Saved("attention's output", shape.query_width, itemsize),
    ]
    if not shape.parallel:
        tensors += _norm_reads("input of the second norm", spec)
    tensors.append(Saved("second norm", shape.width, itemsize, whole=True))
    inner = ["gate", "up", "activation", "gated"] if shape.gated else ["up", "activation"]
    for name in inner:
        # without a gate the last product reads the activation
        fusible = name == "activation" and shape.gated
        tensors.append(Saved(name, shape.ffn_per_token, itemsize, fusible=fusible))
    statistics = 4 if shape.norm_bias else 2  # two norms, each with a mean and a deviation, or the latter only
    return [*tensors, *_routed(spec), Saved("statistics of the norms", statistics, _STATISTIC)]


def _routed(spec: PlanSpec) -> list[Saved]:
    """What a mixture of experts keeps beside its products' results: a token's copies for its experts and their answers,
    which are weighted, and the router's probabilities in float32.
    """
    experts = spec.model.mixture
    if experts is None:
        return []
    copies = experts.per_token * spec.model.width
    return [
        Saved("tokens for experts", copies, spec.param_bytes),
        Saved("experts' answers", copies, spec.param_bytes),
        Saved("router's probabilities", experts.count, _STATISTIC),
    ]


def _norm_reads(name: str, spec: PlanSpec) -> list[Saved]:
    """What a norm keeps of its input: the input itself, or in steps of float32 a copy and what it is normed to."""
    width = spec.model.width
    is_one_operator = spec.fused_norms or spec.model.norm_bias
    if is_one_operator:
        return [Saved(name, width, spec.stream_bytes)]
    return [Saved(f"{name} in float32", width, 4), Saved(f"{name}, normed in float32", width, 4, fusible=True)]


def _attention(spec: PlanSpec) -> list[Saved]:
    """Flash attention keeps a log-sum-exp a head; plain attention the probabilities, a row of `seq` a head."""
    if spec.flash:
        return [Saved("log-sum-exp", spec.model.heads, _STATISTIC)]
    return [Saved("attention's probabilities", spec.model.heads * spec.seq, spec.param_bytes)]


def kept_tensors(spec: PlanSpec) -> list[Saved]:
    """List what one block keeps until its backward. A compiled block makes the results of element-wise operators again.

    A policy of checkpointing keeps the input, all but "full" attention too, and of the matrix products all
    ("products"), every other one ("selective": torchtitan's choice, and this engine's) or none ("attention").
    """
    if spec.checkpointing == "none":
        tensors = block_tensors(spec)
        return [saved for saved in tensors if not saved.fusible] if spec.compile else tensors
    kept = [Saved("input", spec.model.width, spec.stream_bytes)]
    if spec.checkpointing == "full":
        return kept
    kept += [*_attention(spec), Saved("attention's output", spec.model.query_width, spec.param_bytes)]
    every = _KEPT_PRODUCTS.get(spec.checkpointing)
    if every is not None:
        for name, width in _products(spec.model)[::every]:
            kept.append(Saved(name, width, spec.param_bytes, whole=name in _UNCUT))
    return kept


_KEPT_PRODUCTS = {"products": 1, "selective": 2}  # of so many products a policy keeps the first


_UNCUT = ("output", "down")  # partial sums over the tensor-parallel ranks: whole until they are reduced


def _products(shape: ModelShape) -> list[tuple[str, int]]:
    """The matrix products of a block in order, each with the width of its result."""
    products = [*shape.qkv, ("output", shape.width)]
    if shape.gated:
        products.append(("gate", shape.ffn_per_token))
    return [*products, ("up", shape.ffn_per_token), ("down", shape.width)]


def kept_per_token(spec: PlanSpec) -> float:
    """Return the bytes a token that one block keeps until its backward, on one rank.

    Llama 2 7B in bf16, nothing checkpointed: 2 x (8 x 4096 + 4 x 11008) + 4 x (32 + 2) bytes.
    """
    return _on_rank(kept_tensors(spec), spec)


def computed_per_token(spec: PlanSpec) -> float:
    """Return the bytes a token that a block's forward keeps while nothing is checkpointed.

    A recomputation brings them back.
    """
    return kept_per_token(replace(spec, checkpointing="none"))


CHUNKS = 8  # parts of the tokens that a chunked loss takes one after the other, as torchtune's and torchtitan's


@dataclass(frozen=True)
class LossBytes:
    """Bytes of logits and of what is made of them: at the end of the forward, at their backward's peak, after it (their
    gradient, for the head), and until the backward has ended.
    """

    forward: float
    backward: float
    after: float
    saved: float  # what the forward keeps: the log-softmax
    held: float  # what the training loop itself keeps until the backward has ended

    @classmethod
    def of(cls, spec: PlanSpec) -> LossBytes:
        """Count the bytes of cross entropy on logits of `param_dtype`, over a vocabulary that tensor parallelism cuts.

        Fused (flash-attn's and Liger's kernels): the logits, and in the backward their gradient; no copy in float32.
        Chunked (Liger's fused linear cross-entropy): what eager takes of one part of the tokens, and the gradient of
        the head's input, which is made with it.
        """
        if spec.loss == "eager":
            return cls._eager(spec)
        if spec.loss == "chunked":
            part = cls._eager(replace(spec, keeps_logits=False, keeps_outputs=False))
            head_input = spec.tokens * spec.model.width
            gradient = spec.param_bytes * head_input / spec.tensor_parallel
            widest = part.backward / CHUNKS + gradient
            return cls(widest, widest, gradient, gradient, 0.0)
        logits = spec.param_bytes * spec.logits
        return cls(logits, 2 * logits, logits, logits, 0.0)

    @classmethod
    def _eager(cls, spec: PlanSpec) -> LossBytes:
        """PyTorch's, in float32.

        Forward: logits, their float32 copy, its log-softmax. Backward: log-softmax, its gradient and the copy's
        gradient, 12 bytes a logit; a loop that keeps the float32 logits holds 4 more. Llama 3.1 8B, 16,384 tokens:
        25 GB. A loss over a vocabulary that is cut has its softmax in steps, with a fourth copy
        (torch.distributed.tensor.parallel.loss).
        """
        logits = spec.logits
        if not spec.float_logits:  # every copy is in 16 bits, and none is made to convert
            return cls(4 * logits, 8 * logits, 2 * logits, 2 * logits, 0.0)
        held = 4 * logits if spec.keeps_logits else 0.0
        low_precision = spec.param_bytes if spec.param_bytes < 4 else 0
        # bytes a logit
        forward = 8 + low_precision
        if spec.shifts_logits:
            forward = 12  # the copy in 16 bits is gone when the shifted one is made
        if spec.keeps_outputs:
            forward += 4
        backward = 12 if spec.tensor_parallel == 1 or spec.whole_logits else 16
        return cls(
            forward=forward * logits,
            backward=backward * logits + held,
            after=(4 + low_precision) * logits + held,
            saved=4 * logits + held,
            held=held,
        )


class Activations:
    """Bytes of activations on one rank through a step; the first `recomputed` blocks are checkpointed."""

    def __init__(self, spec: PlanSpec, recomputed: int) -> None:
        shape, cut = spec.model, spec.tensor_parallel
        self._recomputed = recomputed
        self._kept = kept_per_token(spec) * spec.tokens
        self._computed = computed_per_token(spec) * spec.tokens
        # A backward's widest place is behind the last product, whose input is freed: there are the gradients of a gate
        # and of what it gates, or those of a GELU's input and result, and the residual stream's own.
        inner = 2 * shape.ffn_per_token if shape.gated else shape.ffn_per_token
        widest = inner + 2 * shape.width
        self._backward = spec.param_bytes * widest / cut * spec.tokens
        self.batch = BATCH_PER_TOKEN * spec.tokens
        # for the backward of its head the root keeps the last norm's input, result and statistics
        statistics = _STATISTIC * (2 if shape.norm_bias else 1)
        norm = _on_rank(_norm_reads("input", spec), spec) + statistics / cut
        self.last_norm = (shape.width * spec.param_bytes + norm) * spec.tokens
        self.stream = shape.width * spec.stream_bytes / cut * spec.tokens  # between two blocks
        self.loss = LossBytes.of(spec)

    def saved(self, block: int, share: float) -> float:
        """Return what the blocks before `block` have saved, and a share of what it saves itself; with the batch."""
        checkpointed = min(block, self._recomputed)
        before = checkpointed * self._kept + (block - checkpointed) * self._computed
        own = self._kept if block < self._recomputed else self._computed
        return self.batch + before + share * own

    def inside(self, block: int) -> float:
        """Return what its backward adds at its widest, also by running a forward again."""
        if block >= self._recomputed:
            return self._backward
        return self._backward + max(0.0, self._computed - self._kept)


def _on_rank(tensors: list[Saved], spec: PlanSpec) -> float:
    """Bytes a token of these tensors, of which tensor parallelism cuts those that are not whole."""
    cut = spec.tensor_parallel
    return sum(saved.channels * saved.itemsize / (1 if saved.whole else cut) for saved in tensors)
