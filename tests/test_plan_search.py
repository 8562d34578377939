"""The search of `fsdplab plan fit`: what it tries, what it answers, and how few plans it works out for that."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fsdplab.common.names import STRATEGIES
from fsdplab.planning import PlanError, memory, step_time
from fsdplab.planning.memory import memory_of
from fsdplab.planning.plan_spec import LOSSES, OPTIMIZERS, POLICIES, PlanSpec, changed
from fsdplab.planning.planner import fewest_gpus, plan_of, plan_spec
from fsdplab.planning.published import read_published
from fsdplab.planning.search import Fit, answers, axes, candidates, fit
from fsdplab.planning.search.candidates import Candidate, Grid, peak_of
from fsdplab.planning.step_time import has_known_flops, least_step_s
from tests.test_plan import ended

PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "published.csv"
DRAWN = 150


def drawn(count: int = DRAWN) -> list[PlanSpec]:
    """Plans whose choices are drawn, the same in every run."""
    draw, found = random.Random(5), list[PlanSpec]()
    models = [plan_spec(name, "h100").model for name in ("gpt2", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b")]
    while len(found) < count:
        spec = plan_spec("gpt2", "h100", gpus=draw.choice([1, 2, 8, 64]), seq=1024)
        other = changed(
            spec, model=draw.choice(models), strategy=draw.choice(STRATEGIES), checkpointing=draw.choice(POLICIES),
            tensor_parallel=draw.choice([1, 1, 2, 4]), context_parallel=draw.choice([1, 1, 2]),
            loss=draw.choice(LOSSES), grad_accum=draw.choice([1, 2, 3, 5]), micro_batch=draw.choice([1, 2, 8, 64]),
            prefetch=draw.choice([0, 1, 1, 2, 3]), compile=draw.random() < 0.3, no_sync=draw.random() < 0.3,
            masters=draw.choice(["slices", "separate"]), offload=draw.random() < 0.2, flash=draw.random() < 0.8,
            optimizer=draw.choice(list(OPTIMIZERS)), lora_rank=draw.choice([0, 0, 16]),
            pipeline_parallel=draw.choice([1, 1, 2, 4]),
            keeps_logits=draw.random() < 0.2, keeps_outputs=draw.random() < 0.2, autocast=draw.random() < 0.2,
        )  # fmt: skip
        found += [other] if other else []
    return found


@cache
def searched(model: str, gpu: str, gpus: int, seq: int) -> Fit:
    """The search for a model with its usual batch, made once for all tests."""
    return fit(plan_spec(model, gpu, gpus=gpus, seq=seq))


# ---- what makes it fast is exact


@pytest.mark.quick
def test_peaks_of_two_short_walks_are_those_of_whole_steps():
    for spec in drawn():
        assert peak_of(spec)[0] == pytest.approx(memory_of(spec).peak.total, rel=1e-9), spec


@pytest.mark.quick
def test_no_step_is_faster_than_its_bound():
    for spec in drawn():
        assert least_step_s(spec) <= step_time.step_time(spec).step_s * (1 + 1e-9), spec


def counted(monkeypatch) -> Counter[str]:
    """How many steps are walked through, for memory and for time."""
    found: Counter[str] = Counter()

    def count(module, name: str) -> None:
        walk = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: found.update([name]) or walk(*given))

    count(memory, "memory_of_program")
    count(candidates, "step_time")
    candidates._walked.cache_clear()
    return found


@pytest.mark.parametrize(
    "model,gpus,plans,walked,timed",
    [("llama-3.1-8b", 64, 40_000, 3000, 400), ("llama-3.1-405b", 512, 100_000, 5000, 400)],
)
def test_a_search_works_out_few_of_its_plans(model, gpus, plans, walked, timed, monkeypatch):
    """Of 2,000 plans a search must work out few enough for 5 s: here it has 15 to 30 times as many."""
    steps = counted(monkeypatch)
    found = fit(plan_spec(model, "h100", gpus=gpus, seq=8192))
    assert found.fastest is not None and found.tried.total > plans
    assert steps["memory_of_program"] < walked and steps["step_time"] < timed
    assert found.timed <= steps["step_time"]


@pytest.mark.quick
def test_a_search_loads_no_torch():
    code = (
        "import sys; from fsdplab.cli.app import main;"
        " sys.argv = 'fsdplab plan fit --model gpt2 --world-size 2'.split();"
        " sys.exit(bool(main()) or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- what was tried


@pytest.mark.quick
def test_every_plan_of_the_axes_is_counted_once():
    """On a grid small enough to go through: each plan is tried as a whole, and the counts are the same."""
    spec, sequences = plan_spec("llama-3.1-8b", "h100", gpus=8, seq=4096), 64
    kept = ("world-size", "strategy", "cp")
    grid = Grid(spec, sequences, kept)
    fits, large, unequal = set(), 0, 0
    for tensor in (1, 2, 4, 8):
        for checkpointing in ("none", "selective", "full"):
            for loss in LOSSES:
                for count in axes.micro_batches(sequences):
                    passes, rest = divmod(sequences, count * (8 // tensor))
                    if rest or not passes:
                        unequal += 1
                        continue
                    each = replace(
                        spec, tensor_parallel=tensor, checkpointing=checkpointing, loss=loss, micro_batch=count,
                        grad_accum=passes,
                    )  # fmt: skip
                    if plan_of(each).fits:
                        fits.add(each)
                    else:
                        large += 1
    assert {each.spec for each in grid.fitting} == fits and len(grid.fitting) == len(fits)
    tried = grid.tried
    assert sum(tried.too_large.values()) == large and tried.contradictory[candidates.UNEQUAL] == unequal
    assert tried.total == len(fits) + large + unequal


@pytest.mark.quick
def test_contradictions_are_counted_with_their_reason():
    """Of 14 heads and 2 key/value heads tensor parallelism makes at most two parts."""
    found = fit(plan_spec("qwen2.5-0.5b", "h100", gpus=8), keep=("strategy", "cp"))
    heads = [reason for reason in found.tried.contradictory if "heads" in reason]
    assert heads == ["the model has N heads and N key/value heads, not divisible by --tp N"]
    assert found.fastest is not None and found.fastest.chosen.spec.tensor_parallel <= 2


@pytest.mark.quick
def test_what_is_kept_stays():
    kept = ("world-size", "strategy", "tp", "cp", "pp", "ep", "checkpoint", "loss", "batch-size")
    spec = plan_spec("llama-3.1-8b", "h100", gpus=8, tensor_parallel=2, micro_batch=2, grad_accum=4)
    found = fit(spec, keep=kept)
    assert found.tried.total == 1 and found.fastest is not None and found.fastest.chosen.spec == spec
    assert found.fastest.runner_up is None and not found.singles


# ---- what is answered


@pytest.mark.quick
def test_answers_are_the_best_of_all_that_fit():
    """Every plan that fits is timed here, and no answer is worse than the best by more than what counts as equal."""
    spec, kept = plan_spec("llama-3.1-8b", "h100", gpus=8, seq=4096), ("cp", "loss")
    found = fit(spec, 256, kept)
    grid = Grid(found.own.spec, 256, kept)
    surest = [each for each in grid.fitting if each.certain]
    fastest, cheapest, safest = (getattr(found, name).chosen for name in ("fastest", "cheapest", "safest"))
    assert fastest.certain and cheapest.certain and safest.certain
    bound = 1 + answers.EQUAL
    assert fastest.expected_s <= bound * min(each.expected_s for each in surest)
    assert cheapest.expected_s * cheapest.spec.gpus <= bound * min(each.expected_s * each.spec.gpus for each in surest)
    fast_enough = [each for each in surest if each.expected_s <= fastest.expected_s / answers.SLOWEST_SAFE]
    assert safest in fast_enough
    assert safest.needed <= min(each.needed for each in fast_enough) + 0.02 * spec.gpu.memory_bytes
    for pick in (found.fastest, found.cheapest):
        assert pick.runner_up is not None and pick.runner_up.family != pick.chosen.family
    assert all(each.spec.step_tokens == 256 * 4096 for each in surest), "the global batch is fixed"
    assert found.bolder is None or found.bolder.expected_s < fastest.expected_s and not found.bolder.certain
    assert found.fewest is not None and found.fewest.spec.gpus == min(each.spec.gpus for each in grid.fitting)


def test_the_best_single_change_is_one_change():
    """Without recomputation 70 B parameters do not fit on 64 H100; recomputing alone makes it fit."""
    found = searched("llama-3.1-70b", "h100", 64, 8192)
    assert not plan_of(found.own.spec).fits
    assert found.single is not None and found.single.changes == {"checkpointing": "full"}
    assert plan_of(found.single.candidate.spec).fits
    own = found.own.spec
    for each in found.singles:
        differ = {name for name in each.changes if getattr(each.candidate.spec, name) != getattr(own, name)}
        back = replace(each.candidate.spec, grad_accum=own.grad_accum, **{name: getattr(own, name) for name in differ})
        assert back == own and each.candidate.spec.step_tokens == own.step_tokens


@pytest.mark.quick
def test_a_plan_that_cannot_be_improved_is_told_so():
    best = fit(plan_spec("gpt2", "h100", gpus=1)).fastest.chosen.spec
    again = fit(best, best.micro_batch * best.grad_accum)
    assert again.single is None and again.fastest.chosen.spec == best


@pytest.mark.quick
def test_where_nothing_fits_the_answers_change_the_arithmetic_and_say_so():
    """7 billion parameters with their states need 116 GB, four cards of 24 GB have 103."""
    found = searched("mistral-7b", "4090", 4, 4096)
    assert found.tried.fitting == 0 and found.instead and found.fastest is not None
    assert not found.fastest.chosen.spec.lora_rank, "adapters train something else: they are told, and no answer"
    told = {each.other.words: each.best for each in found.others}
    assert told["CPU offload"] is not None and told["adapters on a frozen base in nf4"] is not None
    assert fewest_gpus(found.own.spec).spec.gpus > 4


@pytest.mark.quick
def test_a_card_without_known_rates_is_answered_by_memory():
    found = fit(plan_spec("gpt2", "t4", gpus=4))
    assert found.fastest is not None and not has_known_flops(found.own.spec.gpu)


# what an experienced engineer would take: of the answer of each job, what must hold
SENSIBLE = {
    "8b on 8 h100": (
        ("llama-3.1-8b", "h100", 8, 8192), lambda spec: spec.tensor_parallel == 1 and spec.checkpointing != "full"
    ),
    "70b on 64 h100": (
        ("llama-3.1-70b", "h100", 64, 8192),
        lambda spec: spec.strategy == "full_shard" and spec.checkpointing == "full" and spec.gpus == 64,
    ),
    "405b on 512 h100": (
        ("llama-3.1-405b", "h100", 512, 8192),
        lambda spec: spec.strategy == "full_shard" and spec.checkpointing == "full" and spec.tensor_parallel > 1,
    ),
    "1.3b on one a100": (("mpt-1b", "a100-40gb", 1, 2048), lambda spec: spec.checkpointing == "none"),
    "7b on 4 of 24 GB": (("mistral-7b", "4090", 4, 4096), lambda spec: spec.offload and spec.checkpointing == "full"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENSIBLE)
def test_the_fastest_answer_is_a_sensible_one(name):
    asked, sensible = SENSIBLE[name]
    found = searched(*asked)
    assert found.fastest is not None and sensible(found.fastest.chosen.spec), found.fastest.chosen.spec


# ---- published runs


def best_of_published(spec: PlanSpec) -> tuple[bool, float]:
    """Whether a published plan is among the candidates, and the speed of the answer over its own, both predicted: the
    fastest that certainly or likely fits.
    """
    sequences = spec.micro_batch * spec.grad_accum * spec.data_ranks
    found = fit(spec, keep=("world-size",))
    grid = Grid(found.own.spec, sequences, ("world-size",))
    own = Candidate(found.own.spec, found.own.peak)
    best = min(each.expected_s for each in (found.bolder, found.fastest and found.fastest.chosen) if each)
    return any(each.spec == own.spec for each in grid.fitting), own.expected_s / best


def published(begin: str) -> PlanSpec:
    cases, _ = read_published(PUBLISHED)
    return next(case.spec for case in cases if case.id == begin)


@pytest.mark.parametrize("name", ["tt-l31-8b-8", "tt-l31-8b-128"])
def test_a_published_plan_is_a_candidate_and_no_faster_than_the_answer(name):
    among, faster = best_of_published(published(name))
    assert among and faster >= 1 - answers.EQUAL


# ---- the command


def test_the_command_says_why_what_comes_next_and_what_was_tried(capsys, tmp_path):
    path = tmp_path / "fit.json"
    given = ["plan", "fit", "--model", "llama-3.1-8b", "--world-size", "16", "--price", "2.5", "--json", str(path)]
    code, out, _ = ended(given, capsys)
    assert code == 0
    for words in (
        "fastest: No plan that certainly fits", "cheapest:", "safest: It needs", "runner-up:", "command: fsdplab plan",
        "best single change:", "fewest GPUs: 2", "global batch: 1,024 sequences", "tried:", "do not fit", "not tried:",
        "other arithmetic", "$ of a billion",
    ):  # fmt: skip
        assert words in out, words
    found = json.loads(path.read_text())
    assert set(found["answers"]) == {"fastest", "cheapest", "safest"}
    for each in found["answers"].values():
        assert each["reason"] and each["fits"] == "yes" and each["dollars"] == pytest.approx(2.5 * each["gpu_hours"])
    tried = found["tried"]
    parts = [tried["do_not_fit"], tried["contradict_themselves"], tried["no_better"]]
    assert tried["plans"] == tried["fit"] + sum(sum(each.values()) for each in parts)


def test_the_command_that_is_told_plans_the_answer(capsys, tmp_path):
    path, again = tmp_path / "fit.json", tmp_path / "plan.json"
    model = ["--model", "llama-3.1-70b", "--sequence-length", "8192"]
    kept = ["--world-size", "64", "--keep", "world-size,cp"]
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
