"""Tensor parallelism inside, sharding outside, on a 2-D mesh: the unsharded twin's training, and torch's own bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from fsdplab import checkpoint
from fsdplab.engine import clip_grad_norm_
from fsdplab.workloads import ModelError, build_model, initialise, loss_of
from fsdplab.workloads.parallel import parallelize
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
TWO_BY_TWO = {"dp": 2, "tp": 2}


def data(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that shards (and replicates): all but the last dimension."""
    return mesh[mesh.mesh_dim_names[:-1]] if mesh.ndim > 2 else mesh["dp"]


def composed(
    engine: str, name: str, mesh: DeviceMesh, sequence: bool, device: str | None = None, **options: object
) -> nn.Module:
    """A model that is tensor-parallel over the mesh's last dimension and sharded over the others."""
    model = parallelize(build_model(name, device=device), mesh["tp"], sequence)
    for block in model.blocks:
        ENGINES[engine](block, mesh=data(mesh), **options)
    return ENGINES[engine](model, mesh=data(mesh), **options)


def place(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's number among the data-parallel ranks, and how many there are;
    tensor-parallel ranks share one number.
    """
    ranks = math.prod(mesh.shape[:-1])
    return mesh.mesh.reshape(ranks, -1).eq(torch.distributed.get_rank()).any(dim=1).int().argmax().item(), ranks


# ---- equal to the twin


@pytest.fixture(scope="module")
def twin_of(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """The file of a model's twin on so many data-parallel ranks."""
    replayed = twins_in(ranks, tmp_path_factory)
    return lambda name, count: replayed(build_model, name, count, loss_of)


def beside_twin(file: str, name: str, shape: dict[str, int], sequences: tuple[bool, ...]) -> None:
    """Three steps of each engine."""
    mesh, twin = mesh_of(**shape), twin_in(file)
    (rank, _), cases = place(mesh), [(engine, sequence) for sequence in sequences for engine in ENGINES]
    for case in cases:
        model = composed(case[0], name, mesh, case[1])

        def checked(step: int, model: nn.Module = model, case: tuple[str, bool] = case) -> None:
            loss = loss_of(model, *tokens_of(step, rank))
            loss.backward()
            assert loss.item() == pytest.approx(twin.losses[step][rank][0], rel=1e-6, abs=0), case
            assert step or worst_gradient(model, twin.first_gradients) < 2e-6, case

        train(model, 3, checked)
        assert_near(model, twin.model)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_two_by_two_equals_the_twin(ranks, twin_of, name: str) -> None:
    ranks(4, beside_twin, twin_of(name, 2), name, TWO_BY_TWO, (False, True))


@pytest.mark.parametrize("shape", [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}])
def test_two_ranks_equal_the_twin(ranks, twin_of, shape: dict[str, int]) -> None:
    ranks(2, beside_twin, twin_of("gpt-tiny", shape["dp"]), "gpt-tiny", shape, (True,))


def test_hybrid_sharding_and_tensor_parallelism(ranks, twin_of) -> None:
    """Replicas x slices x tensor parallel: parameters at rest are 3-D DTensors."""
    shape = {"replicate": 2, "dp": 1, "tp": 2}
    ranks(4, beside_twin, twin_of("gpt-tiny", 2), "gpt-tiny", shape, (False,))


# ---- the lab beside torch in one program


def beside_torch(name: str, sequences: tuple[bool, ...]) -> None:
    mesh = mesh_of(**TWO_BY_TWO)
    for sequence in sequences:
        for reshard in (None, False):
            same_as_torchs(mesh, name, sequence, reshard)


def same_as_torchs(mesh: DeviceMesh, name: str, sequence: bool, reshard: bool | None) -> None:
    models = {
        engine: composed(engine, name, mesh, sequence, reshard_after_forward=reshard) for engine in ("lab", "torch")
    }
    # CommDebugMode loses count where blocks share a module, as Llama's share rotary positions
    counting = name == "gpt-tiny"
    rank, losses, counts = mesh["dp"].get_local_rank(), {}, {}
    for engine, model in models.items():

        def step_of(step: int, model: nn.Module = model) -> float:
            loss = loss_of(model, *tokens_of(step, rank))
            loss.backward()
            return loss.item()

        losses[engine] = train(model, 3, step_of)
        with CommDebugMode() if counting else nullcontext() as seen:
            step_of(3)
        counts[engine] = {str(op): count for op, count in seen.get_comm_counts().items()} if counting else {}
    assert losses["lab"] == losses["torch"]
    assert_same_bits(models["lab"], models["torch"])
    assert counts["lab"] == counts["torch"]
    for ours, theirs in zip(models["lab"].parameters(), models["torch"].parameters()):
        assert ours.grad.placements == theirs.grad.placements and torch.equal(
            ours.grad.to_local(), theirs.grad.to_local()
        )


@pytest.mark.parametrize("name,sequences", [("gpt-tiny", (False, True)), ("llama-tiny", (True,))])
def test_training_placements_and_collectives_are_torchs(ranks, name: str, sequences: tuple[bool, ...]) -> None:
    ranks(4, beside_torch, name, sequences)


def placements(engine: str) -> dict[str, tuple]:
    model = composed(engine, "gpt-tiny", mesh_of(**TWO_BY_TWO), False)
    first = [(name, p) for name, p in model.named_parameters() if not name.startswith("blocks.1")]
    return {name.removeprefix("blocks.0."): placed(p) for name, p in first}


