"""What the checks of notebook 20 say of a fact that differs: the parameter, the step, and the likely cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdplab.teaching.lessons.nb20_own_fully_shard import on_ranks as seen
from fsdplab.teaching.lessons.nb20_own_fully_shard import pytorchs_loop as loop
from fsdplab.teaching.lessons.nb20_own_fully_shard.on_ranks import Facts

Cause = Callable[[Facts, Facts], str]


def named(fact: str, cause: str) -> Cause:
    """Return a cause after the names that a fact holds."""
    return lambda got, right: f"{some(got[fact])}: {cause}"


def some(names: list[str], most: int = 3) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---- stage 1


def _not_sharded(got: Facts, right: Facts) -> str:
    """Return the likely cause of parameters that are no DTensor."""
    names = got[seen.NO_DTENSOR]
    # "blocks.0.up.weight" is a block's, "embed.weight" the root's
    in_blocks = ["blocks." in name for name in names]
    if not any(in_blocks):
        return f"{some(names)} belong to no block: the call on the whole model shards what is left over, the root"
    if all(in_blocks):
        return f"{some(names)} are blocks' parameters: the calls on blocks shard theirs"
    return (
        f"{some(names)}: replace each in its module, `owner._parameters[name] = nn.Parameter(DTensor...)`;"
        " `module.modules()` gives the modules inside too"
    )


_OF_SHARDS = {
    "rows of rank": "rank r keeps piece r of `whole.chunk(n)`",
    "th row": "rank r keeps piece r of `whole.chunk(n)`, rows that stand together",
    "Replicate": "a replicated DTensor keeps the whole on every rank; place it as Shard(0)",
    "placed as": "a parameter is cut along its first dimension, into rows; place it as Shard(0)",
    "dtype": "a shard keeps the dtype of its parameter",
    "whole's shape": "`DTensor.from_local` takes n times the rows for the whole unless it is given shape and stride",
    "requires_grad": "a frozen parameter's shard is frozen too, a trained one's is not",
    "shape": "rank r keeps piece r of `whole.chunk(n)`, without padding",
}


def _wrong_shards(got: Facts, right: Facts) -> str:
    """Return the likely cause of shards that are not this rank's rows."""
    names = some(got[seen.WRONG_SHARDS])
    for sign, cause in _OF_SHARDS.items():
        if sign in names:
            return f"{names}: {cause}"
    return f"{names}: copy the rows, and change nothing"


OF_SHARDS: dict[str, Any] = {
    seen.RETURNED: lambda got, right: (
        "PyTorch's `fully_shard` is the one that you are to write"
        if got[seen.RETURNED].startswith("PyTorch")
        else "end `fully_shard` with `return module`, as PyTorch's does"
    ),
    seen.WRONG_NAMES: named(seen.WRONG_NAMES, "a shard stands where the parameter stood, in `owner._parameters[name]`"),
    seen.NO_DTENSOR: _not_sharded,
    seen.WRONG_SHARDS: _wrong_shards,
    seen.WRONG_WHOLES: named(seen.WRONG_WHOLES, "each rank's rows in rank order"),
    seen.KEPT: "a chunk is a view of the whole, whose memory stays as long: clone it, and keep nothing of the whole",
}


# ---- stage 2

_NOT_WRITTEN = "the memory is there and not all of it was written: wait for the all-gather, then copy every rank's rows"
_AT_USE = {
    seen.STILL_SHARDED: "a unit computes with whole parameters: the hook before forward puts them into the modules",
    seen.NOTHING: "a parameter without memory stands in the module: allocate it, and free it after its use only",
    seen.UNFILLED: _NOT_WRITTEN,
    seen.ZEROS: _NOT_WRITTEN,  # and where they are zeros in part
    seen.ROUNDED: "shards travel as they are, in their own dtype",
    " times": "an all-gather joins rows, and adds nothing up",
    seen.REORDERED: (
        "the all-gather brings n lines, one a rank, each with a part of every parameter; a parameter is the same part"
        " of all n lines, in rank order"
    ),
    seen.OTHER_SHAPE: "the whole has the shape that the parameter had, without padding",
}


def _at_use(got: Facts, right: Facts) -> str:
    """Return the likely cause of wrong values while a unit computes."""
    wrong = got[seen.AT_USE]
    # the first name decides: later ones may follow from it
    cause = next((cause for sign, cause in _AT_USE.items() if sign in wrong[0]), _AT_USE[seen.REORDERED])
    # wrong in the first use already; values that are wrong only later may be old ones
    first = "forward 1" in wrong[0] or "step 0" in wrong[0]
    if not first and any(sign in wrong[0] for sign in (seen.OTHER, seen.ROUNDED, " times")):
        cause = "as the shards were before they changed: every use unshards anew"
    return f"{some(wrong)}: {cause}"


