"""Losses of the ranks on the stand-in's GPUs equal the CPU twin's, and a wait that is left out changes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.machine import Done, Machine

Answer = list[float] | str
Trained = Callable[..., list[Answer]]
TINY = {"model": "gpt-tiny", "steps": 3, "profile": 0, "device": "cuda"}
TWIN = {**TINY, "engine": "twin", "device": "cpu"}
# Seeded delays before kernels and copies, and slow collectives: what is not ordered comes out of order.
DELAYS = {"SEED": 1, "KERNEL_DELAY_US": 300, "COPY_DELAY_US": 2000, "NCCL_US": 3000}


@pytest.fixture
def trained(on_gpus: Callable[..., Done], tmp_path: Path) -> Trained:
    """The losses of runs, in one process under the stand-in: `trained(machine, {"spec": ...}, ...)`."""

    def train(machine: Machine, *cases: dict[str, Any]) -> list[Answer]:
        answers = tmp_path / "losses.json"
        command = ("python", "-m", "tests.fake_cuda.train", json.dumps(cases), str(answers))
        done = on_gpus(machine, *command, limit_s=550)
        assert done.returncode == 0, done.output
        return list(json.loads(answers.read_text()))

    return train


def test_every_strategy_has_the_losses_of_the_twin_on_the_cpu(trained: Trained) -> None:
    strategies = ("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard")
    specs = [TWIN, *({**TINY, "strategy": name} for name in strategies), {**TINY, "engine": "torch-fsdp2"}]
    twin, *others = trained(Machine(gpus=2), *({"spec": spec} for spec in specs))
    for name, losses in zip((*strategies, "torch-fsdp2"), others):
        assert losses == pytest.approx(twin, rel=1e-6), name


def test_variants_have_the_losses_of_the_twin_on_the_cpu(trained: Trained) -> None:
    twice = {"micro_batches": 2}
    variants = [{"prefetch": 0}, {"prefetch": 2}, {"checkpoint": "full"}, {"checkpoint": "selective"}]
    specs = [TWIN, *({**TINY, **variant} for variant in variants), {**TWIN, **twice}, {**TINY, **twice}]
    twin, *single, twin_of_two, two = trained(Machine(gpus=2), *({"spec": spec} for spec in specs))
    for variant, losses in zip(variants, single):
        assert losses == pytest.approx(twin, rel=1e-6), variant
    assert two == pytest.approx(twin_of_two, rel=1e-6)


def test_delays_do_not_change_the_losses_but_a_wait_that_is_left_out_does(trained: Trained) -> None:
    left_out = ("nothing", "wait_stream in streams.py", "wait_event in streams.py")
    cases = [{"spec": TWIN}, *({"spec": TINY, "left_out": what} for what in left_out)]
    twin, all_waits, no_streams, no_events = trained(Machine(gpus=2, settings=DELAYS), *cases)
    assert all_waits == pytest.approx(twin, rel=1e-6)
    assert no_streams != pytest.approx(twin, rel=1e-3)
    # Losses are wrong, or the host asks for the time of a collective that nobody has waited for.
    asked = "Both events must be completed" in str(no_events)
    assert asked or no_events != pytest.approx(twin, rel=1e-3), (twin, no_events)


def test_four_ranks_of_hybrid_shard_have_the_losses_of_the_twin(trained: Trained) -> None:
    four = {"world_size": 4}
    hybrid = {**TINY, **four, "strategy": "hybrid_shard", "shard_size": 2}
    twin, losses = trained(Machine(gpus=4), {"spec": {**TWIN, **four}}, {"spec": hybrid})
    assert losses == pytest.approx(twin, rel=1e-6)


def test_bf16_and_llama_have_the_losses_of_the_twin_to_their_accuracy(trained: Trained) -> None:
    """Attention is cuDNN's here in bf16, and a GPU's operator for RMSNorm runs."""
    llama, bf16 = {"model": "llama-tiny"}, {"precision": "bf16"}
    specs = [{**TWIN, **llama}, {**TINY, **llama}, {**TWIN, **bf16}, {**TINY, **bf16, "checkpoint": "selective"}]
    twin, losses, twin_in_bf16, losses_in_bf16 = trained(Machine(gpus=2), *({"spec": spec} for spec in specs))
    assert losses == pytest.approx(twin, rel=1e-6)
    assert losses_in_bf16 == pytest.approx(twin_in_bf16, rel=1e-4)
