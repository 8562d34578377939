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
    ### END SOLUTION


# ---- check: on 3 ranks, also on 2


def cases(rank, n):
    yield ("who am I",)


def observe(hello_ranks):
    said = hello_ranks()
    words = said.split() if isinstance(said, str) else []
    return {"the returned value": said, "_words": words + [""] * (4 - len(words))}


def say(got, right):
    """Which of the four words is another one."""
    (first, rank, of, ranks), (_, own, _, all) = got["_words"][:4], right["_words"]
    if (first, of) == ("rank", "of") and rank != own:
        return f"the second word is this rank's number, what `dist.get_rank()` returns: {own}, and not {rank}"
    if (first, of) == ("rank", "of") and ranks != all:
        return f"the fourth word is the number of ranks, what `dist.get_world_size()` returns: {all}, and not {ranks}"
    return 'return one text that reads exactly like "rank 0 of 2": a word, a number, a word, a number'


SAYS = {"the returned value": say}
