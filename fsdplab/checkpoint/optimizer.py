"""Matches a saved optimizer state with the optimizer that loads it, parameter by parameter and group by group.

A parameter may have no state in the file (an expert that no token was routed to, a parameter that was frozen) or none
in memory yet (an optimizer that has not stepped). State is restored where the file has it, and only there: a parameter
without saved state begins as it would in a job that had never stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

STATE, GROUPS = "optim.state.", "optim.param_groups."
# what torch's learning rate schedulers write into a group; an optimizer without a scheduler has none of it
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
Group = dict[str, Any]
# what entries of a state hold before the first step, where that is not zero: a number, or the group's value of a name
_BEFORE_THE_FIRST_STEP: Mapping[type[torch.optim.Optimizer], Mapping[str, float | str]] = {
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.ASGD: {"mu": 1.0, "eta": "lr"},
    torch.optim.Rprop: {"step_size": "lr"},
}


@contextmanager
def zero_gradients(optimizer: torch.optim.Optimizer, wanted: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give the `wanted` parameters a gradient of zeros inside, and all others none."""
    parameters = parameters_of(optimizer)
    gradients = [parameter.grad for parameter in parameters]
    chosen = {id(parameter) for parameter in wanted}
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in chosen else None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient


def make_states(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Make the state of `parameters` as it is before their first step, and leave the parameters as they are.

    A step with gradients of zero and a learning rate of 0 does it; what such a step changes, as the count of steps, is
    set back.
    """
    if not parameters:
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        # An optimizer makes the state of parameters that have a gradient, and of no others.
        with zero_gradients(optimizer, parameters):
            optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates):
            if rate is not None:
                group["lr"] = rate
    chosen = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in chosen:
                _set_back(optimizer, group, optimizer.state.get(parameter, {}))


def _set_back(optimizer: torch.optim.Optimizer, group: Group, state: dict[str, Any]) -> None:
    """Give the entries of one parameter's state the values that they have before the first step."""
    first: dict[str, float | str] = {"step": 0.0}
    for kind, entries in _BEFORE_THE_FIRST_STEP.items():
        if isinstance(optimizer, kind):
            first.update(entries)
    for name, value in first.items():
        entry = state.get(name)
        if isinstance(entry, torch.Tensor):
            entry.fill_(float(group[value] if isinstance(value, str) else value))


def begins_with_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a state that `make_states` made is as good as none.

    It is not for SGD with dampening: without a momentum its first step takes the whole gradient, with one of zeros a
    part of it.
    """
    return not any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)


class SavedOptimizer:
    """The optimizer of a checkpoint: its groups, and which parameters have a state in the file."""

    def __init__(self, metadata: Metadata, values: Mapping[str, Any]) -> None:
        """`values` are the hyperparameters by their names in the file, `optim.param_groups.0.lr` and so on.

        ValueError where a group has no parameters, or a state no group.
        """
        self.groups: dict[str, Group] = {}  # by their numbers
        for name, value in values.items():
            # "optim.param_groups.0.lr" is key "lr" of group "0".
            number, _, key = name.removeprefix(GROUPS).partition(".")
            self.groups.setdefault(number, {})[key] = value

        self.group_of: dict[str, str] = {}  # parameter -> the number of its group
        for number, group in self.groups.items():
            names = group.get("params")
            if not isinstance(names, list):
                raise _inconsistent(f"group {number} of its optimizer names no parameters")
            self.group_of.update(dict.fromkeys(names, number))

        self.entries: dict[str, dict[str, Any]] = {}  # parameter -> the entries of its state
        for name, entry in metadata.state_dict_metadata.items():
            if name.startswith(STATE):
                self.entries.setdefault(self._parameter_of(name), {})[name] = entry

    def _parameter_of(self, entry: str) -> str:
        """Return the parameter of an entry: "optim.state.block.0.weight.exp_avg" -> "block.0.weight"."""
        name = entry.removeprefix(STATE)
        while name not in self.group_of:
            if not name:
                raise _inconsistent(f"it has {entry!r}, of a parameter that is in no group")
            name = name.rpartition(".")[0]
        return name

    def entries_of(self, groups: list[Group]) -> dict[str, Any]:
        """Return the entries of the file that are states of parameters of these groups."""
        entries: dict[str, Any] = {}
        for name in _names_of(groups):
            entries.update(self.entries.get(name, {}))
        return entries

    def match(self, optimizer: torch.optim.Optimizer, groups: list[Group]) -> list[Group]:
        """Return `groups` with the saved hyperparameters; ValueError where parameters are grouped otherwise.

        A group of which the file has no parameter, and a hyperparameter that the file lacks, stay as they are.
        """
        matched = []
        first_of: dict[str, str] = {}  # number of a saved group -> the first parameter of the group that takes it
        for group in groups:
            known = [name for name in group["params"] if name in self.group_of]
            # All parameters of the group were added after the save.
            if not known:
                matched.append(group)
                continue
            number = self.group_of[known[0]]
            for name in known:
                if self.group_of[name] != number:
                    raise _grouped_otherwise(known[0], name, "two groups", "one")
            if number in first_of:
                raise _grouped_otherwise(first_of[number], known[0], "one group", "two")
            first_of[number] = known[0]
            saved = self.groups[number]
            _check_hyperparameters(optimizer, group, saved)
            matched.append({**group, **saved, "params": group["params"]})
        return matched

    def states_to_load(
        self, optimizer: torch.optim.Optimizer, groups: list[Group], states: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the states of this optimizer, by parameter, which the file has too; made where there is none yet."""
        lacking = []
        for name, parameter in zip(_names_of(groups), parameters_of(optimizer)):
            # Only what the file has: a parameter without saved state begins without.
            if name in self.entries and parameter not in optimizer.state:
                lacking.append(parameter)
        make_states(optimizer, lacking)
        return {name: state for name, state in states().items() if name in self.entries}

    def say_what_differs(self, groups: list[Group]) -> None:
        """Warn of states that no parameter of this optimizer takes, and of parameters that no saved group has."""
        names = set(_names_of(groups))
        unclaimed = sorted({*self.entries} - names)
        new = sorted(names - {*self.group_of})
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if unclaimed:
            warnings.warn(
                f"the optimizer has no {unclaimed[0]!r}, whose saved state is left out ({len(unclaimed)} in all); if"
                " they train on, give all parameters to the optimizer",
                stacklevel=4,
            )
        if new:
            warnings.warn(
                f"the saved optimizer had no {new[0]!r}, which begins without state ({len(new)} in all)", stacklevel=4
            )


def give_states(optimizer: torch.optim.Optimizer, groups: list[Group], states: Mapping[str, Any]) -> None:
    """Put loaded states and hyperparameters into the optimizer; parameters that `states` lacks have none then."""
    number_of = {name: number for number, name in enumerate(_names_of(groups))}  # as `Optimizer.state_dict` counts
    packed_groups = []
    for group in groups:
        packed_groups.append({**group, "params": [number_of[name] for name in group["params"]]})
    packed_states = {number_of[name]: state for name, state in states.items()}
    optimizer.load_state_dict({"state": packed_states, "param_groups": packed_groups})


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in their order."""
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _names_of(groups: list[Group]) -> list[str]:
    names: list[str] = []
    for group in groups:
        names += group["params"]
    return names


def _check_hyperparameters(optimizer: torch.optim.Optimizer, group: Group, saved: Group) -> None:
    """Raise ValueError for a saved group that has other hyperparameters; more or fewer alone are another version's."""
    missing = sorted({*optimizer.defaults} - {*saved})
    strange = sorted({*saved} - {*group} - _OF_SCHEDULERS)
    if missing and strange:
        raise ValueError(
            f"the checkpoint is of another optimizer: it has {strange[0]!r} and no {missing[0]!r}, expected the"
            f" hyperparameters of {type(optimizer).__name__}; build the optimizer that was saved"
        )


def _inconsistent(what: str) -> ValueError:
    return ValueError(f"the checkpoint is of another kind of optimizer, or damaged: {what}; copy it again")


def _grouped_otherwise(first: str, second: str, there: str, here: str) -> ValueError:
    return ValueError(
        f"the checkpoint is of an optimizer with other groups: {first!r} and {second!r} are in {there} in it and in"
        f" {here} here; build the groups that were saved"
    )
