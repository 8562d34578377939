"""Saves what a training has besides model and optimizer: schedulers, positions in the data, averages, random states.

An object takes part if it has `state_dict` and `load_state_dict` (torch's `Stateful`), or is a dict. Its tensors are
saved as tensors, sharded ones by all ranks. The rest is one entry of plain values, and keeps its structure: the file
tells what to restore, not the object, which may be empty before it is loaded.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from fsdplab.checkpoint import files
from fsdplab.checkpoint.optimizer import make_states, parameters_of

EXTRA = "extra."
_TENSOR, _SHARDED = "fsdplab tensor", "fsdplab sharded tensor"  # (_TENSOR, path) stands for it among plain values
Extra = Mapping[str, Any]


# ---- states that differ between ranks


class PerRank:
    """Wraps an object whose state differs between ranks, as a data loader's may: every rank gets its own state back.

    On another number of ranks `on_other_ranks(states)` is called with the states of all ranks; without it, raises
    `ValueError`.
    """

    def __init__(self, holder: Any, on_other_ranks: Callable[[list[Any]], None] | None = None) -> None:
        self.holder, self.on_other_ranks = holder, on_other_ranks

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks; all ranks must call it."""
        return {"ranks": _of_all_ranks(_state_of("PerRank", self.holder))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give this rank's part to the object."""
        rank, ranks = 0, 1
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
        # Saved by 4 ranks and loaded by 4, rank 2 gets the state of rank 2.
        if len(state["ranks"]) == ranks:
            _give_state(self.holder, state["ranks"][rank])
        elif self.on_other_ranks is not None:
            self.on_other_ranks(state["ranks"])
        else:
            raise ValueError(
                f"a state of {len(state['ranks'])} ranks cannot be given to {ranks} ranks; start as many ranks as saved"
                " it, or give PerRank a function on_other_ranks"
            )


class RandomState:
    """Saves the random number generators of this rank: torch's on the CPU and the current GPU, and Python's."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states as plain values."""
        state = {"python": random.getstate(), "cpu": bytes(torch.get_rng_state().tolist())}
        if torch.cuda.is_available():
            state["cuda"] = bytes(torch.cuda.get_rng_state().tolist())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the generators go on from where they were."""
        random.setstate(state["python"])
        torch.set_rng_state(torch.tensor(list(state["cpu"]), dtype=torch.uint8))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(list(state["cuda"]), dtype=torch.uint8))


def random_states() -> PerRank:
    """Save the generators of all ranks. Other ranks than those that saved are seeded anew, each from the saved states
    and its own number, so that no random numbers come twice.
    """

    def seed_anew(states: list[Any]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        digest = hashlib.sha256(repr((rank, states)).encode()).digest()
        seed = int.from_bytes(digest[:7], "big")  # 56 bits, which both generators take
        random.seed(seed)
        torch.manual_seed(seed)

    return PerRank(RandomState(), seed_anew)


# ---- to and from the entries of a checkpoint


def entries_of(extra: Extra) -> dict[str, Any]:
    """Return what is saved of the objects: {"ema": ema} -> {"ema": {"plain": b"...", "tensors": {"weight": tensor}}}.

    ValueError where reading would run code, or where ranks hold different values, of which one would win.
    """
    entries, digests = {}, {}
    for name, holder in extra.items():
        if "." in name:
            raise ValueError(f"the extra state {name!r} has a dot in its name; give it a name without one")
        tensors: dict[str, torch.Tensor] = {}
        plain = _without_tensors(_state_of(name, holder), "", tensors)
        entries[name] = {"plain": as_plain_bytes(f"the extra state {name!r}", plain), "tensors": tensors}
        # Of the plain values alone, which one rank writes for all.
        digests[name] = hashlib.sha256(repr(plain).encode()).digest()
    by_rank = _of_all_ranks(digests)
    names: set[str] = set().union(*by_rank)
    for name in sorted(names):
        if any(of_rank.get(name) != by_rank[0].get(name) for of_rank in by_rank):
            raise ValueError(
                f"the extra state {name!r} differs between ranks, and only one of them would be saved; wrap the object"
                " in PerRank"
            )
    return entries


def names_in(metadata: Metadata) -> set[str]:
    """Return the names of the extra states of a checkpoint."""
    names = set()
    for entry in metadata.state_dict_metadata:
        if entry.startswith(EXTRA):
            name, _, _ = entry.removeprefix(EXTRA).partition(".")
            names.add(name)
    return names


def plain_value(folder: Any, name: str, content: Any) -> Any:
    """Read the plain values of one extra state from its entry; CheckpointDamaged where it is none."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        raise files.CheckpointDamaged(
            f"the extra state {name!r} in {folder} is no plain value ({type(error).__name__}), and reading it might run"
            " code; it is refused"
        ) from error


