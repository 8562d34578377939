"""Objects that are taken at the wrong time are refused in one line, or do what they do without sharding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdplab.engine import clip_grad_norm_, fully_shard, shard_model
from tests.each_strategy import in_turn, sharded
from tests.ranks import transports
from tests.surface import Net, close, data, gradients, loss_of, mesh_of, twin_gradients

pytestmark = pytest.mark.quick


def refused(action: Callable[[], Any], *words: str) -> None:
    """`action` raises one line that has all `words`."""
    with pytest.raises(RuntimeError) as raised:
        action()
    text = str(raised.value)
    assert "\n" not in text and all(word in text for word in words), text


def between_forward_and_backward(strategy: str, transport: str) -> None:
    model = sharded(Net(), strategy, transport)
    loss = loss_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    by_group = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    by_group.add_param_group({"params": list(model.parameters())})
    clipped = list(model.parameters())
    loss.backward()
    refused(lambda: clip_grad_norm_(clipped, 1.0), "clip_grad_norm_", "between a forward and its backward")
    refused(optimizer.step, "SGD", "between a forward and its backward", "build it while the model is sharded")
    refused(by_group.step, "between a forward and its backward")
    right = torch.optim.SGD(model.parameters(), 0.1)
    assert clip_grad_norm_(model.parameters(), 1.0) > 0
    right.step()


def test_what_is_taken_between_a_forward_and_its_backward(ranks) -> None:
    ranks(2, in_turn, between_forward_and_backward)


def list_for_torchs_clip(strategy: str, transport: str) -> None:
    """PyTorch's own clip cannot be refused: the step after it says that there is such a list. Who only reads the
    parameters between a forward and its backward, or takes them after it, is told nothing.
    """
    for taken in ("between", "after", "read"):
        model = sharded(Net(), strategy, transport, units="root")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        clipped: list[nn.Parameter] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                loss = loss_of(model)
                clipped = list(model.parameters()) if taken == "between" else []
                loss = loss + sum(each.square().mean() for each in model.parameters()) if taken == "read" else loss
                loss.backward()
                clipped = list(model.parameters()) if taken == "after" else clipped
                torch.nn.utils.clip_grad_norm_(clipped, 1.0)
                optimizer.step()
        texts = [str(each.message) for each in caught if "a list holds unsharded parameters" in str(each.message)]
        assert len(texts) == (taken == "between") and "\n" not in "".join(texts), (taken, texts)


def test_a_list_for_torchs_own_clip(ranks) -> None:
    ranks(2, in_turn, list_for_torchs_clip)


def unsharded_by_hand() -> None:
    """As well after `unshard()`, after an evaluation that stays unsharded, and where fewer ranks keep the shards."""
    for transport in transports():
        model = fully_shard(Net(), transport=transport)
        model.unshard()
        optimizer = torch.optim.AdamW(model.parameters())
        model.reshard()
        loss_of(model).backward()
        refused(optimizer.step, "after unshard()")

        model = fully_shard(Net(), transport=transport)
        model.set_reshard_after_forward(False)
        with torch.no_grad():
            loss_of(model)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model).backward()
        refused(optimizer.step, "AdamW")


def test_what_is_taken_while_a_unit_is_unsharded_by_hand(ranks) -> None:
    ranks(2, unsharded_by_hand)


def over_fewer_ranks() -> None:
    model = fully_shard(Net(), reshard_after_forward=2)
    loss = loss_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss.backward()
    refused(optimizer.step, "between a forward and its backward")


def test_shards_over_fewer_ranks(ranks) -> None:
    ranks(4, over_fewer_ranks)


def replaced(strategy: str, transport: str) -> None:
    model = sharded(Net(), strategy, transport)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model).backward()
    optimizer.step()
    new = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(new, assign=True)
    loss_of(model).backward()
    refused(optimizer.step, "SGD", "assign=True", "no longer part of the model")
    optimizer.zero_grad()
    refused(optimizer.step, "assign=True")
    torch.optim.SGD(model.parameters(), 0.1).step()


def test_an_optimizer_whose_parameters_were_replaced(ranks) -> None:
    ranks(2, in_turn, replaced)


def zeroed_between(strategy: str, transport: str) -> None:
    """`model.zero_grad()` between a forward and its backward resets what the step before has left."""
    for set_to_none in (True, False):
        model, twin = sharded(Net(), strategy, transport), Net()
        for seed in range(3):
            loss = loss_of(model, seed)
            model.zero_grad(set_to_none)
            loss.backward()
            twin.zero_grad(set_to_none)
            close(gradients(model), twin_gradients(twin, seed), rtol=0, atol=0)


def test_gradients_that_are_reset_between_a_forward_and_its_backward(ranks) -> None:
    ranks(2, in_turn, zeroed_between)


def never_collected(strategy: str, transport: str) -> None:
    """Gradients that a user has put on unsharded parameters are lost for ever: the next step or forward says so."""
    for use in (lambda model, optimizer: optimizer.step(), lambda model, optimizer: loss_of(model)):
        model = sharded(Net(), strategy, transport, units="root")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_of(model).backward()
        loss = loss_of(model)
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad = gradient
        refused(lambda: use(model, optimizer), "unit 'root'", "reset_iter_state()")  # noqa: B023
        model.reset_iter_state()
        use(model, optimizer)


def test_gradients_that_no_backward_has_collected(ranks) -> None:
    ranks(2, in_turn, never_collected)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([])
        self.table, self.last = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((x.abs() * 5).long().clamp(max=9)).sum(1))


def sparse(strategy: str, transport: str) -> None:
    """A sparse gradient trains as it does without sharding: it is made dense before it is reduced."""
    model, twin = shard_model(Words(), strategy, mesh=mesh_of(), transport=transport), Words()
    for seed in range(2):
        model(data(seed)).square().mean().backward()
        twin(data(seed)).square().mean().backward()
    twin.table.weight.grad = twin.table.weight.grad.to_dense()
    for each in (model, twin):
        each.zero_grad()
    model(data()).square().mean().backward()
    dense = Words()
    dense.table.sparse = False
    close(gradients(model), twin_gradients(dense, loss=lambda each: each(data()).square().mean()), rtol=0, atol=0)


def test_sparse_gradients(ranks) -> None:
    ranks(2, in_turn, sparse)
