"""The two sentences beside a plan are there, or empty, for every plan that does not contradict itself."""

from __future__ import annotations

import random

import pytest

from fsdplab.common.names import STRATEGIES
from fsdplab.planning.advice import hiding_sentence, hybrid_sentence
from fsdplab.planning.plan_spec import OPTIMIZERS, PlanSpec, changed
from fsdplab.planning.planner import plan_spec

pytestmark = pytest.mark.quick
DRAWN = 200


def drawn() -> list[PlanSpec]:
    """Plans whose choices are drawn, the same in every run."""
    draw, found = random.Random(3), list[PlanSpec]()
    names = ("gpt2", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b", "mixtral-8x7b")
    models = [plan_spec(name, "h100").model for name in names]
    while len(found) < DRAWN:
        spec = plan_spec("gpt2", draw.choice(["h100", "a100-40gb"]), gpus=draw.choice([1, 2, 8, 16, 64]), seq=1024)
        other = changed(
            spec, model=draw.choice(models), strategy=draw.choice(STRATEGIES),
            tensor_parallel=draw.choice([1, 1, 2, 4, 8]), context_parallel=draw.choice([1, 1, 2]),
            pipeline_parallel=draw.choice([1, 1, 2]), expert_parallel=draw.choice([1, 1, 2, 8]),
            offload=draw.random() < 0.2, lora_rank=draw.choice([0, 16]), prefetch=draw.choice([0, 1, 2]),
            optimizer=draw.choice(list(OPTIMIZERS)), grad_accum=draw.choice([1, 4]),
        )  # fmt: skip
        found += [other] if other else []
    return found


def test_every_plan_has_its_sentences_or_none():
    for spec in drawn():
        hybrid, hiding = hybrid_sentence(spec), hiding_sentence(spec)
        assert "nan" not in hybrid + hiding
        assert not hybrid or spec.gpus > spec.gpus_per_node
        assert not hiding or spec.pipeline_parallel == 1


def test_a_gpu_of_unknown_speed_has_none():
    spec = plan_spec("gpt2", "t4", gpus=2)
    assert hybrid_sentence(spec) == hiding_sentence(spec) == ""