def tensors_to_load(name: str, holder: Any, plain: Any, metadata: Metadata) -> dict[str, torch.Tensor]:
    """Return memory for the saved tensors of one extra state, by path; the object's own, maybe sharded, where they fit.

    ValueError for a sharded tensor where the object has none: nothing tells how it is to be sharded.
    """
    # An optimizer that has not stepped has no tensors yet into which to load.
    if isinstance(holder, torch.optim.Optimizer) and not holder.state:
        make_states(holder, parameters_of(holder))
    of_holder: dict[str, torch.Tensor] = {}
    _without_tensors(_state_of(name, holder), "", of_holder)
    tensors = {}
    prefix = f"{EXTRA}{name}.tensors."
    for entry, about in metadata.state_dict_metadata.items():
        if not entry.startswith(prefix) or not isinstance(about, TensorStorageMetadata):
            continue
        path = entry.removeprefix(prefix)
        tensor = of_holder.get(path)
        if tensor is None or (tensor.shape, tensor.dtype) != (about.size, about.properties.dtype):
            if path in _sharded_in(plain):
                raise ValueError(
                    f"the extra state {name!r} has the sharded tensor {path!r} of shape {tuple(about.size)} in the"
                    " checkpoint, and none like it here; give the object its tensors before it is loaded"
                )
            # None that fits: a whole one on the CPU, which `load_state_dict` takes over.
            tensor = torch.empty(about.size, dtype=about.properties.dtype)
        tensors[path] = tensor
    return tensors


def give(holder: Any, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore one object from its plain values and tensors."""
    _give_state(holder, _with_tensors(plain, tensors))


def as_plain_bytes(what: str, value: Any) -> bytes:
    """Return a value as bytes; ValueError unless it can be read back without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # an object's own pickling raises anything; torch's refusal has many lines
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what} could not be loaded again: it holds more than numbers, text, tensors and containers of them"
            f" ({reason[:200]}); convert it, as float(value) does for a number of numpy"
        ) from error
    return buffer.getvalue()


def _state_of(name: str, holder: Any) -> Any:
    if isinstance(holder, Stateful):
        return holder.state_dict()
    if isinstance(holder, dict):
        return holder
    raise TypeError(
        f"the extra state {name!r} is of {type(holder).__name__}; expected an object with state_dict and"
        " load_state_dict, or a dict"
    )


def _give_state(holder: Any, state: Any) -> None:
    if isinstance(holder, Stateful):
        holder.load_state_dict(state)
    else:
        # The same dict: others may hold it.
        holder.clear()
        holder.update(state)


def _without_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Copy a value, with marks in the places of tensors; put the tensors into `tensors`."""
    # {"a": [tensor, 2]} becomes {"a": [("fsdplab tensor", "a.0"), 2]}, with the tensor under "a.0".
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise ValueError(
                f"two tensors of an extra state are at {path!r} (keys that are equal as text, or have a dot), and only"
                " one of them would be saved; rename one of the keys"
            )
        tensors[path] = value.detach()
        mark = _SHARDED if isinstance(value, DTensor) else _TENSOR
        return mark, path
    if isinstance(value, Mapping):
        return {key: _without_tensors(part, f"{path}.{key}".lstrip("."), tensors) for key, part in value.items()}
    if type(value) in (list, tuple):
        parts = [_without_tensors(part, f"{path}.{at}".lstrip("."), tensors) for at, part in enumerate(value)]
        return type(value)(parts)
    return value


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Copy a value, with tensors in the places of marks."""
    if _is_mark(value):
        return tensors[value[1]]
    if isinstance(value, dict):
        return {key: _with_tensors(part, tensors) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(part, tensors) for part in value)
    return value


def _sharded_in(value: Any) -> set[str]:
    """Return the paths of the sharded tensors in a value."""
    if _is_mark(value):
        mark, path = value
        return {path} if mark == _SHARDED else set()
    if isinstance(value, dict):
        value = [*value.values()]
    if type(value) not in (list, tuple):
        return set()
    paths: set[str] = set()
    for part in value:
        paths |= _sharded_in(part)
    return paths


def _is_mark(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] in (_TENSOR, _SHARDED)


def _of_all_ranks(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts
