"""The search of `fsdplab plan fit`: what it tries, and that its answers are the best of that."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from fsdplab.planning import PlanError
from fsdplab.planning.memory import memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import plan_of, plan_spec
from fsdplab.planning.search import EQUAL, SLOWEST_SAFE, Candidate, Fit, _all_plans, axes, fit, micro_batches
from fsdplab.planning.step_time import has_known_flops
from tests.test_plan import ended


@cache
def searched(model: str, gpu: str, gpus: int, seq: int) -> Fit:
    """The search for a model with its usual batch, made once for all tests."""
    return fit(plan_spec(model, gpu, gpus=gpus, seq=seq))


@pytest.mark.quick
def test_a_search_loads_no_torch():
    code = (
        "import sys; from fsdplab.cli.app import main;"
        " sys.argv = 'fsdplab plan fit --model gpt2 --world-size 2'.split();"
        " sys.exit(bool(main()) or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- what is tried


@pytest.mark.quick
def test_every_plan_of_the_axes_is_tried():
    """On a grid small enough to go through: each plan is planned as a whole, and as many fit."""
    spec, sequences = plan_spec("llama-3.1-8b", "h100", gpus=8, seq=4096), 64
    fits, planned = set(), 0
    for tensor in (1, 2, 4, 8):
        for checkpointing in ("none", "selective", "full"):
            for count in (1, 2, 4, 8, 16, 32, 64):
                passes, rest = divmod(sequences, count * (8 // tensor))
                if rest or not passes:
                    continue
                planned += 1
                each = replace(
                    spec, tensor_parallel=tensor, checkpointing=checkpointing, micro_batch=count, grad_accum=passes
                )
                if plan_of(each).fits:
                    fits.add(each)
    total, fitting = _all_plans(spec, sequences, ("world-size", "strategy"))
    assert {candidate.spec for candidate in fitting} == fits and len(fitting) == len(fits)
    assert total == planned
    assert all(candidate.peak == memory_of(candidate.spec).peak.total for candidate in fitting[::9])


@pytest.mark.quick
def test_axes_have_the_plans_own_choices_and_halves_of_its_gpus():
    spec = plan_spec("llama-3.1-8b", "h100", gpus=96, strategy="hybrid_shard", shard_size=8, tensor_parallel=2)
    found = axes(spec)
    assert [change["gpus"] for change in found["world-size"]] == [96, 48, 24]  # 12 are no whole nodes
    assert {"strategy": "hybrid_shard", "shard_size": 8} in found["strategy"]
    assert [change["tensor_parallel"] for change in found["tp"]] == [1, 2, 4, 8] and micro_batches(24, own=3) == [
        1,
        2,
        3,
        4,
        8,
    ]


@pytest.mark.quick
def test_what_is_kept_stays():
    spec = plan_spec("llama-3.1-8b", "h100", gpus=8, tensor_parallel=2, micro_batch=2, grad_accum=4)
    found = fit(spec, keep=("world-size", "strategy", "tp", "checkpoint", "batch-size"))
    assert found.planned == 1 and found.fastest is not None and found.fastest.spec == spec and found.single is None


# ---- what is answered


@pytest.mark.quick
def test_answers_are_the_best_of_all_that_fit():
    """No answer is worse than the best of all plans by more than what counts as equal."""
    spec = plan_spec("llama-3.1-8b", "h100", gpus=8, seq=4096)
    found = fit(spec, 256)
    _, fitting = _all_plans(found.own.spec, 256, ())
    surest = [candidate for candidate in fitting if candidate.certain]
    fastest, cheapest, safest = found.fastest, found.cheapest, found.safest
    assert fastest and cheapest and safest and fastest.certain and cheapest.certain and safest.certain
    assert fastest.expected_s <= (1 + EQUAL) * min(candidate.expected_s for candidate in surest)
    assert cheapest.gpu_seconds <= (1 + EQUAL) * min(candidate.gpu_seconds for candidate in surest)
    fast_enough = [each for each in fitting if each.expected_s <= fastest.expected_s / SLOWEST_SAFE]
    assert safest.spec in {each.spec for each in fast_enough}
    assert safest.needed <= min(each.needed for each in fast_enough) + EQUAL * spec.gpu.memory_bytes
    assert all(candidate.spec.step_tokens == 256 * 4096 for candidate in fitting), "the global batch is fixed"


def test_the_best_single_change_is_one_change():
    """Without recomputation 70 B parameters do not fit on 64 H100; recomputing alone makes it fit."""
    found = searched("llama-3.1-70b", "h100", 64, 8192)
    own, single = found.own.spec, found.single
    assert not plan_of(own).fits and single is not None and single.changes == {"checkpointing": "full"}
    assert plan_of(single.candidate.spec).fits
    back = replace(single.candidate.spec, checkpointing=own.checkpointing, grad_accum=own.grad_accum)
    assert back == own and single.candidate.spec.step_tokens == own.step_tokens


@pytest.mark.quick
def test_a_plan_that_cannot_be_improved_is_told_so():
    best = fit(plan_spec("gpt2", "h100", gpus=1)).fastest
    assert best is not None
    again = fit(best.spec, best.spec.micro_batch * best.spec.grad_accum)
    assert again.single is None and again.fastest is not None and again.fastest.spec == best.spec


@pytest.mark.quick
def test_where_nothing_fits_the_command_says_what_lacks_and_how_many_gpus_hold_it(capsys):
    """7 billion parameters with their states need 116 GB, four cards of 24 GB have 103."""
    given = ["--model", "mistral-7b", "--gpu", "4090", "--world-size", "4"]
    code, out, _ = ended(["plan", "fit", *given], capsys)
    assert code == 0 and "nothing fits on 4 GPUs or fewer" in out and "--offload cpu" in out
    assert "fewest GPUs: " in out and "--lora-rank 16 --base-dtype" in out and "best single change" not in out


@pytest.mark.quick
def test_the_fewest_gpus_are_no_more_than_those_of_the_plans_above(capsys):
    """70 billion parameters hold on 16 cards with tensor parallelism, and without it on 24: 16 is said."""
    given = ["--model", "llama-3.1-70b", "--gpu", "h100-80gb", "--world-size", "16"]
    _, out, _ = ended(["plan", "fit", *given], capsys)
    assert "fewest GPUs: 16 with" in out and ", tp " in out.partition("fewest GPUs: ")[2].splitlines()[0]


@pytest.mark.quick
def test_a_card_without_known_rates_is_answered_by_memory():
    found = fit(plan_spec("gpt2", "t4", gpus=4))
    assert found.fastest is not None and not has_known_flops(found.own.spec.gpu)
    _, fitting = _all_plans(found.own.spec, found.sequences, ())
    assert found.fastest.peak <= (1 + EQUAL) * min(candidate.peak for candidate in fitting)


# what an experienced engineer would take: of the answer of each job, what must hold
SENSIBLE = {
    "8b on 8 h100": (("llama-3.1-8b", "h100", 8, 8192), lambda spec: spec.checkpointing != "full"),
    "70b on 64 h100": (
        ("llama-3.1-70b", "h100", 64, 8192),
        lambda spec: spec.strategy == "full_shard" and spec.gpus == 64,
    ),
    "1.3b on one a100": (("mpt-1b", "a100-40gb", 1, 2048), lambda spec: spec.checkpointing == "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENSIBLE)
def test_the_fastest_answer_is_a_sensible_one(name):
    asked, sensible = SENSIBLE[name]
    found = searched(*asked)
    assert found.fastest is not None and sensible(found.fastest.spec), found.fastest.spec


# ---- the command


def test_the_command_says_why_and_what_was_tried(capsys, tmp_path):
    path = tmp_path / "fit.json"
    given = ["plan", "fit", "--model", "llama-3.1-8b", "--world-size", "16", "--price", "2.5", "--json", str(path)]
    code, out, _ = ended(given, capsys)
    assert code == 0
    for words in (
        "fastest: No plan that certainly fits", "cheapest:", "safest: It needs", "command: fsdplab plan",
        "best single change:", "global batch: 1,024 sequences", "tried:", "$ of a billion",
    ):  # fmt: skip
        assert words in out, words
    found = json.loads(path.read_text())
    assert set(found["answers"]) == {"fastest", "cheapest", "safest"}
    for answer in found["answers"].values():
        assert answer["reason"] and answer["fits"] == "yes"
        assert answer["dollars"] == pytest.approx(2.5 * answer["gpu_hours"])
    assert found["tried"]["plans"] > found["tried"]["fit"] > 0


def test_the_command_that_is_told_plans_the_answer(capsys, tmp_path):
    path, again = tmp_path / "fit.json", tmp_path / "plan.json"
    model = ["--model", "llama-3.1-70b", "--sequence-length", "8192"]
    kept = ["--world-size", "64", "--keep", "world-size"]
    assert ended(["plan", "fit", *model, *kept, "--json", str(path)], capsys)[0] == 0
    answer = json.loads(path.read_text())["answers"]["fastest"]
    assert ended(["plan", *model, *answer["flags"].split(), "--json", str(again)], capsys)[0] == 0
    planned = json.loads(again.read_text())
    assert all(answer[name] == value for name, value in planned.items() if name in answer and name != "format")


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--keep", "strategi"], "--keep has 'strategi' (did you mean strategy?); expected some of"),
        (["--keep", "cp"], "expected some of world-size, strategy, tp, checkpoint, batch-size"),
        (["--price", "0"], "--price is 0.0"),
        (["--price", "nan"], "--price is nan"),
        (["--global-batch", "0"], "--global-batch is 0"),
        (["--global-batch", "12"], "--global-batch 12 is not divisible by 8 data-parallel ranks"),
    ],
    ids=str,
)
def test_wrong_questions_are_refused_in_one_sentence(arguments, words, capsys):
    code, out, err = ended(["plan", "fit", *arguments], capsys)
    assert code and words in err and not out and len(err.strip().splitlines()) == 1


@pytest.mark.quick
def test_a_wrong_global_batch_is_refused():
    with pytest.raises(PlanError, match="expected a whole number"):
        fit(plan_spec("gpt2", "h100"), True)


def certain(spec: PlanSpec) -> bool:
    return Candidate(spec, memory_of(spec).peak.total).certain


@pytest.mark.quick
def test_what_fits_for_certain_is_what_a_plan_says():
    for gpus in (8, 16, 64):
        spec = plan_spec("llama-3.1-70b", "h100", gpus=gpus, checkpointing="full")
        assert certain(spec) == (plan_of(spec).fitness == "yes")
