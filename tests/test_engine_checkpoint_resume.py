"""What `checkpoint.save` wrote, `checkpoint.load` restores: parameters without state, other groups, extra states."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdplab import checkpoint
from fsdplab.checkpoint import CheckpointDamaged
from fsdplab.engine import fully_shard
from tests.ranks import RankPool

pytestmark = pytest.mark.quick
ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "lab": fully_shard,
    "torch": torch_fully_shard,
    "plain": lambda model: model,
}


class Experts(nn.Module):
    """Two experts; the first `chosen` ones are used."""

    def __init__(self, chosen: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts[: self.chosen]:
            x = expert(x).tanh()
        return x


def built(engine: str, freeze: bool = False, only_trained: bool = False, sgd: bool = False) -> tuple[Any, Any]:
    """A model and its optimizer; `freeze` freezes the first expert, `only_trained` leaves it out of the optimizer."""
    model = ENGINES[engine](Experts())
    model.experts[0].requires_grad_(not freeze)
    parameters = [each for each in model.parameters() if each.requires_grad or not only_trained]
    if sgd:
        return model, torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)
    return model, torch.optim.AdamW(parameters, lr=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, chosen: int, steps: int = 2) -> list[torch.Tensor]:
    """Some steps; the whole parameters and optimizer states after them."""
    model.chosen = chosen
    for step in range(steps):
        inputs = torch.full((1, 4), 1.0 + step)
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [*model.parameters()]
    for parameter in model.parameters():
        values += [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
    return [(value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone() for value in values]


def check_equal(values: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for value, then in zip(values, expected, strict=True):
        assert torch.equal(value, then)


def resumes(folder: Path) -> None:
    """Each job is continued, and loaded into a new one that does the same steps: equal to the bit."""
    for engine in ENGINES:
        for sgd in (False, True):
            # an expert that was never chosen, and is chosen later
            model, optimizer = built(engine, sgd=sgd)
            train(model, optimizer, chosen=1)
            checkpoint.save(model, optimizer, folder / f"{engine} {sgd} unused")
            other, its = built(engine, sgd=sgd)
            checkpoint.load(other, its, folder / f"{engine} {sgd} unused")
            assert not its.state.get(list(other.parameters())[-1]), "the expert was given a state that nobody saved"
            expected = train(model, optimizer, chosen=2)
            check_equal(train(other, its, chosen=2), expected)

            # a part that is frozen after training keeps its state, for the day on which it is unfrozen
            model.experts[0].requires_grad_(False)
            train(model, optimizer, chosen=2)
            checkpoint.save(model, optimizer, folder / f"{engine} {sgd} frozen")
            other, its = built(engine, freeze=True, sgd=sgd)
            checkpoint.load(other, its, folder / f"{engine} {sgd} frozen")
            for each in (model, other):
                each.experts[0].requires_grad_(True)
            expected = train(model, optimizer, chosen=2)
            check_equal(train(other, its, chosen=2), expected)

        # a part that was frozen from the beginning, and is trained later
        model, optimizer = built(engine, freeze=True)
        train(model, optimizer, chosen=2)
        checkpoint.save(model, optimizer, folder / f"{engine} unfrozen")
        other, its = built(engine)
        checkpoint.load(other, its, folder / f"{engine} unfrozen")
        model.experts[0].requires_grad_(True)
        check_equal(train(other, its, chosen=2), train(model, optimizer, chosen=2))


def test_state_is_restored_where_the_file_has_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, resumes, tmp_path)


def saves_unused(folder: Path) -> None:
    model, optimizer = built("lab")
    train(model, optimizer, chosen=1)
    checkpoint.save(model, optimizer, folder)


def loads_unused(folder: Path) -> list[torch.Tensor]:
    """The values as they were loaded, after which the other expert trains for the first time."""
    model, optimizer = built("lab")
    checkpoint.load(model, optimizer, folder)
    loaded = train(model, optimizer, chosen=0, steps=0)
    train(model, optimizer, chosen=2)
    assert optimizer.state[list(model.parameters())[-1]]["step"] == 2
    return loaded


def test_state_is_restored_on_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, saves_unused, tmp_path / "saved")
    two, _ = ranks(2, loads_unused, tmp_path / "saved")
    assert len(two) == 4 + 2 * 3, "parameters, and the states of one expert"
    for values in ranks(3, loads_unused, tmp_path / "saved"):
        check_equal(values, two)


def warned(action: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught if "optimizer" in str(each.message)]


def grouped(model: nn.Module, number: int, decay: float = 0.1, biases_first: bool = False) -> torch.optim.Optimizer:
    """Everything in one group, or weights and biases in two, biases without weight decay."""
    weights = [value for name, value in model.named_parameters() if "bias" not in name]
    biases = [value for name, value in model.named_parameters() if "bias" in name]
    if number == 1:
        return torch.optim.AdamW(model.parameters(), weight_decay=decay)
    groups = [{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups[::-1] if biases_first else groups)


def groups(folder: Path) -> None:
    saved = {}
    for number in (1, 2):
        model = ENGINES["lab"](Experts())
        saved[number] = grouped(model, number)
        train(model, saved[number], chosen=2)
        checkpoint.save(model, saved[number], folder / str(number))
    for number, words in ((2, "in two groups in it and in one here"), (1, "in one group in it and in two here")):
        model = ENGINES["lab"](Experts())
        before = train(model, grouped(model, 3 - number), chosen=0, steps=0)
        with pytest.raises(ValueError, match=f"other groups: '.*' and '.*' are {words}; build the groups") as error:
            checkpoint.load(model, grouped(model, 3 - number), folder / str(number))
        assert not isinstance(error.value, CheckpointDamaged)
        check_equal(train(model, grouped(model, 1), chosen=0, steps=0)[:4], before[:4])
    # the order of the groups is none of their names
    model = ENGINES["lab"](Experts())
    optimizer = grouped(model, 2, decay=0.7, biases_first=True)
    checkpoint.load(model, optimizer, folder / "2")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    # a scheduler adds hyperparameters, and one without it loads them and the other way round
    model = ENGINES["lab"](Experts())
    optimizer = grouped(model, 2)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    checkpoint.load(model, optimizer, folder / "2")
    train(model, optimizer, chosen=2)
    checkpoint.save(model, optimizer, folder / "scheduled")
    checkpoint.load(model, grouped(model, 2), folder / "scheduled")
    # another kind of optimizer, whose states cannot tell
    with pytest.raises(ValueError, match="of another optimizer"):
        checkpoint.load(model, torch.optim.SGD(model.parameters(), lr=1.0), folder / "1")
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    train(model, plain, chosen=2)
    checkpoint.save(model, plain, folder / "sgd")
    with pytest.raises(ValueError, match="of another optimizer: it has 'dampening' and no 'amsgrad'"):
        checkpoint.load(model, grouped(model, 1), folder / "sgd")


def test_groups_are_compared_by_the_names_of_their_parameters(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, groups, tmp_path)


def other_parameters(folder: Path) -> None:
    """An optimizer of fewer or more parameters than the saved one loads, and says so."""
    model, optimizer = built("lab")
    train(model, optimizer, chosen=2)
    checkpoint.save(model, optimizer, folder / "all")
    fewer = built("lab", freeze=True, only_trained=True)
    said = warned(lambda: checkpoint.load(*fewer, folder / "all"))
    first = dist.get_rank() == 0
    assert len(said) == first and all("saved state is left out (2 in all)" in text for text in said)
    check_equal(train(*fewer, chosen=0, steps=0)[:4], train(model, optimizer, chosen=0, steps=0)[:4])
    train(*fewer, chosen=2)
    checkpoint.save(*fewer, folder / "fewer")
    said = warned(lambda: checkpoint.load(model, optimizer, folder / "fewer"))
    assert len(said) == first and all("begins without state (2 in all)" in text for text in said)


def test_what_an_optimizer_does_not_share_with_the_saved_one_is_said(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, other_parameters, tmp_path)


class WithExtraState(nn.Linear):
    """Counts its calls in a dict that is a part of its state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: dict[str, Any] = {"calls": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


def test_a_value_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    """A learning rate of numpy; and a model's own extra state is loaded as it was."""
    model = WithExtraState()
    optimizer = torch.optim.AdamW(model.parameters(), lr=numpy.float64(0.1))
    with pytest.raises(ValueError, match=r"optim.param_groups.0.lr could not be loaded again: .*float\(value\)"):
        checkpoint.save(model, optimizer, tmp_path / "numpy")
    assert not (tmp_path / "numpy").exists()
    optimizer.param_groups[0]["lr"] = 0.1
    model.seen = {"calls": 3}
    checkpoint.save(model, optimizer, tmp_path / "saved")
    model.seen = {"calls": 0}
    checkpoint.load(model, optimizer, tmp_path / "saved")
    assert model.seen == {"calls": 3}


STEPPED_BY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "SGD with dampening": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
}


