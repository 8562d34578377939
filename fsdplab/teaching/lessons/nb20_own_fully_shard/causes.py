"""What the checks of notebook 20 say of a fact that differs: the parameter, the step, and the likely cause."""

from __future__ import annotations

from typing import Any

from fsdplab.teaching.lessons.nb20_own_fully_shard.on_ranks import (
    AT_USE,
    EXPOSED,
    FROZEN,
    GATHERS,
    GRADIENTS,
    HELD,
    KEPT,
    LOSSES,
    NO_DTENSOR,
    NOTHING,
    OTHER,
    OTHER_SHAPE,
    OUTPUTS,
    PARAMETERS,
    REDUCTIONS,
    REORDERED,
    RETURNED,
    SHARDED_AGAIN,
    STAYING,
    STILL_SHARDED,
    UNFILLED,
    UNWAITED,
    WRONG_NAMES,
    WRONG_SHARDS,
    WRONG_WHOLES,
    Facts,
)  # fmt: skip
from fsdplab.teaching.lessons.nb20_own_fully_shard.pytorchs_loop import AFTER_LOADING, BUFFERS, NORMS, PEAK, RESTING


def some(names: list[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---- stage 1


def _not_sharded(got: Facts, right: Facts) -> str:
    names = got[NO_DTENSOR]
    in_blocks = ["blocks." in name for name in names]
    if not any(in_blocks):
        return f"{some(names)} belong to no block: the call on the whole model shards what is left over, the root"
    if all(in_blocks):
        return f"{some(names)} are blocks' parameters: the calls on blocks shard theirs"
    return f"{some(names)}: replace each in its module, `owner._parameters[name] = nn.Parameter(DTensor...)`"


_OF_SHARDS = {
    "rows of rank": "rank r keeps piece r of `whole.chunk(n)`",
    "Replicate": "a replicated DTensor keeps the whole on every rank; place it as Shard(0)",
    "whole's shape": "`DTensor.from_local` takes n times the rows for the whole unless it is given shape and stride",
    "requires_grad": "a frozen parameter's shard is frozen too, a trained one's is not",
    "shape": "rank r keeps piece r of `whole.chunk(n)`, without padding",
}


def _wrong_shards(got: Facts, right: Facts) -> str:
    told = some(got[WRONG_SHARDS])
    cause = next((cause for sign, cause in _OF_SHARDS.items() if sign in told), "copy the rows, and change nothing")
    return f"{told}: {cause}"


OF_SHARDS: dict[str, Any] = {
    RETURNED: "end `fully_shard` with `return module`, as PyTorch's does",
    WRONG_NAMES: lambda got, right: (
        f"{some(got[WRONG_NAMES])}: a shard stands where the parameter stood, in `owner._parameters[name]`"
    ),
    NO_DTENSOR: _not_sharded,
    WRONG_SHARDS: _wrong_shards,
    WRONG_WHOLES: lambda got, right: f"{some(got[WRONG_WHOLES])}: each rank's rows in rank order",
    KEPT: "a chunk is a view of the whole, whose memory stays as long: clone it, and keep nothing of the whole",
}


# ---- stage 2

_AT_USE = {
    STILL_SHARDED: "the hook before forward puts whole parameters into the modules",
    NOTHING: "a parameter without memory stands in the module: allocate it, and free it after its use only",
    UNFILLED: "the memory is there and not all of it was written: wait for the all-gather, then copy every rank's rows",
    REORDERED: (
        "the all-gather brings n lines, one a rank, each with a part of every parameter; a parameter is the same part"
        " of all n lines, in rank order"
    ),
    OTHER_SHAPE: "the whole has the shape that the parameter had, without padding",
}


def _at_use(got: Facts, right: Facts) -> str:
    wrong = got[AT_USE]
    cause = next((cause for sign, cause in _AT_USE.items() if sign in wrong[0]), _AT_USE[REORDERED])
    if OTHER in wrong[0] or "times" in wrong[0]:
        first = "forward 1" in wrong[0] or "step 0" in wrong[0]
        cause = _AT_USE[REORDERED] if first else "as the shards were before they changed: every use unshards anew"
    return f"{some(wrong)}: {cause}"


def _not_again(got: Facts, right: Facts) -> str:
    names = got[SHARDED_AGAIN]
    if not any("blocks." in name for name in names):
        return (
            f"{some(names)} stay whole: the root is resharded too, after a forward without gradients, and at the end of"
            " a backward by a callback"
        )
    return f"{some(names)}: put the shards back into the modules when the unit's use ends"


def _gathers(got: Facts, right: Facts) -> str:
    number = got[GATHERS]
    if number < 0:
        return (
            f"{-number} fewer than expected: a unit was not unsharded again for its backward, so it stayed in memory,"
            " or its rows came by another message"
        )
    return (
        f"{number} more than expected: one for a unit's forward and one for its backward, with all its parameters in"
        " one message; the root stays from forward to backward and takes one"
    )


OF_FORWARD: dict[str, Any] = {
    AT_USE: _at_use,
    OUTPUTS: "parameters were right when each unit began, and outputs are not: nothing may change them meanwhile",
    SHARDED_AGAIN: _not_again,
    STAYING: lambda got, right: (
        f"{some(got[STAYING])}: a unit is resharded after its forward and after its backward, a frozen one too"
    ),
    HELD: (
        "more units than two are whole at once: reshard each unit but the root after its forward, and again after its"
        " backward; let no buffer outlive its use; unshard one unit ahead at most"
    ),
    KEPT: (
        "after it there is more in memory than before: `resize_(0)` on the storages of whole parameters, the root's"
        " too, and no list or attribute that keeps a message's buffer"
    ),
    GATHERS: _gathers,
}


# ---- stages 3 and 5


def _wrong_gradients(got: Facts, right: Facts) -> str:
    step = got[GRADIENTS][0].rpartition("step ")[2].partition(":")[0]
    wrong = [each for each in got[GRADIENTS] if f"step {step}:" in each]
    kinds = {each.rpartition(": ")[2] for each in wrong}
    return f"{some(wrong)}: {_cause_of_gradients(wrong, kinds, got['_ranks'])}"


def _cause_of_gradients(wrong: list[str], kinds: set[str], ranks: int) -> str:
    if kinds == {"none"}:
        if not any("blocks." in each for each in wrong):
            return (
                "the root's input has no gradient, so no hook on it is called: reduce what is left over in a callback"
                " at the end of the backward"
            )
        return "set `shard.grad` to a DTensor with this rank's rows of the mean gradient"
    if kinds == {"no DTensor"}:
        return "`DTensor.from_local`, with the mesh, the placement and the shape of the shard"
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
    if UNFILLED in kinds:
        return "what was to arrive was read before it had, or not all of it was written: wait for the reduction"
    return "line r of the reduce-scatter's input is what rank r gets, a part of every parameter's gradient"


def _wrong_parameters(got: Facts, right: Facts) -> str:
    told = some(got[PARAMETERS])
    if OTHER_SHAPE in told:
        return f"{told}: `DTensor.from_local` takes n times the rows for the whole unless it is given shape and stride"
    return (
        f"{told}: gradients are right, so the optimizer updates something else: it holds what"
        " `module.parameters()` gave after `fully_shard`; these objects stay the same"
    )


OF_TRAINING: dict[str, Any] = {
    **OF_FORWARD,
    LOSSES: lambda got, right: (
        f"{some(got[LOSSES])}: parameters were right when each unit began; something changed them during the forward"
    ),
    FROZEN: lambda got, right: (
        f"{some(got[FROZEN])}: a frozen parameter gets no gradient, not even zeros, or weight decay changes it"
    ),
    GRADIENTS: _wrong_gradients,
    PARAMETERS: _wrong_parameters,
    REDUCTIONS: (
        "one reduce-scatter for each unit that trains, with all its gradients in one message, none for a frozen one"
    ),
}
AS_THE_TWIN: Facts = {
    FROZEN: [], AT_USE: [], LOSSES: [], SHARDED_AGAIN: [], GRADIENTS: [], PARAMETERS: [], STAYING: [], GATHERS: 0,
    REDUCTIONS: 0, HELD: 0.0, KEPT: 0,
}  # fmt: skip


# ---- stage 4


def _exposed_in_forward(got: Facts, right: Facts) -> str:
    return (
        f"{got[EXPOSED['forward']]:g} ms more than the first all-gathers of a step: begin the next unit's all-gather,"
        " with `async_op=True`, before this unit computes, and wait for it when the next one begins"
    )


def _exposed_in_backward(got: Facts, right: Facts) -> str:
    waited = {lane_name for lane, lane_name, *_ in got["_bars"] if lane == "exposed" and lane_name.endswith("backward")}
    told = f"{got[EXPOSED['backward']]:g} ms too many, waiting for {' and '.join(sorted(waited))}"
    if not any(name.startswith("all_gather") for name in waited):
        return f"{told}: begin a reduction and wait for it when the next one begins, or at the end of the backward"
    return (
        f"{told}: in backward the unit before this one in forward order comes next; begin its all-gather before this"
        " one computes"
    )


OF_ORDER: dict[str, Any] = {
    UNWAITED: lambda got, right: (
        f"{some(got[UNWAITED])}: a message that was begun has arrived only once `wait()` on its Work has returned"
    ),
    EXPOSED["forward"]: _exposed_in_forward,
    EXPOSED["backward"]: _exposed_in_backward,
    HELD: OF_FORWARD[HELD],
}


# ---- the last check


def _more_at_the_peak(got: Facts, right: Facts) -> str:
    held = ", ".join(
        f"{name.replace('_', ' ')} {size / 1e6:.0f} MB" for name, size in got["_held"].items() if size > 1e6
    )
    return (
        f"{got['_peak'] / 1e6:.0f} MB, the lab's engine {got['_lab'] / 1e6:.0f}; at the peak {held}. Reshard"
        " each unit after its forward and after its backward, and free a whole gradient once it is in its message"
    )


OF_THE_LOOP: dict[str, Any] = {
    LOSSES: "the stages pass and this does not: what does your engine share between two models?",
    NORMS: (
        "clip_grad_norm_ reads each parameter's `.grad`: this rank's rows of the mean over the ranks, as a DTensor with"
        " the whole's shape. Adam hides a wrong factor from the losses"
    ),
    AFTER_LOADING: (
        "a second model that loads the first one's checkpoint goes on otherwise: `state_dict()` must give the shards"
        " themselves, and what is loaded must be what the next forward unshards"
    ),
    PARAMETERS: OF_TRAINING[PARAMETERS],
    GATHERS: _gathers,
    REDUCTIONS: OF_TRAINING[REDUCTIONS],
    RESTING: "something that is as large as the shards stays between steps: a second copy of them, or whole parameters",
    PEAK: _more_at_the_peak,
    BUFFERS: (
        "free an all-gather's buffer once it was copied out, and wait for a reduction before the next one begins: one"
        " of each is under way at most"
    ),
}
