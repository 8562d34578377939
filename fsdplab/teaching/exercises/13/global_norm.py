"""One norm for all ranks

Write global_norm(gradients): the norm of the unsharded gradient from this rank's shards, equal on every rank, with one
collective.

1. The norm is the root of a sum of squares. Which part of that sum can a rank compute alone?
2. Each rank adds the squares of its own shards (in fp32); one all_reduce adds the ranks' sums; then everybody takes the
   root. A rank with no rows calls too, with 0.
3. `total = torch.zeros(())`, in a loop `total += gradient.float().square().sum()`, then `dist.all_reduce(total)` and
   `return total.sqrt()`.
"""

import torch
import torch.distributed as dist


def global_norm(gradients):
    """The 2-norm of the unsharded gradient, equal on all ranks, from this rank's shards (or none)."""
    ### BEGIN SOLUTION
    total = torch.zeros(())
    for gradient in gradients:
        total += gradient.float().square().sum()
    dist.all_reduce(total)
    return total.sqrt()
    ### END SOLUTION


# ---- check: on 3 ranks, within 1e-5

import math


def cases(rank, n):
    each = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], [torch.tensor([12.0])], [torch.tensor([84.0])]
    yield "shards of two parameters", each[rank]
    yield "a rank without rows", ([torch.tensor([-3.0, 4.0])], [], [torch.tensor([12.0])])[rank]
    yield "bf16 gradients", [torch.full((5000,), 0.0123).bfloat16()]  # a sum in bf16 would lose such small squares


def observe(global_norm, gradients):
    from fsdplab.teaching.core.comm_log import WireLog

    with WireLog() as log:
        norm = global_norm(gradients)
    sent = [call for call in log.calls if call.kind != "barrier"]
    number = norm.item() if isinstance(norm, torch.Tensor) and norm.numel() == 1 else norm
    too_many = len(sent) > 1 or sum(call.nbytes for call in sent) > 64
    seen = {"norm": number, "more than one number sent": too_many, "gradients afterwards": gradients}
    pickled = [call.kind for call in sent] == ["all_gather"] * 2 and sent[0].nbytes == 8 * dist.get_world_size()
    return {**seen, "_pickled": pickled, "_bf16": any(gradient.dtype == torch.bfloat16 for gradient in gradients)}


def wrong_norm(got, right):
    norm = got["norm"] if isinstance(got["norm"], float) else 0.0
    in_bf16 = got["_bf16"] or math.isclose(norm**2, torch.tensor(norm**2).bfloat16().item(), rel_tol=1e-6)
    if in_bf16 and 0.5 < norm / right["norm"] < 1:
        return "the squares were summed or sent in bf16, which keeps 8 bits: convert with .float() first"
    return "sum of squares over all tensors and all ranks, then the root"


def sent_too_much(got, right):
    if got["_pickled"]:
        return "an object is pickled and takes two collectives, one for its length: all_reduce the sum as a tensor"
    return (
        "the ranks need to exchange one number only: add up the squares of all tensors first, then all_reduce that sum"
        " once"
    )


SAYS = {
    "norm": wrong_norm,
    "more than one number sent": sent_too_much,
    "gradients afterwards": "the gradients were changed: only their norm is asked for; scaling them is the next step",
    "hung": "a rank waits in a collective that another never calls: a rank without gradients must take part too, with a"
    " sum of 0. And one call a rank: behind the loop over its gradients, for they are not equally many",
}
