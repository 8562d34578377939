"""The planner's questions: every one answers, sentences say what tables say, and cases that can be checked by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from fsdplab import figures
from fsdplab.engine.core.layout import Layout
from fsdplab.figures.style import alt_text
from fsdplab.planning import PlanError
from fsdplab.planning.activations import kept_per_token
from fsdplab.planning.links import LinkSpec
from fsdplab.planning.memory import memory_of
from fsdplab.planning.plan_spec import POLICIES
from fsdplab.planning.planner import largest_micro_batch, plan_of, plan_spec
from fsdplab.planning.questions import LISTED, QUESTIONS, answer, ask, fitting
from fsdplab.planning.simulation import simulate_work, work_of
from fsdplab.planning.step_time import Compute
from fsdplab.workloads.errors import ModelError
from tests.test_plan import ended

pytestmark = pytest.mark.quick
SPECS = {
    "8b on 8": lambda: plan_spec("llama-3.1-8b", "h100", gpus=8),
    "70b on 16": lambda: plan_spec("llama-3.1-70b", "h100", gpus=16),
    "70b on 64, recomputed": lambda: plan_spec("llama-3.1-70b", "h100", gpus=64, checkpointing="full"),
}
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


@pytest.fixture(scope="module")
def answers():
    """Question and spec -> its answer, each found once."""
    return {(name, which): ask(name, make()) for which, make in SPECS.items() for name in QUESTIONS}


# ---- every question


def test_there_are_14_in_the_order_of_the_list_and_five_more():
    listed = (
        "peak wrapping batch sequence world_size optimizer_on_cpu checkpointing policies mixed_policies reduction"
        " precision hybrid smaller_mesh no_reshard"
    )
    assert LISTED == tuple(listed.split()) == tuple(QUESTIONS)[:14] and len(QUESTIONS) == 19
    assert all(question.asked.endswith("?") for question in QUESTIONS.values())


def of_the_spec(found) -> set[str]:
    """Numbers of the plan itself, which a sentence may name without a row for them, and those of fixed wording."""
    spec = found.spec
    whole = (spec.gpus, spec.gpus // spec.gpus_per_node, spec.micro_batch, spec.seq, spec.gpus_per_node)
    return {f"{each:,}" for each in whole}


@pytest.mark.parametrize("which", SPECS)
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_answers_in_one_sentence_of_the_tables_numbers(name, which, answers):
    found = answers[name, which]
    assert found.question == name and found.asked == QUESTIONS[name].asked and found.rows
    assert "\n" not in found.sentence and not found.sentence.endswith(".") and len(found.sentence) < 320
    names = " ".join([*(row[0] for row in found.texts()), "full_shard hybrid_shard zero1 zero2 bf16 fp32"])
    said = found.sentence
    for word in sorted(set(re.findall(r"[a-z_]+\d+(?:_\w+)?", said)), key=len, reverse=True):
        assert word in names, word
        said = said.replace(word, "")
    shown = {number for row in found.texts() for cell in row for number in NUMBER.findall(cell)}
    missing = set(NUMBER.findall(said)) - shown - of_the_spec(found)
    assert not missing, (missing, found.sentence)
    assert len(NUMBER.findall(said)) >= 1


@pytest.mark.parametrize("which", SPECS)
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_answer_has_a_figure_that_says_so(name, which, answers):
    found = answers[name, which]
    drawn = figures.answer_figure(found)
    assert drawn.layout.title.text.replace("<br>", " ") == f"<b>{found.sentence}</b>"
    said = drawn.layout.title.subtitle.text.replace("<br>", " ")
    assert said.startswith("Predicted in closed form") and found.spec.model.name in said
    assert ("simulated: step" in said) == (name in ("wrapping", "mixed_policies", "no_reshard"))
    points = sum(len(trace.y) for trace in drawn.data)
    assert points == len(found.rows) * sum(len(panel.columns) for panel in found.panels)
    lines = [shape for shape in drawn.layout.shapes if shape.line.dash == "dash"]
    assert len(lines) == sum(panel.limit is not None for panel in found.panels)
    assert found.sentence in alt_text(drawn)


def test_bars_above_the_card_are_red_and_those_below_are_not(answers):
    found = answers["batch", "8b on 8"]
    bars = figures.answer_figure(found).data[0]
    red = [colour == figures.answer_figure(found).layout.shapes[0].line.color for colour in bars.marker.color]
    assert red == [not fits for fits in found.column("fits")] and any(red) and not all(red)


# ---- by hand


def test_full_checkpointing_keeps_one_input_a_block():
    """Between the forward and the backward: 2 x width bytes a token and block, against all that autograd saves."""
    spec = replace(SPECS["8b on 8"](), keeps_logits=False)
    kept = [memory_of(replace(spec, checkpointing=each)).at("end of the forward") for each in ("none", "full")]
    none, full = (each.by_category["activations"] for each in kept)
    shape = spec.model
    per_block = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14_336) + 4 * (32 + 2) - 2 * 4096
    assert none - full == spec.tokens * shape.layers * per_block
    found = ask("checkpointing", spec)
    assert found.column("peak")[0] - found.column("peak")[2] > 15e9
    steps = found.column("step")
    assert steps[0] < steps[1] < steps[2] < 1.4 * steps[0], "a third of the products are computed again"


def test_hybrid_pays_only_below_its_rate_and_by_the_bytes_that_cross():
    """Two nodes, a network that is all there is: a rank sends 15/16 x 8/8 P over it under full_shard, where a node's
    eight cards carry a ring's bytes together; hybrid_shard all-reduces 1/2 x 2 x 4 P / 8 on one card. P: a byte a
    parameter.
    """
    spec = plan_spec("llama-3.1-8b", "h100", gpus=16)
    found = ask("hybrid", spec)
    rates, full, groups = (found.column(each.name) for each in found.columns)
    (crossing,) = [rate for rate in rates if f"{rate / 1e9:.1f} GB/s" in found.sentence.split(";")[0]]
    for rate, one, other in zip(rates, full, groups):
        assert (other < one) == (rate <= crossing * 1.001) or abs(other / one - 1) < 0.011
    slow = replace(spec, gpu=replace(spec.gpu, nic_bytes_per_s=1e6, link=LinkSpec("fast", 1e15, 0.0)))
    steps = [plan_of(replace(slow, strategy=each)).time.step_s for each in ("full_shard", "hybrid_shard")]
    root = spec.model.root_parameters / spec.model.parameters
    sent = (2 * (2 - root) + 4) / 8 * 15 / 16
    assert steps[0] / steps[1] == pytest.approx(sent / (2 * 4 / 8 * 1 / 2), rel=0.01)


def test_where_hybrid_pays_is_said_where_it_pays_at_no_single_side_of_a_rate():
    """It paid at five of seven rates in the table, and the sentence said "at no rate"."""
    found = ask("hybrid", plan_spec("llama-3.1-8b", "h100", gpus=64, seq=1024))
    pays = [row[2] < answer.ALIKE * row[1] for row in found.rows]
    assert 0 < sum(pays) < len(pays)
    assert f"pays at {sum(pays)} of the {len(pays)} rates of the network that were tried" in found.sentence


def test_hybrid_of_one_node_is_asked_for_two():
    found = ask("hybrid", plan_spec("llama-3.1-8b", "h100", gpus=8))
    assert found.sentence.startswith("On 16 GPUs in 2 nodes") and "8 GPUs are one node" in found.note


def test_the_largest_batch_is_the_plans():
    spec = plan_spec("llama-3.1-8b", "h100", gpus=8, checkpointing="full")
    largest = largest_micro_batch(spec)
    found = ask("batch", spec)
    counts, fits = found.column("micro-batch"), found.column("fits")
    assert counts[-2:] == (largest.micro_batch, largest.micro_batch + 1) and fits[-2:] == (True, False)
    assert not any(ask("batch", SPECS["70b on 16"]()).column("fits"))


def test_the_longest_sequence_fits_and_256_tokens_more_do_not():
    spec = plan_spec("llama-3.1-8b", "h100", gpus=8)
    found = ask("sequence", spec)
    tokens, fits = found.column("sequence"), found.column("fits")
    assert fits == (True,) * (len(fits) - 1) + (False,) and tokens[-1] - tokens[-2] == 256
    whole = ask("sequence", plan_spec("gpt2", "h100", gpus=8))
    assert "the model's whole context" in whole.sentence and all(whole.column("fits"))


def test_eight_micro_batches_send_eight_times_but_zero1_once():
    found = ask("accumulation", SPECS["8b on 8"]())
    sent, once = found.column("sent"), found.column("sent by zero1")
    assert sent[-1] == pytest.approx(8 * sent[0]) and once[-1] == once[0]


def test_the_fewest_gpus_are_in_the_table_and_one_node_fewer_does_not_fit():
    found = ask("world_size", SPECS["70b on 64, recomputed"]())
    fits = dict(zip(found.column("GPUs"), found.column("fits")))
    (fewest,) = [gpus for gpus in fits if f"fits on {gpus} GPUs" in found.sentence]
    assert fits[fewest] and not any(fit for gpus, fit in fits.items() if gpus < fewest)
    assert not plan_of(replace(found.spec, gpus=fewest - 8)).fits


def test_one_gpu_may_be_enough():
    assert "it fits on 1 GPU or more" in ask("world_size", plan_spec("gpt2", "h100", gpus=8)).sentence


def test_the_exposed_share_falls_with_the_first_unit_gathered_ahead():
    found = ask("prefetch", SPECS["8b on 8"]())
    none, one, *more = found.column("exposed")
    assert none > 5 * one and max(more) <= one
    gathered, block = found.column("most gathered"), 2 * found.spec.model.block_parameters
    assert [round((each - gathered[0]) / block, 3) for each in gathered] == [0, 1, 2, 4]


def test_the_optimizer_on_the_cpu_saves_its_moments_and_moves_gradients_and_parameters():
    """8 bytes a parameter over 8 ranks are saved; float32 gradients go and parameters come. All states there: slices
    go up in float32 for two gathers, the root's for one, gradients come down once.
    """
    spec = SPECS["8b on 8"]()
    found = ask("optimizer_on_cpu", spec)
    own = spec.model.parameters / 8
    crossing = found.column("crosses a step")
    every = own * (2 * 4 + 4) - 4 * spec.model.root_parameters / 8
    assert crossing == (0.0, pytest.approx(own * (4 + 4), rel=1e-4), pytest.approx(every, rel=1e-4))
    assert found.column("saved")[:2] == (0.0, pytest.approx(8 * own, rel=1e-4))
    assert found.column("on the host's link") == (None, *[pytest.approx(each / 63e9) for each in crossing[1:]])
    assert "optimizer is not timed" in found.note


def test_zero_offload_moves_four_bytes_a_parameter_and_nothing_without_state():
    separate = replace(SPECS["8b on 8"](), masters="separate", strategy="zero2")
    moved = ask("optimizer_on_cpu", separate).column("crosses a step")[1]
    assert moved == pytest.approx(4 * separate.model.parameters / 8, rel=1e-4), "Ren et al. 2021: 4 M bytes"
    nothing = ask("optimizer_on_cpu", replace(separate, masters="slices", optimizer="sgd"))
    assert nothing.column("crosses a step")[1] == nothing.column("saved")[1] == 0


def test_more_ranks_share_the_states_and_nothing_else():
    found = ask("world_size", SPECS["70b on 64, recomputed"]())
    of = {row[0]: row for row in found.rows}
    states, rest = ([each.name for each in found.columns].index(name) for name in ("states", "all else"))
    assert of[16][states] == pytest.approx(2 * of[32][states], rel=1e-4)
    assert of[16][rest] == pytest.approx(of[32][rest], rel=1e-4)


def test_a_reduction_in_fp32_reads_and_sends_twice_the_bytes():
    """The largest buffer is the root's: two matrices of the vocabulary and a norm, 4 or 2 bytes an element."""
    spec = SPECS["8b on 8"]()
    found = ask("reduction", spec)
    root = 2 * 128_256 * 4096 + 4096
    assert found.column("largest buffer") == (2 * root, 4 * root)
    narrow, wide = found.column("sent in reductions")
    assert wide == 2 * narrow == pytest.approx(4 * spec.model.parameters * 7 / 8, rel=1e-6)


