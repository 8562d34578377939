"""The closed form: parameter counts, the published claims, errors, and the command's table and JSON."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from fsdplab import cli, planning
from fsdplab.common.names import CATEGORIES, STRATEGIES
from fsdplab.figures.plots.plans import sweep_figure
from fsdplab.planning import HardwareError, PlanError, plan, plan_traffic, planner
from fsdplab.planning import step_time as step_time_module
from fsdplab.planning.activations import block_tensors, computed_per_token, kept_per_token
from fsdplab.planning.bands import memory_band
from fsdplab.planning.efficiency import (
    ASSUMED,
    FP8_SPEEDUP,
    LAUNCH_S,
    LAUNCHES,
    Efficiency,
    attention_of,
    efficiency_of,
)
from fsdplab.planning.hardware import GPUS, find_gpu
from fsdplab.planning.links import LinkSpec
from fsdplab.planning.memory import FRAMEWORK_BYTES
from fsdplab.planning.plan_spec import CHECKPOINTINGS, MASTERS, OPTIMIZERS, flag_of, under_each_strategy
from fsdplab.planning.planner import SWEPT, SWEPT_WORDS, plan_of, plan_spec, swept_name
from fsdplab.planning.remedies import remedies, shortfall
from fsdplab.planning.step_time import rates_of
from fsdplab.workloads.errors import ModelError
from fsdplab.workloads.model_files import model_named
from fsdplab.workloads.shapes import SHAPES

pytestmark = pytest.mark.quick

PUBLISHED = {  # of model cards, papers and checkpoints
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648, "qwen3-8b": 8_190_735_360, "gpt-neox-20b": 20_554_567_680,
}  # fmt: skip


# ---- parameters


MODULES = [each.name for each in pkgutil.walk_packages(planning.__path__, "fsdplab.planning.")]


@pytest.mark.parametrize("name", [*MODULES, "fsdplab.workloads.shapes"])
def test_the_docstrings_examples_hold(name):
    assert not doctest.testmod(importlib.import_module(name)).failed


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_counts(name):
    assert model_named(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", [each for each in SHAPES if each.startswith("mpt-")])
def test_mosaics_own_formula(name):
    shape = SHAPES[name]
    d, L = shape.width, shape.layers
    assert shape.parameters == L * (12 * d * d + 13 * d) + 2 * d + 50_368 * d + 2048 * d


CONFIGS = {  # counts equal those that transformers 4.57.6 builds
    "llama": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14_336, "vocab_size": 128_256, "max_position_embeddings": 131_072}, 8_030_261_248),
    "mistral": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14_336, "vocab_size": 32_000}, 7_241_732_096),
    "qwen2": (
        {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
         "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True}, 494_032_768),
    "qwen3": (
        {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936}, 8_190_735_360),
    "phi3": (
        {"hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
         "intermediate_size": 8192, "vocab_size": 32_064}, 3_821_079_552),
    "gemma": (
        {"hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1,
         "intermediate_size": 16_384, "vocab_size": 256_000}, 2_506_172_416),
    "gpt2": ({}, 124_439_808),
    "gpt_neox": (
        {"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24_576,
         "vocab_size": 50_432}, 20_554_567_680),
    "mpt": ({"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50_432, "no_bias": True,
             "attn_config": {"alibi": True}}, 6_649_286_656),
    "opt": (
        {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
         "vocab_size": 50_272}, 1_315_758_080),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_json_gives_the_published_count(kind, tmp_path):
    config, count = CONFIGS[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **config}))
    assert model_named(str(path)).parameters == model_named(str(tmp_path)).parameters == count


@pytest.mark.parametrize(
    "text,words",
    [
        ('{"model_type": "mistrall"}', "model_type is 'mistrall' (did you mean mistral"),
        ('{"model_type": "dbrx", "num_experts": 8}', "model_type is 'dbrx'; expected one of"),
        ('{"model_type": "gpt2", "n_layer": 999999999}', "the model has 999,999,999 layers; expected at most 10,000"),
        ('{"hidden_size": 8}', "model_type is None"),
        ("{", "is no JSON file"),
        ("[1]", "holds no JSON object"),
        ('{"model_type": "llama"}', "hidden_size is None"),
        ('{"model_type": "llama", "hidden_size": -1}', "hidden_size is -1"),
        ('{"model_type": "gpt2", "n_head": 7}', "7 heads do not divide the width 768"),
        ('{"model_type": "gpt2", "tie_word_embeddings": 1}', "expected true or false"),
        ('{"model_type": "mpt", "attn_config": 3}', "expected a JSON object"),
    ],
)
def test_a_wrong_config_json_is_refused(text, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match="config.json") as refused:
        model_named(str(path))
    assert words in str(refused.value)


# ---- claims (C1 to C4, C22)

SEVENTY = dict(model="llama-3.1-70b", gpu="h100-80gb", masters="separate", param_dtype="bf16", master_dtype="fp32")
P = 70_553_706_496


def test_c1_a_replica_of_70_b_takes_1_12_tb():
    (resting, *_, stepping) = plan(**SEVENTY, gpus=16, strategy="no_shard").memory.moments
    assert resting.by_category["sharded_parameters"] == 2 * P
    assert stepping.by_category["unsharded_gradients"] == 2 * P
    assert resting.by_category["optimizer_state"] == (8 + 4) * P
    states = ("sharded_parameters", "unsharded_gradients", "optimizer_state")
    assert sum(stepping.by_category[name] for name in states) == 16 * P == pytest.approx(1.12e12, rel=0.01)


def test_c2_under_ddp_every_gpu_holds_it():
    peaks = [plan(**SEVENTY, gpus=gpus, strategy="no_shard") for gpus in (16, 256)]
    assert all(found.memory.peak.total > 16 * P and not found.fits for found in peaks)
    said = shortfall(peaks[0]) or ""
    assert "--offload cpu --strategy full_shard" in said, "sharding alone is not enough"


def test_c3_fully_sharded_over_16_it_is_70_gb_and_what_is_gathered():
    found = plan(**SEVENTY, gpus=16, checkpointing="full", reduce_dtype="bf16")
    stepping = found.memory.moments[-1].by_category
    states = sum(stepping[name] for name in ("sharded_parameters", "sharded_gradients", "optimizer_state"))
    assert states == pytest.approx(16 * P / 16, rel=1e-4)
    shape = found.spec.model
    assert 2 * shape.block_parameters == pytest.approx(1.7e9, rel=0.01)
    assert 2 * shape.root_parameters == pytest.approx(4.2e9, rel=0.01)
    assert found.fits and not plan_of(replace(found.spec, optimizer="adamw-foreach")).fits
    assert not plan_of(replace(found.spec, reduce_dtype="fp32")).fits, "the root reduces 8.4 GB, not 4.2"
    left = found.spec.gpu.memory_bytes - found.memory.peak.total
    assert 0 < left < 10e9, "it fits, but not comfortably"
    backward = next(each for each in found.memory.moments if each.name == "backward of the last block")
    assert backward.by_category["unsharded_parameters"] == 2 * (shape.root_parameters + 2 * shape.block_parameters)


def test_c4_over_512_gpus_a_rank_holds_276_mb():
    resting = plan(**SEVENTY, gpus=512).memory.resting.by_category
    assert resting["sharded_parameters"] == pytest.approx(2 * P / 512, rel=1e-3)
    assert resting["sharded_parameters"] == pytest.approx(273e6, rel=0.02)


def test_c22_four_24_gb_cards_do_not_hold_70_b_and_a_quantised_base_does():
    found = plan(**(SEVENTY | {"gpu": "4090"}), gpus=4, checkpointing="full", seq=1024)
    said = shortfall(found) or ""
    assert "on a 25.8 GB card" in said and "nf4" in said and "--lora-rank" in said
    assert found.memory.resting.by_category["sharded_parameters"] == pytest.approx(35.3e9, rel=0.01)
    base = dict(gpus=4, checkpointing="full", seq=1024, lora_rank=16, base_dtype="nf4")
    assert plan("llama-3.1-70b", "4090", **base).fits


def test_torchtitans_one_published_out_of_memory():
    """Llama 2 70B on 64 A100 80 GB, selective checkpointing, sequences of 4,096: 2 a micro-batch did not fit, 1 did."""
    given = dict(gpus=64, seq=4096, checkpointing="selective")
    assert not plan("llama-2-70b", "a100-80gb", micro_batch=2, **given).fits
    assert plan("llama-2-70b", "a100-80gb", micro_batch=1, **given).fits


def test_adapters_have_gradients_and_state_and_a_frozen_base_has_none():
    """LoRA: rank x (in + out) of each matrix is trained; the base rests in its own dtype."""
    found = plan("llama-3.1-8b", "h100-80gb", gpus=8, lora_rank=16, base_dtype="nf4", micro_batch=1)
    shape = found.spec.model
    matrices = [each for each in shape.block if each.is_matrix]
    trained = shape.layers * sum(16 * sum(each.shape) for each in matrices)
    states = found.memory.moments[-1].by_category
    assert states["optimizer_state"] == 8 * trained / 8 and states["sharded_gradients"] == 4 * trained / 8
    frozen = sum(each.count for each in matrices) * shape.layers * 4.127 / 8
    others = 2 * (shape.parameters - shape.layers * sum(each.count for each in matrices))
    assert states["sharded_parameters"] == pytest.approx((4 * trained + frozen + others) / 8, rel=1e-3)
    whole = plan("llama-3.1-8b", "h100-80gb", gpus=8, micro_batch=1).as_dict()["comm_bytes_per_step"]["shard"]
    assert found.as_dict()["comm_bytes_per_step"]["shard"] < 0.25 * whole, "a base is gathered in 4 bits, never reduced"


def test_offload_takes_states_to_the_host_and_accumulation_keeps_gradients():
    given = dict(model="llama-3.1-8b", gpu="h100-80gb", gpus=8, checkpointing="full")
    here, there = plan(**given), plan(**given, offload=True)
    states = ("sharded_parameters", "sharded_gradients", "optimizer_state")
    assert all(there.memory.peak.by_category[name] == 0 for name in states)
    stepping = here.memory.moments[-1].by_category
    assert there.as_dict()["host_bytes"] == pytest.approx(sum(stepping[name] for name in states))
    loss = plan(**given, grad_accum=8).memory.at("loss").by_category
    assert (
        loss["sharded_gradients"] == stepping["sharded_gradients"]
        and not here.memory.at("loss").by_category["sharded_gradients"]
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_search_and_every_advice_leave_out_offload_that_a_strategy_cannot_do(strategy):
    spec = plan_spec("llama-3.1-8b", "4090", gpus=2, strategy=strategy)
    said = shortfall(plan_of(spec)) or ""
    keeps_whole = strategy in ("no_shard", "zero1", "zero2")
    assert ("--offload cpu --strategy full_shard" in said) == keeps_whole and "--offload cpu" in said, said
    offloaded = under_each_strategy(plan_spec("llama-3.1-8b", "h100", gpus=16, offload=True))
    assert {each.strategy for each in offloaded} == {"shard_grad_op", "full_shard", "hybrid_shard"}


def test_no_shard_keeps_a_quantised_base_whole_and_restores_a_matrix_at_a_time():
    """nf4: 4.127 bits a weight of every matrix on every GPU, never sent; the widest matrix in bf16 while a block's
    backward runs; adapters rest in float32, with a copy in bf16 that stays until their backward.
    """
    found = plan("llama-3.1-8b", "h100", gpus=8, strategy="no_shard", lora_rank=16, base_dtype="nf4")
    shape = found.spec.model
    matrices = [each for each in shape.block if each.is_matrix]
    frozen, adapters = sum(each.count for each in matrices), sum(16 * sum(each.shape) for each in matrices)
    others = shape.parameters - shape.layers * frozen
    resting = found.memory.resting.by_category
    assert resting["sharded_parameters"] == pytest.approx(
        shape.layers * (frozen * 4.127 / 8 + 4 * adapters) + 2 * others, rel=1e-6
    )
    inside = found.memory.at("backward of the last block").by_category["unsharded_parameters"]
    assert inside == 2 * shape.layers * adapters + 2 * shape.ffn * shape.width
    (row,) = found.traffic
    assert (row.kind, row.unit, row.wire_bytes) == ("all_reduce", "block", 2 * 4 * adapters * 7 // 8)


def test_an_optimizer_reads_the_gradients_of_its_own_rows():
    """zero1 keeps all gradients and updates a part of the parameters: that part's gradients are read."""
    specs = (plan_spec("llama-3.1-8b", "h100", gpus=8, strategy=name) for name in ("zero1", "zero2"))
    first, second = map(step_time_module.step_time, specs)
    assert first.compute_s == second.compute_s


