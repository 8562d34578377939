"""Models have the published sizes and behave as their families should; text is real, deterministic and checked."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import math
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdplab.workloads as workloads
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker.engines import Held, micro_batches, one_step
from fsdplab.workloads import (
    PRESETS,
    ByteText,
    GPTBlock,
    LlamaBlock,
    ModelError,
    RotaryScaling,
    TextError,
    block_types,
    build_model,
    initialise,
    loss_of,
    preset,
    reset_buffers,
)  # fmt: skip
from fsdplab.workloads.transformer import CausalAttention, Rotary, rotary_frequencies
from fsdplab.workloads.twin import SideBySide, replay_gradients
from fsdplab.workloads.workload import At, OnText, Task

TINY = ("gpt-tiny", "llama-tiny")
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


def some_tokens(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def louder(model: torch.nn.Module) -> torch.nn.Module:
    """Larger weights: a fresh model's attention is nearly uniform, and would hide a mistake in it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


# Shapes


@pytest.mark.parametrize("name", PRESETS)
def test_a_shape_has_the_parameters_of_the_model_on_the_meta_device(name):
    model = build_model(name, device="meta")
    assert PRESETS[name].parameters == sum(p.numel() for p in model.parameters())
    assert all(p.is_meta for p in model.parameters())
    built = [(path, tuple(each.shape)) for path, each in model.blocks[0].named_parameters()]
    built = [(path.removeprefix("attention.").removeprefix("feed_forward."), shape) for path, shape in built]
    assert built == [(each.name, each.shape) for each in PRESETS[name].block]
    outside = [tuple(each.shape) for path, each in model.named_parameters() if not path.startswith("blocks.")]
    assert outside == [each.shape for each in PRESETS[name].root]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    assert preset(name).parameters == PUBLISHED[name]


def test_lab_sizes():
    assert preset("gpt-20m").parameters == 21_589_248
    assert preset("gpt-25m").parameters == 25_613_312
    assert preset("llama-20m").parameters == 20_716_032


def test_untying_costs_one_more_table():
    tied = PRESETS["gpt2"]
    untied = dataclasses.replace(tied, tied=False)
    assert untied.root_parameters - tied.root_parameters == 50_257 * 768


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "llama-tiny: layers is 0; expected a whole number from 1"),
        ({"width": 64.0}, "width is 64.0; expected a whole number"),
        ({"context": True}, "context is True; expected a whole number"),
        ({"vocabulary": -1}, "vocabulary is -1"),
        ({"kv_heads": 3}, "4 heads and 3 key/value heads; expected that these divide those"),
        ({"norm_epsilon": 0.0}, "norm_epsilon is 0.0"),
        ({"rotary_base": 1.0}, "rotary_base 1.0; expected more than 0, and more than 1"),
        ({"positions": 128}, "positions are learned; expected rotary_base and rotary_scaling to be None"),
    ],
)
def test_impossible_shapes_are_rejected(wrong, message):
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(PRESETS["llama-tiny"], **wrong)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama-tiny", {"head_width": 3}, "rotary positions turn pairs of channels, and a head has 3"),
        ("llama-tiny", {"rotary_base": None}, "the base of its rotary positions is not known"),
        ("llama-tiny", {"qkv_bias": True}, "a GPT here has all biases, and a Llama none"),
        ("gpt-tiny", {"positions": 64}, "a learned position for each token of its context"),
        ("gpt-tiny", {"parallel": True}, "its two halves read the same input"),
        ("gpt-tiny", {"query_key_norm": True}, "norms of query and key"),
    ],
)
def test_a_shape_that_is_only_planned_is_not_built(name, changes, reason):
    shape = dataclasses.replace(PRESETS[name], **changes)
    with pytest.raises(ModelError, match=f"{name} cannot be built here: .*{reason}"):
        build_model(shape, device="meta")


def test_a_model_that_is_only_planned_says_why():
    with pytest.raises(ModelError, match="qwen3-8b is planned, not built: it has norms of query and key; give another"):
        build_model("qwen3-8b", device="meta")


