"""What makes a plan fit that does not: the search finds it, its figures are a plan's own, and its commands run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from fsdplab.planning.elsewhere import ASSUMED_STORAGE, checkpoint_bytes, elsewhere
from fsdplab.planning.host import host_memory_of, node_host_bytes
from fsdplab.planning.memory import fits_card, memory_of
from fsdplab.planning.planner import plan_of, plan_spec
from fsdplab.planning.remedies import EQUAL, MOST, ROWS, remedies, smaller_batches
from fsdplab.planning.step_time import step_time
from tests.test_plan import ended

pytestmark = pytest.mark.quick
P = 70_553_706_496
SIXTEEN = plan_spec("llama-3.1-70b", "h100", gpus=16, checkpointing="full")
FOUR = plan_spec("llama-3.1-70b", "4090", gpus=4)
PLANS = (
    SIXTEEN,
    FOUR,
    plan_spec("llama-3.1-8b", "4090", gpus=4),
    plan_spec("llama-3.1-8b", "h100", gpus=8, micro_batch=8),
    plan_spec("llama-3.1-70b", "h100", gpus=16, strategy="no_shard"),
    plan_spec("llama-3.1-8b", "h100", gpus=8, seq=65_536, checkpointing="full"),
    plan_spec("llama-3.2-1b", "t4", gpus=2),
)


def peak(spec):
    return memory_of(spec).peak.total


def a_gpu(spec):
    return spec.step_tokens / step_time(spec).step_s / spec.gpus


@pytest.mark.parametrize("spec", PLANS, ids=lambda spec: f"{spec.model.name} on {spec.gpus} {spec.gpu.name}")
def test_remedies_fit_and_are_named_fastest_first(spec):
    found = remedies(spec)
    assert not fits_card(spec) and 0 < len(found) <= MOST
    speeds = []
    for remedy in found:
        other = replace(spec, **dict(remedy.changes))
        assert other == remedy.spec and remedy.peak == peak(other) <= spec.gpu.memory_bytes
        assert remedy.fitness == plan_of(other).fitness != "no"
        speeds.append(-a_gpu(other) if spec.gpu.bf16_flops else remedy.peak)
    assert speeds == sorted(speeds)
    for one in found:
        assert not any(set(other.changes) < set(one.changes) for other in found), "a part of it is enough"


@pytest.mark.parametrize("spec", PLANS[:6], ids=lambda spec: f"{spec.model.name} on {spec.gpus} {spec.gpu.name}")
def test_no_single_change_of_the_table_that_fits_is_faster(spec):
    fitting = [change for row in ROWS for change in row.changes(spec) if fits_card(replace(spec, **change))]
    least = [change for change in fitting if not any(other.items() < change.items() for other in fitting)]
    fastest = max((a_gpu(replace(spec, **change)) for change in least), default=0.0)
    assert remedies(spec)[0].tokens_per_s >= (1 - EQUAL) * fastest


def test_gradients_in_bf16_make_70_b_fit_on_16_h100():
    """The peak has one block's packed gradients: 2 bytes of each are saved, 1.71 GB, and 425 MB are missing."""
    first, second, third = remedies(SIXTEEN)
    missing = peak(SIXTEEN) - 80 * 2**30
    saved = 2 * SIXTEEN.model.block_parameters
    assert round(missing / 1e6) == 425 and missing < saved == pytest.approx(1.71e9, rel=0.01)
    assert second.words == "--reduce-dtype bf16" and second.fitness == "likely"
    assert second.peak == pytest.approx(peak(SIXTEEN) - saved, rel=1e-4)
    assert first.words == "--lora-rank 16 --base-dtype nf4" and first.notes == ["adapters alone are trained"]
    assert third.words == "--optimizer adamw-8bit" and third.fitness == "yes"
    # 8 bits of both moments in place of 32: 2 of 8 bytes a parameter, on a sixteenth
    states = memory_of(third.spec).resting.by_category["optimizer_state"]
    assert states == pytest.approx(2 * P / 16, rel=1e-3)


def test_adapters_on_a_base_in_4_bits_make_70_b_fit_on_four_24_gb_cards():
    """4.127 bits of each matrix of a block and 2 bytes of the embeddings and the head, over four cards."""
    (adapters, offload) = remedies(FOUR)
    assert adapters.words == "--lora-rank 16 --base-dtype nf4 --loss chunked --checkpoint full"
    shape = FOUR.model
    matrices = shape.layers * sum(each.count for each in shape.block if each.is_matrix)
    rank_16 = shape.layers * sum(16 * sum(each.shape) for each in shape.block if each.is_matrix)
    base = (4.127 / 8 * matrices + 2 * (P - matrices) + 4 * rank_16) / 4
    resting = memory_of(adapters.spec).resting.by_category["sharded_parameters"]
    assert resting == pytest.approx(base, rel=1e-3) and adapters.peak == pytest.approx(24.4e9, rel=0.005)
    assert remedies(replace(FOUR, seq=1024))[0].peak == pytest.approx(19.0e9, rel=0.005)
    assert offload.words == "--checkpoint full --offload cpu"