def test_zeros_table_1():
    """7.5 B parameters, fp16 and Adam, in units of 1e9 bytes (Rajbhandari et al. 2020, table 1)."""
    shape = replace(SHAPES["mpt-7b"], name="7.5 B")
    scale = 7.5e9 / shape.parameters
    table = {"no_shard": 120, "zero1": 31.4, "zero2": 16.6, "full_shard": 1.88}
    for strategy, published in table.items():
        found = plan(shape, "h100-80gb", gpus=64, strategy=strategy, masters="separate", seq=1)
        stepping = found.memory.moments[-1]
        states = stepping.total - stepping.by_category["unsharded_parameters"] - FRAMEWORK_BYTES
        assert states * scale / 1e9 == pytest.approx(published, rel=0.005), strategy


# ---- activations


def test_a_gpt_block_keeps_korthikantis_bytes():
    """Equation 2 without dropout's masks: 32 bytes x sequence x batch x width, and 2 a s / h with plain attention."""
    spec = plan_spec("gpt2-xl", "h100-80gb", seq=1024)
    shape, statistics = spec.model, 4 * (4 + spec.model.heads)
    assert kept_per_token(spec) == 32 * shape.width + statistics
    plain = kept_per_token(replace(spec, flash=False))
    assert plain == 32 * shape.width + 4 * 4 + 2 * shape.heads * 1024


