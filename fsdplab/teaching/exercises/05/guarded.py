"""Use after reshard must raise

Write guarded(whole, name): it returns `whole` where its memory is there, and raises a helpful RuntimeError where it is
not.

1. What differs between an unsharded and a resharded tensor? Not its shape.
2. `whole.untyped_storage().nbytes()` counts the bytes behind it. Do not read the tensor, and do not print it.
3. If that is 0, `raise RuntimeError(f"{name} ... unshard ...")`; else return `whole`.
"""

import torch


def guarded(whole, name):
    """`whole` where its memory is there; else a RuntimeError with `name` and what to call first."""
    ### BEGIN SOLUTION
    if whole.untyped_storage().nbytes() == 0:
        raise RuntimeError(f"{name} was resharded and holds no memory: call unshard before you use it")
    return whole
    ### END SOLUTION


# ---- check: on 2 ranks, in 30 s


def cases(rank, n):
    yield "unsharded", torch.arange(6.0).reshape(3, 2), "blocks.3.weight", False
    yield "all zeros, but unsharded", torch.zeros(3), "blocks.3.weight", False
    yield "resharded", torch.arange(6.0).reshape(3, 2), "blocks.3.weight", True


def observe(guarded, whole, name, resharded):
    import contextlib
    import io

    whole = whole.clone()
    if resharded:
        whole.untyped_storage().resize_(0)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            got = guarded(whole, name)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        end = "raises RuntimeError" if isinstance(error, RuntimeError) else f"raises {type(error).__name__}"
        said = {"the message holds the name": name in str(error)}
        return {"the guard": end, **said, "the message says unshard": "unshard" in str(error).lower()}
    end = f"returns a {type(got).__name__}" if isinstance(got, Exception) else "returns"
    return {
        "the guard": f"prints a text and {end}" if resharded and printed.getvalue() else end,
        "it returns the tensor itself": got is whole,
        "content": None if resharded else whole,
    }


SAYS = {
    "the guard": lambda got, right: (
        f"it {got['the guard']}; here it {right['the guard'].replace('raises', 'must raise')}"
    ),
    "the message holds the name": "the message must say which tensor: it holds `name`",
    "the message says unshard": "the message must say what to do: it holds the word unshard",
    "it returns the tensor itself": "where the memory is there, return `whole` itself: nothing is printed, copied or"
    " changed",
    "content": "the guard changed what is in the tensor; it only looks at the memory behind it",
}
