"""Pipelines, experts and networks of a plan: bytes and seconds by hand, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import cli
from fsdplab.planning.hardware import NETWORKS, SPREAD, parse_network
from fsdplab.planning.links import LinkError
from fsdplab.planning.memory import fits_card, memory_of
from fsdplab.planning.plan_spec import PlanError
from fsdplab.planning.plan_traffic import axis_link, part_of_network, plan_traffic, sends_of, transfer_of
from fsdplab.planning.planner import plan, plan_spec
from fsdplab.planning.program import Compute as Computes
from fsdplab.planning.program import Issue, StepWork, Transfer, UnitWork, program_of, seconds_of
from fsdplab.planning.simulation import simulate
from fsdplab.planning.stages import bubble, stages, waiting
from fsdplab.planning.step_time import Compute, step_time
from fsdplab.workloads.model_files import model_named

pytestmark = pytest.mark.quick

MIXTRAL = model_named(str(Path(__file__).parent / "configs" / "mixtral-8x7b.json"))


def spec_of(**choices):
    return plan_spec("llama-3.1-70b", "h100", **{"gpus": 64, "tensor_parallel": 4, "checkpointing": "full", **choices})


# ---- networks


def test_every_network_says_where_its_figures_are_from():
    assert all(row.source and 0 < row.efficiency <= 1 and row.latency_s > 0 for row in NETWORKS.values())


def test_a_named_network_is_its_cards_rate_over_the_nodes_gpus():
    spec = spec_of(tensor_parallel=1, network="ib400", nics=4, oversubscription=2.0)
    assert spec.fabric.bytes_per_s == 4 * 50e9 / 8 / 2 and not spec.fabric.assumed
    assert spec_of().fabric.assumed and "H100" in spec_of().fabric.words
    nodes, part = part_of_network(spec)
    assert nodes == 8 and part == pytest.approx(0.94 / (1 + SPREAD * (math.sqrt(8) - 1)))
    assert axis_link(spec, "shard").bytes_per_s == pytest.approx(8 * spec.fabric.bytes_per_s * part)


def test_the_same_network_by_its_name_and_as_assumed_gives_the_same_plan():
    assert plan("llama-3.1-8b", "h100", gpus=64, network="ib400").time == plan("llama-3.1-8b", "h100", gpus=64).time


def test_a_slower_network_and_an_oversubscribed_one_take_longer():
    steps = [
        step_time(spec_of(tensor_parallel=1, **choices)).step_s
        for choices in ({"network": "ib400"}, {"network": "ib400", "oversubscription": 8.0}, {"network": "eth25"})
    ]
    assert steps == sorted(steps) and steps[2] > 2 * steps[0]


def test_all_gathers_over_256_gpus_are_as_fast_as_measured():
    """NVIDIA/nccl #1218: 2 GiB over 32 nodes of 8 H100 at 200 GB/s; held out. The same without a falling part: 300."""
    spec = spec_of(gpus=256, tensor_parallel=1)
    link = axis_link(spec, "shard")
    sent = 2**31 * 255 / 256
    assert sent / (sent / link.bytes_per_s + 255 * link.latency_s) == pytest.approx(200e9, rel=0.15)


def test_a_card_without_a_known_network_takes_a_named_one():
    with pytest.raises(PlanError, match="name one with --network"):
        plan_spec("gpt2", "4090", gpus=16, seq=512)
    assert plan("gpt2", "4090", gpus=16, seq=512, network="eth25").time


@pytest.mark.parametrize("wrong", ["infini", "ib9000", "", "10"])
def test_an_unknown_network_is_refused_with_the_known_ones(wrong):
    with pytest.raises(LinkError, match="expected one of ib800, ib400"):
        parse_network(wrong)


def test_nics_need_a_network_and_oversubscription_a_number():
    with pytest.raises(PlanError, match="name it with --network"):
        spec_of(nics=4)
    with pytest.raises(PlanError, match="--oversubscription is 0"):
        spec_of(oversubscription=0.0)