def test_a_llama_block_keeps_its_own_operators():
    spec = plan_spec("llama-2-7b", "h100-80gb")
    assert kept_per_token(spec) == 2 * (8 * 4096 + 4 * 11_008) + 4 * (32 + 2)
    assert kept_per_token(replace(spec, checkpointing="full")) == 2 * 4096
    some = kept_per_token(replace(spec, checkpointing="selective"))
    assert some == 2 * (5 * 4096 + 11_008) + 4 * 32, "input, query, value, gate, down and attention"


def test_a_compiled_block_keeps_of_element_wise_results_only_what_products_read():
    spec = plan_spec("llama-2-7b", "h100-80gb", compile=True)
    assert kept_per_token(spec) == 2 * (8 * 4096 + 3 * 11_008) + 4 * (32 + 2)


def test_tensor_parallelism_cuts_all_but_what_was_gathered():
    spec = plan_spec("llama-3.1-70b", "h100-80gb", gpus=8, tensor_parallel=8)
    whole = sum(each.channels * each.itemsize for each in block_tensors(spec) if each.whole)
    alone = computed_per_token(replace(spec, tensor_parallel=1))
    assert computed_per_token(spec) == pytest.approx(whole + (alone - whole) / 8)


# ---- strategies and meshes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_plan_whose_parts_add_up(strategy):
    found = plan("llama-3.1-8b", "h100-80gb", gpus=16, strategy=strategy, checkpointing="full").as_dict(15e12)
    by_category = found["memory_bytes"]["by_category"]
    assert tuple(by_category) == CATEGORIES and sum(by_category.values()) == found["memory_bytes"]["total"]
    assert all(value >= 0 for value in by_category.values())
    assert found["step_time_s"] == pytest.approx(found["compute_s"] + found["exposed_s"])
    assert 0 <= found["exposed_s"] <= found["communication_s"] and 0 < found["mfu"] < 1
    assert found["gpu_hours"] == pytest.approx(16 * found["hours"])


CHOICES = {
    "gpus": (1, 2, 6, 8, 16, 24, 512), "gpus_per_node": (1, 4, 8), "strategy": STRATEGIES, "seq": (1, 128, 1024),
    "micro_batch": (1, 3, 16), "grad_accum": (1, 2, 5), "checkpointing": CHECKPOINTINGS,
    "param_dtype": ("bf16", "fp32"), "masters": MASTERS, "optimizer": tuple(OPTIMIZERS),
    "tensor_parallel": (1, 1, 2, 4), "context_parallel": (1, 1, 2),
    "compile": (False, True), "flash": (True, False), "prefetch": (0, 1, 2), "offload": (False, True),
    "lora_rank": (0, 0, 16),
}  # fmt: skip


def test_choices_drawn_at_random_are_planned_soundly_or_refused():
    """No negative bytes, no more exposed than sent and copied, an MFU below 1; what contradicts itself is a
    PlanError.
    """
    chance, planned = random.Random(7), 0
    for _ in range(300):
        choices = {name: chance.choice(values) for name, values in CHOICES.items()}
        try:
            found = plan(chance.choice(("gpt2", "llama-3.1-8b", "qwen3-8b", "gpt-neox-20b")), "h100", **choices)
        except PlanError:
            continue
        planned += 1
        time = found.time
        assert all(nbytes >= 0 for moment in found.memory.moments for nbytes in moment.by_category.values()), choices
        rounding = 1e-9 * time.step_s
        moved_s = time.communication_s + time.copies_s  # no copies without offload
        assert -rounding <= time.exposed_s <= moved_s + rounding and 0 < found.mfu < 1, choices
        assert (shortfall(found) is None) == found.fits, choices
    assert planned > 100


def test_traffic_is_design_2_1s():
    """3 P (n-1)/n for full_shard with one dtype; hybrid: inside 3 P (s-1)/s, across 2 (P/s)(r-1)/r."""
    one = dict(param_dtype="bf16", reduce_dtype="bf16", gpus=16)
    model_bytes = 2 * SHAPES["mpt-70b"].parameters
    root = 2 * SHAPES["mpt-70b"].root_parameters  # gathered once
    sent = plan("mpt-70b", "h100-80gb", seq=2048, **one).as_dict()["comm_bytes_per_step"]
    assert sent == {"shard": pytest.approx((3 * model_bytes - root) * 15 / 16, rel=1e-5)}
    hybrid = plan("mpt-70b", "h100-80gb", seq=2048, strategy="hybrid_shard", **one).as_dict()["comm_bytes_per_step"]
    assert hybrid["shard"] == pytest.approx((3 * model_bytes - root) * 7 / 8, rel=1e-5)
    assert hybrid["replicate"] == pytest.approx(2 * model_bytes / 8 / 2, rel=1e-5)


def on_a_link(bytes_per_s, **choices):
    """A plan of one node whose GPUs have another link, without latency."""
    spec = plan_spec("llama-2-7b", "h100-80gb", gpus=8, **choices)
    return plan_of(replace(spec, gpu=replace(spec.gpu, link=LinkSpec("other", bytes_per_s, 0.0)))).time


def test_on_an_infinitely_fast_link_nothing_is_exposed():
    time = on_a_link(1e18)
    assert time.exposed_s < 1e-6 * time.step_s


def test_on_a_slow_link_communication_hides_all_but_the_ends_of_compute():
    """Collectives follow each other without a gap but where the next one waits for compute: the head, a block."""
    for strategy in ("full_shard", "shard_grad_op", "no_shard"):
        time = on_a_link(1e9, strategy=strategy)
        assert time.communication_s < time.step_s < time.communication_s + time.compute_s, strategy


def test_on_a_fast_enough_link_only_the_first_gathers_and_the_last_reductions_are_exposed():
    spec = plan_spec("llama-2-7b", "h100-80gb", gpus=8, micro_batch=8)
    rows = {
        (row.unit, row.kind): plan_traffic.transfer_of(spec, row).seconds for row in plan_traffic.plan_traffic(spec)
    }
    ends = rows["root", "all_gather"] + rows["block", "all_gather"]
    ends += rows["block", "reduce_scatter"] + rows["root", "reduce_scatter"]
    assert plan_of(spec).time.exposed_s == pytest.approx(ends, rel=1e-6)


def test_without_prefetch_every_gather_is_exposed():
    spec = plan_spec("llama-2-7b", "h100-80gb", gpus=8, micro_batch=8)
    gather = next(
        plan_traffic.transfer_of(spec, row).seconds
        for row in plan_traffic.plan_traffic(spec)
        if (row.unit, row.kind) == ("block", "all_gather")
    )
    more = plan_of(replace(spec, prefetch=0)).time.exposed_s - plan_of(spec).time.exposed_s
    assert more > 2 * (spec.model.layers - 2) * gather


def test_accumulation_sends_once_a_micro_batch_but_zero1_once_a_step():
    for strategy, grows in (("full_shard", 4), ("zero1", 1), ("no_shard", 1)):
        sent = [plan("llama-2-7b", "h100-80gb", strategy=strategy, grad_accum=count) for count in (1, 4)]
        one, four = (sum(each.as_dict()["comm_bytes_per_step"].values()) for each in sent)
        assert four == pytest.approx(grows * one, rel=1e-6), strategy


