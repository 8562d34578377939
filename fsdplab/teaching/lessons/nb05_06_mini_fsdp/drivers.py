"""How the checks of notebooks 05 and 06 call a learner's function on a rank: `driver(function, *arguments)`.

A driver also checks what a returned value cannot show (the memory behind a tensor, a required error) and never reads a
tensor without memory: that would end the process instead of giving feedback.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdplab.teaching.lessons.nb05_06_mini_fsdp.on_ranks import (
    largest_gathered,
    loaded,
    one_backward,
    trained,
    twin_trained,
)

LOSSES, PARAMETERS = "loss minus the twin's, by step", "parameter minus the twin's"
ROUNDING = 1e-6
FRESH = 0xA5  # every byte of memory that a storage got back, until it is written
REBOUND = "the name `whole` was given to another tensor"


def storage_bytes(tensor: object) -> int:
    """Bytes of memory behind a tensor, whatever part of it the tensor shows; 0 for what is no tensor."""
    return tensor.untyped_storage().nbytes() if isinstance(tensor, torch.Tensor) else 0


def readable(tensor: torch.Tensor) -> torch.Tensor | str:
    """The tensor where its memory is there, else a text."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor if storage_bytes(tensor) >= needed else f"no memory: {storage_bytes(tensor)} of {needed} bytes"


def drive_shard(shard: Callable[..., Any], whole: torch.Tensor, rank: int, ranks: int) -> dict[str, Any]:
    """The slice, and the bytes that it keeps alive."""
    mine = shard(whole.clone(), rank, ranks)
    return {"slice": mine, "bytes behind it": storage_bytes(mine)}


def drive_unshard(unshard: Callable[..., Any], mine: torch.Tensor, rows: int) -> dict[str, Any]:
    """The content of the dropped tensor afterwards, and of an alias made before."""
    whole = mine.new_zeros(rows, *mine.shape[1:])
    alias = whole[1:]
    whole.untyped_storage().resize_(0)
    with memory_marked():
        unshard(mine, whole)
    if rebinds(unshard, "whole"):
        print(REBOUND)
    return {"whole": readable(whole), "alias": readable(alias)}


@contextlib.contextmanager
def memory_marked() -> Iterator[None]:
    """Memory that a storage gets back holds FRESH: by chance it would hold the right values of an earlier case."""
    resize = torch.UntypedStorage.resize_

    def marked(storage: torch.UntypedStorage, nbytes: int) -> Any:
        grown = storage.nbytes() < nbytes
        returned = resize(storage, nbytes)
        if grown:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(FRESH)
        return returned

    with mock.patch.object(torch.UntypedStorage, "resize_", marked):
        yield


def rebinds(function: Callable[..., Any], name: str) -> bool:
    """Whether the function assigns to the name, `whole = ...`, which leaves the caller's tensor as it is."""
    code: types.CodeType = inspect.unwrap(function).__code__
    return any(step.opname.startswith("STORE_FAST") and step.argval == name for step in dis.get_instructions(code))


def drive_reshard(reshard: Callable[..., Any], whole: torch.Tensor) -> dict[str, Any]:
    """The bytes left behind a tensor and an alias of it, and its shape."""
    whole = whole.clone()  # what arrives from another process cannot be resized
    alias = whole[1:]
    reshard(whole)
    return {
        "bytes behind whole": storage_bytes(whole),
        "bytes behind the alias": storage_bytes(alias),
        "shape": list(whole.shape),
    }


def drive_guarded(guarded: Callable[..., Any], whole: torch.Tensor, name: str, dropped: bool) -> dict[str, Any]:
    """How the guard ends: with the tensor, or with an error and its text."""
    whole = whole.clone()
    if dropped:
        whole.untyped_storage().resize_(0)
    try:
        got = guarded(whole, name)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        what = RUNTIME_ERROR if isinstance(error, RuntimeError) else f"raises {type(error).__name__}"
        return raises(what, name in str(error), "unshard" in str(error).lower())
    return passes(readable(got) if isinstance(got, torch.Tensor) else got, got is whole)


END, PASSES, RUNTIME_ERROR = "the guard", "returns", "raises RuntimeError"


def passes(returned: object, itself: bool) -> dict[str, Any]:
    """What is compared where the guard returns."""
    return {END: PASSES, "what it returns": returned, "it is the tensor itself": itself, **_message(False, False)}


def raises(end: str, named: bool, advised: bool) -> dict[str, Any]:
    """What is compared where the guard raises: which error, whether it names the tensor, whether it says `unshard`."""
    return {END: end, "what it returns": None, "it is the tensor itself": False, **_message(named, advised)}


def _message(named: bool, advised: bool) -> dict[str, Any]:
    return {"the message holds the name": named, "the message says unshard": advised}


def drive_hooks(hooks: Callable[..., Any], parts: dict[str, str], work: dict[str, Any]) -> dict[str, Any]:
    """Train a small GPT under the learner's engine with these hooks, and the twin beside it: what differs, what one
    step did.

    The twin runs here and not in the notebook's process: another number of threads sums in another order.
    """
    engine, losses = trained(loaded(parts, hooks=hooks), work)
    last = [row for row in engine.log.rows if row["step"] == work["steps"] - 1]
    counted = {what: sum(row["what"] == what for row in last) for what in ("unshard", "reduce")}
    kept, twin, ours = sum(unit.gathered_bytes for unit in engine.units), twin_trained(work), engine.whole_parameters()
    apart = [loss - expected for loss, expected in zip(losses, twin["by_rank"][dist.get_rank()], strict=True)]
    return {
        LOSSES: [0.0 if abs(value) <= ROUNDING else value for value in apart],
        "gathers in a step": counted["unshard"],
        "reductions in a step": counted["reduce"],
        "bytes gathered after a step": kept,
        "bytes gathered at the peak": largest_gathered(last),
        PARAMETERS: {
            name: beyond_rounding(ours[name] - value) for name, value in twin["parameters"].items() if compared(name)
        },
    }


def beyond_rounding(apart: torch.Tensor) -> torch.Tensor:
    """A difference with what rounding explains set to zero; what is no number stays."""
    return torch.where(apart.abs() <= ROUNDING, 0.0, apart)


def compared(name: str) -> bool:
    """Whether a parameter is compared: a key's bias moves all scores of a query alike, so its gradient is mere
    rounding.
    """
    return not name.endswith("key.bias")


def drive_units(choose_units: Callable[..., Any], parts: dict[str, str], work: dict[str, Any]) -> dict[str, Any]:
    """One forward and backward with these units: by how much the run exceeds the target and the limit."""
    engine = one_backward(loaded(parts), choose_units, work)
    peak, collectives = largest_gathered(engine.log.rows), sum(row["what"] != "reshard" for row in engine.log.rows)
    print(f"{len(engine.units)} units, {peak:,} bytes gathered at the peak, {collectives} collectives")
    return {
        "bytes over the target": max(0, peak - work["target"]),
        "collectives over the limit": max(0, collectives - work["limit"]),
    }