def test_axes_on_one_link_share_it():
    """A gather of 4 s is under way while 2 s of products wait for 1 s on the same link: each sends at half the rate, so
    both end 1 s later. On links of their own neither does.
    """

    def step(link: str) -> float:
        sent = {"all_gather": Transfer("all_gather", 4.0, 1.0, link="node")}
        inline = Transfer("all_gather", 1.0, 1.0, axis="tensor", link=link)
        root = UnitWork("root", 0.0, 0.0)
        blocks = [UnitWork(f"blocks.{index}", 2.0, 2.0, sent, (inline,)) for index in range(2)]
        work = StepWork(root, tuple(blocks), prefetch=1)
        (operations,) = program_of(work)
        return seconds_of(operations, {unit.name: unit for unit in work.units})

    assert step("node") == step("other") + 1.0


def test_each_collective_between_products_shares_its_own_link():
    """Of 1 s on "node" and 9 s on "network" in 10 s of a forward a gather of 30 s on one link meets its part."""

    def forward_s(link: str) -> float:
        inline = (Transfer("all_gather", 1.0, 1.0, link="node"), Transfer("ring", 9.0, 1.0, link="network"))
        sent = {"all_gather": Transfer("all_gather", 30.0, 1.0, link=link)}
        units = {"block": UnitWork("block", 0.0, 0.0, sent, inline)}
        return seconds_of([Issue(0, "block", "forward", "all_gather"), Computes("block", "forward")], units)

    assert forward_s("node") == 10 + 1 and forward_s("network") == 10 + 9 and forward_s("other") == 10


def test_exposed_collectives_of_tensor_parallelism_are_no_compute():
    """Over two nodes of four GPUs they take longer than the products that they go on beside."""
    spec = plan_spec("llama-3.1-8b", "h100", gpus=64, gpus_per_node=4, tensor_parallel=8)
    between, beside = step_time(spec), step_time(replace(spec, async_tensor=True))
    assert beside.compute_s == between.compute_s == pytest.approx(49.1e-3, rel=1e-3)
    assert beside.exposed_s == pytest.approx(135.5e-3, rel=1e-3) and beside.exposed_s < between.exposed_s
    assert beside.step_s == pytest.approx(beside.compute_s + beside.exposed_s)


# ---- pipelines


def test_the_bubble_is_that_of_megatrons_paper():
    """Narayanan et al. 2021, section 2.2: (p - 1) / m, and v times less with v parts a stage."""
    assert bubble(spec_of(pipeline_parallel=4, grad_accum=8)) == 3 / 8
    assert bubble(spec_of(pipeline_parallel=4, grad_accum=8, schedule="interleaved", virtual_stages=5)) == 3 / 40
    assert bubble(spec_of(pipeline_parallel=4, grad_accum=8, schedule="zero-bubble")) == 1 / 8


def test_first_stages_keep_more_micro_batches():
    spec = spec_of(pipeline_parallel=4, grad_accum=16)
    assert [waiting(spec, index) for index in range(4)] == [3, 2, 1, 0]
    assert waiting(replace(spec, grad_accum=2), 0) == 1, "no more than there are"
    more = replace(spec, schedule="interleaved", virtual_stages=2)
    assert waiting(more, 0) == (2 * 3 + 4 + 1) / 2 - 1


def test_stages_hold_the_model_once():
    spec = plan_spec("llama-3.1-405b", "h100", gpus=512, tensor_parallel=8, pipeline_parallel=8)
    found = dict(stages(spec))
    assert [found[index].model.layers for index in (0, 1, 7)] == [16, 16, 15] and found[7].gpus == 64
    held = [found[0].model, *[found[1].model] * 5, found[7].model.stage(15, False, False), found[7].model]
    assert sum(each.parameters for each in held) == spec.model.parameters
    tied = plan_spec("llama-3.2-1b", "h100", gpus=8, pipeline_parallel=2)
    first, last = (stage.model for _, stage in stages(tied))
    table = tied.model.vocabulary * tied.model.width
    assert first.parameters + last.parameters == tied.model.parameters + table, "each end has the table"


def test_memory_of_waiting_micro_batches_is_added():
    """Of the first of 4 stages 3 micro-batches wait, with the input of each of 20 recomputed blocks."""
    choices = dict(pipeline_parallel=4, strategy="zero1")
    one, many = (memory_of(spec_of(grad_accum=count, **choices)) for count in (1, 8))
    spec = spec_of(**choices)
    kept = 20 * 2 * spec.model.width * spec.tokens / 4
    name = "backward of the last block but one"
    grown = many.at(name).by_category["activations"] - one.at(name).by_category["activations"]
    assert grown == pytest.approx(3 * kept, rel=0.01)


def test_micro_batches_fill_the_pipeline():
    speeds = [
        plan("llama-3.1-70b", "h100", gpus=64, tensor_parallel=4, pipeline_parallel=4, strategy="zero1",
             checkpointing="full", grad_accum=count, **more).tokens_per_s_per_gpu
        for count, more in ((4, {}), (32, {}), (32, {"schedule": "interleaved", "virtual_stages": 5}))
    ]  # fmt: skip
    assert speeds == sorted(speeds) and speeds[1] > 1.4 * speeds[0]


def test_neighbours_get_each_micro_batch_once_each_way():
    spec = spec_of(pipeline_parallel=4, grad_accum=6)
    (send,) = [row for row in plan_traffic(spec) if row.axis == "pipeline"]
    assert send.wire_bytes == 2 * 4096 * 8192 / 4 and send.count in (6, 12), "of the stage that sends most"


def test_each_stage_is_charged_its_own_sends():
    """Of 4 stages with 8 micro-batches of 33.6 MB those in the middle send 16 times: they are timed with 537 MB."""
    spec = plan_spec("llama-3.1-8b", "h100", gpus=32, pipeline_parallel=4, grad_accum=8)
    sends = [sends_of(spec, index) for index in range(4)]
    assert [send.count for send in sends] == [8, 16, 16, 8] and sends[1].step_bytes == 16 * 4096 * 4096 * 2
    last = dict(stages(spec))[3]  # the slowest: it has the head
    own_s = sum(row.count * transfer_of(last, row).seconds for row in plan_traffic(last))
    assert step_time(spec).communication_s == pytest.approx(own_s + 8 * transfer_of(spec, sends[3]).seconds)
    in_parts = replace(spec, schedule="interleaved", virtual_stages=2)
    assert [sends_of(in_parts, index).count for index in range(4)] == [24, 32, 32, 24]


def test_collectives_beside_products_are_no_part_of_the_bubble():
    """Two thirds of 1f1b's bubble are what ZB-H1 saves: of compute alone where this hides all collectives."""
    spec = replace(spec_of(pipeline_parallel=4, grad_accum=8), async_tensor=True)
    slow, fast = step_time(spec), step_time(replace(spec, schedule="zero-bubble"))
    optimizer_s = [Compute(stage, None).optimizer_s for _, stage in stages(spec)][-1]
    assert slow.step_s - fast.step_s == pytest.approx(2 / 3 * 3 / 8 * (slow.compute_s - optimizer_s))


def test_a_stage_says_how_much_of_its_compute_collectives_take():
    """What its own step has as a job of its own, and 0 where nothing is sent beside its products."""
    spec = plan_spec("llama-3.1-8b", "h100", gpus=16, gpus_per_node=8, pipeline_parallel=2, grad_accum=8)
    last = dict(stages(spec))[1]
    assert step_time(spec).slowed_s == step_time(last).slowed_s > 0.01
    assert step_time(spec).compute_s == step_time(last).compute_s
    alone = replace(spec, gpus=2, gpus_per_node=2)
    assert step_time(alone).slowed_s == 0


def test_a_pipeline_of_one_is_no_pipeline():
    assert step_time(spec_of(pipeline_parallel=1)) == step_time(spec_of())


@pytest.mark.parametrize(
    "wrong,words",
    [
        (dict(pipeline_parallel=3), "in 3 stages"),
        (dict(pipeline_parallel=4, virtual_stages=2), "with interleaved"),
        (dict(pipeline_parallel=4, schedule="interleaved"), "with interleaved"),
        (dict(pipeline_parallel=4, schedule="gpipes"), "expected one of 1f1b"),
        (dict(pipeline_parallel=16, schedule="interleaved", virtual_stages=8), "do not fill 128 parts"),
        (dict(pipeline_parallel=4, offload=True), "leave --offload or --pp out"),
        (dict(expert_parallel=2), "has none"),
    ],
)
def test_contradictions_are_refused_in_one_line(wrong, words):
    with pytest.raises(PlanError, match=words) as error:
        spec_of(**wrong)
    assert "\n" not in str(error.value)


def test_a_pipeline_is_not_simulated():
    with pytest.raises(PlanError, match="leave --pp out"):
        simulate(spec_of(pipeline_parallel=4))


# ---- experts