def test_an_axis_takes_the_link_it_leaves_its_node_by():
    spec = plan_spec("llama-3.1-70b", "h100-80gb", gpus=64, tensor_parallel=8)
    inside, outside = (plan_traffic.axis_link(spec, axis).bytes_per_s for axis in ("tensor", "shard"))
    assert inside == pytest.approx(450e9 * plan_traffic.LINK_EFFICIENCY)
    nodes, part = plan_traffic.part_of_network(spec)
    assert outside == pytest.approx(50e9 * part) and nodes == 8, "one member a node: one network card"


def test_fp32_is_planned_as_tf32_and_says_so(capsys):
    for gpu in GPUS.values():
        if "tf32" in gpu.peaks:
            spec = plan_spec("llama-3.1-8b", gpu.name, param_dtype="fp32")
            assert rates_of(spec, efficiency=1.0).flops == pytest.approx(gpu.peaks["tf32"], rel=0.02)
    for precision, says_so in (("fp32", True), ("bf16", False)):
        code, shown, _ = ended(["plan", "--model", "llama-3.1-8b", "--precision", precision], capsys)
        in_one_line = " ".join(shown.split())
        assert code == 0 and ('as TF32: with torch.set_float32_matmul_precision("high")' in in_one_line) == says_so


def test_context_parallelism_cuts_the_sequence_and_shares_states():
    alone = plan("llama-3.1-8b", "h100-96gb", gpus=8, seq=32_768, checkpointing="full").memory.peak.total
    spec = plan_spec("llama-3.1-8b", "h100-96gb", gpus=8, seq=65_536, checkpointing="full", context_parallel=2)
    assert plan_of(spec).memory.peak.total == pytest.approx(alone, rel=1e-6)
    assert "context" in plan_of(spec).as_dict()["comm_bytes_per_step"]


# ---- errors


@pytest.mark.parametrize(
    "choices,words",
    [
        (dict(gpu="h200-80gb"), "did you mean"),
        (dict(model="llama-3.1-70"), "did you mean llama-3.1-70b"),
        (dict(model="no/such/config.json"), "No such file"),
        (dict(gpus=0), "--world-size is 0"),
        (dict(gpus=-8), "--world-size is -8"),
        (dict(gpus=10**30), "--world-size is 1000"),
        (dict(micro_batch=0), "--batch-size is 0"),
        (dict(seq=10**9), "--sequence-length is 1000000000"),
        (dict(seq=200_000), "longer than the 131072 positions"),
        (dict(gpus=12), "12 GPUs do not fill nodes of 8"),
        (dict(gpus=8, tensor_parallel=3), "groups of 3 x 1; give a multiple of 3"),
        (dict(gpus=16, tensor_parallel=16), "8 key/value heads, not divisible by --tp 16; give a common divisor"),
        (dict(gpus=16, strategy="hybrid_shard", shard_size=3), "groups of 3 do not divide the 16 ranks"),
        (dict(gpus=12, gpus_per_node=4, strategy="hybrid_shard", tensor_parallel=2, shard_size=4), "divisor of 6"),
        (dict(gpus=16, shard_size=8), "--shard-size is hybrid_shard's"),
        (dict(strategy="fullshard"), "did you mean full_shard"),
        (dict(checkpointing="some"), "none, products, selective, attention, full"),
        (dict(param_dtype="fp8"), "--precision is 'fp8'"),
        (dict(optimizer="lion"), "adamw"),
        (dict(gpu="4090", gpus=16), "no network between nodes is known for RTX 4090"),
        (dict(base_dtype="nf4"), "give --lora-rank"),
        (dict(gpus=3, context_parallel=3), "--cp 3 does not divide a sequence of 4096 tokens"),
        (dict(context_parallel=0), "--cp is 0"),
    ],
    ids=str,
)
def test_wrong_input_is_one_clear_line(choices, words, capsys):
    given = {"model": "llama-3.1-70b", "gpu": "h100-80gb", **choices}
    with pytest.raises((ModelError, PlanError, HardwareError)) as refused:
        plan(**given)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    flags = [f"{flag_of(name)}={value}" for name, value in given.items()]
    code, _, said = ended(["plan", *flags], capsys)
    assert code == 2 and said.count("\n") == 1 and words in said


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "zero2"])
def test_what_keeps_parameters_whole_is_not_offloaded(strategy, capsys):
    code, _, said = ended(["plan", "--model", "gpt2", "--strategy", strategy, "--offload", "cpu"], capsys)
    assert code == 2 and said.count("\n") == 1 and f"{strategy} keeps parameters whole; give --strategy" in said


def test_an_impossible_request_says_what_is_missing_and_what_would_do():
    alone = plan("llama-3.1-70b", "4090", gpus=4, master_dtype="bf16", checkpointing="full", seq=512)
    said = shortfall(alone) or ""
    assert said.startswith("35.3 GB of sharded parameters on a 25.8 GB card, "), said
    assert "6 cards hold the sharded parameters" in said and "--offload cpu" in said
    assert "564 GB of host memory a node" in said, "8 bytes of state a parameter"
    many = plan("llama-3.1-70b", "h100-80gb", gpus=8, checkpointing="full")
    gpus = planner.least_gpus(many.spec)
    assert gpus and f"{gpus} cards hold the same choices" in (shortfall(many) or "")
    assert plan_of(replace(many.spec, gpus=gpus)).fits
    assert not plan_of(replace(many.spec, gpus=gpus - 8)).fits, "it is the least"


