"""Reshard the whole

Write reshard(whole): the memory behind it is given back, its shape stays.

1. You saw the call in the first cell of this notebook.
2. A tensor is a shape over a storage, and a storage can be resized.
3. `whole.untyped_storage()` is the storage; `.resize_(bytes)` changes how much memory it has.
"""

import torch


def reshard(whole):
    """Give the memory behind `whole` back; its shape, and all that looks at the same storage, stay."""
    ### BEGIN SOLUTION  one line
    whole.untyped_storage().resize_(0)
    ### END SOLUTION


# ---- check: on 2 ranks, in 30 s


def cases(rank, n):
    yield "floats [7, 2]", torch.arange(14.0).reshape(7, 2)
    yield "doubles [5]", torch.arange(5.0, dtype=torch.float64)


def observe(reshard, whole):
    whole = whole.clone()
    kept = whole[1:]  # autograd keeps such views
    reshard(whole)
    return {
        "bytes behind whole": whole.untyped_storage().nbytes(),
        "bytes behind what autograd kept": kept.untyped_storage().nbytes(),
        "shape": whole.shape,
    }


SAYS = {
    "bytes behind whole": lambda got, right: (
        f"{got['bytes behind whole']} bytes of the storage are still there: resize it to 0"
    ),
    "bytes behind what autograd kept": "`whole` got another storage; the old one lives on behind what autograd kept, so"
    " nothing is freed: empty the storage itself",
    "shape": "`whole` must keep its shape; only the storage behind it is emptied",
}
