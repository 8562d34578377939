"""What a recording sees of a job's updates: whether they arrive in parameters, and make those of all ranks equal."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data.distributed import DistributedSampler

from fsdplab.engine import shard_model
from fsdplab.recording.gradients import Gradients
from fsdplab.recording.rank import RankRecorder
from fsdplab.recording.replicas import compared, values_of
from fsdplab.recording.scales import Scales, are_scaled
from fsdplab.recording.settings import Settings
from fsdplab.recording.subject import fsdp2_groups, has_no_learning_rate, subject_of
from fsdplab.recording.untrained import untrained, untrained_everywhere

pytestmark = pytest.mark.quick


def copies(*of_ranks: dict[str, list[float]], ranks: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
    return [{"ranks": list(ranks), "values": values} for values in of_ranks]


def test_copies_of_a_parameter_that_differ_are_counted():
    mine = {"up.weight": [0.5, -0.25, 0.0], "norm.weight": [1.0, 1.0, 1.0]}
    assert compared(copies(mine, mine)) == {"compared_parameters": 2, "different_parameters": 0}
    other = {**mine, "up.weight": [0.5, -0.26, 0.0]}
    assert compared(copies(mine, other)) == {"compared_parameters": 2, "different_parameters": 1}
    assert compared(copies(mine, mine, other)) == {"compared_parameters": 2, "different_parameters": 1}


@pytest.mark.parametrize(
    "found",
    [
        [],
        [{}, {}],  # shards, of which no rank has a copy
        copies({"a": [1.0]}),  # the other rank was not measured
        [*copies({"a": [1.0]}, ranks=(0, 2)), *copies({"a": [3.0]}, ranks=(1, 3))],  # two groups of tensor parallelism
        copies({"stage0": [1.0]}, {"stage1": [2.0]}),  # two stages of a pipeline
    ],
)
def test_ranks_that_share_no_parameter_are_not_compared(found):
    assert compared(found) == {}


@pytest.mark.parametrize(
    "one,other",
    [
        ([1.0, 1e-6], [1.0, 1e-6 + 1e-8]),  # another kind of GPU rounds otherwise
        ([0.0, 0.0], [0.0, 0.0]),
        ([float("nan"), 1.0], [float("nan"), 1.0]),  # which is another fault
        ([float("inf")], [float("inf")]),
    ],
)
def test_rounding_is_no_difference(one, other):
    assert compared(copies({"a": one}, {"a": other}))["different_parameters"] == 0


@pytest.fixture
def alone():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_values_of_what_ddp_keeps_equal_are_read(alone):
    network = nn.ModuleDict({"up": nn.Linear(8, 8), "own": nn.Linear(8, 1), "scale": nn.Embedding(1, 1)})
    network._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]  # DistributedDataParallel's own name
    found = values_of(nn.parallel.DistributedDataParallel(network))
    assert found["ranks"] == [0, 1]
    assert set(found["values"]) == {"module.up.weight", "module.up.bias", "module.scale.weight"}
    weight = network["up"].weight.flatten()
    assert found["values"]["module.up.weight"][0] == weight[0] and found["values"]["module.up.weight"][-1] == weight[-1]
    assert {len(values) for values in found["values"].values()} == {8}
    assert values_of(network) == {}, "a model of no engine"


@pytest.mark.parametrize("strategy,held", [("no_shard", 4), ("zero1", 0), ("full_shard", 0)])
def test_values_of_the_labs_replicas_are_read(alone, strategy, held):
    network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    shard_model(network, strategy, units=[nn.Linear])
    found = values_of(network)
    assert len(found.get("values", ())) == held
    assert fsdp2_groups(network) == [], "they pass for PyTorch's units"


def test_values_of_replicas_of_shards_are_read_and_not_those_of_experts_on_another_mesh(alone):
    mesh, own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")), DeviceMesh("cpu", [0])
    network = nn.Sequential(OrderedDict(dense=nn.Linear(8, 8), experts=nn.Linear(8, 1), ignored=nn.Linear(8, 1)))
    of_experts = ShardPlacementResult(Shard(0), FSDPMeshInfo(own, shard_mesh_dim=0))
    of_dense = ShardPlacementResult(Shard(0), HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0))
    experts = set(network.experts.parameters())
    fully_shard(
        network,
        mesh=mesh,
        ignored_params=set(network.ignored.parameters()),
        shard_placement_fn=lambda parameter: of_experts if parameter in experts else of_dense,
    )
    assert len(fsdp2_groups(network)) == 2
    assert set(values_of(network)["values"]) == {"dense.weight", "dense.bias"}
    assert subject_of([torch.optim.SGD(network.parameters())], network).strategy == "hybrid_shard"


class Quantised(torch.Tensor):
    """Values of a library's own, of which little is defined."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.any, torch.Tensor.reshape, torch.Tensor.float):
            raise NotImplementedError(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_parameters_that_cannot_be_read_are_left_out(alone):
    network = nn.ParameterDict({
        "up": nn.Parameter(torch.ones(4)),
        "quantised": nn.Parameter(torch.ones(4).as_subclass(Quantised)),
        "fp8": nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False),
        "whole": nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False),
    })  # fmt: skip
    network._ddp_params_and_buffers_to_ignore = []
    assert set(values_of(nn.parallel.DistributedDataParallel(network))["values"]) == {"module.up"}


