"""Expert parallelism: experts on one mesh, everything else on another, in one model; the dense twin's training comes
out.

Tokens of several ranks meet in one expert's matrix product, so expert gradients are summed in another order than the
twin's: equal to 1e-6, and torch's engine differs from the twin as much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from fsdplab import checkpoint
from fsdplab.engine import clip_grad_norm_
from fsdplab.workloads import ModelError, initialise
from fsdplab.workloads.moe import (
    MOE_PRESETS,
    MoE,
    MoEConfig,
    Routing,
    build_moe,
    dispatch,
    moe_loss_of,
    spread_experts,
)  # fmt: skip
from fsdplab.workloads.twin import replay_gradients
from tests.composed import (
    ENGINES,
    assert_near,
    assert_same_bits,
    mesh_of,
    placed,
    tokens_of,
    train,
    twin_in,
    twins_in,
    whole,
    worst_gradient,
)  # fmt: skip
from tests.ranks import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def composed(engine: str, mesh: DeviceMesh, columns: bool = False, divide: bool = True, device: str = "cpu") -> MoE:
    """Experts over `ep`, sharded over `efsdp`; the rest sharded over all ranks. `columns` cuts experts along dimension
    1.
    """
    shard, model, everyone = ENGINES[engine], spread_experts(build_moe(device=device), mesh["ep"]), mesh._flatten("dp")
    cut = {"shard_placement_fn": lambda parameter: Shard(1)} if columns else {}
    for block in model.blocks:
        experts = shard(block.feed_forward.experts, mesh=mesh["efsdp"], **cut)
        if divide:
            experts.set_gradient_divide_factor(float(mesh.size()))
            # torch's other way asks gloo for what it has not; where one rank shards, torch 2.13 divides twice with this
            # way
            experts.set_force_sum_reduction_for_comms(mesh["efsdp"].size() > 1)
        shard(block, mesh=everyone)
    return shard(model, mesh=everyone)


def experts_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".experts." in name}


# ---- equal to the twin


@pytest.fixture(scope="module")
def twin_of(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The file of the twin of so many ranks."""
    replayed = twins_in(ranks, tmp_path_factory)
    return lambda count: replayed(build_moe, "moe-tiny", count, moe_loss_of)


def beside_twin(file: str, efsdp: int, ep: int, columns: bool) -> None:
    """Three steps of each engine."""
    mesh, twin, rank = mesh_of(efsdp=efsdp, ep=ep), twin_in(file), dist.get_rank()
    for engine in ENGINES:
        model = composed(engine, mesh, columns)

        def checked(step: int, model: nn.Module = model, engine: str = engine) -> None:
            loss = moe_loss_of(model, *tokens_of(step, rank))
            loss.backward()
            assert loss.item() == pytest.approx(twin.losses[step][rank][0], rel=1e-6), engine
            assert step or worst_gradient(model, twin.first_gradients) < 1e-6, engine

        train(model, 3, checked)
        assert_near(model, twin.model)


@pytest.mark.parametrize(("efsdp", "ep", "columns"), [(2, 2, False), (2, 2, True), (1, 4, False)])
def test_four_ranks_equal_the_twin(ranks, twin_of, efsdp: int, ep: int, columns: bool) -> None:
    """1 x 4: experts are nowhere sharded, so nothing of theirs is gathered or reduced,
    but their gradients are divided.
    """
    ranks(4, beside_twin, twin_of(4), efsdp, ep, columns)


@pytest.mark.parametrize(("efsdp", "ep"), [(1, 2), (2, 1)])
def test_two_ranks_equal_the_twin(ranks, twin_of, efsdp: int, ep: int) -> None:
    ranks(2, beside_twin, twin_of(2), efsdp, ep, False)


def undivided(file: str) -> list[float]:
    """Expert gradients over the twin's, with the divide factor left at its default:
    the size of the group that shards.
    """
    mesh, expected, found = mesh_of(efsdp=2, ep=2), dict(twin_in(file).first_gradients.named_parameters()), []
    for engine in ENGINES:
        model = composed(engine, mesh, divide=False)
        moe_loss_of(model, *tokens_of(0, dist.get_rank())).backward()
        found += [float(whole(p.grad).norm() / expected[name].grad.norm()) for name, p in experts_of(model).items()]
    return found


