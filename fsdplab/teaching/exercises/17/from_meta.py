"""Begin on the meta device

Write from_meta(make, read_rows): a fully sharded model with the checkpoint's values, of which no rank ever holds the
whole. `make()` builds the model on torch's default device. `read_rows(name, start, stop)` reads these rows of a
parameter from the checkpoint. Every block is a unit.

1. On the meta device a parameter has a shape and no memory. Three things have to happen to it afterwards: it is
   sharded, it gets memory, it gets values. In which order does no rank hold it whole?
2. `with torch.device("meta"): model = make()`. After `fully_shard` on the blocks and on the model,
   `model.to_empty(device="cpu")` gives memory to shards alone.
3. A rank has rows from `rank * -(-rows // n)` on, as many as `parameter.to_local()` has. Under `torch.no_grad()`:
   `mine.copy_(read_rows(name, start, start + len(mine)))`.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def from_meta(make, read_rows):
    """Build on the meta device, shard, give memory, read this rank's rows."""
    ### BEGIN SOLUTION
    with torch.device("meta"):
        model = make()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    n, rank = dist.get_world_size(), dist.get_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mine = parameter.to_local()
            start = rank * -(-parameter.shape[0] // n)
            mine.copy_(read_rows(name, start, start + len(mine)))
    return model
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2, in 40 s, facts only

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdplab.workloads import build_model, loss_of

MADE, REST, READ, VALUES, UNITS, MEMORY = (
    "made on", "parameters at rest", "part of the rows that a rank reads", "values", "units",
    "what got memory",
)  # fmt: skip


class Emptied(TorchDispatchMode):
    """Counts the elements that `to_empty` gives memory to on this rank."""

    def __init__(self):
        super().__init__()
        self.emptied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.__name__.startswith("empty_like") and isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.emptied += (made.to_local() if isinstance(made, DTensor) else made).numel()
        return made


def cases(rank, n):
    yield ("gpt-tiny, on three ranks, from a checkpoint",)


def observe(from_meta):
    whole = build_model("gpt-tiny")
    rows, built, read = dict(whole.named_parameters()), [], [0]

    def make():
        model = build_model("gpt-tiny", device=str(torch.get_default_device()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # a model that was made here has not the checkpoint's values
        built.append(next(model.parameters()).device.type)
        return model

    def read_rows(name, start, stop):
        if not 0 <= start <= stop <= max(start, len(rows[name])):
            has = f"{name} has {len(rows[name])} rows"
            raise ValueError(f"read_rows: {has}, and these are rows {start} to {stop}; stop is where they end")
        found = rows[name].detach()[start:stop].clone()
        read[0] += found.numel()
        return found

    with Emptied() as seen:
        model = from_meta(make, read_rows)
    if not isinstance(model, torch.nn.Module):
        return {MADE: "nothing", REST: "", UNITS: 0, READ: "", MEMORY: "", VALUES: ""}
    parameters, total = list(model.parameters()), sum(each.numel() for each in rows.values())
    device = parameters[0].device.type
    sharded = all(isinstance(each, DTensor) for each in parameters)
    facts = {
        MADE: ", ".join(built),
        REST: f"{'DTensors' if sharded else 'whole'} on {device}",
        UNITS: sum(hasattr(module, "set_requires_gradient_sync") for module in model.modules()),
        READ: "its own" if read[0] < 0.5 * total else "more",
        MEMORY: "shards" if seen.emptied < 0.5 * total else "the whole model",
        VALUES: "not read",
    }
    if device == "cpu" and sharded:
        on_ranks = [""] * dist.get_world_size()
        dist.all_gather_object(on_ranks, differs(model, rows))
        facts["_why"] = next(filter(None, on_ranks), "")
        tokens = torch.arange(34).view(2, 17) % 256
        ours, theirs = (loss_of(each, tokens[:, :-1], tokens[:, 1:]).item() for each in (model, whole))
        facts[VALUES] = "others" if facts["_why"] or abs(ours - theirs) > 1e-4 else "the checkpoint's"
    return facts


def differs(model, rows):
    """What of this rank's shards is not the checkpoint's, or nothing."""
    on_rank = f"on rank {dist.get_rank()}"
    shards = {name: parameter.detach().to_local() for name, parameter in model.named_parameters()}
    starts = {name: dist.get_rank() * -(-len(whole) // dist.get_world_size()) for name, whole in rows.items()}
    right = {name: whole.detach()[starts[name] : starts[name] + len(shards[name])] for name, whole in rows.items()}
    dtype = next((mine.dtype for name, mine in shards.items() if mine.dtype != right[name].dtype), None)
    if dtype:
        return f"parameters are {dtype}, and the checkpoint's are {next(iter(right.values())).dtype}"
    wrong = [name for name, mine in shards.items() if not torch.equal(mine, right[name])]
    if not wrong:
        return ""
    first, unread = wrong[0], [name for name in wrong if shards[name].isnan().any()]
    if unread:
        return (
            f"{len(unread)} of {len(shards)} parameters have no values {on_rank}, the first is {unread[0]}: all are"
            " read, and copied into `parameter.to_local()`"
        )
    if torch.equal(shards[first], right[first].bfloat16().float()):
        return f"{first} is rounded to bf16: read_rows gives {right[first].dtype}"
    same = (rows[first] == shards[first][0]).view(len(rows[first]), -1).all(1).nonzero()
    if not len(same):
        return f"{first} has values {on_rank} that stand nowhere in the checkpoint"
    return (
        f"{first} begins {on_rank} with row {int(same[0])} of the checkpoint, and the shard of that rank with row"
        f" {starts[first]}: rank r's rows begin at r * ceil(rows / n)"
    )


def made(got, right):
    if got[MADE] == "nothing":
        return "return the model"
    return 'the whole model is built on every rank before it is sharded: `with torch.device("meta"): model = make()`'


def rest(got, right):
    if "meta" in got[REST]:
        return 'parameters are still on the meta device: model.to_empty(device="cpu") gives memory to the shards'
    return "not all parameters are sharded: fully_shard on every block, then on the model"


OTHERS = (
    "the model has other values than the checkpoint on some rank: rank r's rows begin at r * ceil(rows / n), and are"
    " copied into `parameter.to_local()`"
)
SAYS = {
    MADE: made,
    REST: rest,
    UNITS: "the whole model is one unit: fully_shard(block) for every block first",
    MEMORY: "memory came before the shards, so a rank held all of the model: shard first, then to_empty",
    READ: "every row was read on this rank: read the rows of its shard alone",
    VALUES: lambda got, right: got.get("_why") or OTHERS,
    "hung": "the ranks make different calls: shard the same modules, in the same order, on every rank",
}
