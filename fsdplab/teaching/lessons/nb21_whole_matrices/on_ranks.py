"""The part of lesson 21 that runs on ranks: Newton-Schulz as torch has it, and the collectives of a step of Muon."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Muon, _muon

from fsdplab.engine import whole_matrices
from fsdplab.workloads import build_model, loss_of

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # torch.optim.Muon's defaults, as are the next two
STEPS, EPSILON = 5, 1e-7
_KINDS = {
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all",
}


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` [rows, columns] as torch's own Newton-Schulz leaves it, in bfloat16: singular values near 1."""
    return _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, STEPS, EPSILON)


@lru_cache(maxsize=2)
def gradients(model: str = "gpt-tiny", seed: int = 0) -> dict[str, torch.Tensor]:
    """The gradients of the first block's matrices by name, of one batch of tokens drawn at random."""
    gpt = build_model(model, seed=seed)
    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(seed))
    loss_of(gpt, tokens[:, :-1], tokens[:, 1:]).backward()
    named = gpt.blocks[0].named_parameters()
    return {name.split(".")[-2]: p.grad for name, p in named if p.ndim == 2 and p.grad is not None}


def collectives_of_a_step(payload: object) -> dict[str, dict[str, int]]:
    """Collectives by kind of one step of Muon, all matrices of gpt-tiny on PyTorch's `fully_shard`: torch.optim.Muon as
    it is, and with owners.
    """
    found = {}
    for name in ("torch.optim.Muon", "owners"):
        gpt = build_model("gpt-tiny", seed=0)
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(gpt)
        matrices = [p for p in gpt.blocks.parameters() if p.ndim == 2]
        optimizer = Muon(matrices) if name == "torch.optim.Muon" else whole_matrices(Muon(matrices))
        tokens = torch.full((1, 17), dist.get_rank())
        loss_of(gpt, tokens[:, :-1], tokens[:, 1:]).backward()
        counts: Counter[str] = Counter()
        with CommDebugMode() as log:
            optimizer.step()
        for operation, count in log.get_comm_counts().items():
            counts[_KINDS[str(operation).rpartition(".")[2]]] += count
        found[name] = dict(counts)
    return found
