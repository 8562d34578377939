"""Save, load and gather a training state, as `torch.distributed.checkpoint` (DCP) does it, without its traps.

The files are plain DCP with the keys of PyTorch's own recipe (`model`, `optim`): any number of ranks, any strategy,
PyTorch's FSDP2 and an unsharded model read each other's. The traps: asking an optimizer that has not stepped for its
state counts as a step (or leaves the state out, where gradients exist), saving over a checkpoint can lose both, a
"full" state dict may be the live parameters, which the next step changes, and loading a file runs the code that it
holds, or leaves a model half overwritten (files.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from fsdplab.checkpoint import files


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Write `model` and `optimizer` to a new `folder`, every rank its own shards; all ranks must call it.

    Raises torch's `CheckpointException` ("Checkpoint already exists") where a checkpoint is: give every save its own
    folder.
    """
    dcp.save(states_of(model, optimizer), storage_writer=dcp.FileSystemWriter(str(folder), overwrite=False))
    files.write_manifest(Path(folder))


def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path, *, require_manifest: bool = False
) -> None:
    """Read what `save` wrote into `model` and `optimizer`, in place, whatever the number of ranks and the strategy
    were.

    Hyperparameters (the learning rate too) become the saved ones. Before anything is changed, raises
    `FileNotFoundError` if there is no checkpoint, `CheckpointDamaged` (a `ValueError`) if a file is not as it was saved
    or would run code, and `ValueError` with name, shapes and dtypes if it is of another model or optimizer.

    A checkpoint without a manifest (PyTorch's own) has no checksums: `load` warns, or with `require_manifest` raises
    `CheckpointDamaged`.
    """
    reader = files.CheckedReader(str(folder))
    _find(Path(folder))
    listed = files.check_manifest(Path(folder), require_manifest)
    metadata = files.on_all_ranks(reader.read_metadata)
    files.check_entries(Path(folder), metadata, listed)
    entries = metadata.state_dict_metadata
    state = states_of(model, optimizer)
    _check("model", "model.", state["model"], entries)
    states = {f"{name}.{key}": value for name, each in state["optim"]["state"].items() for key, value in each.items()}
    _check("optimizer", "optim.state.", states, entries)
    try:
        dcp.load(state, storage_reader=reader, planner=files.CheckedPlanner())
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise files.CheckpointDamaged(
            f"the checkpoint in {folder} cannot be read ({reason}), and a part of it may have been loaded; copy it"
            " again, build the model anew and load once more"
        ) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the whole parameters and buffers in host memory on rank 0; {} elsewhere. All ranks must call it.

    Gathered one at a time: beside its shards (and rank 0's result) a rank holds about one whole parameter.
    """
    whole, first = {}, not dist.is_initialized() or dist.get_rank() == 0
    for name, value in get_model_state_dict(model).items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if first:
            whole[name] = value.to("cpu", copy=True)  # the gathered one may be padded, or be the parameter itself
    return whole


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Both states over the live memory, as DCP's recipe has them (`model`, `optim`); those of an optimizer that has not
    stepped are made, as zeros.
    """
    fresh, parameters = not optimizer.state, [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    if fresh:
        optimizer.zero_grad(set_to_none=True)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    for parameter, gradient in zip(parameters, gradients) if fresh else ():
        parameter.grad = gradient
        if "step" in (made := optimizer.state.get(parameter, {})):
            made["step"].zero_()
    return state


def _find(folder: Path) -> None:
    if not any((folder / name).exists() for name in (".metadata", files.MANIFEST)):
        inside = ", ".join(sorted(path.name for path in folder.iterdir())[:3]) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"no checkpoint in {folder}: got {inside or 'an empty folder'}, expected a .metadata file (a save that was"
            " cut short has none); name the folder that was given to `save`"
        )


def _check(what: str, prefix: str, expected: dict[str, Any], entries: dict[str, Any]) -> None:
    saved = {n.removeprefix(prefix): _kind_saved(e) for n, e in entries.items() if n.startswith(prefix)}
    here = {name: _kind(value) for name, value in expected.items()}
    if wrong := [name for name in sorted({*saved, *here}) if saved.get(name) != here.get(name)]:
        got, wanted = (kinds.get(wrong[0], "absent") for kinds in (saved, here))
        raise ValueError(
            f"the checkpoint is of another {what}: {wrong[0]!r} is {got} in it and {wanted} here "
            f"({len(wrong)} differ in all); build the {what} that was saved"
        )


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else "no tensor"


def _kind_saved(entry: Any) -> str:
    return f"{tuple(entry.size)} {entry.properties.dtype}" if isinstance(entry, TensorStorageMetadata) else "no tensor"