@pytest.mark.parametrize(
    "wrong", [{"factor": 0.5}, {"original_context": 0}, {"low_frequency": 4.0}, {"low_frequency": 0.0}]
)
def test_impossible_rotary_scalings_are_rejected(wrong):
    with pytest.raises(ModelError, match="rotary scaling"):
        RotaryScaling(**wrong)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-20", "did you mean gpt-20m"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("zzz", "expected one of gpt-tiny, gpt-20m"),
        (None, "unknown model None"),
    ],
)
def test_an_unknown_preset_names_the_near_ones(name, message):
    with pytest.raises(ModelError, match=message):
        build_model(name)


# Models


@pytest.mark.parametrize("name", TINY)
def test_a_later_token_does_not_change_earlier_logits(name):
    model, tokens = louder(build_model(name)), some_tokens()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10], after[:, 10]) and not torch.equal(before[:, 11:], after[:, 11:])


@pytest.mark.parametrize("name", TINY)
def test_forward_and_backward_are_finite_and_reach_every_parameter(name):
    model = build_model(name)
    tokens, targets = some_tokens(), some_tokens().roll(-1, dims=1)
    logits = model(tokens)
    assert logits.shape == (2, 16, 256)
    loss = loss_of(model, tokens, targets)
    loss.backward()
    assert loss.shape == () and abs(loss.item() - math.log(256)) < 0.3
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        # A key bias shifts all scores of a query alike, so softmax cancels it.
        assert parameter_name.endswith("key.bias") or parameter.grad.abs().max() > 0, parameter_name


