"""Who am I?

Write hello_ranks(): on every rank it returns "rank r of n".

1. All ranks run the same file. What differs between them is only what they are told when they ask.
2. torch.distributed has one function for the number of this process and one for the number of processes.
3. `return f"rank {dist.get_rank()} of {...}"`, with `dist.get_world_size()` in place of the dots.
"""

import torch.distributed as dist


def hello_ranks():
    """Return a text such as "rank 0 of 2": who this process is, and how many there are."""
    ### BEGIN SOLUTION  dist knows both numbers
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    #! return f"rank {dist.get_rank() + 1} of {dist.get_world_size()}"
    #: ranks count from 0
    #! return f"rank {dist.get_rank()} of 2"
    #: the number of ranks is written down as a constant; this check starts another: ask `dist.get_world_size()`
    #! return f"rank 0 of {dist.get_world_size()}"
    #: the rank is written down as a constant, but every rank runs this same code: ask `dist.get_rank()`
    #! return f"rank {dist.get_world_size()} of {dist.get_rank()}"
    #: the two numbers are swapped: `get_rank()` says who, `get_world_size()` says how many
    #! print("rank", dist.get_rank())
    #: the function returns nothing
    #! return dist.get_rank(), dist.get_world_size()
    #: return one text that holds both numbers: an f-string joins them
    #! return f"rank {rank} of {dist.get_world_size()}"
    #: raises: `rank` and `world_size` are there in `%%ranks` cells only
    #! return f"rank {torch.distributed.get_rank()} of {dist.get_world_size()}"
    #: raises: it needs its own imports and helpers
    #! return f"I am {dist.get_rank()} of {dist.get_world_size()}"
    #: the text must read exactly like "rank 0 of 2": a word, a number, a word, a number
    ### END SOLUTION


# ---- check: on 3 ranks


def cases(rank, n):
    yield ("who am I",)


def observe(hello_ranks):
    said = hello_ranks()
    words = said.split() if isinstance(said, str) else []
    return {"the returned value": said, "_rank": words[1:2], "_ranks": words[3:]}


SAYS = {
    "the returned value": lambda got, right: (
        "the number of ranks is written down as a constant: ask `dist.get_world_size()`"
        if got["_rank"] == right["_rank"] and got["_ranks"] != right["_ranks"]
        else 'return one text that reads exactly like "rank 0 of 2": a word, a number, a word, a number'
    )
}