def _not_again(got: Facts, right: Facts) -> str:
    """Return the likely cause of parameters that stay whole after a forward."""
    names = got[seen.SHARDED_AGAIN]
    if not any("blocks." in name for name in names):
        return (
            f"{some(names)} stay whole: the root is resharded too, after a forward without gradients, and at the end of"
            " a backward by a callback"
        )
    return f"{some(names)}: put the shards back into the modules when the unit's use ends"


def _gathers(got: Facts, right: Facts) -> str:
    """Return the likely cause of too many or too few all-gathers."""
    number = got[seen.GATHERS]
    # fewer than needed
    if number < 0:
        return (
            f"{-number} fewer than needed: a unit was not unsharded again for its backward, so it stayed in memory,"
            " or its rows came by another message"
        )
    # as many too many as there are checkpointed blocks
    if number == got.get("_checkpointed"):
        return (
            f"{number} more than needed, one for each checkpointed block: the second forward of a checkpointed block"
            " computes with what was unsharded for its backward; nothing is unsharded or resharded around it"
        )
    return (
        f"{number} more than needed: one for a unit's forward and one for its backward, with all its parameters in"
        " one message; the root stays from forward to backward and takes one"
    )


OF_FORWARD: dict[str, Any] = {
    seen.AT_USE: _at_use,
    seen.OUTPUTS: "parameters were right when each unit began, and outputs are not: nothing may change them meanwhile",
    seen.SHARDED_AGAIN: _not_again,
    seen.STAYING: named(seen.STAYING, "a unit is resharded after its forward and after its backward, a frozen one too"),
    seen.HELD: (
        "more units than two are whole at once: reshard each unit but the root after its forward, and again after its"
        " backward; let no buffer outlive its use; unshard one unit ahead at most"
    ),
    seen.HOOKS: (
        "register a module's hooks once, in `fully_shard`: what a forward registers is called in all later ones too"
    ),
    seen.KEPT: (
        "after it there is more in memory than before: `resize_(0)` on the storages of whole parameters, the root's"
        " too, and no list or attribute that keeps a message's buffer"
    ),
    seen.GATHERS: _gathers,
}


# ---- stages 3 and 5


def _wrong_gradients(got: Facts, right: Facts) -> str:
    """Return the likely cause of gradients that are not the twin's."""
    # "blocks.0.up.weight, step 1: 4 times": those of the first step that has any
    sentences = got[seen.GRADIENTS]
    step = sentences[0].rpartition("step ")[2].partition(":")[0]
    wrong = [sentence for sentence in sentences if f"step {step}:" in sentence]
    kinds = {sentence.rpartition(": ")[2] for sentence in wrong}
    return f"{some(wrong)}: {_cause_of_gradients(wrong, kinds, got['_ranks'])}"


def _cause_of_gradients(wrong: list[str], kinds: set[str], ranks: int) -> str:
    """Return the likely cause of wrong gradients, by what their values are like: `kinds` are ends of the sentences."""
    if kinds == {"none"}:
        if not any("blocks." in sentence for sentence in wrong):
            return (
                "the root's input has no gradient, so no hook on it is called: reduce what is left over in a callback"
                " at the end of the backward"
            )
        return "set `shard.grad` to a DTensor with this rank's rows of the mean gradient"
    if kinds == {"no DTensor"}:
        return "`DTensor.from_local`, with the mesh, the placement and the shape of the shard"
    # ends of sentences such as "blocks.0.up.weight, step 1: 4 times"
    if kinds == {f"{ranks} times"}:
        return f"this is the sum over the {ranks} ranks; divide it by {ranks}"
    if kinds == {f"{1 / ranks:.4g} times"}:
        return "divided by the number of ranks twice"
    if "this rank's own" in kinds:
        return "every rank keeps its own gradient: a reduce-scatter adds up over the ranks"
    if "step 0" not in some(wrong):
        return (
            "right in step 0, so something is left over from it: take the gradient from the whole parameter and set"
            " that to None, and set `shard.grad` anew"
        )
    if seen.UNFILLED in kinds or kinds == {seen.IN_PART}:
        return "what was to arrive was read before it had, or not all of it was written: wait for the reduction"
    if kinds == {seen.ZEROS}:
        return (
            "autograd adds gradients to the tensors that the forward computed with: keep one whole parameter for each"
            " shard, unshard the same one for backward, and take its `.grad`"
        )
    if kinds == {seen.ROUNDED}:
        return "gradients are divided, sent and added in a shorter dtype than the parameters have"
    return (
        "line r of the reduce-scatter's input is what rank r gets, a part of every parameter's gradient; what arrives"
        " is split in the same order"
    )