def test_a_smaller_loss_is_enough_where_logits_are_too_large():
    """65,536 tokens x 128,256 words: 12 bytes each do not fit, 4 do; no second change and no adapters are named."""
    spec = PLANS[5]
    assert 12 * spec.seq * spec.model.vocabulary > 80 * 2**30 > 4 * spec.seq * spec.model.vocabulary
    assert [remedy.words for remedy in remedies(spec)] == ["--loss fused", "--cp 2", "--tp 4"]


def test_long_sequences_are_shared_by_several_gpus_and_usual_ones_are_not():
    long = plan_spec("llama-3.1-8b", "h100-80gb", gpus=8, checkpointing="full", seq=131_072)
    ways = {remedy.words: remedy for remedy in remedies(long)}
    shared = ways["--cp 8"]
    # each GPU has an eighth of the activations, and holds as much of the states as before
    assert shared.spec.context_parallel == 8 and shared.fitness == "yes"
    activations = [plan_of(spec).memory.peak.by_category["activations"] for spec in (long, shared.spec)]
    assert activations[1] == pytest.approx(activations[0] / 8, rel=0.01)
    assert shared.tokens_per_s > ways["--tp 8"].tokens_per_s
    usual = plan_spec("llama-3.1-8b", "h100-80gb", gpus=8, micro_batch=32, seq=4096)
    assert remedies(usual) and not any("--cp" in remedy.words for remedy in remedies(usual))


def test_a_smaller_micro_batch_keeps_the_tokens_of_a_step():
    spec = replace(PLANS[3], micro_batch=6, grad_accum=2)
    assert [change["micro_batch"] for change in smaller_batches(spec)] == [3, 2, 1]
    assert {replace(spec, **change).step_tokens for change in smaller_batches(spec)} == {spec.step_tokens}


def test_choices_that_are_kept_are_no_remedy():
    kept = frozenset({"checkpoint", "batch-size", "tp", "strategy", "world-size"})
    for remedy in remedies(PLANS[3], kept):
        assert not {"checkpointing", "micro_batch", "tensor_parallel", "strategy", "gpus"} & dict(remedy.changes).keys()


# ---- what moves elsewhere


def test_offload_takes_16_bytes_a_parameter_of_one_nodes_memory_and_unknown_memory_is_asked_for():
    offload = remedies(FOUR)[1]
    assert host_memory_of(offload.spec) is None and node_host_bytes(offload.spec) == pytest.approx(16 * P, rel=1e-3)
    assert offload.notes == ["1,129 GB of host memory a node; --host-memory says what the node has"]
    enough, little = (replace(FOUR, host_memory=nbytes) for nbytes in (2 * 10**12, 512 * 10**9))
    assert remedies(enough)[1].notes == ["1,129 GB of host memory a node"]
    assert not any(remedy.spec.offload for remedy in remedies(little))


def test_a_nodes_host_memory_is_that_of_its_usual_machine():
    on_eight = plan_spec("llama-3.1-70b", "h100", gpus=8, offload=True)
    found = elsewhere(on_eight)
    assert found.host_memory_bytes == 2e12 and found.host_memory_of == "a DGX H100" and found.fits_host
    other_nodes = replace(on_eight, gpus_per_node=4)
    assert elsewhere(other_nodes).host_memory_bytes is None
    assert elsewhere(other_nodes).host_bytes == pytest.approx(found.host_bytes / 2, rel=1e-3), "4 of 8 ranks a node"
    large = plan_spec("llama-3.1-405b", "a100-40gb", gpus=8, offload=True)
    assert elsewhere(large).host_bytes == pytest.approx(16 * 405_853_388_800, rel=1e-3)
    assert not elsewhere(large).fits_host


