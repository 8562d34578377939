"""Reduce into the owner's rows

Write reduce_rows(parameter, mine): mine.grad becomes this rank's rows of the averaged gradient, parameter.grad becomes
None.

1. Which of the three collectives of notebook 01 gives each rank one block of the sum?
2. dist.reduce_scatter(output, blocks) writes this rank's block of the sum into `output`, so `mine.grad` must exist
   first. Then average (op=dist.ReduceOp.AVG does that too), and free the unsharded gradient.
3. `mine.grad = torch.empty_like(mine)`, `dist.reduce_scatter(mine.grad, blocks)`, `mine.grad /= dist.get_world_size()`,
   `parameter.grad = None`.
"""

import torch
import torch.distributed as dist


def reduce_rows(parameter, mine):
    """mine.grad = this rank's rows of the averaged gradient; the unsharded gradient is freed."""
    blocks = list(parameter.grad.chunk(dist.get_world_size()))  # one block of rows for each rank
    ### BEGIN SOLUTION  a gradient for mine, reduce_scatter into it, average, free the whole
    mine.grad = torch.empty_like(mine)
    dist.reduce_scatter(mine.grad, blocks)
    mine.grad /= dist.get_world_size()
    parameter.grad = None
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2, within 1e-6


def cases(rank, n):
    own = 3 * 10.0**rank  # threes, thirties, three hundreds: an average tells whose shares are in it
    yield f"a matrix [{2 * n}, 2]", own * torch.arange(1, 4 * n + 1).reshape(2 * n, 2)
    yield f"a bias [{n}]", own * torch.arange(1, n + 1)


def observe(reduce_rows, gradient):
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.data += 7  # weights that are not zero
    rows = parameter.detach().chunk(dist.get_world_size())[dist.get_rank()]
    parameter.grad, mine = gradient.clone(), torch.nn.Parameter(rows)  # on the same memory
    reduce_rows(parameter, mine)
    whole = mine.grad is not None and mine.grad.untyped_storage().nbytes() > mine.grad.nbytes
    kept = "the unsharded gradient's memory" if whole else "its own rows"
    seen = {"mine.grad": mine.grad, "parameter.grad": parameter.grad, "weights": parameter.detach()}
    return seen | {"what mine.grad keeps in memory": kept}


SAYS = {
    "mine.grad": lambda got, right: (
        "`mine` has no gradient: make one like `mine` (torch.empty_like) and let the reduce_scatter write into it"
        if got["mine.grad"] is None
        else "`mine.grad` holds this rank's rows only: it has the shape of `mine`"
        if got["mine.grad"].shape != right["mine.grad"].shape
        else "these are not this rank's rows of the average: a reduce_scatter leaves its rows of the sum, to be divided"
    ),
    "parameter.grad": "the unsharded gradient is still there; set `parameter.grad = None`: that is the memory to be"
    " saved",
    "what mine.grad keeps in memory": "`mine.grad` is a window on the unsharded gradient, whose memory stays as long as"
    " it is there: give it memory of its own (torch.empty_like, clone)",
    "weights": "the weights themselves were written to: `mine` and `mine.data` are rows of the parameter, only"
    " `mine.grad` is to change",
    "hung": "deadlock: a rank waits in a collective that another rank never calls; every rank must make the same calls"
    " in the same order",
}