@pytest.mark.parametrize("name", TINY)
def test_training_learns(name):
    model, text = build_model(name), ByteText.from_bytes(b"the cat sat on the mat. " * 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        loss = loss_of(model, *text.batch(step, 0, 1, 4, 32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 2


@pytest.mark.parametrize("name", TINY)
def test_the_loss_is_float32_in_a_bfloat16_model(name):
    tokens = some_tokens()
    whole = loss_of(build_model(name), tokens, tokens)
    half = loss_of(build_model(name).bfloat16(), tokens, tokens)
    assert half.dtype == torch.float32
    assert abs(half.item() - whole.item()) < 0.05


def test_the_loss_is_the_mean_over_all_tokens():
    model = build_model("gpt-tiny")
    tokens, targets = some_tokens(), some_tokens().roll(-1, dims=1)
    by_hand = -model(tokens).log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss_of(model, tokens, targets), by_hand)


@pytest.mark.parametrize("name", TINY)
def test_a_sequence_beyond_the_context_is_rejected(name):
    model = build_model(name)
    assert model(some_tokens(1, 128)).shape == (1, 128, 256)
    with pytest.raises(ModelError, match="129 tokens is longer than the model's context of 128"):
        model(some_tokens(1, 129))


def test_grouped_query_attention_equals_repeated_keys_and_values():
    grouped_config = PRESETS["llama-tiny"]
    full_config = dataclasses.replace(grouped_config, kv_heads=grouped_config.heads)
    grouped, full = louder(build_model(grouped_config)), build_model(full_config)
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("key.weight", "value.weight")):
            D = grouped_config.head_width
            heads = weight.view(grouped_config.kv_heads, D, -1)  # (K, D, C)
            state[name] = heads.repeat_interleave(2, dim=0).reshape(-1, grouped_config.width)  # (H*D, C)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(some_tokens()), full(some_tokens()), rtol=1e-5, atol=1e-5)


def test_attention_equals_the_formula():
    torch.manual_seed(0)
    config = PRESETS["gpt-tiny"]
    attention, x = CausalAttention(config, bias=True), torch.randn(2, 8, config.width)
    D = config.head_width
    q, k, v = (part(x).view(2, 8, 4, D).transpose(1, 2) for part in (attention.query, attention.key, attention.value))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(~torch.ones(8, 8).tril().bool(), float("-inf"))
    by_hand = attention.output((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 8, -1))
    torch.testing.assert_close(attention(x), by_hand)


def test_block_types_are_the_units():
    assert block_types(build_model("gpt-tiny")) == (GPTBlock,)
    assert block_types(build_model("llama-3.1-405b", device="meta")) == (LlamaBlock,)
    model = build_model("gpt-tiny")
    assert sum(isinstance(m, block_types(model)) for m in model.modules()) == PRESETS["gpt-tiny"].layers


# Rotary positions


def test_rotary_scores_depend_on_the_distance_only():
    rotary = Rotary(PRESETS["llama-tiny"])
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(16, generator=generator), torch.randn(16, generator=generator)
    q, k = rotary(query.expand(100, 16)), rotary(key.expand(100, 16))  # the same vector at 100 positions
    scores = q @ k.T
    for distance in (0, 1, 7):
        along = torch.diagonal(scores, -distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[0, 0], query @ key)
    assert abs(scores[1, 0] - scores[0, 0]) > 1e-2
    torch.testing.assert_close(q.norm(dim=-1), query.norm().expand(100))


def test_rotary_turns_bfloat16_in_float32():
    rotary = Rotary(PRESETS["llama-tiny"])
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert rotary(x).dtype == torch.bfloat16
    assert torch.equal(rotary(x), rotary(x.float()).bfloat16())


def test_llama_31_frequencies():
    """Fast pairs stay, slow ones become 8 times slower, those between lie between; the bounds are wavelengths 8192/4
    and 8192/1.
    """
    config = PRESETS["llama-3.1-8b"]
    plain = rotary_frequencies(config.head_width, config.rotary_base)
    scaled = rotary_frequencies(config.head_width, config.rotary_base, config.rotary_scaling)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength <= 8192 / 4, wavelength >= 8192
    between = ~fast & ~slow
    assert plain.shape == (64,) and fast.any() and slow.any() and between.any()
    torch.testing.assert_close(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8)
    assert (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_llama_2_has_no_scaling():
    assert PRESETS["llama-2-7b"].rotary_scaling is None
    torch.testing.assert_close(
        rotary_frequencies(128, 10_000.0)[[0, 32, 63]], torch.tensor([1, 1e-2, 10_000 ** (-126 / 128)]).double()
    )


def test_rotary_tables_exist_once_and_are_not_in_a_checkpoint():
    model = build_model("llama-tiny")
    assert len(list(model.buffers())) == 2
    assert not any("cos" in name or "sin" in name for name in model.state_dict())
    assert len(list(copy.deepcopy(model).buffers())) == 2


# Initialisation


@pytest.mark.parametrize("name", TINY)
def test_a_seed_gives_the_same_model_and_leaves_the_global_generator_alone(name):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, other = build_model(name, seed=1), build_model(name, seed=1), build_model(name, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    for (parameter_name, p), q, r in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, q), parameter_name
        assert p.dim() == 1 or not torch.equal(p, r), parameter_name


@pytest.mark.parametrize("name", TINY)
def test_to_empty_and_initialise_give_the_values_of_a_direct_build(name):
    late = build_model(name, device="meta").to_empty(device="cpu")
    for tensor in (*late.parameters(), *late.buffers()):
        tensor.data.fill_(float("nan"))
    initialise(late, seed=3)
    assert torch.equal(late(some_tokens()), build_model(name, seed=3)(some_tokens()))


def test_reset_buffers_alone_repairs_a_loaded_model():
    whole = build_model("llama-tiny")
    loaded = build_model("llama-tiny", device="meta").to_empty(device="cpu")
    loaded.load_state_dict(whole.state_dict())
    for buffer in loaded.buffers():
        buffer.fill_(float("nan"))
    assert loaded(some_tokens()).isnan().any()
    reset_buffers(loaded)
    assert torch.equal(loaded(some_tokens()), whole(some_tokens()))


def test_a_model_on_the_meta_device_is_built_without_torchs_compiler():
    """Importing it takes longer than all else that a command does between a run's end and its row."""
    code = (
        "import sys; from fsdplab.workloads import build_model, build_moe\n"
        "for build in (lambda: build_model('gpt-tiny', device='meta'), lambda: build_moe(device='meta')):\n"
        "    assert all(p.is_meta for p in build().parameters())\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_initialising_on_the_meta_device_is_rejected():
    with pytest.raises(ModelError, match="token_embedding.weight: it is on the meta device.*to_empty"):
        initialise(build_model("gpt-tiny", device="meta"))


def test_initial_values_follow_gpt_2():
    model = build_model("gpt-20m")
    block = model.blocks[3]
    assert abs(block.attention.query.weight.std().item() - 0.02) < 1e-4
    residual = 0.02 / math.sqrt(2 * 12)
    assert abs(block.attention.output.weight.std().item() - residual) < 1e-4
    assert abs(block.feed_forward.down.weight.std().item() - residual) < 1e-4
    assert (block.attention.query.bias == 0).all() and (block.feed_forward_norm.weight == 1).all()
    assert not torch.equal(block.attention.query.weight, block.attention.key.weight)


def test_the_ambient_device_is_used_when_none_is_named():
    with torch.device("meta"):
        assert all(p.is_meta for p in build_model("llama-tiny").parameters())
        assert not any(p.is_meta for p in build_model("llama-tiny", device="cpu").parameters())


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_tied_embeddings_share_storage_before_and_after_to_empty(family):
    config = dataclasses.replace(PRESETS[f"{family}-tiny"], tied=True)
    for model in (build_model(config), initialise(build_model(config, device="meta").to_empty(device="cpu"))):
        assert model.head.weight is model.token_embedding.weight
        assert sum(p.numel() for p in model.parameters()) == config.parameters
        loss_of(model, some_tokens(), some_tokens()).backward()
    untied = build_model(f"{family}-tiny")
    assert untied.head.weight.data_ptr() != untied.token_embedding.weight.data_ptr()


SLICES = """
import torch
from torch import distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from fsdplab.workloads import build_model, initialise

whole = build_model("gpt-tiny", seed=7)
for world_size, rank in ((2, 0), (3, 2), (100, 99)):
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    mesh = dist.init_device_mesh("cpu", (world_size,))
    sharded = build_model("gpt-tiny", seed=0)
    for module in sharded.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, torch.nn.Parameter(part))
    initialise(sharded, seed=7)
    for (name, part), full in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        chunks = full.chunk(world_size)
        assert torch.equal(part.to_local(), chunks[rank] if rank < len(chunks) else full[:0]), (world_size, rank, name)
    dist.destroy_process_group()
print("equal")
"""


def test_slices_hold_the_values_of_the_whole_model():
    """Initialising needs no communication, so one rank of the fake backend shows it, also where its slices are uneven
    or empty.

    In a process of its own: torch caches what it learnt about a mesh beyond the life of the process group.
    """
    finished = subprocess.run([sys.executable, "-c", SLICES], capture_output=True, text=True, timeout=150)
    assert finished.returncode == 0 and finished.stdout.strip() == "equal", finished.stderr


# Text


@pytest.fixture(scope="module")
def library() -> ByteText:
    return ByteText.from_standard_library()


def test_the_standard_library_is_a_few_megabytes_of_python(library):
    assert 1_000_000 < len(library) < 10_000_000
    raw = bytes(library.data.tolist())
    assert raw.count(b"import ") > 100 and b"_sysconfigdata" not in raw[:1000]
    import_module("fsdplab.workloads.text")._library_in.cache_clear()
    again = ByteText.from_standard_library()
    assert torch.equal(library.data, again.data) and library.fingerprint == again.fingerprint


def test_the_split_is_the_last_tenth_and_loses_nothing(library):
    assert torch.equal(torch.cat((library.train, library.validation)), library.data)
    assert library.validation.numel() == len(library) // 10


def test_targets_are_the_next_bytes(library):
    tokens, targets = library.batch(3, 1, 2, 4, 64)
    assert tokens.shape == targets.shape == (4, 64)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    raw = bytes(library.train.tolist())
    for row, last in zip(tokens, targets[:, -1], strict=True):
        assert bytes([*row.tolist(), last.item()]) in raw


def test_a_batch_is_a_pure_function_of_its_arguments(library):
    base = dict(step=3, rank=1, world_size=2, batch_size=4, sequence_length=64, micro_batch=0, seed=0, split="train")
    tokens, _ = library.batch(**base)
    torch.manual_seed(1)
    assert torch.equal(tokens, library.batch(**base)[0])
    assert torch.equal(tokens, library.batch(**{**base, "world_size": 4})[0])
    for change in ({"step": 4}, {"rank": 0}, {"micro_batch": 1}, {"seed": 1}, {"split": "validation"}):
        assert not torch.equal(tokens, library.batch(**{**base, **change})[0]), change


def test_batches_stay_inside_their_split():
    text = ByteText.from_bytes(b"t" * 900 + b"v" * 100)
    for step in range(50):
        for split, letter in (("train", ord("t")), ("validation", ord("v"))):
            tokens, targets = text.batch(step, 0, 1, 4, 64, split=split)
            assert (tokens == letter).all() and (targets == letter).all()


def test_the_shortest_text_that_is_enough():
    text = ByteText.from_bytes(bytes(range(10)))  # 9 bytes to train on
    tokens, targets = text.batch(0, 0, 1, 2, 8)
    assert tokens.tolist() == [list(range(8))] * 2 and targets.tolist() == [list(range(1, 9))] * 2
    too_short = r"train part has 9 bytes \(of 10\), and a sequence_length of 9 needs at least 10; give a longer text"
    with pytest.raises(TextError, match=too_short):
        text.batch(0, 0, 1, 2, 9)
    with pytest.raises(TextError, match="validation part has 1 bytes"):
        text.require(1, "validation")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"rank": -1}, "got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"split": "test"}, "unknown split 'test'"),
    ],
)
def test_wrong_batches_are_rejected(library, wrong, message):
    with pytest.raises(ValueError, match=message):
        library.batch(**{**dict(step=0, rank=0, world_size=2, batch_size=1, sequence_length=8), **wrong})


