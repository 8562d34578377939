"""Average in a hook

Write average_in_hook(parameter): a hook that leaves the average over all ranks in parameter.grad.

1. What does every rank hold when the hook is called, and what should every rank hold when it returns?
2. dist.all_reduce works in place and adds up by default (op=dist.ReduceOp.AVG averages). The number of ranks is
   dist.get_world_size(). A hook returns nothing: it changes parameter.grad itself.
3. `dist.all_reduce(parameter.grad)`, and then divide `parameter.grad` in place by `dist.get_world_size()`.
"""

import torch.distributed as dist


def average_in_hook(parameter):
    """Called as soon as parameter.grad is there: put the average over all ranks in its place."""
    ### BEGIN SOLUTION  two lines: add up over the ranks, then divide
    dist.all_reduce(parameter.grad)
    #! return
    #: this is the rank's own gradient: nothing came from the other ranks, or the average was not written back into
    #: `.grad`
    #! average = parameter.grad.clone()
    #! dist.all_reduce(average)
    #! average /= dist.get_world_size()
    #! return
    #: as above
    #! average = parameter.grad.clone()
    #! dist.all_reduce(average)
    #! return average / dist.get_world_size()
    #: raises: a hook returns nothing
    #! pass
    #: this is the rank's own gradient divided by the number of ranks: the others' shares were never added
    #! dist.all_reduce(parameter.detach())
    #: as above
    #! dist.broadcast(parameter.grad, src=0)
    #! return
    #: this is the gradient of one rank: nothing came from the other ranks, a broadcast adds nothing up
    #! dist.reduce(parameter.grad, dst=0)
    #: `dist.reduce` leaves its result on one rank only (`dst`); here every rank needs the sum: all_reduce
    #! dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    #: divided twice by the number of ranks: ReduceOp.AVG divides already
    #! whole = parameter.grad.clone().zero_()
    #! dist.all_reduce(whole)
    #! parameter.grad = whole
    #: the gradient is zero: average it, do not clear it
    #! parts = [parameter.grad.clone() for _ in range(dist.get_world_size())]
    #! dist.all_gather(parts, parameter.grad)
    #! parameter.grad = sum(parts)
    #: more travels than an all_reduce needs: the sum alone is wanted, not every rank's gradient
    #! dist.recv(parameter.grad, src=(dist.get_rank() + 1) % dist.get_world_size())
    #: hangs: deadlock
    parameter.grad /= dist.get_world_size()
    #! pass
    #: this is the sum over the ranks: it was never divided by their number
    #! parameter.grad /= 2
    #: divided by 2, but there are more ranks: ask `dist.get_world_size()`
    #! parameter.grad /= 7
    #: the sum over the ranks must be divided by their number: ask `dist.get_world_size()`
    #! parameter.grad = None
    #: this parameter has no gradient any more: write the average into its `.grad`
    #! parameter.grad /= dist.get_world_size()
    #! dist.all_reduce(parameter.grad)
    #! parameter.grad /= dist.get_world_size()
    #: more travels than an all_reduce needs: each gradient once a step
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2, within 1e-4, in 25 s


def cases(rank, n):
    yield ("gradients of a small GPT",)


def observe(average_in_hook):
    from fsdplab.teaching.lessons.nb03_ddp_by_hand.on_ranks import gradients_by_step, two_steps

    def attach(model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average_in_hook)

    return gradients_by_step(two_steps(attach))


SAYS = {
    "otherwise": "these are other numbers: `.grad` should hold the sum over all ranks, divided by their number",
    "gradients of step 1": "step 0 was right on this rank, so something is left over from it (a list that was not"
    " emptied?), or it was wrong on another rank (an `if rank == 0`?) and the models have differed since",
    "hung": "deadlock: a rank waits in a collective that another rank never calls. Every rank must make the same calls"
    " in the same order: no `if rank == 0` around them, and no decision that depends on a rank's own values",
}