# ---- checkpointing by units


def test_policies_keep_the_results_they_name():
    """Llama 3.1 8B: input and attention 2 x 2 x 4,096 bytes a token, its log-sum-exp 4 x 32; products as listed."""
    spec = SPECS["8b on 8"]()
    attention = 2 * 2 * 4096 + 4 * 32
    products = 2 * (4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096)
    kept = {each: kept_per_token(replace(spec, checkpointing=each)) for each in POLICIES}
    assert kept["attention"] == attention and kept["products"] == attention + products and kept["full"] == 2 * 4096
    found = ask("policies", spec)
    steps, peaks = found.column("step"), found.column("peak")
    assert found.column("policy") == POLICIES and list(steps) == sorted(steps) and list(peaks)[::-1] == sorted(peaks)
    forward = {each: Compute(replace(spec, checkpointing=each), None) for each in POLICIES}
    again = {each: found.backward_s - forward["none"].backward_s for each, found in forward.items()}
    products_s = 2 * spec.model.block_parameters * spec.tokens / forward["none"].flops
    assert again["attention"] - again["products"] == pytest.approx(products_s, rel=1e-3), "all products again, or none"


def test_each_block_that_is_recomputed_saves_as_much():
    spec = replace(SPECS["8b on 8"](), checkpointing="full")

    def kept(blocks):
        return memory_of(replace(spec, recomputed_blocks=blocks)).at("end of the forward").total

    block = (kept_per_token(replace(spec, checkpointing="none")) - 2 * 4096) * spec.tokens
    assert [kept(0) - kept(count) for count in (1, 7, 32)] == pytest.approx([block, 7 * block, 32 * block])
    none, every = (memory_of(replace(spec, recomputed_blocks=count)) for count in (0, 32))
    assert none == memory_of(replace(spec, checkpointing="none")) and every == memory_of(spec)


