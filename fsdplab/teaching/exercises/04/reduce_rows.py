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
    #! pass
    #: raises: something is None
    #! mine.grad = mine.data
    #: the weights themselves were written to: `mine` and `mine.data` are rows of the parameter, only `mine.grad` is to
    #: change
    dist.reduce_scatter(mine.grad, blocks)
    #! mine.grad.copy_(blocks[dist.get_rank()])
    #: these are the rank's own rows: nothing came from the other ranks
    #! mine.grad = sum(blocks)
    #: no collective was called, so nothing came from the other ranks: a reduce_scatter adds up over ranks
    #! every = [torch.empty_like(mine) for _ in blocks]
    #! dist.all_gather(every, blocks[dist.get_rank()])
    #! mine.grad = sum(every)
    #: every rank sent only its own block, and these are different rows: rank r needs block r of all ranks, which a
    #: reduce_scatter adds up
    #! dist.reduce_scatter(mine.grad, blocks[1:] + blocks[:1])
    #: these are the next rank's rows: block r of the list goes to rank r
    #! dist.all_reduce(parameter.grad)
    #! mine.grad = parameter.grad[: len(mine)].clone()
    #: these are rank 0's rows on every rank: rank r has those from r * len(mine) on
    #! dist.reduce(parameter.grad, dst=0)
    #! mine.grad = parameter.grad[dist.get_rank() * len(mine) :][: len(mine)].clone()
    #: `dist.reduce` leaves its result on one rank only (`dst`); here every rank needs its rows: reduce_scatter
    #! dist.all_reduce(parameter.grad)
    #! mine.grad = parameter.grad[dist.get_rank() * len(mine) :][: len(mine)].clone()
    #: an all_reduce brings every rank the whole sum, and it then keeps a third: a reduce_scatter sends half as much
    mine.grad /= dist.get_world_size()
    #! pass
    #: this is the sum over the ranks, 3 times the average: divide by their number
    #! mine.grad /= len(parameter)
    #: the sum must be divided by the number of ranks, not of rows
    #! mine.grad /= 2
    #: divided by 2, but there are 3 ranks: ask `dist.get_world_size()`
    #! mine.grad = blocks[dist.get_rank()].clone()
    #: these are the rank's own rows: what came from the other ranks was lost
    #! mine.grad /= dist.get_world_size() ** 2
    #: divided twice by the number of ranks
    parameter.grad = None
    #! pass
    #: the unsharded gradient is still there; set `parameter.grad = None`: that is the memory to be saved
    #! parameter.grad.zero_()
    #: as above
    #! mine.grad = parameter.grad = None
    #: `mine` has no gradient: make one like `mine` (torch.empty_like) and let the reduce_scatter write into it
    ### END SOLUTION


#! def reduce_rows(parameter, mine):
#!     dist.all_reduce(parameter.grad)
#!     mine.grads, parameter.grad = parameter.grad, None
#: `mine` has no gradient: make one like `mine` (torch.empty_like) and let the reduce_scatter write into it


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
        else ""
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