def test_a_checkpoint_has_what_is_trained_and_its_state():
    """12 bytes a parameter with masters in float32 and Adam, 6 in bf16, and of adapters theirs alone."""
    assert checkpoint_bytes(SIXTEEN) == pytest.approx(12 * P, rel=1e-3)
    assert checkpoint_bytes(replace(SIXTEEN, master_dtype="bf16")) == pytest.approx(6 * P, rel=1e-3)
    shape = SIXTEEN.model
    rank_16 = shape.layers * sum(16 * sum(each.shape) for each in shape.block if each.is_matrix)
    assert checkpoint_bytes(replace(SIXTEEN, lora_rank=16)) == pytest.approx(12 * rank_16, rel=1e-3)
    found = elsewhere(SIXTEEN)
    assert found.checkpoint_s == pytest.approx(12 * P / 2 / ASSUMED_STORAGE, rel=1e-3) and found.storage_assumed
    named = elsewhere(replace(SIXTEEN, storage=10**10))
    assert named.checkpoint_s == pytest.approx(12 * P / 2 / 1e10, rel=1e-3) and not named.storage_assumed


def test_states_in_files_are_read_and_written_as_the_optimizer_and_the_gathers_do():
    """A step of 4-byte states: 28 bytes a parameter for Adam, gathers twice (the root once) and gradients back."""
    spec = replace(FOUR, offload=True, checkpointing="full")
    gathered = 2 * 4 * P - 4 * spec.model.root_parameters
    assert elsewhere(spec).drive_bytes_per_step == pytest.approx(28 * P + gathered + 4 * P, rel=1e-3)


# ---- the commands


def test_the_commands_that_are_named_are_plans_that_fit(capsys, tmp_path):
    path, again = tmp_path / "plan.json", tmp_path / "again.json"
    given = ["plan", "--model", "llama-3.1-70b", "--gpu", "4090", "--world-size", "4"]
    code, out, _ = ended([*given, "--json", str(path)], capsys)
    assert code == 0 and "what makes it fit" in out and "11 cards hold the sharded parameters and 44 all" in out
    found = json.loads(path.read_text())["remedies"]
    assert len(found) == 2
    for remedy in found:
        assert f"fsdplab plan --model llama-3.1-70b --gpu 4090 {remedy['flags']}" in " ".join(out.split())
        model = ["plan", "--model", "llama-3.1-70b", "--gpu", "4090"]
        assert ended([*model, *remedy["flags"].split(), "--json", str(again)], capsys)[0] == 0
        planned = json.loads(again.read_text())
        assert planned["fits"] == remedy["fits"] != "no" and planned["remedies"] == []
        assert planned["memory_bytes"]["total"] == pytest.approx(remedy["peak_bytes"], abs=20)
        assert planned["tokens_per_s_per_gpu"] == pytest.approx(remedy["tokens_per_s_per_gpu"])


def test_a_search_that_finds_nothing_names_the_remedies_of_the_plan(capsys, tmp_path):
    path = tmp_path / "fit.json"
    kept = ["--keep", "world-size,strategy,tp,checkpoint"]
    given = ["--model", "llama-3.1-70b", "--world-size", "16", "--checkpoint", "full", "--global-batch", "16", *kept]
    code, out, _ = ended(["plan", "fit", *given, "--json", str(path)], capsys)
    assert code == 0 and "nothing fits on 16 GPUs" in out and "--reduce-dtype bf16" in out
    found = json.loads(path.read_text())
    assert found["best_single_change"]["changes"] == {"reduce_dtype": "bf16"}
    assert all("--world-size 16 " in remedy["flags"] for remedy in found["remedies"])


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ([], "1,129 GB are needed; how much a node has is not known here: give --host-memory"),
        (["--host-memory", "2TB"], "1,129 GB are needed of 2,000 GB (--host-memory)"),
        (["--host-memory", "512GB"], "1,129 GB are needed, which do not fit in 512 GB (--host-memory)"),
    ],
)
@pytest.mark.parametrize("command", [["plan"], ["plan", "fit"]])
def test_host_memory_is_told_or_asked_for(command, host, words, capsys):
    given = [
        "--model",
        "llama-3.1-70b",
        "--gpu",
        "4090",
        "--world-size",
        "4",
        "--checkpoint",
        "full",
        "--offload",
        "cpu",
    ]
    code, out, _ = ended([*command, *given, *host], capsys)
    assert code == 0 and words in " ".join(out.split())
    assert ("nothing fits on 4" in out) == ("512GB" in host and "fit" in command)


@pytest.mark.parametrize("flag", ["--host-memory", "--storage"])
@pytest.mark.parametrize("given", ["much", "0", "-3GB", "5 apples", ""])
def test_a_wrong_size_is_refused_in_one_line(flag, given, capsys):
    code, out, said = ended(["plan", flag, given], capsys)
    assert code == 2 and not out and said.count("\n") == 1 and f"{flag} is {given!r}; expected a size such as" in said


def test_states_over_cards_alone_are_counted():
    """4 and 16 bytes a parameter over cards of 24 GiB."""
    card = 24 * 2**30
    assert (math.ceil(4 * P / card), math.ceil(16 * P / card)) == (11, 44)
