"""The planner's questions: every one answers, sentences say what tables say, and cases that can be checked by hand."""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import replace

import pytest

from fsdplab import cli, figures
from fsdplab.figures.style import alt_text
from fsdplab.planning import ModelError, PlanError, fit, questions
from fsdplab.planning.fit import largest_micro_batch
from fsdplab.planning.links import LinkSpec
from fsdplab.planning.memory import memory_of
from fsdplab.planning.planner import plan_of, plan_spec
from fsdplab.planning.questions import QUESTIONS, answer, ask, units
from fsdplab.planning.simulation import simulate_work, work_of

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


@pytest.mark.parametrize("module", [questions, answer, fit], ids=lambda module: module.__name__)
def test_the_docstrings_examples_hold(module):
    tried = doctest.testmod(module)
    assert tried.attempted and not tried.failed


# ---- every question


def test_there_are_14_and_the_docstring_lists_them():
    listed = re.findall(r"^ +(\d+) (\w+) +(\S.*)$", questions.__doc__, re.MULTILINE)
    assert [name for _, name, _ in listed] == list(QUESTIONS) and len(listed) == 14
    assert [asked for *_, asked in listed] == [question.asked for question in QUESTIONS.values()]


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
    assert ("simulated: step" in said) == (name == "wrapping")
    points = sum(len(trace.y) for trace in drawn.data)
    assert points == len(found.rows) * sum(len(panel.columns) for panel in found.panels)
    lines = [shape for shape in drawn.layout.shapes if shape.line.dash == "dash"]
    assert len(lines) == sum(panel.limit is not None for panel in found.panels)
    assert found.sentence in alt_text(drawn) and figures.svg(drawn).startswith("<svg")


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


def test_the_exposed_share_falls_with_the_first_unit_gathered_ahead():
    found = ask("prefetch", SPECS["8b on 8"]())
    none, one, *more = found.column("exposed")
    assert none > 5 * one and max(more) <= one
    gathered, block = found.column("most gathered"), 2 * found.spec.model.block_parameters
    assert [round((each - gathered[0]) / block, 3) for each in gathered] == [0, 1, 2, 4]


def test_offload_moves_slices_twice_and_gradients_once():
    spec = SPECS["8b on 8"]()
    found = ask("offload", spec)
    crossing = found.column("crosses a step")
    assert crossing == (0.0, pytest.approx(spec.model.parameters / 8 * (2 * 2 + 4), rel=1e-4))
    assert found.column("on the host's link") == (None, pytest.approx(crossing[1] / 31e9))
    assert "optimizer is not timed" in found.note


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
        work = units.rewrapped(whole, count)
        assert len(work.blocks) == 32 / count
        for part in ("gather", "reduce"):
            sent = sum(getattr(each, part).wire_bytes for each in work.blocks)
            assert sent == pytest.approx(sum(getattr(each, part).wire_bytes for each in whole.blocks))
        assert sum(each.forward_s for each in work.blocks) == pytest.approx(32 * whole.blocks[0].forward_s)
    found = ask("wrapping", spec)
    gathered = found.column("gathered at once")
    assert list(gathered) == sorted(gathered)
    assert gathered[-1] == pytest.approx(2 * spec.model.parameters), "all is gathered at once"


def test_one_unit_of_all_blocks_hides_no_gather():
    """Both gathers and the reduction of all blocks are waited for: the head alone computes beside them."""
    spec = replace(SPECS["8b on 8"](), gpus=64, gpus_per_node=8)
    work = units.rewrapped(work_of(spec), 32)
    (unit,) = work.blocks
    step = simulate_work(work).step_s
    computed = unit.forward_s + unit.backward_s + work.root.forward_s + work.root.backward_s + work.optimizer_s
    ends = work.root.gather.seconds + unit.gather.seconds + unit.reduce.seconds + work.root.reduce.seconds
    assert step >= computed + ends - 1e-9


# ---- the command, and what is refused


def ended(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    printed = capsys.readouterr()
    return stop.value.code, printed.out, printed.err


def test_the_command_lists_the_questions(capsys, tmp_path):
    code, out, _ = ended(["plan", "--ask", "--json", str(tmp_path / "q.json")], capsys)
    assert code == 0 and all(name in out and question.asked in out for name, question in QUESTIONS.items())
    assert len(json.loads((tmp_path / "q.json").read_text())) == 14


def test_the_command_answers_with_a_table_json_and_a_figure(capsys, tmp_path):
    picture, path = tmp_path / "a.svg", tmp_path / "a.json"
    given = ["plan", "--ask", "hybrid", "--model", "llama-3.1-70b", "--gpus", "16"]
    code, out, _ = ended([*given, "--figure", str(picture), "--json", str(path)], capsys)
    found = json.loads(path.read_text())
    assert code == 0 and found["sentence"][:60] in out and "network of a GPU" in out and "provenance: predicted" in out
    assert {"network of a GPU", "full_shard", "hybrid_shard"} == set(found["rows"][0])
    assert "hybrid_shard pays where" in picture.read_text()


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--ask", "hybird"], "did you mean hybrid?"),
        (["--ask", "hybrid", "--gpu", "4090"], "RTX 4090 has no known network"),
        (["--ask", "batch", "--gpu", "a10g"], "no bf16 FLOP/s are known for A10G"),
        (["--ask", "peak", "--model", "llama"], "unknown model 'llama'"),
        (["--ask", "peak", "--figure", "a.png"], "ends in .svg or .html"),
        (["hybrid"], "plan takes no FILE ('hybrid') here; give --validate before a file"),
        (["--ask", "--simulate"], "--ask and --simulate were given; expected one of them"),
        (["--fit", "--figure", "a.svg"], "plan takes no --figure ('a.svg') here"),
        (["--ask", "peak", "--html", "a.html"], "give it with --simulate"),
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
    assert answered >= (3 if spec.gpu.name == "A10G" else 12)