# ---- the command


def ended(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    printed = capsys.readouterr()
    return stop.value.code, printed.out, printed.err


def test_the_command_prints_a_table_and_writes_json(capsys, tmp_path):
    path = tmp_path / "plan.json"
    given = ["--model", "llama-3.1-70b", "--gpu", "h100-80gb", "--world-size", "8", "--strategy", "full_shard"]
    code, out, _ = ended(["plan", *given, "--tokens", "15e12", "--json", str(path)], capsys)
    assert code == 0 and all(each.replace("_", " ") in out for each in CATEGORIES)
    assert "does not fit" in out and "GPU-hours" in out and "predicted" in out
    found = json.loads(path.read_text())
    for name in ("fits", "comm_bytes_per_step", "step_time_s", "exposed_s", "tokens_per_s_per_gpu", "mfu"):
        assert name in found
    assert set(found["memory_bytes"]) == {"total", "by_category"} and found["fits"] == "no"


def test_json_to_stdout_is_all_of_stdout(capsys):
    code, out, err = ended(["plan", "--model", "gpt2", "--json", "-"], capsys)
    assert code == 0 and json.loads(out)["fits"] == "yes" and "fits" in err


def test_a_sweep_is_a_table_and_a_figure(capsys, tmp_path):
    path, rows = tmp_path / "sweep.html", tmp_path / "rows.json"
    given = ["sweep", "gpus=8..64", "--model", "llama-3.1-70b", "--checkpoint", "full"]
    code, out, _ = ended(["plan", *given, "--figure", str(path), "--json", str(rows)], capsys)
    assert code == 0 and out.count("does not fit") == 2 and "world size 64" in out
    found = [row["memory_bytes"]["total"] for row in json.loads(rows.read_text())["rows"]]
    assert found == sorted(found, reverse=True) and len(found) == 4
    picture = path.read_text()
    assert "<b>llama-3.1-70b fits with world size 32, 64</b>" in picture and 'format: "svg"' in picture


@pytest.mark.parametrize("name", [*SWEPT, *SWEPT_WORDS])
def test_the_axis_of_every_sweep_has_words_and_a_unit(name):
    """`gpus` is a field of the code; a reader sees `world size (GPUs)`, as the flag is called."""
    figure = sweep_figure(name, [1, 2], [plan("gpt2", "h100-80gb", gpus=8)] * 2)
    words, title = figure.layout.xaxis.title.text, figure.layout.title.text
    assert f"with {swept_name(name)} 1, 2" in title.replace("<br>", " ")
    assert words.startswith(swept_name(name)) and "_" not in words and (name not in SWEPT or words != name)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["sweep", "world=8..64"], "did you mean world-size"),
        (["--tokens", "-5"], "--tokens is -5.0"),
        (["--tokens", "nan"], "--tokens is nan"),
        (["--tokens", "1e400"], "--tokens is inf"),
        (["sweep", "gpus"], "sweep is 'gpus'"),
        (["sweep", "gpus=8..x"], "sweep has values"),
        (["sweep", "gpus=0..8"], "sweep has values"),
        (["sweep", "gpus=8,12"], "12 GPUs do not fill nodes of 8"),
        (["sweep", "gpus=8,16", "--figure", "a.svg"], "ends in .html: its button saves an SVG"),
        (["sweep", "gpus=8,16", "--figure", "/no/such/folder/a.html"], "--figure /no/such/folder/a.html cannot be"),
        (["--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json cannot be written"),
        (["fit", "--model", "my/model.py"], "my/model.py is a Python file, of which one step is planned"),
        (["sweep", "model=gpt2,mine.py"], "mine.py is a Python file, of which one step is planned"),
    ],
    ids=str,
)
def test_wrong_sweeps_and_targets_are_refused(arguments, words, capsys):
    code, _, said = ended(["plan", *arguments], capsys)
    assert code == 2 and words in said and said.count("\n") == 1


def printed(*flags, capsys):
    """What the command prints, without line breaks."""
    code, out, said = ended(["plan", *flags], capsys)
    assert code == 0, said
    return " ".join(out.split())


def test_no_mfu_is_above_what_products_reach():
    """A frozen matrix has two products of three: LoRA on one card was said to reach an MFU of 74 %, at 60 %."""
    frozen = plan("llama-3.1-8b", "4090", gpus=1, lora_rank=16, base_dtype="nf4", checkpointing="none", seq=1024)
    whole = plan("llama-3.1-8b", "4090", gpus=1, seq=1024)
    assert whole.mfu < 0.6 and 0.8 * whole.mfu < frozen.mfu < 0.6
    products = 6 * 7_504_658_432 * 1024  # without the embedding and the norms
    attention = 12 * 32 * 4096 * 1024 * 1024
    assert step_time_module.model_flops(whole.spec) == pytest.approx(products + attention, rel=1e-3)
    assert step_time_module.model_flops(frozen.spec) == pytest.approx(2 / 3 * products + attention, rel=0.01)


