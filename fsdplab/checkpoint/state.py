"""Saves, loads and gathers a training state as `torch.distributed.checkpoint` (DCP) does, without its traps.

The files are plain DCP with the keys of PyTorch's own recipe (`model`, `optim`): any number of ranks, any strategy,
PyTorch's FSDP2 and an unsharded model read each other's. The traps: asking an optimizer that has not stepped for its
state counts as a step (or leaves the state out, where gradients exist), saving over a checkpoint can lose both, a
"full" state dict may be the live parameters, which the next step changes, and loading a file runs the code that it
holds, or leaves a model half overwritten (files.py).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdplab.checkpoint import extra as extras
from fsdplab.checkpoint import files
from fsdplab.checkpoint.optimizer import (
    GROUPS,
    STATE,
    SavedOptimizer,
    begins_with_zeros,
    give_states,
    make_states,
    parameters_of,
)


def save(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path, *, extra: extras.Extra | None = None
) -> None:
    """Write `model`, `optimizer` and the states of `extra` (a scheduler, an average: name -> object) to a new `folder`.

    Every rank writes its own shards; all ranks must call it. Raises torch's `CheckpointException` ("Checkpoint already
    exists") where a checkpoint is: give every save its own folder. Raises `ValueError` for a value that `load` would
    refuse, before anything is written.
    """
    dcp.save(all_states(model, optimizer, extra), storage_writer=dcp.FileSystemWriter(str(folder), overwrite=False))
    files.write_manifest(Path(folder))


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
    *,
    extra: extras.Extra | None = None,
    require_manifest: bool = False,
) -> None:
    """Read what `save` wrote into `model`, `optimizer` and the objects of `extra`, in place, whatever the number of
    ranks and the strategy were.

    Hyperparameters (the learning rate too) become the saved ones; a parameter whose state was not saved has none
    afterwards. Before anything is changed, raises `FileNotFoundError` if there is no checkpoint, `CheckpointDamaged` (a
    `ValueError`) if a file is not as it was saved or would run code, and `ValueError` with name, shapes and dtypes if
    it is of another model or optimizer, or lacks an extra state.

    A checkpoint without a manifest (PyTorch's own) has no checksums: `load` warns, or with `require_manifest` raises
    `CheckpointDamaged`.
    """
    CheckedCheckpoint(folder, require_manifest).load(model, optimizer, extra or {})


class CheckedCheckpoint:
    """Checks all files of a checkpoint, then loads it; all ranks make it, and call its methods."""

    def __init__(self, folder: str | Path, require_manifest: bool) -> None:
        self.folder = Path(folder)
        reader = files.CheckedReader(str(folder))
        files.on_all_ranks(partial(_find, self.folder))  # a machine may lack the folder
        listed = files.check_manifest(self.folder, require_manifest)
        self.metadata = files.on_all_ranks(reader.read_metadata)
        files.check_entries(self.folder, self.metadata, listed)
        self.entries = self.metadata.state_dict_metadata

    def value_of(self, name: str) -> Any:
        """Read the plain values of an extra state; None where the checkpoint has none of this name."""
        entry = f"{extras.EXTRA}{name}.plain"
        if entry not in self.entries:
            return None
        return extras.plain_value(self.folder, name, self._read({entry: None})[entry])

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, extra: extras.Extra) -> None:
        """Read the states in place, as `load` does."""
        plain = {name: self._extra_of(name) for name in extra}
        live = states_of(model, optimizer)
        model_state, groups = live["model"], live["optim"]["param_groups"]
        _check_layout(self.folder, self.entries)
        _check("model", "model.", {"model": model_state}, self.entries)

        saved = SavedOptimizer(self.metadata, self._read(self._hyperparameters()))
        # An optimizer that has not stepped gets zeros, into which the saved states are read.
        states = saved.states_to_load(optimizer, groups, lambda: states_of(model, optimizer)["optim"]["state"])
        _check("optimizer", STATE, {"optim": {"state": states}}, saved.entries_of(groups))
        groups = saved.match(optimizer, groups)
        saved.say_what_differs(groups)

        tensors, extra_state = {}, {}
        for name, holder in extra.items():
            tensors[name] = extras.tensors_to_load(name, holder, plain[name], self.metadata)
            extra_state[name] = {"tensors": tensors[name]}
        # Into the live memory: each rank reads its shards of parameters and states.
        loaded = self._read({"model": model_state, "optim": {"state": states}, "extra": extra_state})
        set_model_state_dict(model, loaded["model"])
        give_states(optimizer, groups, loaded["optim"]["state"])
        for name, holder in extra.items():
            extras.give(holder, plain[name], tensors[name])

    def _extra_of(self, name: str) -> Any:
        names = extras.names_in(self.metadata)
        if name not in names:
            raise ValueError(
                f"the checkpoint in {self.folder} has no extra state {name!r}: got {sorted(names) or 'none'}; leave it"
                " out of `extra`, and it begins anew"
            )
        return self.value_of(name)

    def _hyperparameters(self) -> dict[str, Any]:
        """Places for the hyperparameters of the file, by their names in it."""
        places: dict[str, Any] = {}
        for name, entry in self.entries.items():
            if name.startswith(GROUPS):
                is_tensor = isinstance(entry, TensorStorageMetadata)
                places[name] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
        return places

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        """Read entries in place, and return them."""
        try:
            dcp.load(state, storage_reader=files.CheckedReader(str(self.folder)), planner=files.CheckedPlanner())
        except CheckpointException as error:
            # DCP collects the failures of all ranks; the first is shown.
            reason = next(iter(error.failures.values()))[0]
            raise files.CheckpointDamaged(
                f"the checkpoint in {self.folder} cannot be read ({reason}), and a part of it may have been loaded;"
                " copy it again, build the model anew and load once more"
            ) from error
        return state


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the whole parameters and buffers to host memory on rank 0; {} elsewhere. All ranks must call it.

    Gathered one at a time: beside its shards (and rank 0's result) a rank holds about one whole parameter.
    """
    whole = {}
    on_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
    for name, value in get_model_state_dict(model).items():
        if isinstance(value, DTensor):
            # An all-gather, in which all ranks take part; only rank 0 keeps the result.
            value = value.full_tensor()
        if on_rank_0:
            whole[name] = value.to("cpu", copy=True)  # the gathered one may be padded, or be the parameter itself
    return whole


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return both states over the live memory, as DCP's recipe has them (`model`, `optim`); those of an optimizer that
    has not stepped are made, as zeros.
    """
    # first the model's, which reshards what a lone forward has left unsharded: the optimizer's names it otherwise
    model_state = get_model_state_dict(model)
    if not optimizer.state:
        make_states(optimizer, [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad])
    return {"model": model_state, "optim": get_optimizer_state_dict(model, optimizer)}


def all_states(model: nn.Module, optimizer: torch.optim.Optimizer, extra: extras.Extra | None) -> dict[str, Any]:
    """Return what a save writes; ValueError for a value that could not be loaded again.

    An optimizer that has not stepped has no state afterwards either: its first step makes it, as without a save.
    """
    has_stepped = bool(optimizer.state)
    state = states_of(model, optimizer)
    if not has_stepped:
        optimizer.state.clear()
        if not begins_with_zeros(optimizer):
            state["optim"]["state"] = {}
    # What is no tensor is pickled, and a load would refuse more than plain values.
    plain = {}
    for name, value in flatten_state_dict(state)[0].items():
        if not isinstance(value, torch.Tensor):
            plain[name] = value
    try:
        extras.as_plain_bytes("the state", plain)
    except ValueError:
        # once more, to name the one
        for name, value in plain.items():
            extras.as_plain_bytes(name, value)
        raise
    if extra:
        state["extra"] = extras.entries_of(extra)
    return state


def _find(folder: Path) -> None:
    """Raise FileNotFoundError where a folder has neither metadata nor a manifest."""
    if (folder / ".metadata").exists() or (folder / files.MANIFEST).exists():
        return
    inside = "no such folder"
    if folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())
        inside = ", ".join(names[:3]) or "an empty folder"
    raise FileNotFoundError(
        f"no checkpoint in {folder}: got {inside}, expected a .metadata file (a save that was"
        " cut short has none); name the folder that was given to `save`"
    )


def _check_layout(folder: Path, entries: dict[str, Any]) -> None:
    """Raise ValueError for a checkpoint that somebody else has written, under other keys than PyTorch's recipe."""
    if entries and not any(name.startswith(("model.", STATE, GROUPS)) for name in entries):
        raise ValueError(
            f"the checkpoint in {folder} has the model under other keys: got {min(entries)!r}, expected 'model.' and"
            " names of parameters, 'optim.' and names of states; save what get_state_dict(model, optimizer) returns as"
            " dcp.save({'model': ..., 'optim': ...})"
        )


def _check(what: str, prefix: str, expected: dict[str, Any], entries: dict[str, Any]) -> None:
    """Raise ValueError unless the file's entries with a prefix are those of the `expected` state."""
    # Both sides as name -> "(8, 4) torch.float32": one comparison finds what is absent, too.
    saved = {}
    for name, entry in entries.items():
        if name.startswith(prefix):
            saved[name.removeprefix(prefix)] = _kind_saved(entry)
    here = {}
    for name, value in flatten_state_dict(expected)[0].items():
        here[name.removeprefix(prefix)] = _kind(value)
    wrong = [name for name in sorted({*saved, *here}) if saved.get(name) != here.get(name)]
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"the checkpoint is of another {what}: {first!r} is {saved.get(first, 'absent')} in it and"
            f" {here.get(first, 'absent')} here ({len(wrong)} differ in all); build the {what} that was saved"
        )


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    return f"{tuple(value.shape)} {value.dtype}"


def _kind_saved(entry: Any) -> str:
    if not isinstance(entry, TensorStorageMetadata):
        return "no tensor"
    return f"{tuple(entry.size)} {entry.properties.dtype}"