def test_a_file_is_read_as_bytes(tmp_path):
    file = tmp_path / "text.anything"
    file.write_bytes("Grüße\n".encode())
    text = ByteText.from_path(file)
    assert text.data.tolist() == list("Grüße\n".encode()) and text.source == str(file)
    assert text.fingerprint != ByteText.from_bytes(b"other").fingerprint


def test_a_folder_is_read_in_order_of_path(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in {"b.py": b"2", "a.txt": b"1", "sub/c.md": b"3", "data.bin": b"no"}.items():
        (tmp_path / name).write_bytes(content)
    assert bytes(ByteText.from_path(str(tmp_path)).data.tolist()) == b"123"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist"),
        ("empty.txt", "is empty: got 0 bytes"),
        ("folder", "holds no text: expected files ending in .md, .py, .txt"),
        ("blank", "is empty: got 0 bytes"),
    ],
)
def test_paths_without_text_are_rejected(tmp_path, name, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data.bin").write_bytes(b"x")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.md").touch()
    with pytest.raises(TextError, match=message):
        ByteText.from_path(tmp_path / name)


def test_a_blank_path_and_an_impossible_one_are_rejected(tmp_path):
    with pytest.raises(TextError, match="path of the text is empty"):
        ByteText.from_path("")
    with pytest.raises(TextError, match="cannot look for text|does not exist"):
        ByteText.from_path(tmp_path / ("x" * 5000))


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="needs a device file")
def test_a_device_is_rejected():
    with pytest.raises(TextError, match="neither a file nor a folder"):
        ByteText.from_path("/dev/null")


