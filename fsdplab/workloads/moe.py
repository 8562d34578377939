"""Builds a GPT whose feed-forward parts are mixtures of experts: a few of many experts work on each token.

Two forms of one model. Dense: every rank holds all experts (the unsharded twin). Expert-parallel, after
`spread_experts`: each rank of a mesh holds some of them, and tokens travel to their experts and back, in two
all-to-alls a layer. Nothing is dropped and nothing is drawn at random, so both forms compute the same numbers up to the
order of sums.

Letters: B batch, T tokens, N = B T, C width, E experts, K experts per token, F inner width of an expert,
L = E / n experts a rank, R rows that a rank receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from .errors import ModelError
from .models import WithoutValues, initialise
from .shapes import ModelShape, gpt
from .transformer import Decoder, GPTBlock


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ModelShape):
    """Describes a mixture-of-experts GPT; `ffn` is the inner width of one expert. A wrong one raises `ModelError`."""

    experts: int = 4
    experts_per_token: int = 2
    balance_weight: float = 0.01  # of the load-balancing loss; 0 trains without it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.family != "gpt" or self.tied:
            raise ModelError(
                "a mixture-of-experts model here is a gpt with a head of its own: "
                f"expected gated=False and tied=False, got {self.gated} and {self.tied}"
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise ModelError(
                "experts_per_token must be from 1 to the number of experts, "
                f"got {self.experts_per_token} of {self.experts} experts"
            )
        if self.balance_weight < 0:
            raise ModelError(f"balance_weight must be 0 or more, got {self.balance_weight!r}")


MOE_PRESETS: dict[str, MoEConfig] = {
    "moe-tiny": MoEConfig(**asdict(gpt("moe-tiny", layers=2, width=64, heads=4, ffn=128, context=128)))
}


class Experts(nn.Module):
    """All experts of a layer as two 3-D parameters. Rows sorted by expert [R, C], how many each gets -> [R, C]."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        E, C, F = config.experts, config.width, config.ffn
        self.up = nn.Parameter(torch.empty(E, C, F))
        self.down = nn.Parameter(torch.empty(E, F, C))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        up, down = _local(self.up), _local(self.down)  # (L, C, F), (L, F, C)
        answers = []
        # an expert without rows still takes part: its gradient is 0
        for part, widen, narrow in zip(rows.split(counts), up, down, strict=True):
            inner = functional.gelu(part @ widen, approximate="tanh")  # (rows of the expert, F)
            answers.append(inner @ narrow)
        return torch.cat(answers)


class MoEFeedForward(nn.Module):
    """Send each token to its K best experts and mix what they answer. [B, T, C] -> [B, T, C], balance loss."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.K, self.E = config.experts_per_token, config.experts
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config)
        self.group: dist.ProcessGroup | None = None  # over which experts are spread; None: all are here

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, 1)  # (N, C)
        probabilities = self.router(rows).float().softmax(dim=-1)  # (N, E)
        weights, chosen = probabilities.topk(self.K, dim=-1)  # (N, K) each
        routing = Routing.of(chosen, self.E)
        answers = dispatch(rows[routing.token], routing, self.experts, self.group)  # (N K, C), sorted by expert
        by_token = routing.restore(answers).unflatten(0, (-1, self.K))  # (N, K, C)
        mixed = by_token * weights.unsqueeze(-1).to(x.dtype)  # (N, K, C)
        return mixed.sum(dim=1).view_as(x), routing.balance(probabilities)


class MoEBlock(GPTBlock):
    """Attention, then experts, each added to its input. [B, T, C], balance loss so far -> the same two."""

    feed_forward_type = MoEFeedForward

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x + self.attention(self.attention_norm(x))
        added, unevenness = self.feed_forward(self.feed_forward_norm(x))
        return x + added, balance + unevenness


class MoE(Decoder):
    """tokens int64 [B, T] -> logits [B, T, V] and the balance loss of all layers (a scalar; `layers` when even)."""

    block_type = MoEBlock
    config: MoEConfig

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(tokens), torch.zeros((), device=tokens.device)
        for block in self.blocks:
            x, balance = block(x, balance)
        return self.head(self.final_norm(x)), balance


def build_moe(model: str | MoEConfig = "moe-tiny", device: torch.device | str = "cpu", seed: int = 0) -> MoE:
    """Build the dense form, by preset name or shape, with values set by `seed` alone; on "meta", without memory."""
    config = model if isinstance(model, MoEConfig) else MOE_PRESETS.get(model)
    if config is None:
        raise ModelError(f"unknown mixture-of-experts model {model!r}: expected one of {', '.join(MOE_PRESETS)}")
    with torch.device("meta"), WithoutValues():
        built = MoE(config)
    if torch.device(device).type == "meta":
        return built
    return initialise(built.to_empty(device=device), seed)


def spread_experts(model: MoE, mesh: DeviceMesh) -> MoE:
    """Leave each rank of the 1-D `mesh` its share of every layer's experts, in place; from now on tokens travel.

    Expert parameters become DTensors, `Shard(0)` over `mesh`. Call it before sharding. Raises `ModelError` unless the
    ranks divide the experts evenly.
    """
    E, ranks = model.config.experts, mesh.size()
    if mesh.ndim != 1 or E % ranks:
        raise ModelError(
            f"{E} experts cannot be spread evenly over a mesh of shape {tuple(mesh.shape)}; "
            f"expected a 1-D mesh whose size divides {E}"
        )
    for layer in model.modules():
        if not isinstance(layer, MoEFeedForward):
            continue
        for name, whole in list(layer.experts.named_parameters()):
            # every rank has the whole, so nothing is sent
            share = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(layer.experts, name, nn.Parameter(share))
        layer.group = mesh.get_group() if ranks > 1 else None
    return model


def moe_loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token plus the weighted balance loss; tokens, targets: int64 [B, T]."""
    logits, balance = model(tokens)
    entropy = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return entropy + model.config.balance_weight * balance.float()