def test_a_step_with_states_in_host_memory_has_its_copies_and_the_optimizer_of_the_cpu(capsys):
    out = printed("--offload", "cpu", capsys=capsys)
    # 8.03 B in fp32, an eighth: two copies up, of embeddings and head one, and the gradients down: 3 x 4.02 - 0.53 GB
    assert "copies to and from the host 11.5 GB over pcie5 (63.0 GB/s each way, of its specification): 183 ms" in out
    # 8 ranks with 28 bytes for each of their 1.004 B parameters, at 109 GB/s of one node
    assert "optimizer on the CPU 2.06 s of the compute; at the rate of ZeRO-Offload's table 4" in out
    assert "none of them offloads" in out and "at least" not in out
    assert not {"copies to and from", "on the CPU", "offloads"} & {*re.findall("[a-zA-Z ]+", printed(capsys=capsys))}


def test_one_rank_sends_nothing_and_many_wait_for_the_latency_of_rings(capsys):
    assert "exposed none communication alone none: no rank sends anything" in printed(
        "--world-size", "1", capsys=capsys
    )
    large = printed(
        "--model", "llama-3.1-405b", "--world-size", "16384", "--tp", "8", "--sequence-length", "8192", capsys=capsys
    )
    # 127 rings of gathers twice or once and of reductions, 2,047 steps of 14 us each
    assert "(10.9 s of it the latency of rings)" in large
    assert "latency" not in printed("--world-size", "8", capsys=capsys)


def test_advice_for_a_long_sequence_is_to_cut_it_and_says_nothing_twice(capsys):
    long = plan("llama-3.1-8b", "h100", gpus=64, seq=131_072, checkpointing="full")
    assert [remedy.words for remedy in remedies(long.spec)] == ["--loss chunked", "--cp 4", "--tp 4"]
    assert plan_of(replace(long.spec, tensor_parallel=4)).fits and plan_of(replace(long.spec, context_parallel=8)).fits
    alone = shortfall(plan("llama-3.1-8b", "4090", gpus=1, lora_rank=16, base_dtype="nf4")) or ""
    assert "--strategy full_shard" not in alone and "--batch-size 1" not in alone and "--tp" not in alone
    assert "context 45.1 GB" in printed("--world-size", "64", "--sequence-length", "131072", "--cp", "8", capsys=capsys)


def test_an_efficiency_is_fitted_or_carried_over_from_the_nearest_card_or_assumed():
    h100, h200 = efficiency_of(find_gpu("h100")), efficiency_of(find_gpu("h200"))
    assert h100.origin == "fitted on 70 published runs"
    assert h200.part == h100.part and h200.origin == "carried over from H100 SXM 80GB, the same die GH100"
    assert efficiency_of(find_gpu("b200")).part == pytest.approx(h100.part * (1745 / 2250) / (794.5 / 989))
    assert "at 51%, there at 80%" in efficiency_of(find_gpu("mi300x")).origin
    assert efficiency_of(find_gpu("4090")) == Efficiency(ASSUMED, "assumed: no published run on it was fitted")


LONG = dict(model="llama-3.1-8b", gpu="h100-80gb", gpus=8, seq=65_536, checkpointing="full")


def test_another_loss_makes_a_long_sequence_fit_and_the_plan_says_so(capsys):
    """Logits of 65,536 tokens and 128,256 words: 12 bytes each, 4 in one fused kernel, an eighth of them at a time."""
    plans = {loss: plan(**LONG, loss=loss) for loss in ("eager", "fused", "chunked")}
    peaks = {loss: found.memory.peak.total / 1e9 for loss, found in plans.items()}
    assert [round(peak) for peak in peaks.values()] == [134, 67, 50]
    assert peaks["eager"] - peaks["fused"] == pytest.approx(8 * 65_536 * 128_256 / 1e9, rel=0.001)
    assert [found.fitness for found in plans.values()] == ["no", "yes", "yes"]
    assert "needs --loss fused" in (shortfall(plans["eager"]) or "")
    assert plans["fused"].time.step_s < plans["eager"].time.step_s
    said = printed("--sequence-length", "65536", "--checkpoint", "full", "--loss", "chunked", capsys=capsys)
    assert "chunked loss" in said and "fits: yes" in said
    code, _, error = ended(["plan", "--loss", "fuse"], capsys)
    assert code == 2 and "fused" in error and error.count("\n") == 1


def test_fits_is_yes_likely_or_no_and_bands_are_around_the_figures():
    found = plan("llama-3.1-8b", "h100-80gb", gpus=8, seq=8192, checkpointing="selective")
    memory, card = found.memory, found.spec.gpu.memory_bytes
    band = memory_band(found.spec)
    assert found.fitness == "yes" and memory.fitness(memory.peak.total, band) == "likely"
    assert memory.fitness(memory.peak.total - 1, band) == "no"
    answer = found.as_dict()
    low, high = answer["memory_band_bytes"]
    assert low < memory.peak.total < high < card and answer["reserved_bytes"] > memory.used_bytes
    slow, fast = answer["tokens_per_s_band"]
    assert slow < found.tokens_per_s_per_gpu < fast and answer["loss"] == "eager"


