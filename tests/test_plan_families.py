"""Models by their config.json: as many parameters as published, and as transformers' model on the meta device has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdplab.planning.planner import plan
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.model_files import model_named, shape_of_config
from fsdplab.workloads.shapes import Experts, model

pytestmark = pytest.mark.quick

FOLDER = Path(__file__).parent / "configs"
FILES = sorted(FOLDER.glob("*.json"))
# what their model cards say, in billions: all parameters, and those that a token meets where these are fewer
PUBLISHED = {
    "gemma-2-9b": (9.24, None), "gemma-3-1b": (1.0, None), "olmo-1b": (1.18, None), "olmo-2-7b": (7.3, None),
    "smollm2-1.7b": (1.71, None), "smollm3-3b": (3.08, None), "qwen2.5-7b": (7.61, None), "qwen3-8b": (8.19, None),
    "mistral-7b": (7.24, None), "mixtral-8x7b": (46.7, 12.9), "qwen1.5-moe-a2.7b": (14.3, 2.7),
    "qwen3-30b-a3b": (30.5, 3.3), "deepseek-v2-lite": (15.7, 2.4), "deepseek-v3": (671.0, 37.0),
}  # fmt: skip


def shape_of(name: str):
    return model_named(str(FOLDER / f"{name}.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    total, active = PUBLISHED[name]
    shape = shape_of(name)
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    if active:  # cards differ in whether the embeddings count
        embedding = shape.vocabulary * shape.width
        assert shape.active_parameters - 2 * embedding < 1.03 * active * 1e9 < 1.08 * shape.active_parameters
    else:
        assert shape.active_parameters == shape.parameters


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_parameters_are_those_of_transformers(path):
    transformers = pytest.importorskip("transformers")
    import torch

    given = json.loads(path.read_text())
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model_named(str(path)).parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_named_mixtures_are_those_of_their_files(name):
    assert model(name).block == shape_of(name).block and model(name).root == shape_of(name).root


def test_every_file_is_a_row_above():
    assert {path.stem for path in FILES} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_is_planned(name):
    shape = shape_of(name)
    found = plan(shape, "h100", gpus=512, seq=min(2048, shape.context), checkpointing="full")
    assert found.tokens_per_s_per_gpu > 0 and 0 < found.mfu < 1
    states = found.memory.resting.by_category
    whole = 4 * shape.parameters / 512
    assert states["sharded_parameters"] == pytest.approx(whole, rel=0.12), "a dense model's slices, and some padding"


def test_a_model_of_which_only_some_blocks_have_experts_is_refused():
    config = json.loads((FOLDER / "qwen3-30b-a3b.json").read_text())
    for changed in ({"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}):
        with pytest.raises(ModelError, match="only some blocks have experts"):
            shape_of_config(config | changed, "some")


def test_wrong_experts_are_refused():
    with pytest.raises(ModelError, match="1 <= per_token <= count"):
        Experts(8, 9, 100)