def test_without_the_divide_factor_expert_gradients_are_too_large(ranks, twin_of) -> None:
    """The loss is a mean over four ranks, the group that shards experts has two: twice too large, in both engines."""
    for found in ranks(4, undivided, twin_of(4)):
        assert len(found) >= 4 and found == pytest.approx([2.0] * len(found), rel=1e-5)


# ---- the lab beside torch in one program


def beside_torch() -> None:
    """On two ranks all sums have two terms, so that their order cannot differ."""
    mesh = mesh_of(efsdp=1, ep=2)
    models = {engine: composed(engine, mesh) for engine in ("lab", "torch")}
    losses, counts = {}, {}
    for engine, model in models.items():

        def step_of(step: int, model: nn.Module = model) -> float:
            loss = moe_loss_of(model, *tokens_of(step, dist.get_rank()))
            loss.backward()
            return loss.item()

        losses[engine] = train(model, 3, step_of)
        with CommDebugMode() as seen:
            step_of(3)
        counts[engine] = {str(op).removeprefix("c10d."): count for op, count in seen.get_comm_counts().items()}
    assert losses["lab"] == losses["torch"]
    assert_same_bits(models["lab"], models["torch"])
    assert counts["lab"] == counts["torch"]


def test_losses_parameters_and_collectives_are_torchs(ranks) -> None:
    ranks(2, beside_torch)


def counted() -> list[dict[str, int]]:
    mesh, found = mesh_of(efsdp=2, ep=2), []
    for engine in ENGINES:
        model = composed(engine, mesh)
        with CommDebugMode() as seen:
            moe_loss_of(model, *tokens_of(0, dist.get_rank())).backward()
        found.append({str(op).removeprefix("c10d."): count for op, count in seen.get_comm_counts().items()})
    return found


def test_collectives_of_a_step(ranks) -> None:
    """Two blocks and two sets of experts are gathered twice, the root once; each of the five is reduced once. A layer
    sends counts, tokens and answers forward, and two gradients back: five all-to-alls.
    """
    for found in ranks(4, counted):
        assert found == [{"_allgather_base_": 9, "_reduce_scatter_base_": 5, "alltoall_base_": 10}] * len(ENGINES)


def where(engine: str, columns: bool) -> dict[str, tuple]:
    model = composed(engine, mesh_of(efsdp=2, ep=2), columns)
    return {name.removeprefix("blocks.0."): placed(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_where_parameters_are_at_rest(ranks, engine: str, columns: bool) -> None:
    cut = Shard(1) if columns else _StridedShard(0, split_factor=2)
    for found in ranks(4, where, engine, columns):
        local = (2, 32, 128) if columns else (1, 64, 128)
        assert found["feed_forward.experts.up"] == ((cut, Shard(0)), ("efsdp", "ep"), (4, 64, 128), local)
        assert found["feed_forward.router.weight"] == ((Shard(0),), ("dp",), (4, 64), (1, 64))


# ---- clipping, checkpoints, meta device


def clipped() -> tuple[float, float]:
    mesh = mesh_of(efsdp=2, ep=2)
    model, twin = composed("lab", mesh), build_moe()
    moe_loss_of(model, *tokens_of(0, dist.get_rank())).backward()
    replay_gradients(twin, [[tokens_of(0, r)] for r in range(4)], moe_loss_of)
    norms = clip_grad_norm_(model.parameters(), 0.5), nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    assert worst_gradient(model, twin) < 1e-6
    return norms[0].item(), norms[1].item()


def test_clipping_over_mixed_meshes_is_the_twins(ranks) -> None:
    found = ranks(4, clipped)
    assert len({ours for ours, _ in found}) == 1 and found[0][1] > 0.5
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-6)


def saved(folder: str) -> None:
    model = composed("lab", mesh_of(efsdp=2, ep=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, 2, lambda step: moe_loss_of(model, *tokens_of(step, dist.get_rank())).backward(), optimizer)
    checkpoint.save(model, optimizer, folder)
    full = checkpoint.full_state_dict(model)
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}/full.pt")


def loaded(folder: str, efsdp: int, ep: int) -> None:
    model = composed("lab", mesh_of(efsdp=efsdp, ep=ep))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint.load(model, optimizer, folder)
    expected = torch.load(f"{folder}/full.pt")
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), expected[name]), name
        assert optimizer.state[parameter]["step"].item() == 2
    train(model, 1, lambda step: moe_loss_of(model, *tokens_of(9, dist.get_rank())).backward(), optimizer)


