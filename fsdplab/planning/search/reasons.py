"""Answers of a search in words: a plan in short and as flags, and one sentence on why it was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from fsdplab.common.sizes import percent, size
from fsdplab.planning.plan_spec import CHECKPOINTINGS, PlanSpec, flag_of
from fsdplab.planning.planner import Plan

from .answers import EQUAL, Fit, Pick
from .axes import OTHERS, Changes
from .candidates import Candidate
from .peaks import peak_of

NOT_TRIED = (
    "interleaved and zero-bubble schedules",
    "pipelines beside context parallelism",
    "optimizers beside AdamW in 8 bits",
    "other prefetch depths",
    "no_sync",
    "other sequence lengths",
    "other GPUs and links",
)
# of two plans with one number of GPUs, the exposed share explains a difference where it differs by this much
_TELLING = 0.01
_ALWAYS = ("gpus", "strategy", "micro_batch", "grad_accum", "checkpointing", "loss")
_BOOLEANS = {"compile": "--compile blocks", "offload": "--offload cpu", "flash": "--no-flash"}


def in_short(spec: PlanSpec, own: PlanSpec) -> str:
    """`full_shard, checkpoint full, fused loss, 2 x 4 sequences, tp 2`, and what changes the arithmetic of `own`."""
    groups = f" in groups of {spec.shards}" if spec.row.in_groups else ""
    words = [f"{spec.strategy}{groups}", f"checkpoint {spec.checkpointing}", f"{spec.loss} loss"]
    words.append(f"{spec.micro_batch} x {spec.grad_accum} sequences")
    degrees = {
        "tp": spec.tensor_parallel, "cp": spec.context_parallel, "pp": spec.pipeline_parallel,
        "ep": spec.expert_parallel,
    }  # fmt: skip
    words += [f"{name} {count}" for name, count in degrees.items() if count > 1]
    return ", ".join((*words, *_other_arithmetic(spec, own)))


def _other_arithmetic(spec: PlanSpec, own: PlanSpec) -> Iterator[str]:
    """The names of the choices of other arithmetic that a plan has and the given one has not; the most telling one."""
    has = [
        each for each in OTHERS if all(getattr(spec, name) == value for name, value in each.changes.items())
        and any(getattr(own, name) != value for name, value in each.changes.items())
    ]  # fmt: skip
    yield from [max(has, key=lambda each: len(each.changes)).words] if has else []


def flags(spec: PlanSpec) -> str:
    """The choices of a plan as flags of `fsdplab plan`: what a search varies, and what is not as it is by default."""
    flagged = [each for each in fields(spec) if "help" in each.metadata and each.name != "seq"]
    values = {each.name: getattr(spec, each.name) for each in flagged}
    shown = [each.name for each in flagged if each.name in _ALWAYS or values[each.name] != each.default]
    return " ".join(flag(name, values[name]) for name in shown)


def flag(name: str, value: Any) -> str:
    """One choice: `--batch-size 2`."""
    if isinstance(value, bool):
        return _BOOLEANS.get(name, flag_of(name))
    return f"{flag_of(name)} {value}"


def changes_in_words(changes: Changes) -> str:
    """A single change as flags."""
    return " ".join(flag(name, value) for name, value in changes.items() if value is not None)


# ---- why


def why_fastest(found: Fit, pick: Pick) -> str:
    """What the step of the fastest plan is made of, and what keeps it from being faster."""
    plan = pick.plan
    computed, limit = _recomputed(plan.spec), _limit(plan.spec)
    facts = "; ".join(each for each in (computed, _waits(plan), limit) if each)
    return f"No plan that {_fits(pick)} is more than {percent(EQUAL)} faster: {facts}"


def _fits(pick: Pick) -> str:
    return "certainly fits" if pick.chosen.certain else "is likely to fit"


def _recomputed(spec: PlanSpec) -> str:
    if spec.checkpointing == "none":
        return ""
    return f"{'all' if spec.checkpointing == 'full' else 'some'} activations are computed twice"


def _waits(plan: Plan) -> str:
    if plan.time is None:
        return "its times are not known, so it is the one that needs least memory"
    return f"{percent(_exposed(plan))} of a step waits for communication"


def _exposed(plan: Plan) -> float:
    return max(0.0, plan.time.exposed_s / plan.time.step_s) if plan.time else 0.0


def _limit(spec: PlanSpec) -> str:
    """The next choice that would save compute or collectives, if memory forbids it: `needs 96 GB of 85.9 GB`."""
    card = spec.gpu.memory_bytes
    for words, other in _bolder_choices(spec):
        candidate = Candidate(other, peak_of(other)[0])
        if not candidate.certain:
            return f"with {words} it would need up to {size(candidate.needed)} of {size(card)}"
    return ""


def _bolder_choices(spec: PlanSpec) -> Iterator[tuple[str, PlanSpec]]:
    place = CHECKPOINTINGS.index(spec.checkpointing) if spec.checkpointing in CHECKPOINTINGS else 0
    if place:
        less = CHECKPOINTINGS[place - 1]
        yield f"--checkpoint {less}", replace(spec, checkpointing=less)
    if spec.grad_accum % 2 == 0:
        twice = 2 * spec.micro_batch
        yield f"--batch-size {twice}", replace(spec, micro_batch=twice, grad_accum=spec.grad_accum // 2)


def why_cheapest(found: Fit, pick: Pick) -> str:
    """What its GPU-hours are beside those of the fastest plan."""
    assert found.fastest is not None, "where there is a cheapest plan there is a fastest one"
    fast, cheap = found.fastest.chosen, pick.chosen
    if cheap.spec == fast.spec and "world-size" in found.kept:
        return "It is the fastest one: fewer GPUs were not tried"
    if cheap.spec == fast.spec:
        return "It is the fastest one: on no fewer GPUs does a token take less GPU time, within what a plan can tell"
    saved = 1 - cheap.expected_s * cheap.spec.gpus / (fast.expected_s * fast.spec.gpus)
    longer = cheap.expected_s / fast.expected_s
    waits, waited = _exposed(pick.plan), _exposed(found.fastest.plan)
    because = ""
    if waited - waits > _TELLING:
        because = f", since {percent(waits)} of a step in place of {percent(waited)} waits for communication"
    return (
        f"A token takes {percent(saved)} less GPU time than in the fastest plan{because}; the training takes"
        f" {longer:.1f} times as long on {cheap.spec.gpus} of {fast.spec.gpus} GPUs"
    )


def why_safest(found: Fit, pick: Pick) -> str:
    """What it leaves free at the upper end of the band, and what that costs."""
    assert found.fastest is not None, "where there is a safest plan there is a fastest one"
    chosen = pick.chosen
    free = chosen.spec.gpu.memory_bytes - chosen.needed
    speed = found.fastest.chosen.expected_s / chosen.expected_s
    room = f"leaves {size(free)} of the card free" if free >= 0 else f"lacks {size(-free)}"
    return (
        f"It needs {size(chosen.needed)} with the allocator's reserve and the upper end of the band, which {room}, at"
        f" {percent(speed)} of the fastest plan's speed"
    )


WHY = {"fastest": why_fastest, "cheapest": why_cheapest, "safest": why_safest}


def runner_up(pick: Pick, own: PlanSpec, by_gpus: bool = False) -> str:
    """The next best plan of another kind, and by how much it is worse."""
    if pick.runner_up is None:
        return "none of another kind"
    times = [each.expected_s * (each.spec.gpus if by_gpus else 1) for each in (pick.runner_up, pick.chosen)]
    worse = times[0] / times[1] - 1
    how = f"{percent(worse)} {'more GPU time' if by_gpus else 'slower'}" if worse >= 0.005 else "as good"
    gpus = f"{pick.runner_up.spec.gpus} GPUs, " if pick.runner_up.spec.gpus != pick.chosen.spec.gpus else ""
    return f"{gpus}{in_short(pick.runner_up.spec, own)} ({how})"
