"""Faults by which a job trains something else than it should: gradients that are not reduced, not stepped, or never set
to zero, and ranks that train on the same data.

Such a job runs as fast as a right one, and its loss may fall, so nothing but these counts tells. They come before all
faults that cost time only.
"""

from __future__ import annotations

import math
from collections import Counter
from operator import itemgetter

from fsdplab.common.rows import grouped
from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.profiling.loop_faults import MANY, NEARLY_ALL, REGULAR, SMALL_BYTES, micro_batches
from fsdplab.profiling.rules import Fact, fault_rule
from fsdplab.profiling.step_facts import StepFacts, Unclaimed
from fsdplab.profiling.update_faults import UPDATE_FAULTS
from fsdplab.records.tables import Row

REDUCTIONS = ("reduce_scatter", "all_reduce")
_REPLICATED = "torch-ddp"
_SHARDED = ("torch-fsdp1", "torch-fsdp2")
FIGURES_BYTES = 64  # of a collective of a few figures, such as a loss, where parts of a model are larger
FEW_BATCHES = 3  # batches of a step that tell, by all they hold, whether ranks have the same
DIFFERENT_PART = 0.1  # of the parameters that are compared; norms and biases begin equal on any seed
IDLE_PART = 0.05  # part of the peak from which on gradients that nobody steps are worth a word


def _ranks(facts: StepFacts) -> int:
    return int(facts.spec.get("world_size") or 1)


def _exchanges_itself(facts: StepFacts) -> bool:
    """Whether the loop itself sends tensors in any step, or calls many collectives: it may reduce gradients, or average
    parameters now and then. A loss that is averaged for a log is neither.
    """
    for name, activity in facts.activities.items():
        if not name.startswith("own "):
            continue
        calls_of_a_step = activity.count / max(activity.regular, 0.01)
        if activity.nbytes > SMALL_BYTES * activity.count or calls_of_a_step >= MANY:
            return True
    return False


def _model_communicates(facts: StepFacts, more_than: int = 0) -> bool:
    """Whether a collective of no unit and of so many bytes runs before the backward: a part of the model, or a loss
    that is averaged.
    """
    for row in facts.record.table("collectives"):
        is_small = row["logical_bytes"] is not None and row["logical_bytes"] <= more_than
        if not row["unit"] and row["phase"] == "forward" and row["kind"] != "broadcast" and not is_small:
            return True
    return False


def _reductions(facts: StepFacts) -> dict[int, list[Row]]:
    """Rank 0's reductions of each profiled step."""
    of_step: dict[int, list[Row]] = {step: [] for step in facts.steps}
    for row in facts.record.table("collectives"):
        if row["rank"] == 0 and row["kind"] in REDUCTIONS and row["step"] in of_step:
            of_step[row["step"]].append(row)
    return of_step