@pytest.mark.skipif(
    not Path("/proc/self/mem").is_file(), reason="needs a file that exists and cannot be read, even by root"
)
def test_an_unreadable_file_is_rejected():
    with pytest.raises(TextError, match="cannot read /proc/self/mem.*permissions"):
        ByteText.from_path("/proc/self/mem")


# Documentation


@pytest.mark.parametrize("name", ["shapes", "transformer", "models", "text"])
def test_examples_in_docstrings(name):
    module = import_module(f"fsdplab.workloads.{name}")
    results = doctest.testmod(module, extraglobs={name: getattr(workloads, name) for name in workloads.__all__})
    assert results.attempted > 0 and results.failed == 0


# The twin


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_ranks_replayed_side_by_side_give_the_same_bits(at_once):
    text = ByteText.from_standard_library()
    batches = [[text.batch(0, rank, 5, 2, 16, micro_batch=micro) for micro in range(2)] for rank in range(5)]
    one, several = (build_model("gpt-tiny", seed=3) for _ in range(2))
    one.head.weight.requires_grad_(False), several.head.weight.requires_grad_(False)

    losses = replay_gradients(one, batches, loss_of), SideBySide(several, at_once).replay_gradients(batches, loss_of)

    assert losses[0] == losses[1]
    for (name, expected), got in zip(one.named_parameters(), several.parameters()):
        assert (expected.grad is None) == (got.grad is None), name
        assert expected.grad is None or torch.equal(expected.grad, got.grad), name


