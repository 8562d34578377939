"""Train the adapters only

Write fine_tune(model, shard): freeze all but the adapters, shard the model with shard(model), return an AdamW that
trains them.

1. Three lines of work: freeze, shard, build the optimizer. Which must come after shard(model), and why?
2. Freezing is `parameter.requires_grad_(False)`. shard(model) replaces the parameters by shards, so an optimizer that
   was built before it holds the old ones.
3. In a loop over model.named_parameters(): `parameter.requires_grad_("adapter" in name)`. Then shard(model). Then AdamW
   over the parameters with requires_grad.
"""

import torch


def fine_tune(model, shard):
    """Freeze all but the adapters, call shard(model) once, and return an AdamW that trains them."""
    ### BEGIN SOLUTION  adapters are the parameters with "adapter" in their name
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)
    ### END SOLUTION


# ---- check: on 3 ranks, in 20 s, facts only

from fsdplab.engine import FSDPModule
from fsdplab.teaching.core.collectives_log import payload_bytes
from fsdplab.teaching.lessons.nb13_trading.on_ranks import adapted_model, adapters_of, shard, state_bytes, train


def cases(rank, n):
    yield ("two steps of a small GPT with adapters",)


def observe(fine_tune):
    model = adapted_model()
    names, before = adapters_of(model), whole(model)
    optimizer = fine_tune(model, shard)
    made = isinstance(optimizer, torch.optim.Optimizer)
    seen = train(model, optimizer if made else torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    moved = [name for name, value in whole(model).items() if not torch.equal(value, before[name])]
    return {
        "an optimizer was returned": made,
        "the model is sharded": isinstance(model, FSDPModule),
        "adapters that did not move": [name for name in names if name not in moved],
        "frozen parameters that moved": [name for name in moved if name not in names],
        "bytes reduced in a step": payload_bytes(seen, "reduce_scatter"),
        "bytes of optimizer state": state_bytes(optimizer) if made else 0,
    }


def whole(model):
    each = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in each.items()}


FEWER = "fewer bytes are reduced, or more are kept, than the adapters have: train all of them with AdamW, nothing else"


def reduced(got, right):
    if got["bytes reduced in a step"] < right["bytes reduced in a step"]:
        return FEWER
    return (
        "right weights move, but gradients of the others are computed, held and reduced for nothing"
        f" ({got['bytes reduced in a step']:,} bytes): leaving a parameter out of the optimizer does not freeze it,"
        " requires_grad_(False) does"
    )


SAYS = {
    "an optimizer was returned": "return the optimizer: `return torch.optim.AdamW(...)`",
    "the model is sharded": "shard(model) was not called, so every rank trains a whole model of its own",
    "adapters that did not move": "adapters are frozen or not in the optimizer; they are what shall be trained",
    "frozen parameters that moved": "weights outside the adapters are trained too: set requires_grad_(False) on them",
    "bytes reduced in a step": reduced,
    "bytes of optimizer state": FEWER,
    "hung": "the ranks make different calls: shard the same modules in the same order on every rank",
}