def test_the_least_recomputed_blocks_fit_and_one_fewer_do_not():
    spec = SPECS["70b on 64, recomputed"]()
    found = ask("mixed_policies", spec)
    fits = dict(zip(found.column("blocks recomputed"), found.column("fits")))
    (least,) = [count for count in fits if f"the first {count} blocks is the least that fits" in found.sentence]
    assert fits[least] and not fits[least - 1]
    steps = found.column("step")
    closed = [plan_of(replace(spec, checkpointing=each)).time.step_s for each in ("none", "full")]
    assert [steps[0], steps[-1]] == pytest.approx(closed) and list(steps) == sorted(steps)


def test_a_sharded_gradient_larger_than_an_activation_peaks_at_the_last_recomputed_block():
    """Two GPUs, few tokens: slices grow behind the backward; the recomputation of the first blocks comes on top."""
    spec = plan_spec("llama-3.1-8b", "h100", gpus=2, seq=256, checkpointing="full")
    memory = memory_of(replace(spec, recomputed_blocks=8))
    moment = memory.at("backward of the last recomputed block").by_category
    assert moment["sharded_gradients"] == pytest.approx(24 * 4 * spec.model.block_parameters / 2)


# ---- between the forward and the backward


def test_slices_over_fewer_ranks_are_kept_beside_those_over_all():
    """Four of eight ranks: 2 bytes x a quarter of every block at the end of the forward, as the engine lays them out;
    in the backward a block more, the buffer that the next gather arrives in.
    """
    spec = SPECS["8b on 8"]()
    entries = [(each.name, each.shape, 2) for each in spec.model.block]
    for ranks in (2, 4):
        planned, fewer = memory_of(spec), memory_of(replace(spec, ranks_after_forward=ranks))
        slices = 32 * Layout.of(entries, ranks).shard_bytes
        assert slices == 32 * 2 * spec.model.block_parameters / ranks
        more = [memory.at("end of the forward").total for memory in (fewer, planned)]
        assert more[0] - more[1] == pytest.approx(slices)
        more = [memory.at("backward of the last block").total for memory in (fewer, planned)]
        assert more[0] - more[1] == pytest.approx(slices + 2 * spec.model.block_parameters)
    found = ask("smaller_mesh", spec)
    assert found.column("ranks") == (8, 4, 2) and found.column("more at the peak")[0] == 0
    assert "over 4 of 8 ranks" in found.sentence and "every smaller mesh raises it" in found.sentence
    more = dict(zip((each := ask("smaller_mesh", replace(spec, gpus=64, micro_batch=2))).column("ranks"), each.rows))
    (least,) = [ranks for ranks in more if f"less than a twentieth has {ranks} ranks" in each.sentence]
    assert more[least][2] < 0.05 <= more[least // 2][2]


def test_a_smaller_mesh_is_a_node_and_its_gather_stays_there():
    spec = SPECS["70b on 64, recomputed"]()
    found = ask("smaller_mesh", spec)
    gathers = dict(zip(found.column("ranks"), found.column("gather of a block")))
    assert "over 8 of 64 ranks" in found.sentence and gathers[8] < gathers[16] < gathers[64]
    inside = plan_spec("llama-3.1-70b", "h100", gpus=8, checkpointing="full")
    assert gathers[8] == pytest.approx(dict(ask("smaller_mesh", inside).as_dict()["rows"][0])["gather of a block"])


def test_without_reshard_the_plan_is_shard_grad_ops():
    spec = SPECS["8b on 8"]()
    found, other = ask("no_reshard", spec), plan_of(replace(spec, strategy="shard_grad_op"))
    assert found.column("peak") == (memory_of(spec).peak.total, other.memory.peak.total)
    assert found.column("sent")[1] == pytest.approx(sum(row.step_bytes for row in other.traffic))
    assert found.column("step") == pytest.approx((plan_of(spec).time.step_s, other.time.step_s))
    asked_of = ask("no_reshard", replace(spec, strategy="zero2"))
    assert asked_of.rows == found.rows and "zero2 reshards nothing" in asked_of.note


def test_two_ranks_have_no_smaller_mesh():
    with pytest.raises(PlanError, match="2 ranks that shard have no smaller mesh of 2 ranks or more; give at least 4"):
        ask("smaller_mesh", plan_spec("llama-3.1-8b", "h100", gpus=2))


# ---- units


def test_units_of_one_block_are_the_plan_itself():
    for strategy in ("full_shard", "shard_grad_op", "zero2", "no_shard"):
        spec = replace(SPECS["8b on 8"](), strategy=strategy)
        found = ask("wrapping", spec)
        row = dict(zip(found.column("a unit"), found.rows))["a block"]
        cells = dict(zip([each.name for each in found.columns], row))
        assert cells["peak"] == memory_of(spec).peak.total
        assert cells["step"] == pytest.approx(plan_of(spec).time.step_s, rel=1e-9)


def test_larger_units_gather_and_keep_more_and_send_the_same_bytes():
    spec = SPECS["8b on 8"]()
    whole = work_of(spec)
    for count in (1 / 7, 2, 8, 32):
        work = fitting.rewrapped(whole, count)
        assert len(work.blocks) == 32 / count
        for kind in ("all_gather", "reduce_scatter"):
            sent = sum(each.sent[kind].wire_bytes for each in work.blocks)
            assert sent == pytest.approx(sum(each.sent[kind].wire_bytes for each in whole.blocks))
        assert sum(each.forward_s for each in work.blocks) == pytest.approx(32 * whole.blocks[0].forward_s)
    found = ask("wrapping", spec)
    gathered = found.column("gathered at once")
    assert list(gathered) == sorted(gathered)
    assert gathered[-1] == pytest.approx(2 * spec.model.parameters), "all is gathered at once"


def test_one_unit_of_all_blocks_hides_no_gather():
    """Both gathers and the reduction of all blocks are waited for: the head alone computes beside them."""
    spec = replace(SPECS["8b on 8"](), gpus=64, gpus_per_node=8)
    work = fitting.rewrapped(work_of(spec), 32)
    (unit,) = work.blocks
    step = simulate_work(work).step_s
    computed = unit.forward_s + unit.backward_s + work.root.forward_s + work.root.backward_s + work.optimizer_s
    ends = sum(each.seconds for sent in (work.root.sent, unit.sent) for each in sent.values())
    assert step >= computed + ends - 1e-9


# ---- the command, and what is refused


def test_the_command_lists_the_questions(capsys, tmp_path):
    code, out, _ = ended(["plan", "ask", "--json", str(tmp_path / "q.json")], capsys)
    assert code == 0 and all(name in out and question.asked in out for name, question in QUESTIONS.items())
    assert list(json.loads((tmp_path / "q.json").read_text())) == list(QUESTIONS)
    numbered = dict(re.findall(r"^ *(\d+) +(\w+)", out, re.MULTILINE))
    assert tuple(numbered.values()) == LISTED and "and five more:" in out


def test_the_command_answers_with_a_table_json_and_a_figure(capsys, tmp_path):
    picture, path = tmp_path / "a.html", tmp_path / "a.json"
    given = ["plan", "ask", "hybrid", "--model", "llama-3.1-70b", "--world-size", "16"]
    code, out, _ = ended([*given, "--figure", str(picture), "--json", str(path)], capsys)
    found = json.loads(path.read_text())
    assert code == 0 and found["sentence"][:60] in out and "network of a GPU" in out and "provenance: predicted" in out
    assert {"network of a GPU", "full_shard", "hybrid_shard"} == set(found["rows"][0])
    assert "hybrid_shard would pay where" in picture.read_text()


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["ask", "hybird"], "did you mean hybrid?"),
        (["ask", "hybrid", "--gpu", "4090"], "RTX 4090 has no known network"),
        (["ask", "batch", "--gpu", "a10g"], "no bf16 FLOP/s are known for A10G"),
        (["ask", "peak", "--model", "llama"], "unknown model 'llama'"),
        (
            ["ask", "peak", "--figure", "a.svg"],
            "expected a file name that ends in .html: its camera button saves an SVG",
        ),
        (["hybrid"], "No such command 'hybrid'"),
        (["--ask", "--simulate"], "--ask and --simulate were given; expected one of them"),
        (["fit", "--figure", "a.html"], "No such option: --figure"),
        (["ask", "peak", "--html", "a.html"], "No such option: --html"),
    ],
    ids=str,
)
def test_a_wrong_question_is_one_clear_line(arguments, words, capsys):
    code, _, said = ended(["plan", *arguments], capsys)
    assert code == 2 and words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "choices",
    [
        dict(gpu="a10g", gpus=1), dict(gpus=1), dict(gpus=64, tensor_parallel=8, context_parallel=2),
        dict(lora_rank=16, base_dtype="nf4"), dict(gpus=64, strategy="hybrid_shard", shard_size=16),
        dict(strategy="no_shard", prefetch=0), dict(offload=True, optimizer="sgd", compile=True),
    ],
    ids=str,
)  # fmt: skip
def test_unusual_plans_are_answered_or_refused_in_one_line(choices):
    spec = plan_spec("llama-3.2-1b", choices.pop("gpu", "h100"), **choices)
    answered = 0
    for name in QUESTIONS:
        try:
            found = ask(name, spec)
        except (PlanError, ModelError) as refused:
            assert "\n" not in str(refused)
            continue
        answered += 1
        assert figures.answer_figure(found).data and "nan" not in found.sentence
    assert answered >= (5 if spec.gpu.name == "A10G" else 16)