def test_of_a_large_model_some_parameters_are_read(alone):
    network = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(1000)])
    assert 200 < len(values_of(nn.parallel.DistributedDataParallel(network))["values"]) <= 256


# ---- learning rates


@pytest.mark.parametrize(
    "rates,is_none",
    [
        ([0.0, 0], True),
        ([torch.tensor(0.0)], True),
        ([0.0, 1e-4], False),  # a part of the model is frozen so
        ([None], False),  # Adafactor finds its own
        ([torch.tensor(0.0, device="meta")], False),  # as on a GPU, whose numbers are not read
        ([], False),
    ],
)
def test_a_learning_rate_of_0_in_all_groups_is_seen(rates, is_none):
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    assert has_no_learning_rate([SimpleNamespace(param_groups=groups)]) is is_none
    assert has_no_learning_rate([]) is False and has_no_learning_rate([object()]) is False


# ---- updates that are rounded away


def lost_in_a_step(optimizer_of: Any, dtype: torch.dtype) -> tuple[int, int, int]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(dtype)
    optimizer = optimizer_of(network.parameters())
    seen = Gradients(network, [optimizer])
    network(torch.randn(16, 64, dtype=dtype)).float().pow(2).mean().backward()
    optimizer.step()
    seen.end()
    report = seen.as_report()
    assert report["trained_elements_here"] == 64 * 64 + 64 + 64 * 8 + 8
    return report["updated_elements"], report["lost_elements"], report["trained_elements_here"]


def test_updates_that_a_short_type_rounds_away_are_counted():
    updated, lost, trained = lost_in_a_step(partial(torch.optim.AdamW, lr=1e-5), torch.bfloat16)
    assert updated > 0.9 * trained and lost > 0.8 * updated
    updated, lost, trained = lost_in_a_step(partial(torch.optim.AdamW, lr=1e-2), torch.bfloat16)
    assert updated > 0.9 * trained and lost < 0.1 * updated
    assert lost_in_a_step(partial(torch.optim.AdamW, lr=1e-5), torch.float32)[:2] == (0, 0)


def test_what_an_optimizer_of_somebody_elses_keeps_is_not_judged():
    class WithMasters(torch.optim.SGD):
        """One that keeps parameters in fp32 besides."""

    assert lost_in_a_step(partial(WithMasters, lr=1e-6), torch.bfloat16)[:2] == (0, 0)


# ---- parameters without a gradient