def test_no_sync_keeps_whole_gradients_and_reduces_once():
    """Unsharded gradients of 8 B parameters in float32 are 32 GB, whatever the number of ranks."""
    given = dict(model="llama-3.1-8b", gpu="h200", grad_accum=4, checkpointing="full", gpus=32)
    plain, kept = plan(**given), plan(**given, no_sync=True)
    more = kept.memory.at("loss").total - plain.memory.at("loss").total
    assert more == pytest.approx(4 * plain.spec.model.parameters, rel=0.05)
    reduced = {each.count for each in kept.traffic if each.kind == "reduce_scatter"}
    assert reduced == {1, 32} and sum(each.step_bytes for each in kept.traffic) < sum(
        each.step_bytes for each in plain.traffic
    )
    assert plan(**{**given, "grad_accum": 1}, no_sync=True).memory == plan(**{**given, "grad_accum": 1}).memory


def test_each_kind_of_kernel_has_its_own_rate():
    given = dict(model="llama-3.1-8b", gpu="h100-80gb", gpus=8, seq=8192, micro_batch=2)
    base, eight = plan(**given), plan(**given, fp8=True)
    assert 1.2 < base.time.compute_s / eight.time.compute_s < FP8_SPEEDUP
    few = plan("llama-3.1-8b", "h100-80gb", gpus=1, seq=1).time
    assert few.compute_s > 32 * 3 * 9 * LAUNCHES * LAUNCH_S, "a block takes at least the launches of its kernels"
    restored, plain = (
        plan("llama-2-7b", "a100-80gb", gpus=1, lora_rank=16, base_dtype=base).time.compute_s for base in ("nf4", None)
    )
    assert restored > plain, "a quantised base is restored for each pass"
    forward, backward = attention_of(find_gpu("h100"), efficiency_of(find_gpu("h100")).part)
    assert forward * 989 == pytest.approx(366, abs=1) and backward * 989 == pytest.approx(316, abs=1)


OWN = {"name": "B300", "memory_gib": 268, "bf16_tflops": 2250, "hbm_tb_per_s": 8.0, "link": "nvlink5", "nic_gbit": 800}


def test_a_gpu_of_ones_own_is_read_from_a_file(tmp_path, capsys):
    path = tmp_path / "b300.json"
    path.write_text(json.dumps(OWN))
    found = plan("llama-3.1-8b", str(path), gpus=16)
    assert (found.spec.gpu.memory_bytes, found.spec.gpu.nic_bytes_per_s) == (268 * 2**30, 100e9)
    assert found.efficiency.part == ASSUMED and found.tokens_per_s_per_gpu > 0
    code, out, _ = ended(["plan", "--gpu", str(path), "--world-size", "8"], capsys)
    assert code == 0 and "B300" in out


@pytest.mark.parametrize(
    "content,words",
    [
        ("{", "is no JSON"),
        ("[]", "missing or unknown: name"),
        (json.dumps(OWN | {"colour": 1}), "unknown: colour"),
        (json.dumps(OWN | {"memory_gib": -1}), "memory_gib is '-1'"),
        (json.dumps(OWN | {"link": "string"}), "unknown link"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_of_a_gpu_is_one_line(content, words, tmp_path, capsys):
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    code, _, error = ended(["plan", "--gpu", str(path)], capsys)
    assert code == 2 and words in error and error.count("\n") == 1


def test_no_step_is_faster_than_products_alone_were_measured_to_be():
    """0.6 was assumed for every card without runs, which on an MI300X is more than its products reach alone."""
    for gpu in GPUS.values():
        if gpu.product_flops and gpu.bf16_flops:
            assert efficiency_of(gpu).part < gpu.product_flops / gpu.bf16_flops


@pytest.mark.parametrize("form", [[], ["fit"], ["sweep", "seq=512,1024"], ["simulate"]])
def test_every_form_says_where_its_figures_and_its_efficiency_are_from(form, capsys):
    given = ["--model", "gpt2", "--world-size", "2", "--gpu", "h200", "--sequence-length", "512"]
    code, printed, _ = ended(["plan", *form, *given], capsys)
    out = " ".join(printed.split())
    assert code == 0 and "0.741 of 989 TFLOP/s: carried over from H100 SXM 80GB, the same die GH100" in out
    assert "predicted, in closed form" in out or "is simulated, the second predicted" in out


def test_a_gpu_of_unknown_speed_has_memory_and_no_time(capsys):
    code, out, _ = ended(["plan", "--model", "gpt2", "--gpu", "a10g", "--world-size", "1"], capsys)
    assert code == 0 and "no bf16 FLOP/s are known" in out


@pytest.mark.parametrize(
    "arguments,printed",
    [
        (["step", "--help"], "--checkpoint"), ([], "tokens/s a GPU"), (["sweep", "gpus=8,16"], "world size 16"),
        (["simulate"], "closed form"),
    ],
    ids=["help", "plan", "sweep", "simulate"],
)  # fmt: skip
def test_planning_loads_no_torch(arguments, printed):
    """Torch takes seconds to import; a plan is arithmetic."""
    code = (
        f"import sys\nfrom fsdplab import cli\ntry: cli.main(['plan', *{arguments!r}])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.rstrip().endswith("False") and printed in done.stdout


def test_the_engines_names_load_when_used():
    """The package's names are those that it lists, and another name is refused with them."""
    from fsdplab import engine

    assert all(callable(getattr(engine, name)) or name == "STRATEGIES" for name in engine.__all__)
    with pytest.raises(AttributeError, match="fully_shard"):
        engine.full_shard
