"""A causal language model from a Hugging Face folder: offline, sharded from the meta device, never held whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers has no release for this Python")

from fsdplab import RunSpec, compare  # noqa: E402
from fsdplab.records import comparison_json  # noqa: E402
from fsdplab.sessions import SpecError, call_on_ranks  # noqa: E402
from fsdplab.sessions.worker.engines import workload_of  # noqa: E402
from fsdplab.workloads.errors import ModelError  # noqa: E402

SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=300,
    max_position_embeddings=128,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=300, n_positions=128, bos_token_id=0, eos_token_id=0
    ),
}


@pytest.fixture
def folder(tmp_path):
    return lambda name: (CONFIGS[name]().save_pretrained(tmp_path / name), str(tmp_path / name))[1]


@pytest.mark.parametrize("name,peer", [("tied", ("torch-ddp", "no_shard")), ("gpt2", ("torch-fsdp2", "full_shard"))])
def test_engines_train_it_as_the_twin_does(folder, name, peer):
    how = dict(model=folder(name), steps=1, sequence_length=32, device="cpu")
    specs = [RunSpec(engine=engine, strategy=strategy, **how) for engine, strategy in (("lab", "full_shard"), peer)]
    records = compare([*specs, RunSpec(engine="twin", memory=False, **how)])
    runs = comparison_json(records, records[-1])["runs"]
    assert all(each["matches_reference"] for each in runs), [record.failure for record in records]
    told = records[0].environment["workload"]
    assert records[0].spec["model"] == name and records[0].summary.tokens_per_s and told["units"].startswith("2 x ")


def test_values_are_as_transformers_draws_them(folder):
    """Of the model's own rule: deviation 0.02 for weights, ones for norms, and buffers as they are computed."""
    work = workload_of(RunSpec(model=folder("llama"), sequence_length=32))
    model = work.build("cpu", 0)
    torch.manual_seed(0)
    usual = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    for (name, ours), theirs in zip(model.named_parameters(), usual.parameters()):
        assert ours.shape == theirs.shape and ours.std().item() == pytest.approx(theirs.std().item(), abs=4e-3), name
    assert [*model.named_buffers()] and all(
        torch.equal(ours, theirs) for ours, theirs in zip(model.buffers(), usual.buffers())
    )
    tied = workload_of(RunSpec(model=folder("tied"), sequence_length=32)).build("cpu", 0)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_weights_of_the_folder_are_taken(folder, tmp_path):
    torch.manual_seed(5)
    kept = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    kept.save_pretrained(tmp_path / "kept")
    work = workload_of(RunSpec(model=str(tmp_path / "kept"), sequence_length=32))
    model = work.build("cpu", 0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), kept.parameters()))
    assert "weights of its folder" in work.notes(model)[0]
    other = dict(CONFIGS["llama"]().to_dict(), num_hidden_layers=3)
    transformers.LlamaConfig(**other).save_pretrained(tmp_path / "kept")
    with pytest.raises(ModelError, match="have no model.layers.2.* and 8 others"):
        workload_of(RunSpec(model=str(tmp_path / "kept"), sequence_length=32)).build("cpu", 0)


PEAK = '''
"""Bytes by which a rank's memory rose at most while a model is sharded from the meta device and filled."""
from pathlib import Path
import torch
from fsdplab.sessions import RunSpec
from fsdplab.sessions.worker.engines import held, workload_of


def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak(rank, world_size, folder):
    spec = RunSpec(model=folder, sequence_length=32, world_size=world_size, device="cpu")
    work, device = workload_of(spec), torch.device("cpu")
    work.build("meta", 0)  # imports the model's code
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work.fill(held(spec, device, work.build("meta", 0), work).model, device, 0)
    return status("VmHWM") - before
'''


def test_no_rank_holds_the_whole_model_while_it_is_built(tmp_path):
    wide = dict(SMALL, hidden_size=768, intermediate_size=2048, num_hidden_layers=8)
    config = transformers.LlamaConfig(**wide)
    config.save_pretrained(tmp_path / "wide")
    with torch.device("meta"):
        whole = 4 * sum(each.numel() for each in transformers.AutoModelForCausalLM.from_config(config).parameters())
    assert whole > 220e6
    program = tmp_path / "peak.py"
    program.write_text(PEAK)
    peaks = call_on_ranks(program, "peak", world_size=2, payload=str(tmp_path / "wide"), time_limit=90)
    assert max(peaks) < 0.72 * whole, f"a rank held {max(peaks) / whole:.0%} of the model"


@pytest.mark.parametrize(
    "changed,settings,words",
    [
        (dict(vocab_size=100), {}, "has a vocabulary of 100, and the text's tokens are the 256 bytes"),
        ({}, dict(sequence_length=200), "takes at most 128 tokens, got sequence_length=200"),
    ],
)
def test_a_text_that_does_not_fit_gets_one_sentence(tmp_path, changed, settings, words):
    transformers.LlamaConfig(**{**SMALL, **changed}).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=words):
        workload_of(RunSpec(model=str(tmp_path / "model"), **{"sequence_length": 32, **settings})).build("cpu", 0)


def test_a_type_that_is_no_language_model_gets_one_sentence(tmp_path):
    Path(tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="transformers cannot build a causal language model"):
        workload_of(RunSpec(model=str(tmp_path))).build("cpu", 0)
    Path(tmp_path / "config.json").write_text('{"model_type": 3}')
    with pytest.raises(SpecError, match="names no model_type"):
        RunSpec(model=str(tmp_path))
