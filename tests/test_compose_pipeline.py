"""Pipeline stages outside, sharding inside: torch's schedules drive the lab's units; the twin's training, bit for bit.

A stage's blocks compute what the whole model's compute, micro-batches are reduced once, in order, and their number is a
power of two, so that dividing by it rounds nothing: no tolerance is needed. Zero-bubble schedules compute weight
gradients later, and the lab adds what came meanwhile in one piece: there, and under tensor parallelism, equal to 1e-6.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)  # fmt: skip
from torch.nn import functional

from fsdplab import checkpoint
from fsdplab.teaching.core.comm_log import WireLog
from fsdplab.workloads import ModelError, build_model, loss_of, preset
from fsdplab.workloads.parallel import build_stage, parallelize, stage_span
from tests.composed import ENGINES, OnSlices, assert_near, mesh_of, tokens_of, train, twin_in, twins_in, whole
from tests.ranks import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
FOUR_BLOCKS = dataclasses.replace(preset("gpt-tiny"), layers=4)
ROWS = 4  # sequences a step: four micro-batches of one
SCHEDULES = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble,
}  # fmt: skip
SEVERAL = ("interleaved", "zero-bubble")  # two stages a rank, UNSHARD and RESHARD in the schedule


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Pipeline:
    """This rank's stages of a four-block GPT under one engine, and the schedule that drives them."""

    def __init__(self, engine: str, mesh: DeviceMesh, kind: str, reshard: bool | None = False) -> None:
        self.mesh, self.kind = mesh, kind
        here, across = mesh["pp"].get_local_rank(), mesh["pp"].size()
        self.numbers = [here, here + across] if kind in SEVERAL else [here]
        total = across * len(self.numbers)
        self.modules = [self._sharded(engine, number, total, reshard) for number in self.numbers]
        stages = [
            PipelineStage(module, number, total, torch.device("cpu"), group=mesh["pp"].get_group())
            for module, number in zip(self.modules, self.numbers)
        ]
        self.first, self.last = 0 in self.numbers, total - 1 in self.numbers
        self.schedule = SCHEDULES[kind](stages if kind in SEVERAL else stages[0], ROWS, loss_fn=entropy)

    def _sharded(self, engine: str, number: int, total: int, reshard: bool | None) -> nn.Module:
        module = build_stage(FOUR_BLOCKS, number, total)
        if "tp" in self.mesh.mesh_dim_names:
            parallelize(module, self.mesh["tp"])
        for block in module.blocks.values():
            ENGINES[engine](block, mesh=self.mesh["dp"], reshard_after_forward=reshard)
        return ENGINES[engine](module, mesh=self.mesh["dp"], reshard_after_forward=reshard)

    def step(self, number: int) -> list[float]:
        """One step's micro-batches through all stages; the losses of each on the last stage, [] elsewhere."""
        tokens, targets = tokens_of(number, self.mesh["dp"].get_local_rank(), ROWS)
        losses: list[Tensor] | None = [] if self.last else None
        self.schedule.step(*([tokens] if self.first else []), target=targets if self.last else None, losses=losses)
        return [loss.item() for loss in losses or []]

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def named(self) -> dict[str, Tensor]:
        return {name: parameter for module in self.modules for name, parameter in module.named_parameters()}


