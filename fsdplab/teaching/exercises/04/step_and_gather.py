"""A local step, then an all-gather

Write step_and_gather(pairs, optimizer): the optimizer updates this rank's rows, then every parameter is whole and new
on every rank.

1. After the optimizer's step, which rows of a parameter are new on this rank, and who has the others?
2. `parameter.detach().chunk(n)` is a list of windows on the parameter's memory, block r for rank r: an all_gather into
   that list needs no copying afterwards.
3. `optimizer.step()` once; then for every pair `dist.all_gather(list(parameter.detach().chunk(dist.get_world_size())),
   mine.detach())`.
"""

import torch.distributed as dist


def step_and_gather(pairs, optimizer):
    """Update this rank's rows, then bring all ranks' into the parameters; pairs: (parameter, mine)."""
    ### BEGIN SOLUTION  one step, then an all_gather into every parameter
    optimizer.step()
    for parameter, mine in pairs:
        blocks = list(parameter.detach().chunk(dist.get_world_size()))
        dist.all_gather(blocks, mine.detach())
    ### END SOLUTION


# ---- check: on 3 ranks, also on 4

STEPS = 2


def cases(rank, n):
    import torch

    wholes = [100.0 * torch.arange(1, 4 * n + 1).reshape(2 * n, 2), 100.0 * torch.arange(1, n + 1)]
    yield f"a matrix [{2 * n}, 2] and a bias [{n}]", wholes, rank + 1.0  # every rank lowers its rows by one, two, three


def observe(step_and_gather, wholes, gradient):
    import torch

    parameters = [torch.nn.Parameter(whole) for whole in wholes]
    own = [torch.nn.Parameter(whole.chunk(dist.get_world_size())[dist.get_rank()]) for whole in wholes]  # same memory
    optimizer = torch.optim.SGD(own, lr=1.0)
    seen = {f"_step 0, parameter {at}": whole.clone() for at, whole in enumerate(wholes)}  # before it
    for step in range(STEPS):
        for mine in own:
            mine.grad = torch.full_like(mine, gradient)
        step_and_gather(list(zip(parameters, own)), optimizer)
        seen |= {f"step {step}, parameter {at}": whole.detach().clone() for at, whole in enumerate(parameters)}
        seen |= {f"_step {step + 1}, parameter {at}": whole.detach().clone() for at, whole in enumerate(parameters)}
    shared = [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in zip(parameters, own)]
    return {**seen, "parameters and their rows share memory": shared}


def whose(fact):
    """What is said where a parameter is wrong: rows of the right ones in another order, old ones, or other numbers."""

    def says(got, right):
        if got[fact].shape == right[fact].shape:
            if sorted(got[fact].flatten()) == sorted(right[fact].flatten()):
                return "these are another rank's rows: block r of the list belongs to rank r"
            before = right[f"_{fact}"]
            if (got[fact] == before).all():
                return "no row has changed: the optimizer did not step, or found no gradients"
            if (got[fact] == before).any():
                return (
                    "some rows are still those from before the step: all-gather after `optimizer.step()`, and into the"
                    " parameter's own memory"
                )
            steps = (before - got[fact]) / (before - right[fact])  # how often each number was updated
            if set(steps.flatten().tolist()) <= {1.0, 2.0, 3.0}:
                return (
                    "some rows were updated more than once: one `optimizer.step()` updates the rows of all pairs, so it"
                    " stands before the loop"
                )
        return "other numbers: what is to travel are the new rows, `mine.detach()`, from each rank to every other once"

    return says


SAYS = {
    "parameters and their rows share memory": "the values are right, but the parameter has new memory now, beside that"
    " of `mine`: all-gather into the parameter's own memory (a chunk of `parameter.detach()` is a window on it)",
    **{
        f"step {step}, parameter {at}": whose(f"step {step}, parameter {at}")
        for step in range(STEPS)
        for at in range(2)
    },
    "hung": "deadlock: a rank waits in a collective that another rank never calls; every rank must make the same calls"
    " in the same order",
}
