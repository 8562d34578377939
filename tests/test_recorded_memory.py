"""Memory of any model, predicted from a recording of one micro-batch and held against real ranks."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fsdplab.common.names import CATEGORIES
from fsdplab.engine import events, shard_model
from fsdplab.planning.lab_memory import MicroBatch, StepChoices, peak_of_step
from fsdplab.planning.recorded_plan import recorded_traffic
from fsdplab.profiling import MemoryRecorder, TagLog
from fsdplab.sessions import RunSpec
from fsdplab.sessions.micro_batch import RecordChoices, record_micro_batch
from fsdplab.sessions.prediction import predict, predict_recorded
from fsdplab.sessions.worker.engines import as_argument, units_of, workload_of
from fsdplab.workloads.workload import At
from tests.own_models import NAMES, OwnModel

RANKS = 2
STRATEGIES = ("full_shard", "zero2", "no_shard")


@cache
def recorded(name: str) -> MicroBatch:
    """One micro-batch of a model in tests/own_models."""
    workload = OwnModel(name)
    return record_micro_batch(workload, RecordChoices(lambda _: tuple(workload.file.units), world_size=RANKS))


def predicted(name: str, strategy: str) -> dict[str, int]:
    """The bytes at the peak by category."""
    shards = 1 if strategy == "no_shard" else RANKS
    return peak_of_step(StepChoices(strategy=strategy, shards=shards, replicas=RANKS // shards), recorded(name))


def measured(name: str, strategy: str) -> tuple[dict[str, int], int]:
    """The same on one of the ranks that train, and the bytes that it sends in a step; called on each."""
    workload, device, sent = OwnModel(name), torch.device("cpu"), []
    with TagLog() as tags:
        model = workload.build(device, 0)
        shard_model(model, strategy, units=tuple(workload.file.units), transport="shm")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for step in range(4):  # buffers that units of unequal size take in turn have grown by then
            batch = workload.batch(At(step, torch.distributed.get_rank(), RANKS))
            if step == 3:
                recorder = MemoryRecorder(model=model, optimizer=optimizer, engine="lab", device=device, tags=tags)
                unsubscribe = events.subscribe(lambda event: sent.append(getattr(event, "wire_bytes", 0)))
                with recorder:
                    _train(workload, model, optimizer, batch)
            else:
                _train(workload, model, optimizer, batch)
    events.flush()
    unsubscribe()
    return {category: recorder.timeline.peak[category] for category in CATEGORIES}, sum(sent)


def _train(workload, model, optimizer, batch) -> None:
    workload.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_models_that_are_no_language_models(ranks, name):
    for strategy in STRATEGIES:
        expected, sent = ranks(RANKS, measured, name, strategy)[0]
        found = sum(predicted(name, strategy).values())
        assert sum(row.step_bytes for row in recorded_traffic(recorded(name), strategy, RANKS)) == sent
        assert found == pytest.approx(sum(expected.values()), rel=0.03), (strategy, predicted(name, strategy), expected)


@pytest.mark.quick
@pytest.mark.parametrize(
    "settings",
    [
        dict(), dict(model="llama-tiny"), dict(precision="bf16"), dict(precision="bf16", model="llama-tiny"),
        dict(units="linear"), dict(units="model"), dict(checkpoint="full", batch_size=8),
        dict(checkpoint="selective", model="llama-tiny"), dict(model="gpt-20m", sequence_length=33),
    ],
    ids=str,
)  # fmt: skip
def test_a_recording_of_a_preset_equals_its_tape(settings):
    """In every category, but for the two scalars that a loss divides; the tape knows no such thing."""
    spec = RunSpec(**{"model": "gpt-tiny", "device": "cpu", **settings})
    workload = workload_of(spec)
    recording = record_micro_batch(
        workload,
        RecordChoices(
            lambda model: as_argument(units_of(spec, model, workload).modules),
            low_precision=spec.precision == "bf16",
            checkpoint=spec.checkpoint,
        ),
    )
    assert not recording.real
    for more in (
        dict(), dict(strategy="zero2", micro_batches=2), dict(strategy="no_shard"), dict(world_size=3, prefetch=2),
        dict(strategy="hybrid_shard", world_size=4, shard_size=2),
    ):  # fmt: skip
        one = RunSpec(**{"model": "gpt-tiny", "device": "cpu", **settings, **more})
        played, taped = predict_recorded(one, recording), predict(one)
        assert played.bytes_per_step == taped.bytes_per_step
        for category in CATEGORIES:
            assert played.by_category[category] == pytest.approx(taped.by_category[category], abs=16), (more, category)