@pytest.fixture(scope="module")
def twin_of(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The file of the twin of so many data-parallel ranks."""
    replayed = twins_in(ranks, tmp_path_factory)
    return lambda count: replayed(build_model, FOUR_BLOCKS, count, loss_of, ROWS, ROWS)


def assert_trained_as(twin: nn.Module, pipeline: Pipeline, exactly: bool) -> None:
    for module in pipeline.modules:
        assert_near(module, twin)
    same = dict(twin.named_parameters())
    for name, parameter in pipeline.named().items() if exactly else ():
        assert torch.equal(whole(parameter), same[name]), name


def beside_twin(file: str, kind: str, shape: dict[str, int], *reshards: bool | None) -> None:
    """Three steps of each engine."""
    mesh, twin = mesh_of(**shape), twin_in(file)
    exactly = kind != "zero-bubble" and "tp" not in shape
    for case in [(engine, reshard) for reshard in reshards for engine in ENGINES]:
        pipeline = Pipeline(case[0], mesh, kind, case[1])
        optimizer = OnSlices(pipeline.parameters())
        for step in range(3):
            losses, expected = pipeline.step(step), twin.losses[step][mesh["dp"].get_local_rank()]
            expected = expected if exactly else pytest.approx(expected, rel=1e-6)
            assert losses == (expected if pipeline.last else []), case
            optimizer.step()
            optimizer.zero_grad()
        assert_trained_as(twin.model, pipeline, exactly)


TWO_BY_TWO = {"pp": 2, "dp": 2}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_stages_train_as_the_twin_does(ranks, twin_of, kind: str) -> None:
    ranks(4, beside_twin, twin_of(2), kind, TWO_BY_TWO, False)


@pytest.mark.parametrize("kind", ["1f1b", "interleaved"])
def test_units_dropped_between_forward_and_backward(ranks, twin_of, kind: str) -> None:
    """Each micro-batch gathers its units again; in between, forwards of later micro-batches run."""
    ranks(4, beside_twin, twin_of(2), kind, TWO_BY_TWO, None)


def test_one_data_rank_a_stage(ranks, twin_of) -> None:
    ranks(2, beside_twin, twin_of(1), "1f1b", {"pp": 2, "dp": 1}, False)


def test_pipeline_tensor_and_data_parallel_together(ranks, twin_of) -> None:
    ranks(4, beside_twin, twin_of(1), "1f1b", {"pp": 2, "dp": 1, "tp": 2}, False)


# ---- what travels


def counted() -> dict[str, dict[str, int]]:
    mesh = mesh_of(**TWO_BY_TWO)
    cases = [(engine, kind) for engine in ENGINES for kind in ("1f1b", "interleaved")]
    return {" ".join(case): counted_of(Pipeline(case[0], mesh, case[1])) for case in cases}


def counted_of(pipeline: Pipeline) -> dict[str, int]:
    """Collectives of the second step."""
    optimizer = OnSlices(pipeline.parameters())
    for step in range(2):
        # CommDebugMode does not bear torch's pipelining: it also follows modules through autograd
        with WireLog() as log:
            pipeline.step(step)
        optimizer.step()
        optimizer.zero_grad()
    kinds = Counter(call.kind for call in log.calls)
    return {kind: kinds[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce")}


def test_a_step_gathers_and_reduces_each_unit_once(ranks) -> None:
    """Four micro-batches, one gather and one reduction a unit: a rank has two blocks, and embeddings or the head
    besides.
    """
    for found in ranks(4, counted):
        for case, counts in found.items():
            assert counts == {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 0}, case


# ---- the stages' parts


def test_a_stage_has_the_whole_models_names_and_values() -> None:
    whole_model = build_model(FOUR_BLOCKS, seed=5).state_dict()
    parts: dict[str, Tensor] = {}
    for stage in range(3):
        parts |= build_stage(FOUR_BLOCKS, stage, 3, seed=5).state_dict()
    assert parts.keys() == whole_model.keys() and all(torch.equal(parts[name], whole_model[name]) for name in parts)
    assert all(parameter.is_meta for parameter in build_stage("gpt-tiny", 1, 2, device="meta").parameters())


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: build_stage("llama-tiny", 0, 2), "cut from a gpt whose head is its own"),
        (lambda: build_stage("gpt2", 0, 2, device="meta"), "cut from a gpt whose head is its own"),
        (lambda: stage_span(2, 2, 2), "stage must be from 0 to stages - 1 = 1, got 2"),
        (lambda: stage_span(2, 0, 3), "2 blocks cannot fill 3 pipeline stages"),
    ],
)
def test_impossible_stages_are_refused(make: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        make()


def saved(folder: str) -> None:
    """Each stage saves under its own folder; names are the whole model's, so the stages' states make up one model."""
    pipeline = Pipeline("lab", mesh_of(pp=2, dp=2), "1f1b")
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    train(pipeline.modules[0], 2, pipeline.step, optimizer)
    state = {name: whole(parameter) for name, parameter in pipeline.named().items()}
    torch.distributed.checkpoint.save(pipeline.modules[0].state_dict(), checkpoint_id=folder)
    torch.save(state, f"{folder}/stage{pipeline.numbers[0]}.pt")


def loaded(folder: str) -> None:
    model = ENGINES["lab"](build_model(FOUR_BLOCKS, seed=1))
    state = model.state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    expected = torch.load(f"{folder}/stage0.pt") | torch.load(f"{folder}/stage1.pt")
    assert checkpoint.full_state_dict(model).keys() in ({}.keys(), expected.keys())
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), expected[name]), name


def test_a_checkpoint_of_stages_loads_as_one_model(ranks, tmp_path) -> None:
    ranks(4, saved, str(tmp_path / "stages"))
    ranks(2, loaded, str(tmp_path / "stages"))