def _not_reduced(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report that an engine reduces no gradient, or that ranks without an engine exchange nothing at all."""
    is_a_job = facts.spec.get("job") and _ranks(facts) > 1 and facts.steps
    # what other transports do is in no trace
    is_seen = any(name in str(facts.record.environment.get("backend")) for name in ("gloo", "nccl"))
    if not is_a_job or not is_seen or facts.observed.get("has_comm_hook") or _exchanges_itself(facts):
        return None
    engine = facts.spec.get("engine")
    collectives = facts.record.table("collectives")
    if engine == "plain" and not collectives and facts.observed.get("has_model"):
        return Fact(kind, 0.0, "step", values={"who": "The ranks exchange nothing: each trains a model of its own"})
    reduces = any(_reductions(facts).values())
    # of what is sharded over several ranks parameters are gathered; else there is one rank to a shard group
    gathers = any(row["kind"] == "all_gather" and row["unit"] for row in collectives)
    if not reduces and (engine == _REPLICATED or (engine in _SHARDED and gathers)):
        return Fact(kind, 0.0, "step", values={"who": "No gradient is reduced: each rank steps its own"})
    return None


def _not_reduced_remedy(facts: StepFacts) -> str:
    if facts.spec.get("engine") == "plain":
        return "Wrap the model: DistributedDataParallel(model) or fully_shard(model), before the optimizer is made."
    if facts.spec.get("engine") == _REPLICATED:
        return (
            "Call the wrapped model, model(x), and not model.module(x) or a method of it: DistributedDataParallel"
            " prepares the reduction in its forward. The last micro-batch must be outside of no_sync()."
        )
    return "Call model.set_requires_gradient_sync(True), or leave no_sync(), before the last micro-batch."


def _reduced_early(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report micro-batches whose backward runs after the last reduction of the step: their gradients stay local."""
    times = micro_batches(facts)
    if times < 2 or not facts.spec.get("job") or _exchanges_itself(facts) or facts.observed.get("has_comm_hook"):
        return None
    reductions = _reductions(facts)
    early_steps = 0
    for step, reduced in reductions.items():
        begins = backward_begins(facts, step)
        if not reduced or not begins:
            return None
        early_steps += max(row["end_ns"] for row in reduced) < begins[-1]
    # on a busy machine a reduction may end late; where ranks' copies differ, most of the steps tell enough
    part = NEARLY_ALL if facts.observed.get("different_parameters") else 1.0
    if not reductions or early_steps < part * len(reductions):
        return None
    return Fact(kind, 0.0, "step", values={"times": times})


def backward_begins(facts: StepFacts, step: int) -> list[int]:
    """When rank 0's backwards of a step begin: where computing of a backward follows that of a forward."""
    begins = []
    is_forward = True
    for row in facts.computing_of_rank_0.get(step, ()):
        if row["phase"] == "backward" and is_forward:
            begins.append(int(row["start_ns"]))
        if row["phase"] in ("forward", "backward"):
            is_forward = row["phase"] == "forward"
    return begins


def _different_copies(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report ranks that hold different values of parameters of which each holds a copy."""
    compared = facts.observed.get("compared_parameters") or 0
    different = facts.observed.get("different_parameters") or 0
    # a hook of the job's own, or its loop, may average parameters now and then
    if facts.observed.get("has_comm_hook") or _exchanges_itself(facts):
        return None
    if not different or different < DIFFERENT_PART * compared:
        return None
    return Fact(kind, 0.0, "step", values={"different": different, "compared": compared})


def _same_start(facts: StepFacts) -> str:
    if facts.spec.get("engine") == _REPLICATED:
        return (
            "Load weights before DistributedDataParallel(model), which sends rank 0's to all ranks when it is made and"
            " never again; or call load_state_dict on every rank, and not inside of `if rank == 0`. Change parameters"
            " afterwards on all ranks alike, with the same learning rate."
        )
    return (
        "Begin with one model: torch.manual_seed with the same number on all ranks before the model is made, or the"
        " same weights loaded on each rank. Sharding sends no parameters from one replica to another."
    )


def _updates_nothing(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report an optimizer none of whose parameters has a gradient when it steps."""
    # without a backward the optimizer has its values from somewhere else
    if not facts.observed.get("updates_nothing") or "backward" not in facts.activities:
        return None
    why = "they were set to zero before the step"
    if not facts.observed.get("has_model"):
        why = "no module has these parameters"
    return Fact(kind, 0.0, "step", values={"why": why})


def _not_stepped(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report gradients of parameters that are in no optimizer."""
    idle = facts.observed.get("idle_gradient_bytes") or 0
    peak = facts.record.summary.peak_memory_bytes.total
    if not peak or idle < IDLE_PART * peak:
        return None
    return Fact(kind, 0.0, "step", values={"idle": size(idle), "peak": size(peak)})


def _outside_units(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report parameters that no unit of FSDP2 has, though others are sharded: nothing reduces their gradients."""
    count = facts.observed.get("outside_parameters")
    if not count or _ranks(facts) < 2 or _exchanges_itself(facts) or _model_communicates(facts):
        return None
    values = {"outside": plural(count, "parameter"), "size": size(facts.observed.get("outside_bytes") or 0)}
    return Fact(kind, 0.0, "step", values=values)


def _never_zeroed(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report gradients with values when the first backward of a step begins, which adds to them."""
    return Fact(kind, 0.0, "step") if facts.observed.get("never_zeroed") else None


def _remade_optimizer(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report an optimizer that is made anew in most steps."""
    made = facts.activities.get("optimizer made")
    if made is None or made.regular <= REGULAR:
        return None
    return Fact(kind, 0.0, "step", values={"optimizer": facts.observed.get("optimizer") or "optimizer"})


def _same_data(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report ranks that have the same losses, or the same batches, in every step, in a job that shards data."""
    engine = facts.spec.get("engine")
    # the ranks of a tensor-parallel group train on the same data, as they should
    if not facts.spec.get("job") or engine not in (_REPLICATED, *_SHARDED) or facts.observed.get("splits_tensors"):
        return None
    if _ranks(facts) < 2 or _model_communicates(facts, more_than=FIGURES_BYTES):
        return None
    equal, steps = "losses", 0
    # losses that are averaged over the ranks are equal by themselves
    if not _model_communicates(facts):
        steps = _steps_of_equal_losses(facts)
    if not steps:
        equal, steps = "batches", _steps_of_equal_batches(facts)
    if not steps:
        return None
    return Fact(kind, 0.0, "step", values={"equal": equal, "steps": steps, "ranks": _ranks(facts)})


def _same_order(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report epochs in which each rank's samples come in the order of the epoch before, though they are shuffled."""
    begun, same = Counter[int](), Counter[int]()
    for row in facts.record.table("activities"):
        if row["name"] == "epoch begun":
            begun[row["rank"]] += row["count"]
        if row["name"] == "same order":
            same[row["rank"]] += row["count"]
    # all of them: an epoch that is begun anew after a failure has its order again
    if not same or any(same[rank] < begun[rank] for rank in begun):
        return None
    return Fact(kind, 0.0, "step", values={"count": plural(max(same.values()), "time")})


def _steps_of_equal_losses(facts: StepFacts) -> int:
    """The steps of the job if the losses of all its ranks are the same number in each of them; else 0."""
    losses_of_step = []
    for _, rows in grouped(facts.record.table("steps"), itemgetter("step")).items():
        losses = [row["loss"] for row in rows]
        if len(losses) == _ranks(facts) and all(loss is not None and math.isfinite(loss) for loss in losses):
            losses_of_step.append(set(losses))
    # a loss that never changes is the same on all ranks by itself
    different = {loss for losses in losses_of_step for loss in losses}
    if len(losses_of_step) < MANY or len(different) < MANY:
        return 0
    if any(len(losses) > 1 for losses in losses_of_step):
        return 0
    return len(losses_of_step)


def _steps_of_equal_batches(facts: StepFacts) -> int:
    """The profiled steps if all ranks had the same batch in each of them, and not always the same one; else 0.

    With dropout, losses of the same batch differ.
    """
    observed = facts.observed
    steps = observed.get("steps_with_batches") or 0
    # of a graph that every rank has as a whole, the batch is always the same
    different = observed.get("equal_batches") or 0
    if observed.get("ranks_with_batches") != _ranks(facts) or min(steps, different) < FEW_BATCHES:
        return 0
    return steps if observed.get("steps_with_equal_batches") == steps else 0


# these come before all others: they change what is trained
TRAINS_WRONGLY = (
    fault_rule(
        "updates_nothing",
        _updates_nothing,
        "The optimizer steps parameters without gradients ({why}): the model is not trained",
        "None of the optimizer's parameters has a gradient when it steps, so it changes none.",
        "Make the optimizer after the model is sharded or wrapped, with model.parameters() of that model; and call"
        " optimizer.zero_grad() after optimizer.step(), or before the backward.",
    ),
    *UPDATE_FAULTS,
    fault_rule(
        "not_reduced",
        _not_reduced,
        "{who}",
        "No reduction of gradients was seen in the profiled steps, so the ranks' models drift apart.",
        _not_reduced_remedy,
        unless=["updates_nothing"],
    ),
    fault_rule(
        "reduced_early",
        _reduced_early,
        "Gradients are reduced before the last of {times} micro-batches: what it adds stays on its rank",
        "The last reduction of a step ends before the last backward begins, so each rank steps gradients of its own.",
        "Reduce in the last micro-batch: no_sync(), or set_requires_gradient_sync(False), for all but the one after"
        " which the optimizer steps, (i + 1) % accumulation != 0. Of several losses of one forward call backward of"
        " their sum: DistributedDataParallel reduces once for each forward.",
    ),
    fault_rule(
        "different_copies",
        _different_copies,
        "Ranks train different models: {different} of {compared} parameters that were compared differ between ranks"
        " that should hold the same",
        "Their gradients are averaged, and each rank adds the average to parameters of its own: a difference from"
        " before stays, and a checkpoint holds what one of them has.",
        _same_start,
        unless=["updates_nothing", "not_reduced", "reduced_early"],
    ),
    fault_rule(
        "outside_units",
        _outside_units,
        "{outside} ({size}) are outside of all units: nothing reduces their gradients",
        "fully_shard was called on parts of the model only. What is in none of them is on each rank as a whole, and"
        " each rank trains its own; and each part is a root of its own, which stays unsharded until the backward and"
        " gathers nothing ahead.",
        "Call fully_shard(model) on the whole model too, last, before the optimizer is made.",
    ),
    fault_rule(
        "never_zeroed",
        _never_zeroed,
        "Gradients are never set to zero: each step adds to those of all steps before",
        "When the first backward of a step begins, the gradients of the step before are still there.",
        "optimizer.zero_grad() after each optimizer.step().",
    ),
    fault_rule(
        "remade_optimizer",
        _remade_optimizer,
        "The optimizer ({optimizer}) is made anew in each step: its state begins at zero each time",
        "Its averages of gradients and its count of steps are lost, so each step is a first step.",
        "Make the optimizer once, before the loop; to change a learning rate, set it in optimizer.param_groups or take"
        " a scheduler.",
    ),
    fault_rule(
        "same_data",
        _same_data,
        "All {ranks} ranks train on the same data: their {equal} are equal in each of {steps} steps",
        "The average of equal gradients is each of them, so further ranks add nothing.",
        "Give each rank its own part: DataLoader(..., sampler=DistributedSampler(dataset)), of an IterableDataset every"
        " world_size-th sample from the rank's on, or a seed with the rank in it.",
    ),
    fault_rule(
        "same_order",
        _same_order,
        "Each epoch has the order of the one before: DistributedSampler was begun again {count} and its epoch was never"
        " set",
        "With shuffle=True its order depends on its seed and on the number that set_epoch gives it alone.",
        "sampler.set_epoch(epoch) before each epoch, or loader.sampler.set_epoch(epoch).",
        unless=["same_data"],
    ),
    fault_rule(
        "not_stepped",
        _not_stepped,
        "Gradients of {idle} are computed for parameters that no optimizer has",
        "The backward computes them, ranks reduce them, and memory keeps them ({idle} beside a peak of {peak}).",
        "parameter.requires_grad_(False) for what is not trained, before the model is wrapped or sharded; or give"
        " these parameters to the optimizer.",
    ),
)
WRONG = tuple(rule.kind for rule in TRAINS_WRONGLY)