def test_a_token_is_multiplied_by_the_experts_that_it_takes():
    found = plan(MIXTRAL, "h100", gpus=64, checkpointing="full")
    dense = 6 * (MIXTRAL.active_parameters - MIXTRAL.vocabulary * MIXTRAL.width)
    from fsdplab.planning.step_time import model_flops

    attention = 12 * MIXTRAL.layers * MIXTRAL.query_width * found.spec.seq
    assert model_flops(found.spec) / found.spec.step_tokens == pytest.approx(dense + attention, rel=1e-3)


def test_expert_parallel_ranks_share_experts_and_send_tokens():
    whole, shared = (plan(MIXTRAL, "h100", gpus=64, checkpointing="full", expert_parallel=ranks) for ranks in (1, 8))
    rest = [each.memory.resting.by_category["sharded_parameters"] for each in (whole, shared)]
    assert rest[0] == pytest.approx(rest[1], rel=0.01), "all states are cut over all ranks either way"
    gathered = [each.memory.peak.by_category["unsharded_parameters"] for each in (whole, shared)]
    assert gathered[1] < gathered[0] / 3
    (sent,) = [row for row in shared.traffic if row.axis == "expert"]
    tokens = shared.spec.tokens * 2 * MIXTRAL.width * 2
    assert sent.kind == "all_to_all" and sent.wire_bytes == tokens * 7 / 8
    assert sent.count == 32 * (2 + 4), "there and back, for gradients too, and again as it is recomputed"


def test_expert_parallel_ranks_divide_experts():
    with pytest.raises(PlanError, match="does not divide 8 experts"):
        plan_spec(MIXTRAL, "h100", gpus=64, expert_parallel=16)


def test_experts_pipelines_and_tensors_together():
    choices = dict(gpus=128, tensor_parallel=2, pipeline_parallel=4, expert_parallel=8, strategy="zero1", grad_accum=16)
    found = plan(MIXTRAL, "h100", checkpointing="full", **choices)
    assert fits_card(found.spec) and set(found.as_dict()["comm_bytes_per_step"]) == {
        "shard", "tensor", "expert", "pipeline",
    }  # fmt: skip


# ---- what else is counted once


def test_a_restored_matrix_is_counted_once_however_many_blocks():
    """QLoRA under no_shard: the scratch of one matrix, 2 bytes an element, not of all 80 blocks."""
    spec = plan_spec(
        "llama-2-70b",
        "h100",
        gpus=1,
        strategy="no_shard",
        lora_rank=16,
        base_dtype="nf4",
        checkpointing="full",
        seq=512,
    )
    largest = 2 * spec.model.ffn * spec.model.width
    moments = memory_of(spec).moments
    assert max(each.by_category["unsharded_parameters"] for each in moments) < 2 * largest


def test_autocast_computes_the_stream_in_float32_and_keeps_casts_of_parameters_only():
    """A cast of a parameter is kept until the forward has ended; one of a view into gathered parameters is not: seen on
    modules alone and inside torch's FSDP1.
    """
    spec = plan_spec("llama-2-7b", "a100", gpus=64, checkpointing="full", micro_batch=4, autocast=True)
    stream = spec.model.layers * spec.tokens * spec.model.width
    before, after = (memory_of(each).at("loss").by_category for each in (replace(spec, autocast=False), spec))
    assert after["activations"] - before["activations"] == pytest.approx(2 * stream, rel=0.1)
    products = sum(each.count for each in spec.model.block if each.is_matrix) * spec.model.layers
    whole = memory_of(spec.under("no_shard"))
    held = whole.at("loss").by_category["unsharded_parameters"]
    assert held >= 2 * products > whole.at("backward of the first block").by_category["unsharded_parameters"]
    gathered = memory_of(spec).at("loss").by_category["unsharded_parameters"]
    assert gathered < products


def test_the_command_names_the_network_and_takes_the_new_axes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--world-size", "16", "--pp", "2", "--micro-batches", "8", "--network", "eth100"])
    out = " ".join(capsys.readouterr().out.split())
    assert "eth100, 8 x 100 Gb/s a node of 8 GPUs; rings over" in out
    assert "2 stages (1f1b)" in out and "bubble of the pipeline 12.5%" in out
    with pytest.raises(SystemExit):
        cli.main(["plan", "--world-size", "16"])
    assert "is assumed; --network names another" in " ".join(capsys.readouterr().out.split())