@pytest.mark.parametrize("name", STEPPED_BY)
def test_a_save_before_the_first_step_changes_no_training(tmp_path: Path, name: str) -> None:
    """Neither that of the job that saved, nor that of one that loads: an optimizer's state is not zeros in all."""

    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        model = Experts(chosen=2)
        return model, STEPPED_BY[name](model.parameters())

    expected = train(*fresh(), chosen=2, steps=3)
    model, optimizer = fresh()
    checkpoint.save(model, optimizer, tmp_path / "saved")
    assert not optimizer.state
    other, its = fresh()
    checkpoint.load(other, its, tmp_path / "saved")
    for found in (train(model, optimizer, chosen=2, steps=3), train(other, its, chosen=2, steps=3)):
        for value, then in zip(found, expected, strict=True):
            assert torch.equal(value, then)


def test_two_tensors_at_one_path_are_refused(tmp_path: Path) -> None:
    """Of an extra state whose keys are equal as text, or have a dot, one tensor would be loaded in both places."""
    model, optimizer = built("plain")
    for state in (
        {"a": [torch.ones(1)], "a.0": torch.zeros(1)},
        {1: torch.ones(1), "1": torch.zeros(1)},
        {"": {"x": torch.ones(1)}, "x": torch.zeros(1)},
    ):
        with pytest.raises(ValueError, match=r"two tensors of an extra state are at '(a\.0|1|x)' .*; rename one"):
            checkpoint.save(model, optimizer, tmp_path / "saved", extra={"mine": state})
    assert not (tmp_path / "saved").exists()
