"""Memory of any model, predicted from a recording of one micro-batch and held against real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch

from fsdplab.common.names import CATEGORIES
from fsdplab.engine import events, shard_model
from fsdplab.planning.lab_memory import MicroBatch, StepChoices, peak_of_step
from fsdplab.planning.lab_memory.presets import RECORDED, kept_recordings
from fsdplab.planning.lab_memory.step import Allocate, Call, Free
from fsdplab.planning.recorded_plan import recorded_traffic
from fsdplab.profiling import MemoryRecorder, TagLog
from fsdplab.sessions import RunSpec
from fsdplab.sessions.micro_batch import RecordChoices, record_micro_batch
from fsdplab.sessions.prediction import predict, predict_recorded
from fsdplab.sessions.preset_recordings import SIZES, lines_of, parts_of, record_preset
from fsdplab.sessions.recorded_model import recording_of
from fsdplab.sessions.spec import MEMORY_STEP
from fsdplab.workloads.shapes import PRESETS
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
        for step in range(MEMORY_STEP + 1):
            batch = workload.batch(At(step, torch.distributed.get_rank(), RANKS))
            if step == MEMORY_STEP:
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


@pytest.mark.parametrize("name", [*NAMES, "tied"])
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
        dict(units="linear", precision="bf16", model="llama-tiny"), dict(checkpoint="full", sequence_length=17),
        dict(units="linear", checkpoint="full"), dict(units="model", checkpoint="full"),
        dict(units="linear", checkpoint="selective", precision="bf16", model="llama-tiny"),
    ],
    ids=str,
)  # fmt: skip
def test_a_recording_of_a_preset_equals_what_is_kept(settings):
    """In every category, and though what is kept was recorded with other sizes."""
    spec = RunSpec(**{"model": "gpt-tiny", "device": "cpu", **settings})
    recording = recording_of(spec)
    assert not recording.real
    for more in (
        dict(), dict(strategy="zero2", micro_batches=2), dict(strategy="no_shard"), dict(world_size=3, prefetch=2),
        dict(strategy="hybrid_shard", world_size=4, shard_size=2),
    ):  # fmt: skip
        one = RunSpec(**{"model": "gpt-tiny", "device": "cpu", **settings, **more})
        played, kept = predict_recorded(one, recording), predict(one)
        assert played.bytes_per_step == kept.bytes_per_step
        assert played.by_category == kept.by_category, more


@pytest.mark.quick
def test_a_tied_head_gives_its_gradient_to_the_embedding(monkeypatch):
    """Its own part is among the activations until the embedding's is added: the head's is a view, so autograd sums
    into a third storage. Where a step has few tokens these three tables are the peak.
    """
    few = dict(strategy="zero2", batch_size=1, sequence_length=64)
    for name in ("gpt-tiny", "llama-tiny"):
        tied = replace(PRESETS[name], name=f"{name}-tied", tied=True, vocabulary=20_000)
        monkeypatch.setitem(PRESETS, tied.name, tied)
        for settings in (
            dict(), dict(precision="bf16"), dict(units="linear"), dict(units="model"), dict(checkpoint="full"),
            few, few | dict(precision="bf16", micro_batches=2), dict(units="linear", checkpoint="full"),
            dict(units="linear", checkpoint="selective", precision="bf16"),
        ):  # fmt: skip
            spec = RunSpec(model=tied.name, device="cpu", **settings)
            found, kept = predict_recorded(spec, recording_of(spec)), predict(spec)
            assert found.peak_bytes == pytest.approx(kept.peak_bytes, abs=1024), settings  # tokens are cut otherwise
            assert found.by_category["unsharded_gradients"] == kept.by_category["unsharded_gradients"], settings
            # the tokens are among them
            activations = pytest.approx(kept.by_category["activations"], abs=1024)
            assert found.by_category["activations"] == activations, settings
        table = 4 * tied.vocabulary * tied.width
        three_tables = predict(RunSpec(model=tied.name, device="cpu", **few)).by_category
        assert three_tables["activations"] + three_tables["unsharded_gradients"] > 3 * table


_OTHERS = pytest.mark.full("the same recording of another precision")


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_OTHERS if "bf16" in name else ()) for name in sorted(kept_recordings())]
)
def test_what_is_kept_is_a_recording(name):
    """`python -m fsdplab.sessions.preset_recordings` writes the file anew."""
    fresh = record_preset(*name.split())
    assert fresh == json.loads(RECORDED.read_text(encoding="utf-8"))[name]


@pytest.mark.quick
def test_the_peak_of_a_preset_is_predicted_without_torch():
    program = """if True:
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None
        from fsdplab.planning.lab_memory import LabRun, memory_of_step
        from fsdplab.workloads.shapes import PRESETS
        choices = dict(strategy="zero2", shards=2, replicas=1, checkpoint="full")
        print(sum(memory_of_step(LabRun(shape=PRESETS["llama-20m"], batch=3, sequence=250, **choices)).values()))
    """
    peak = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    spec = RunSpec(
        model="llama-20m", device="cpu", strategy="zero2", checkpoint="full", batch_size=3, sequence_length=250
    )
    assert predict(spec).peak_bytes == int(peak)


@pytest.mark.quick
def test_a_model_whose_blocks_differ_is_not_kept():
    """The second block has another storage than the first."""
    lines = [
        *("call before_forward root", "call before_forward blocks.0", "allocate 4*B*T*C activations"),
        *("call before_forward blocks.1", "allocate 4*B*T*F activations", "call begin_backward"),
        *("call before_backward blocks.1", "free 1", "call before_backward blocks.0", "free 1"),
    ]
    with pytest.raises(ValueError, match=r"'allocate 4\*B\*T\*F activations' where the first has 'allocate 4\*B\*T\*C"):
        parts_of(lines)
    lines[4] = lines[2]
    parts = parts_of(lines)
    assert parts["block forward"] == ["call before_forward blocks.{}", "allocate 4*B*T*C activations"]
    assert parts["block backward"] == ["call before_backward blocks.{}", "free 1"]


@pytest.mark.quick
def test_bytes_that_are_no_product_of_sizes_are_not_kept():
    tokens, width = SIZES["B"] * SIZES["T"], SIZES["C"]
    kept = lines_of([Allocate(1, 4 * tokens * width, "activations"), Free(1)])
    assert kept == ["allocate 4*B*T*C activations", "free 1"]
    with pytest.raises(ValueError, match="is 48 times the sizes .'B', 'T'.; expected one of"):
        lines_of([Allocate(1, 4 * tokens * (width + 1), "activations")])
    with pytest.raises(ValueError, match="expected a forward in training"):
        lines_of([Call("after_forward", "root", will_backward=False)])