def test_what_a_replay_of_one_rank_raises_is_raised():
    def diverges(model, tokens, targets):
        raise ArithmeticError("rank 1's batch")

    with pytest.raises(ArithmeticError, match="rank 1's batch"):
        SideBySide(build_model("gpt-tiny"), 2).replay_gradients([[(None, None)], [(None, None)]], diverges)


# ---- a workload as a value


class Regression(Task):
    """A model that reads numbers, in batches that are a dict."""

    name = "regression"

    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)

    def batch(self, at: At) -> dict[str, torch.Tensor]:
        drawn = torch.randn(4, 8, generator=at.generator)
        return {"x": drawn.to(at.device), "y": drawn.sum(1, keepdim=True).to(at.device)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    def units(self, model: nn.Module) -> tuple[type[nn.Module], ...]:
        return (nn.Linear,)


def test_a_batch_depends_on_its_step_rank_and_micro_batch_alone():
    here = At(step=3, rank=1, world_size=2, micro_batch=1, seed=5)
    others = [replace(here, **{name: 0}) for name in ("step", "rank", "micro_batch", "seed")]
    found = [Regression().batch(at)["x"] for at in (here, here, replace(here, world_size=4), *others)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not any(torch.equal(found[0], other) for other in found[3:])


def test_a_step_and_the_twin_train_any_workload_alike():
    work, spec = Regression(), RunSpec(world_size=1, micro_batches=2)
    model, twin = work.build("cpu", 0), work.build("cpu", 0)
    batches = micro_batches(spec, work, 0, 0, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases: list[str] = []
    loss = one_step(Held(model), optimizer, batches, work.loss, phases.append)
    expected = replay_gradients(twin, [[(batch,) for batch in batches]], work.loss)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert loss.item() == pytest.approx(expected, rel=1e-6) and phases == ["forward", "backward"] * 2 + ["optimizer"]
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(ours, theirs)


def test_a_preset_on_a_text_is_a_workload():
    text = ByteText.from_bytes(bytes(range(256)) * 8)
    work = OnText("gpt-tiny", text, batch_size=2, sequence_length=16)
    model, batch = work.build("cpu", 0), work.batch(At(step=1, rank=0, world_size=2))
    assert torch.equal(batch[0], text.batch(1, 0, 2, 2, 16)[0]) and work.data() == [text.data]
    assert work.units(model) == (GPTBlock,) and work.loss(model, batch).item() == pytest.approx(5.55, abs=0.1)