def test_a_checkpoint_loads_on_another_spread(ranks, tmp_path) -> None:
    ranks(4, saved, str(tmp_path / "it"))
    ranks(2, loaded, str(tmp_path / "it"), 1, 2)
    ranks(1, loaded, str(tmp_path / "it"), 1, 1)


def from_meta(engine: str) -> None:
    model, twin = composed(engine, mesh_of(efsdp=2, ep=2), device="meta"), build_moe(seed=3)
    initialise(model.to_empty(device="cpu"), seed=3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_built_on_the_meta_device(ranks, engine: str) -> None:
    ranks(4, from_meta, engine)


# ---- the workload itself


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"experts_per_token": 5}, "experts_per_token must be from 1 to the number of experts, got 5 of 4 experts"),
        ({"experts_per_token": 0}, "experts_per_token is 0; expected a whole number"),
        ({"balance_weight": -1.0}, "balance_weight must be 0 or more, got -1.0"),
        ({"tied": True}, "a gpt with a head of its own"),
        ({"layers": 0}, "layers is 0; expected a whole number"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        dataclasses.replace(MOE_PRESETS["moe-tiny"], **changes)
    with pytest.raises(ModelError, match="unknown mixture-of-experts model 'moe-large'"):
        build_moe("moe-large")


def test_tokens_are_sorted_by_expert_and_put_back() -> None:
    routing = Routing.of(torch.tensor([[1, 0], [0, 2]]), experts=3)
    assert routing.order.tolist() == [1, 2, 0, 3] and routing.counts.tolist() == [2, 1, 1]
    assert routing.token.tolist() == [0, 1, 0, 1]
    assert routing.restore(torch.tensor([10, 20, 30, 40])).tolist() == [30, 10, 20, 40]
    even = Routing.of(torch.tensor([[0, 1], [2, 0], [1, 2]]), experts=3)
    assert even.balance(torch.full((3, 3), 1 / 3)).item() == pytest.approx(1.0)
    assert routing.balance(torch.tensor([[1.0, 0.0, 0.0]])).item() == pytest.approx(1.5)


def test_each_token_gets_its_experts_answers() -> None:
    """Dense, by the definition: the sum over chosen experts of probability times answer."""
    model = build_moe()
    layer, x = model.blocks[0].feed_forward, torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    probabilities = layer.router(x).softmax(-1)
    pairs = zip(layer.experts.up, layer.experts.down)
    answers = torch.stack([nn.functional.gelu(x @ up, approximate="tanh") @ down for up, down in pairs], dim=2)
    kept = probabilities * (probabilities >= probabilities.topk(2, dim=-1).values[..., -1:])
    torch.testing.assert_close(layer(x)[0], (kept.unsqueeze(-1) * answers).sum(dim=2))


def exchanged() -> tuple[list[float], list[float]]:
    """Rank r sends 3 rows of value r to expert 0 (rank 0's) and none elsewhere;
    an expert multiplies by its number + 2.
    """
    rows = torch.full((3, 1), float(dist.get_rank()), requires_grad=True)
    routing = Routing.of(torch.zeros(3, 1, dtype=torch.int64), experts=4)
    first = 2 * dist.get_rank()

    def experts(arrived: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return torch.cat([part * (first + index + 2) for index, part in enumerate(arrived.split(counts))])

    answers = dispatch(rows, routing, experts, dist.group.WORLD)
    answers.sum().backward()
    return answers.flatten().tolist(), rows.grad.flatten().tolist()


def test_tokens_travel_and_return_also_where_an_expert_gets_none(ranks) -> None:
    assert ranks(2, exchanged) == [([0.0] * 3, [2.0] * 3), ([2.0] * 3, [2.0] * 3)]


def uneven() -> None:
    with pytest.raises(ModelError, match="6 experts cannot be spread evenly over a mesh of shape"):
        spread_experts(build_moe(dataclasses.replace(MOE_PRESETS["moe-tiny"], experts=6), device="meta"), mesh_of(ep=4))


def test_experts_that_do_not_divide_are_refused(ranks) -> None:
    ranks(4, uneven)
    assert isinstance(MOE_PRESETS["moe-tiny"], MoEConfig)
