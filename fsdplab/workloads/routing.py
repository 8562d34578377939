"""How tokens find their experts: sorted by expert, exchanged between ranks, and put back in place.

Everything is a permutation or a split, chosen by stable sorting, so the same tokens are always sent in the same order.

Letters: N tokens, K experts per token, E experts, C width, L = E / n experts a rank, R rows that a rank receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
        """From the experts that each token chose: int64 [N, K]."""
        flat = chosen.flatten()
        return cls(flat.argsort(stable=True), torch.bincount(flat, minlength=experts), chosen.shape[1])

    @property
    def token(self) -> Tensor:
        """The token of each sorted row: int64 [N K]."""
        return self.order // self.choices

    def restore(self, rows: Tensor) -> Tensor:
        """Rows sorted by expert [N K, C] back in the order of tokens and choices."""
        return rows[self.order.argsort()]

    def balance(self, probabilities: Tensor) -> Tensor:
        """E times the sum over experts of (share of the rows) x (mean probability): 1 when even (Switch Transformer,
        eq. 4).
        """
        share = self.counts / self.counts.sum()
        return len(self.counts) * (share * probabilities.mean(dim=0)).sum()


Experts = Callable[[Tensor, list[int]], Tensor]


def dispatch(rows: Tensor, routing: Routing, experts: Experts, group: dist.ProcessGroup | None) -> Tensor:
    """Send `rows` [N K, C], sorted by expert, to their experts; the results come back in the same order."""
    if group is None:
        return experts(rows, routing.counts.tolist())
    ranks = group.size()
    wanted = torch.empty_like(routing.counts)
    dist.all_to_all_single(wanted, routing.counts, group=group)  # [n, L]: rows that each rank has for each expert here
    send = routing.counts.view(ranks, -1).sum(dim=1).tolist()
    per_rank = wanted.view(ranks, -1)
    receive = per_rank.sum(dim=1).tolist()
    arrived = _Exchange.apply(rows, send, receive, group)  # (R, C): by rank, then by expert
    by_expert = _blocks_by_expert(per_rank)
    answers = experts(arrived[by_expert], per_rank.sum(dim=0).tolist())
    return _Exchange.apply(answers[by_expert.argsort()], receive, send, group)


def _blocks_by_expert(per_rank: Tensor) -> Tensor:
    """The permutation that brings rows sorted by (rank, expert) into the order (expert, rank); `per_rank` is [n, L]."""
    n, L = per_rank.shape
    expert = torch.arange(L, device=per_rank.device).repeat(n).repeat_interleave(per_rank.flatten())
    return expert.argsort(stable=True)


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