def _local(parameter: Tensor) -> Tensor:
    """Return the experts that are here: all of a plain parameter, this rank's share of a DTensor."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return parameter


# ---- how tokens find their experts: sorted by expert, exchanged between ranks, and put back in place; everything is a
# permutation or a split, chosen by stable sorting, so the same tokens are always sent in the same order


@dataclass(frozen=True)
class Routing:
    """Which rows go to which expert: `order` sorts the N K (token, choice) pairs by expert, `counts` [E] are how many.

    Example: tokens 0 and 1 that choose experts (1, 0) and (0, 2) give order [1, 2, 0, 3] and counts [2, 1, 1].
    """

    order: Tensor
    counts: Tensor
    choices: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Routing:
        """Sort by the experts that each token chose: int64 [N, K]."""
        flat = chosen.flatten()  # (N K)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=experts)  # (E)
        return cls(order, counts, choices=chosen.shape[1])

    @property
    def token(self) -> Tensor:
        """The token of each sorted row: int64 [N K]."""
        return self.order // self.choices

    def restore(self, rows: Tensor) -> Tensor:
        """Return rows sorted by expert [N K, C] in the order of tokens and choices."""
        return rows[self.order.argsort()]

    def balance(self, probabilities: Tensor) -> Tensor:
        """E times the sum over experts of (share of the rows) x (mean probability): 1 when even (Switch Transformer,
        eq. 4).
        """
        share = self.counts / self.counts.sum()
        return len(self.counts) * (share * probabilities.mean(dim=0)).sum()


def dispatch(
    rows: Tensor, routing: Routing, experts: Callable[[Tensor, list[int]], Tensor], group: dist.ProcessGroup | None
) -> Tensor:
    """Send `rows` [N K, C], sorted by expert, to their experts; the results come back in the same order."""
    if group is None:
        return experts(rows, routing.counts.tolist())
    ranks = group.size()
    # how many rows each rank has for each expert here: the splits of the exchange of rows
    wanted = torch.empty_like(routing.counts)
    dist.all_to_all_single(wanted, routing.counts, group=group)
    per_rank = wanted.view(ranks, -1)  # (n, L)
    send = routing.counts.view(ranks, -1).sum(dim=1).tolist()
    receive = per_rank.sum(dim=1).tolist()
    arrived = _Exchange.apply(rows, send, receive, group)  # (R, C): by rank, then by expert
    by_expert = _blocks_by_expert(per_rank)
    answers = experts(arrived[by_expert], per_rank.sum(dim=0).tolist())
    by_rank = by_expert.argsort()
    return _Exchange.apply(answers[by_rank], receive, send, group)


def _blocks_by_expert(per_rank: Tensor) -> Tensor:
    """Return the permutation of rows sorted by (rank, expert) into (expert, rank); `per_rank` is int64 [n, L]."""
    n, L = per_rank.shape
    experts = torch.arange(L, device=per_rank.device).repeat(n)  # (n L)
    expert_of_row = experts.repeat_interleave(per_rank.flatten())  # (R)
    return expert_of_row.argsort(stable=True)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; its backward is the all-to-all the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived
