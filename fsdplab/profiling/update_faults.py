"""Faults by which updates do not arrive in a job's parameters, though gradients are computed and reduced as they should
be.

What a step changes is counted in each step (recording/rank.py), or read in the step whose memory is measured
(recording/gradients.py).
"""

from __future__ import annotations

import math

from fsdplab.common.sizes import percent, size
from fsdplab.common.words import plural
from fsdplab.profiling.loop_faults import REGULAR, in_most_steps
from fsdplab.profiling.rules import Fact, fault_rule
from fsdplab.profiling.step_facts import StepFacts, Unclaimed

LOST = 0.5  # part of the elements with a gradient that a step leaves as they were, from which on updates are lost

UNTRAINED_PART = 0.05  # of the bytes that are stepped; a pooler that a model has and a loss does not use is less
MOST_NAMED = 3


def _noted_steps(facts: StepFacts) -> int:
    """How many steps of the job were noted."""
    return len({row["step"] for row in facts.record.table("steps")})


def _no_learning_rate(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a learning rate of 0 in most steps: a warm-up begins there, and a decay ends there, for one step."""
    steps = set[int]()
    for row in facts.record.table("activities"):
        if row["name"] == "learning rate 0":
            steps.add(row["step"])
    noted = _noted_steps(facts)
    if len(steps) <= REGULAR * noted:
        return None
    values = {
        "count": len(steps),
        "steps": noted,
        "first": min(steps),
        "optimizer": facts.observed.get("optimizer") or "optimizer",
    }
    return Fact(kind, 0.0, "step", values=values)


def _lost_updates(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report parameters in a short type of which a step leaves most elements as they were that have gradients."""
    updated = facts.observed.get("updated_elements") or 0
    lost = facts.observed.get("lost_elements") or 0
    # half of the parameters at least: a few in a short type are no model
    is_most = 2 * updated > (facts.observed.get("trained_elements_here") or 0)
    if not updated or lost < LOST * updated or not is_most:
        return None
    values = {
        "part": percent(lost / updated),
        "type": facts.observed.get("short_type"),
        "optimizer": facts.observed.get("optimizer"),
    }
    return Fact(kind, 0.0, "step", values=values)


def _not_finite(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report losses that are no numbers, or infinite, in most of the steps on any rank."""
    steps = set[int]()
    for row in facts.record.table("steps"):
        if row["loss"] is not None and not math.isfinite(row["loss"]):
            steps.add(row["step"])
    noted = _noted_steps(facts)
    if len(steps) <= REGULAR * noted:
        return None
    return Fact(kind, 0.0, "step", values={"count": len(steps), "steps": noted, "first": min(steps)})


def _untrained(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report parameters of which no rank has seen a gradient but zeros in any step so far."""
    untrained = facts.observed.get("untrained_bytes") or 0
    stepped = facts.observed.get("stepped_bytes") or 0
    if not untrained or untrained < UNTRAINED_PART * stepped:
        return None
    # a rank that was not measured may have seen one in its part of a sharded parameter
    are_whole = facts.spec.get("engine") == "torch-ddp"
    if not are_whole and facts.observed.get("ranks_with_batches") != facts.spec.get("world_size"):
        return None
    modules = facts.observed.get("untrained_modules") or []
    listed = ", ".join(modules[:MOST_NAMED])
    if len(modules) > MOST_NAMED:
        listed += f" and {plural(len(modules) - MOST_NAMED, 'other')}"
    values = {
        "count": plural(facts.observed.get("untrained_parameters") or 0, "parameter"),
        "size": size(untrained),
        "part": percent(untrained / stepped),
        "modules": listed,
        "steps": max(facts.steps, default=0) + 1,
    }
    return Fact(kind, 0.0, "step", values=values)


def _skipped_steps(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a GradScaler that has skipped most of the steps between the two in which its scale was read."""
    skipped, steps = facts.observed.get("skipped") or 0, facts.observed.get("scaled_steps") or 0
    if not steps or skipped <= REGULAR * steps:
        return None
    first, last = facts.observed["scale"], facts.observed["last_scale"]
    values = {"skipped": min(skipped, steps), "steps": steps, "first": f"{first:g}", "last": f"{last:g}"}
    return Fact(kind, 0.0, "step", values=values)


def _clipped_scaled(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report gradients that are clipped before they are unscaled, by a scaler that scales at all."""
    scale = facts.observed.get("last_scale") or 0.0
    if in_most_steps(facts, "clipped scaled") is None or scale <= 1:
        return None
    return Fact(kind, 0.0, "step", values={"scale": f"{scale:g}"})


def _in_fp32(facts: StepFacts) -> str:
    """What a job writes that keeps its parameters in fp32 and computes in bf16."""
    trainer, engine = facts.spec.get("trainer"), facts.spec.get("engine")
    if trainer == "Trainer":
        how = "from_pretrained(..., dtype=torch.float32) and TrainingArguments(bf16=True)"
    elif trainer == "Lightning":
        how = 'a model in fp32 and Trainer(precision="bf16-mixed")'
    elif engine == "torch-fsdp2":
        how = "model.float() before fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
    elif engine == "torch-fsdp1":
        how = (
            "model.float() before FullyShardedDataParallel(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))"
        )
    else:
        how = "model.float(), and the forward inside of torch.autocast(device, dtype=torch.bfloat16)"
    return f"Keep parameters in fp32 and compute in bf16: {how}. Or take an optimizer that rounds stochastically."


UPDATE_FAULTS = (
    fault_rule(
        "no_learning_rate",
        _no_learning_rate,
        "The learning rate is 0 in {count} of {steps} steps, first in step {first}: these change no parameter",
        "Each group of the optimizer ({optimizer}) has lr=0 when it steps.",
        "Look at the scheduler. The factor of a warm-up must rise: step // warmup is 0 until it has ended, step /"
        " warmup is not. Of a decay call scheduler.step() once after each optimizer.step(), not in each micro-batch,"
        " and give it as many steps as the job takes. scheduler.get_last_lr() says what it has set.",
        unless=["updates_nothing"],
    ),
    fault_rule(
        "not_finite",
        _not_finite,
        "The loss is NaN or infinite in {count} of {steps} steps, first in step {first}",
        "Its gradients are NaN or infinite too, and an optimizer that steps with them leaves NaN in the parameters.",
        "torch.autograd.set_detect_anomaly(True) for the first of these steps names the operator whose backward makes"
        " it: a log of 0, a division by 0, a softmax of a row that is masked as a whole, too high a learning rate.",
    ),
    fault_rule(
        "skipped_steps",
        _skipped_steps,
        "GradScaler has skipped {skipped} of {steps} steps: their gradients are infinite or NaN at any scale, from"
        " {first} to {last}",
        "It skips the optimizer's step then, and makes its scale smaller for the next one: the model is not trained in"
        " these steps, and its loss is a number all the same.",
        "torch.autograd.set_detect_anomaly(True) for one step names the operator whose backward makes them: the square"
        " root of 0, or in fp16 a value beyond 65504, such as a mask of -1e9. bf16 has no such limit and needs no"
        " scaler: torch.autocast(device, dtype=torch.bfloat16).",
        unless=["not_finite"],
    ),
    fault_rule(
        "clipped_scaled",
        _clipped_scaled,
        "Gradients are clipped before GradScaler unscales them, while they are {scale} times as large",
        "After unscaling, their norm is at most the one that clip_grad_norm_ is given, divided by {scale}.",
        "scaler.unscale_(optimizer) after the last backward of a step, before clip_grad_norm_.",
        unless=["skipped_steps"],
    ),
    fault_rule(
        "lost_updates",
        _lost_updates,
        "Updates are lost to rounding in {type}: a step leaves {part} of the elements that have gradients as they were",
        "Parameters and the state of {optimizer} are in {type}, which has so few digits that an update of less than"
        " about a 500th of a value is rounded away, in each step again. This was counted in one step.",
        _in_fp32,
        unless=["updates_nothing", "no_learning_rate", "not_finite"],
    ),
    fault_rule(
        "untrained",
        _untrained,
        "{count} ({size}, {part} of what is trained) have had no gradient but zeros in {steps} steps: {modules}",
        "The optimizer has made no state of theirs, or all of it is zeros. They cost memory, and reductions and updates"
        " that change nothing.",
        "Look in the forward for torch.no_grad(), detach(), an output that the loss does not use, or a mask or router"
        " that leaves them out. What is not to be trained: parameter.requires_grad_(False) before the model is sharded"
        " or wrapped.",
        unless=["updates_nothing", "not_finite"],
    ),
)
