"""Compares the parameters that several ranks hold as copies of each other: training keeps them equal if they were.

DistributedDataParallel sends rank 0's parameters once, when it wraps the model; replicas of FSDP2's shards, and of the
lab's, are never sent. Afterwards ranks add the same update to what each of them has, so what was loaded on one rank
alone stays there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.recording.gradients import local
from fsdplab.recording.subject import fsdp2_groups, lab_units

_PARAMETERS = 256  # of a model that are looked at, spread over all of it
_VALUES = 8  # of each of them
_Replicated = tuple[dist.ProcessGroup | None, list[nn.Parameter]]
_APART = 1e-3  # of a parameter's size: equal ranks have the same bits, and other kinds of GPUs round otherwise


def values_of(model: nn.Module) -> dict[str, Any]:
    """Return some values of the parameters that this rank holds a copy of, by name, and the ranks that have the others;
    {} where it holds no copies.
    """
    ranks, parameters = _copies(model)
    if len(ranks) < 2:
        return {}
    held = {id(parameter) for parameter in parameters}
    named = []
    for name, parameter in model.named_parameters():
        values = local(parameter.detach())
        if id(parameter) in held and values.numel() and _is_plain(values):
            named.append((name, values))
    every = -(-len(named) // _PARAMETERS)
    chosen = dict(named[:: max(1, every)])
    if not chosen:
        return {}
    # one copy to the host for all of them
    some = torch.stack([_some_of(values) for values in chosen.values()]).tolist()
    return {"ranks": ranks, "values": dict(zip(chosen, some))}


def _copies(model: nn.Module) -> tuple[list[int], list[nn.Parameter]]:
    """Return the ranks that should hold equal values, this rank among them, and the parameters that have these."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return dist.get_process_group_ranks(model.process_group), _kept_equal(model)
    by_ranks: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
    for replicas, parameters in [*_of_lab(model), *_of_fsdp2(model)]:
        if replicas is not None:
            ranks = dist.get_process_group_ranks(replicas)
            by_ranks[tuple(ranks)] += parameters
    if not by_ranks:
        return [], []
    # experts on a mesh of their own have other replicas: what most parameters have is compared
    most = max(by_ranks, key=lambda ranks: len(by_ranks[ranks]))
    return list(most), by_ranks[most]


def _kept_equal(model: nn.parallel.DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that are not on the list of those which DistributedDataParallel leaves alone."""
    ignored = set(model.parameters_to_ignore)
    kept = []
    for name, parameter in model.module.named_parameters():
        if name not in ignored and f"module.{name}" not in ignored:
            kept.append(parameter)
    return kept


def _of_lab(model: nn.Module) -> list[_Replicated]:
    """Return each unit's group of replicas, None where it has none, and its parameters, of the lab's engine."""
    units = []
    for unit in lab_units(model):
        transport = unit.memory.config.replicate
        group = None if transport is None else transport.group
        units.append((group, [param.at_rest for param in unit.memory.params]))
    return units


def _of_fsdp2(model: nn.Module) -> list[_Replicated]:
    """Do as `_of_lab`, of PyTorch's fully_shard."""
    units = []
    for group in fsdp2_groups(model):
        replicas = getattr(group.mesh_info, "replicate_process_group", None)
        units.append((replicas, [param.sharded_param for param in group.fsdp_params]))
    return units


def _is_plain(values: torch.Tensor) -> bool:
    """Return whether these are numbers that can be indexed: of quantised kinds and types of a byte not all can."""
    is_of_torch = type(values) is torch.Tensor and values.layout is torch.strided and not values.is_meta
    return is_of_torch and values.is_floating_point() and values.element_size() > 1


def _some_of(values: torch.Tensor) -> torch.Tensor:
    """Return so many values, at about equal distances; the last one fills up what a small tensor lacks."""
    flat = values.reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, _VALUES, device=flat.device).long()
    return flat[places].float()


def compared(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the parameters that ranks which should hold the same values hold with different ones; {} where there are no
    two such ranks.
    """
    by_group: dict[tuple[int, ...], list[Mapping[str, list[float]]]] = defaultdict(list)
    for of_rank in of_ranks:
        if of_rank:
            by_group[tuple(of_rank["ranks"])].append(of_rank["values"])
    names, apart = set[str](), set[str]()
    for copies in by_group.values():
        first, *others = copies
        for other in others:
            for name in first.keys() & other.keys():
                names.add(name)
                if _differ(first[name], other[name]):
                    apart.add(name)
    return {"compared_parameters": len(names), "different_parameters": len(apart)} if names else {}


def _differ(one: list[float], other: list[float]) -> bool:
    """Return whether a parameter's values differ by more than rounding; what is no number is another fault."""
    a, b = torch.tensor(one), torch.tensor(other)
    scale = torch.maximum(a.abs().max(), b.abs().max())
    return bool((a - b).abs().max() > _APART * scale)
