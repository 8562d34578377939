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
    """Return `matrix` [rows, columns] as torch's own Newton-Schulz leaves it, in bfloat16: singular values near 1."""
    return _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, STEPS, EPSILON)


@lru_cache(maxsize=2)
def gradients(model: str = "gpt-tiny", seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the gradients of the first block's matrices by name, of one batch of tokens drawn at random."""
    gpt = build_model(model, seed=seed)
    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(seed))
    loss_of(gpt, tokens[:, :-1], tokens[:, 1:]).backward()
    by_name = {}
    for name, parameter in gpt.blocks[0].named_parameters():
        if parameter.ndim == 2 and parameter.grad is not None:
            by_name[name.split(".")[-2]] = parameter.grad  # "query" of "attention.query.weight"
    return by_name


def collectives_of_a_step(payload: object) -> dict[str, dict[str, int]]:
    """Return the collectives by kind of one step of Muon, all matrices of gpt-tiny on PyTorch's `fully_shard`.

    One step is torch.optim.Muon's as it is, and one with owners.
    """
    by_optimizer = {}
    for name in ("torch.optim.Muon", "owners"):
        gpt = build_model("gpt-tiny", seed=0)
        for block in gpt.blocks:
            fully_shard(block)
        fully_shard(gpt)
        optimizer = Muon([parameter for parameter in gpt.blocks.parameters() if parameter.ndim == 2])
        if name == "owners":
            optimizer = whole_matrices(optimizer)
        tokens = torch.full((1, 17), dist.get_rank())
        loss_of(gpt, tokens[:, :-1], tokens[:, 1:]).backward()
        counts: Counter[str] = Counter()
        with CommDebugMode() as log:
            optimizer.step()
        for operation, count in log.get_comm_counts().items():
            counts[_KINDS[str(operation).rpartition(".")[2]]] += count
        by_optimizer[name] = dict(counts)
    return by_optimizer