def _wrong_parameters(got: Facts, right: Facts) -> str:
    """Return the likely cause of parameters that are not the twin's after the optimizer's step."""
    names = some(got[seen.PARAMETERS])
    if seen.OTHER_SHAPE in names:
        return f"{names}: `DTensor.from_local` takes n times the rows for the whole unless it is given shape and stride"
    return (
        f"{names}: gradients are right, so the optimizer updates something else: it holds what"
        " `module.parameters()` gave after `fully_shard`; these objects stay the same"
    )


OF_TRAINING: dict[str, Any] = {
    **OF_FORWARD,
    seen.LOSSES: named(
        seen.LOSSES, "parameters were right when each unit began; something changed them during the forward"
    ),
    seen.FROZEN: named(seen.FROZEN, "a frozen parameter gets no gradient, not even zeros, or weight decay changes it"),
    seen.GRADIENTS: _wrong_gradients,
    seen.PARAMETERS: _wrong_parameters,
    seen.REDUCTIONS: (
        "one reduce-scatter for each unit that trains, with all its gradients in one message, none for a frozen one"
    ),
}
_NAMES = (seen.FROZEN, seen.AT_USE, seen.LOSSES, seen.SHARDED_AGAIN, seen.GRADIENTS, seen.PARAMETERS, seen.STAYING)
_NUMBERS = (seen.GATHERS, seen.REDUCTIONS, seen.KEPT, seen.HELD)
AS_THE_TWIN: Facts = dict.fromkeys(_NAMES, []) | dict.fromkeys(_NUMBERS, 0)


# ---- stage 4


def _exposed_in_forward(got: Facts, right: Facts) -> str:
    """Return the likely cause of all-gathers that compute does not hide."""
    return (
        f"{got[seen.EXPOSED['forward']]:g} ms more than the first all-gathers of a step: begin the next unit's"
        " all-gather, with `async_op=True`, before this unit computes, and wait for it when the next one begins"
    )


def _exposed_in_backward(got: Facts, right: Facts) -> str:
    """Return the likely cause of messages that the backward does not hide."""
    waited = set()  # "all_gather in backward"
    for lane, name, *_ in got["_bars"]:
        if lane == "exposed" and name.endswith("backward"):
            waited.add(name)
    beyond = f"{got[seen.EXPOSED['backward']]:g} ms too many, waiting for {' and '.join(sorted(waited))}"
    if not any(name.startswith("all_gather") for name in waited):
        return f"{beyond}: begin a reduction and wait for it when the next one begins, or at the end of the backward"
    return (
        f"{beyond}: in backward the unit before this one in forward order comes next; begin its all-gather before this"
        " one computes"
    )


OF_ORDER: dict[str, Any] = {
    seen.UNWAITED: named(
        seen.UNWAITED, "a message that was begun has arrived only once `wait()` on its Work has returned"
    ),
    seen.EXPOSED["forward"]: _exposed_in_forward,
    seen.EXPOSED["backward"]: _exposed_in_backward,
    seen.HELD: OF_FORWARD[seen.HELD],
}


# ---- the last check


def _more_at_the_peak(got: Facts, right: Facts) -> str:
    """Return the likely cause of more memory than the lab's engine needs."""
    held = ", ".join(
        f"{name.replace('_', ' ')} {size / 1e6:.0f} MB" for name, size in got["_held"].items() if size > 1e6
    )
    return (
        f"{got['_peak'] / 1e6:.0f} MB, the lab's engine {got['_lab'] / 1e6:.0f}; at the peak {held}. Reshard each unit"
        " after its forward and after its backward, and free a whole gradient once it is in its message, and a message"
        " once it was copied out. `pad` and `cat` copy what could be written into the message at once. A block's input"
        " is the output of the block before, whose hook stands first there, so that one is unsharded before this one"
        " is resharded: hook `x.view_as(x)`, and hand that to the block"
    )


OF_THE_LOOP: dict[str, Any] = {
    seen.LOSSES: "the stages pass and this does not: what does your engine share between two models?",
    loop.NORMS: (
        "clip_grad_norm_ reads each parameter's `.grad`: this rank's rows of the mean over the ranks, as a DTensor with"
        " the whole's shape. Adam hides a wrong factor from the losses"
    ),
    loop.AFTER_LOADING: (
        "a second model that loads the first one's checkpoint goes on otherwise: `state_dict()` must give the shards"
        " themselves, and what is loaded must be what the next forward unshards"
    ),
    seen.PARAMETERS: OF_TRAINING[seen.PARAMETERS],
    seen.GATHERS: _gathers,
    seen.REDUCTIONS: OF_TRAINING[seen.REDUCTIONS],
    loop.ADDED_UP: (
        "gradients of several backwards add up until `zero_grad`: what a reduction brings is added to a `.grad` that is"
        " there"
    ),
    loop.RESTING: "something stays between steps: a second copy of the shards, whole parameters, or a message's buffer",
    loop.PEAK: _more_at_the_peak,
}