@pytest.mark.parametrize("engine", ENGINES)
def test_where_parameters_are_at_rest(ranks, engine: str) -> None:
    """Columns are cut twice along dimension 0: first by tp, then by dp inside each tp share,
    which is a strided shard.
    """
    both, rows = ("dp", "tp"), (_StridedShard(0, split_factor=2), Shard(0))
    for found in ranks(4, placements, engine):
        assert found["attention.query.weight"] == (rows, both, (64, 64), (16, 64))
        assert found["attention.query.bias"] == (rows, both, (64,), (16,))
        assert found["attention.output.weight"] == ((Shard(0), Shard(1)), both, (64, 64), (32, 32))
        assert found["attention.output.bias"] == ((Shard(0), Replicate()), both, (64,), (32,))
        assert found["attention_norm.weight"] == ((Shard(0),), ("dp",), (64,), (32,))
        assert found["token_embedding.weight"] == (rows, both, (256, 64), (64, 64))


# ---- accumulation, clipping, meta device, checkpoints


def accumulated() -> None:
    """Two micro-batches, reduced once: with sequence parallelism norm gradients are partial sums over tp until then."""
    mesh, twin = mesh_of(**TWO_BY_TWO), build_model("gpt-tiny")
    replay_gradients(twin, [[tokens_of(micro, rank) for micro in range(2)] for rank in range(2)], loss_of)
    for engine in ENGINES:
        model = composed(engine, "gpt-tiny", mesh, True)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            (loss_of(model, *tokens_of(micro, mesh["dp"].get_local_rank())) / 2).backward()
        assert worst_gradient(model, twin) < 2e-6, engine


def test_accumulation(ranks) -> None:
    ranks(4, accumulated)


def clipped() -> list[list[float]]:
    mesh = mesh_of(**TWO_BY_TWO)
    return [norms_of(mesh, sequence) for sequence in (False, True)]


def norms_of(mesh: DeviceMesh, sequence: bool) -> list[float]:
    """Norms before and after clipping; parameters lie on a 1-D and on a 2-D mesh."""
    model, twin = composed("lab", "gpt-tiny", mesh, sequence), build_model("gpt-tiny")
    loss_of(model, *tokens_of(0, mesh["dp"].get_local_rank())).backward()
    replay_gradients(twin, [[tokens_of(0, rank)] for rank in range(2)], loss_of)
    norms = [clip_grad_norm_(model.parameters(), 0.5), torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)]
    assert type(norms[0]) is torch.Tensor and worst_gradient(model, twin) < 2e-6
    largest = [clip_grad_norm_(each.parameters(), 1.0, math.inf) for each in (model, twin)]
    torch.testing.assert_close(largest[0], largest[1], rtol=1e-5, atol=0)
    return [norm.item() for norm in norms]


def test_clipping_over_mixed_meshes_is_the_twins(ranks) -> None:
    for found in zip(*ranks(4, clipped)):
        assert len({ours for ours, _ in found}) == 1, "every rank must see the same norm"
        assert found[0][0] == pytest.approx(found[0][1], rel=1e-6) and found[0][1] > 0.5


def from_meta() -> None:
    mesh = mesh_of(**TWO_BY_TWO)
    for engine in ENGINES:
        initialised_from_meta(mesh, engine)


def initialised_from_meta(mesh: DeviceMesh, engine: str) -> None:
    model, twin = composed(engine, "llama-tiny", mesh, False, device="meta"), build_model("llama-tiny", seed=3)
    initialise(model.to_empty(device="cpu"), seed=3)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)
    loss = loss_of(model, *tokens_of(0, 0))
    torch.testing.assert_close(loss, loss_of(twin, *tokens_of(0, 0)), rtol=1e-6, atol=0)


def test_a_model_built_on_the_meta_device(ranks) -> None:
    ranks(4, from_meta)


def saved(folder: str) -> None:
    mesh = mesh_of(**TWO_BY_TWO)
    model = composed("lab", "gpt-tiny", mesh, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, 2, lambda step: loss_of(model, *tokens_of(step, mesh["dp"].get_local_rank())).backward(), optimizer)
    checkpoint.save(model, optimizer, folder)
    full = checkpoint.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        torch.save(full, Path(folder) / "full.pt")


def loaded(folder: str, shape: dict[str, int] | None, engine: str) -> None:
    """On another mesh, or on plain slices of all ranks: the same parameters and moments, and training goes on."""
    model = composed(engine, "gpt-tiny", mesh_of(**shape), True) if shape else build_model("gpt-tiny")
    for block in model.blocks if not shape else ():
        ENGINES[engine](block)
    model = model if shape else ENGINES[engine](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint.load(model, optimizer, folder)
    expected = torch.load(Path(folder) / "full.pt")
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), expected[name]), name
        assert optimizer.state[parameter]["step"].item() == 2
    train(model, 1, lambda step: loss_of(model, *tokens_of(9, 0)).backward(), optimizer)


def test_a_checkpoint_of_a_two_dimensional_mesh_loads_on_other_layouts(ranks, tmp_path) -> None:
    ranks(4, saved, str(tmp_path / "it"))
    ranks(2, loaded, str(tmp_path / "it"), {"dp": 1, "tp": 2}, "lab")
    ranks(2, loaded, str(tmp_path / "it"), {"dp": 2, "tp": 1}, "torch")
    ranks(2, loaded, str(tmp_path / "it"), None, "lab")


# ---- what cannot be cut


def refused() -> None:
    mesh = mesh_of(tp=1)
    parallelize(build_model("gpt-tiny"), mesh)
    with pytest.raises(ModelError, match="tied embeddings cannot be cut"):
        parallelize(build_model("gpt2", device="meta"), mesh)


def too_many() -> None:
    with pytest.raises(ModelError, match="over 4 ranks must divide kv_heads, ffn and vocabulary; got 2, 224 and 256"):
        parallelize(build_model("llama-tiny"), mesh_of(tp=4))


def test_models_that_cannot_be_cut_are_refused(ranks) -> None:
    ranks(1, refused)
    ranks(4, too_many)