class Parts(nn.Module):
    """One part that is used, one that the loss does not use, one whose output is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.masked = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + 0.0 * self.masked(x)


def after_steps(optimizer_of: Any, steps: int = 3) -> tuple[Parts, torch.optim.Optimizer]:
    network = Parts()
    optimizer = optimizer_of(network.parameters())
    for _ in range(steps):
        network(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return network, optimizer


@pytest.mark.parametrize(
    "optimizer_of",
    [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.RMSprop, momentum=0.5)],
)
def test_parameters_without_a_gradient_are_read_from_the_optimizers_state(optimizer_of):
    network, optimizer = after_steps(optimizer_of)
    found = untrained(network, [optimizer])
    of_one = {"weight": 256, "bias": 32}
    assert found["bytes"] == 3 * 288
    assert found["without"] == {f"{part}.{name}": of_one[name] for part in ("unused", "masked") for name in of_one}
    network.unused.requires_grad_(False)
    network.masked.requires_grad_(False)
    assert untrained(network, [optimizer]) == {
        "bytes": 288, "without": {}, "with": ["used.weight", "used.bias"], "of_parts": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "optimizer_of,steps", [(partial(torch.optim.SGD, lr=0.1), 3), (torch.optim.AdamW, 0), (torch.optim.Adafactor, 3)]
)
def test_an_optimizer_that_keeps_no_averages_of_gradients_tells_nothing(optimizer_of, steps):
    network, optimizer = after_steps(optimizer_of, steps)
    assert "masked.weight" not in untrained(network, [optimizer]).get("without", {})
    assert untrained(network, []) == {}


def test_a_state_that_cannot_be_read_tells_nothing():
    network, optimizer = after_steps(torch.optim.AdamW)
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].as_subclass(Quantised)
    assert untrained(network, [optimizer]) == {}


def test_a_parameter_that_any_rank_has_seen_a_gradient_of_is_trained():
    whole = {"bytes": 900, "of_parts": False}
    one = whole | {"with": ["c.up.weight"], "without": {"a.up.weight": 400, "a.norm.bias": 10, "c.bias": 400}}
    other = whole | {"with": ["c.bias"], "without": {"a.up.weight": 400, "a.norm.bias": 0, "c.up.weight": 8}}
    found = untrained_everywhere([one, other])  # of a small parameter the other rank has no part
    assert found == {
        "untrained_parameters": 2, "untrained_bytes": 410, "untrained_modules": ["a"], "stepped_bytes": 900,
    }  # fmt: skip
    of_parts = untrained_everywhere([one | {"of_parts": True}, other | {"of_parts": True}])
    assert (of_parts["untrained_bytes"], of_parts["stepped_bytes"]) == (810, 1800), "as FSDP1 shards them"
    beside = one | {"with": ["a.up.bias"]}
    assert untrained_everywhere([beside])["untrained_modules"] == ["a.up.weight", "a.norm", "c"]
    assert untrained_everywhere([one, {}]) == untrained_everywhere([]) == {}
    assert untrained_everywhere([one, other | {"without": {}}])["untrained_bytes"] == 0


# ---- gradient scalers


def test_gradients_that_are_clipped_before_they_are_unscaled_are_seen():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(parameter.sum()).backward()
        assert are_scaled(scaler, 1.0)
        assert not are_scaled(scaler, 1.0 * scaler.get_scale()), "a norm of scaled gradients"
        assert not are_scaled(scaler, torch.inf), "their norm for a log"
        scaler.unscale_(optimizer)
        assert not are_scaled(scaler, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert not are_scaled(object(), 1.0), "a scaler of another library"


@pytest.mark.parametrize("fused", [True, False])
def test_steps_that_a_scaler_skips_are_counted_by_its_scale(fused):
    def skipped(gradient: float, backoff: float) -> dict[str, Any]:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], fused=fused)
        scaler, scales = torch.amp.GradScaler("cpu", backoff_factor=backoff), Scales()
        scales.scaler = scaler
        for step in range(6):
            scaler.scale(parameter.sum()).backward()
            parameter.grad.fill_(gradient)
            scaler.step(optimizer)
            if step in (1, 5):
                scales.read(step)
            scaler.update()
        return scales.as_report()

    assert skipped(torch.inf, 0.5) == {"scale": 32768.0, "last_scale": 2048.0, "skipped": 4, "scaled_steps": 4}
    assert skipped(torch.nan, 0.25)["skipped"] == 4
    assert skipped(1.0, 0.5) == {"scale": 65536.0, "last_scale": 65536.0, "skipped": 0, "scaled_steps": 4}
    assert Scales().as_report() == {}


# ---- epochs


def noted(recorder: RankRecorder) -> dict[str, int]:
    return {name: count for name, (count, _, _) in recorder.taken.activities.items()}


@pytest.fixture
def rank(tmp_path):
    return RankRecorder(Settings(str(tmp_path)))


def test_epochs_of_a_sampler_whose_epoch_is_not_set_are_seen(rank):
    train, validation = (DistributedSampler(range(8), num_replicas=2, rank=0) for _ in range(2))
    rank.epoch_begins(train, 0)
    rank.epoch_begins(train, 0)
    assert noted(rank) == {}, "a batch was looked at before the loop"
    rank._step = 4
    rank.epoch_begins(validation, 0)
    rank.epoch_begins(train, 0)
    assert noted(rank) == {"epoch begun": 1, "same order": 1}
    rank._step = 8
    rank.epoch_begins(train, 1)
    assert noted(rank) == {"epoch begun": 2, "same order": 1}


def test_an_error_in_what_a_hook_tells_ends_the_recording_and_not_the_job(rank, capsys):
    class Unhashable(DistributedSampler):
        __hash__ = None

    rank.epoch_begins(Unhashable(range(8), num_replicas=2, rank=0), 0)
    assert rank.done and "the recording has ended, the job goes on: TypeError" in capsys.readouterr().err


def test_a_scaler_of_another_form_ends_no_job(rank, capsys):
    rank.taken.scaler = SimpleNamespace(_per_optimizer_states={1: "ready"})
    rank.clips(1.0)
    assert rank.done and "the job goes on: AttributeError" in capsys.readouterr().err


# ---- backwards of one step


def seen_in(optimizers: list[Any], step: Any) -> dict[str, Any]:
    seen = Gradients(nn.ModuleList(), optimizers)
    step(seen)
    seen.end()
    return seen.as_report()


def adding(optimizers: list[Any], step: Any) -> int:
    return int(seen_in(optimizers, step)["adding_backwards"])


def test_backwards_that_add_up_are_told_from_those_of_gradients_that_are_set_to_zero_between():
    one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    of_one, of_other = (torch.optim.SGD([parameter], lr=0.1) for parameter in (one, other))

    def backward(seen: Gradients, loss: torch.Tensor) -> None:
        seen.before_backward()
        loss.backward()

    def micro_batches(seen: Gradients) -> None:
        for _ in range(3):
            backward(seen, one.sum())
        seen.before_update(of_one)
        of_one.zero_grad()

    def nearby(seen: Gradients) -> None:
        for set_to_none in (True, False):
            of_one.zero_grad(set_to_none)
            backward(seen, one.sum())
        seen.before_update(of_one)

    def in_turns(seen: Gradients) -> None:
        """A critic, and a generator whose loss goes through it."""
        of_one.zero_grad()
        backward(seen, one.sum())
        seen.before_update(of_one)
        of_other.zero_grad()
        backward(seen, (one * other).sum())
        seen.before_update(of_other)

    def by_a_closure(seen: Gradients) -> None:
        seen.before_update(of_one)
        nearby(seen)

    assert adding([of_one], micro_batches) == 2
    assert adding([of_one], nearby) == 0
    assert [adding([of_one, of_other], in_turns) for _ in range(2)] == [0, 0]
    assert adding([of_one], by_a_closure) == 0


def test_an_optimizer_that_is_made_anew_in_the_measured_step_is_told_of_too():
    parameter = nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.SGD([parameter], lr=0.1)]  # the recorder's own list, which it changes

    def step(seen: Gradients) -> None:
        for _ in range(2):
            seen.before_backward()
            parameter.sum().backward()
            optimizers[:] = [torch.optim.SGD([parameter], lr=0.1)]
            seen.before_update(optimizers[0])

    assert adding(optimizers, step) == 0  # each has a backward of its own


@pytest.mark.parametrize("zeroes", [True, False])
def test_gradients_that_another_models_backward_finds_may_be_set_to_zero_before_their_own(zeroes):
    """A critic that steps several times for each step of the generator, whose backward begins the measured step."""
    critic, generator = (nn.Parameter(torch.ones(3)) for _ in range(2))
    of_critic = torch.optim.SGD([critic], lr=0.1)

    def step(seen: Gradients) -> None:
        seen.before_backward()
        (critic * generator).sum().backward()
        if zeroes:
            of_critic.zero_grad()
        seen.before_backward()
        critic.sum().backward()
        seen.before_update(of_critic)

    critic.sum().backward()
    report = seen_in([of_critic], step)
    assert report["never_zeroed"] is not zeroes and bool(report["kept_gradient_bytes"]) is not zeroes
