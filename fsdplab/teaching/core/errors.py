"""Words for errors of torch that say what happened, and not what to change. Python's own messages need none."""

from __future__ import annotations

import re

from fsdplab.sessions.worker.collective_hooks import NoSuchRank

OTHERWISE = "read the last line first: it names the error; the line above is yours"
_WORDS = (  # (what the error's line says, what to change), the first that fits
    (r"Unreadable: NoneType|hooks returned NoneType", "the function returns nothing: end it with `return ...`"),
    (
        r"Unreadable: Net: .*storage of size 0",
        "a backward computes with the same tensors that its forward used, and one has no memory: unshard these before"
        " a unit's backward, a frozen unit's too",
    ),
    (r"modified by an inplace operation", "autograd follows a copy into a parameter: write through `whole.data`"),
    (r"only accepts torch.Tensor but got .*DTensor", "an earlier call has sharded this one: leave a DTensor alone"),
    (
        r"tuple index out of range",
        "a tuple is shorter than the index: the shape of a tensor with one dimension, or `torch.chunk`, which gives"
        " fewer pieces than ranks where the rows run out",
    ),
    (
        r"UnboundLocalError",
        "a name that a function assigns is its own: change the outer one in place (`.clear()`, `+=` on a tensor), or"
        " declare it `nonlocal`",
    ),
    (r"list size, must be world size", "a list of a collective has one block for each rank: cut the first dimension"),
    (r"non-empty list of Tensors|torch.cat\(\): expected a non-empty", "there is nothing to join: return before that"),
    (r"Unreadable", "what it returned is of another type than the statement asks for"),
    (r"[Ee]llipsis", "the stub's dots are still there: write a value in place of the dots"),
    (r"hooks? should return None", "a hook returns nothing: it changes `parameter.grad` itself"),
    (NoSuchRank.__name__, "the ring is not closed: after the last rank comes rank 0, `(rank + 1) % n`"),
    (r"NameError", "the cell is saved as a file of its own: it needs its own imports and helpers"),
    (
        r"NoneType",
        "a collective writes into its argument and returns None; a `.grad` is None until it is set, and once it is"
        " freed",
    ),
    (r"mixed torch.Tensor and DTensor", "some parameters are sharded and others whole: call `fully_shard(model)` last"),
    (r"value was None|to a module once", "call `fully_shard` once for each block, and then for the model"),
    (r"leaf Variable that requires grad", "write values of parameters under `torch.no_grad()`"),
    (r"Cannot copy out of meta", "a meta tensor has no values: `model.to_empty(device=...)` gives it memory first"),
    (r"storage of size 0", "this tensor has a shape and no memory: resize its storage before it is used"),
    (r"different dtypes|tensor type at index|dtype\(\)", "tensors of a collective have one dtype: `x.new_empty(...)`"),
    (
        r"tensor size at index|sizes\(\)|the same (size|shape)",
        "blocks of a collective have one shape: pad the short ones",
    ),
    (r"before the model was sharded", "build the optimizer after the call that shards, from the sharded parameters"),
    (r"group has not been initialized", "this function runs without ranks: what it needs is in its arguments"),
    (r"(?i)timed out|timeout", "a rank waited for a message that no rank sent"),
)


def words_for(error: str) -> str:
    """Return what to change after an error, by the last line of its traceback."""
    return next((words for says, words in _WORDS if re.search(says, error)), OTHERWISE)
