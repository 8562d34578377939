"""Faults of a job's own loop: what it does in a step besides training, and how it trains.

Each is counted where it happens (recording/activities.py, traces/host_reads.py), or read once (recording/observed.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter

from fsdplab.common.rows import grouped
from fsdplab.common.sizes import percent, seconds, size
from fsdplab.common.words import plural
from fsdplab.profiling.rules import WORTH_SAYING, Fact, Rule, fault_rule
from fsdplab.profiling.step_facts import Activity, StepFacts, Unclaimed, ahead, beside, by_rank
from fsdplab.profiling.traces.host_reads import BEFORE_FORWARD, PREPARING

REGULAR = 0.5  # part of the steps from which on something is done in each step
MANY = 8  # calls, collectives or parameters below which nothing is called many
SMALL_BYTES = 10_000  # a collective of fewer is small: latency is all of it
NORMS_OF_CLIPPING = 2  # single norms that a call of clip_grad_norm_ takes: of the list of norms, and of sharded ones
MANY_FORWARDS = 4  # of a model for each backward; a contrastive loss or one of preferences takes two or three
MANY_READS = 5  # numbers that a step reads out of tensors, from which on they are many
MORE_WORK = 1.4  # CPU time of a rank over the others', from which on it has more work
NEARLY_ALL = 0.75  # part of the steps in which it has
LOADING = 0.1  # part of a step that the loader may take, or the loop for preparing a batch
PREPARING_S = 0.003  # seconds that it may take in any case: a trainer's own callbacks take as long
DROPPED = 0.2  # part of a step's nodes of graphs, and of their time, that no backward uses: then a forward is dropped
GROWING = 0.9  # part of the steps in which memory grows
GROWN = 0.02  # part of the peak by which it has grown in all
STEADY = 0.3  # part of that which the later half of the steps has at least
GROWN_BYTES = 10_000_000  # and by at least so much: what a process holds scatters


def backwards(facts: StepFacts) -> int:
    """How often backward runs in a step."""
    return max(1, round(_times(facts, "backward")))


def micro_batches(facts: StepFacts) -> int:
    """How often backward runs before an optimizer steps.

    Of a GAN, whose two optimizers take turns, that is one backward of the two in a step.
    """
    turns = max(1, round(_times(facts, "turn")))
    return max(1, round(_times(facts, "backward") / turns))


def _times(facts: StepFacts, name: str) -> float:
    """How often a step has an activity, of the steps that have it at all; 0 where none has."""
    activity = facts.activities.get(name)
    if activity is None:
        return 0.0
    # means over all steps: 4 backwards in every second step are a count of 2, regular in 0.5 of them
    return activity.count / max(activity.regular, 0.01)


def in_most_steps(facts: StepFacts, name: str) -> Activity | None:
    """An activity of the loop, if most steps have it."""
    activity = facts.activities.get(name)
    return activity if activity is not None and activity.regular > REGULAR else None


def is_state(gathered: Activity) -> bool:
    """Whether the DTensors that a step gathers are a model's, and not a norm or a loss."""
    return gathered.count >= MANY or gathered.nbytes > SMALL_BYTES


def _done_each_step(*names: str) -> Callable[[str, StepFacts, Unclaimed], Fact | None]:
    """Make a claim of activities of the loop that most steps have."""

    def claims(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
        done: dict[str, Activity] = {}
        for name in names:
            activity = in_most_steps(facts, name)
            if activity is not None:
                done[name] = activity
        # a norm or a loss, which the fault `own_collectives` names
        if "full_tensor" in done and not is_state(done["full_tensor"]):
            del done["full_tensor"]
        if not done:
            return None
        longest = max(done, key=lambda name: done[name].seconds)
        total = sum(activity.seconds for activity in done.values())
        calls = []
        for name, activity in done.items():
            calls.append(f"{plural(max(1, round(activity.count)), 'call')} of {_CALLED[name]}")
        times = max(1, round(sum(activity.count for activity in done.values())))
        values = {
            "calls": ", ".join(calls),
            "took": seconds(total),
            "of_both": percent(total / (total + facts.step_s)),
            "times": "once" if times == 1 else f"{times} times",
        }
        return Fact(kind, total, "step", rank=done[longest].rank, values=values)

    return claims


def _gathered_whole(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report tensors that a loop gathers whole where it neither saves them nor asks for a state dict."""
    if in_most_steps(facts, "saving") or in_most_steps(facts, "state_dict"):
        return None
    return _done_each_step("full_tensor", "summoned")(kind, facts, left)


_CALLED = {
    "state_dict": "state_dict",
    "full_tensor": "full_tensor",
    "summoned": "summon_full_params",
    "saving": "torch.save",
    "evaluation": "eval",
    "garbage_collection": "gc.collect",
    "deep copy": "copy.deepcopy",
    "cache emptied": "torch.cuda.empty_cache",
    "loader begun": "iter(loader)",
    "clipped again": "clip_grad_norm_",
    "compiled": "the compiler",
    "wrapped": "DistributedDataParallel",
    "group made": "new_group",
}


def _reads(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report numbers that are read out of tensors, besides those that are not the loop's own."""
    reads = in_most_steps(facts, "read")
    if reads is None:
        return None
    times = backwards(facts)
    others = 0
    if facts.spec.get("job") and facts.record.environment.get("device") == "cpu":
        others += times  # losses that the recording reads
    if facts.spec.get("trainer") == "Trainer":
        others += times  # what it checks of each loss
    if facts.observed.get("find_unused_parameters"):
        # DDP's map of what was used, and those again that were not
        unused = facts.observed.get("unused_parameters") or 0
        others += times * ((facts.observed.get("parameters") or 0) + unused)
    # of the steps that read at all
    count = round(reads.count / reads.regular) - others
    many = MANY_READS if times == 1 else max(MANY_READS - 1, times)
    if count < many:
        return None
    return Fact(kind, reads.seconds, "step", rank=reads.rank, values={"count": count})


def _read_whole(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report tensors whose numbers the host reads all, as for histograms."""
    reads = in_most_steps(facts, "to numpy")
    if reads is None or reads.count < MANY:
        return None
    return Fact(kind, reads.seconds, "step", rank=reads.rank, values={"count": round(reads.count)})


def _clipped_apart(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report gradients that are clipped one parameter after the other."""
    return _one_by_one(kind, facts, "clipping")


def _norms_apart(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report norms of one parameter after the other, besides those of a call that clips all gradients together."""
    if str(facts.spec.get("engine")).startswith("deepspeed"):  # which takes norms of its own pieces
        return None
    clipping = facts.activities.get("clipping")
    of_a_call = NORMS_OF_CLIPPING
    if facts.spec.get("engine") == "torch-fsdp1":  # whose own clip_grad_norm_ takes one of each parameter
        of_a_call += facts.observed.get("parameters") or 0
    # the norms of a usual call are no fault
    of_clipping = of_a_call * clipping.count if clipping else 0.0
    return _one_by_one(kind, facts, "norm", besides=of_clipping)


def _one_by_one(kind: str, facts: StepFacts, name: str, besides: float = 0.0) -> Fact | None:
    """Report an activity that is done for at least half of the parameters."""
    activity = in_most_steps(facts, name)
    if activity is None:
        return None
    parameters = facts.observed.get("parameters") or 0
    count = activity.count - besides
    if count < max(MANY, 0.5 * parameters):
        return None
    values = {"count": round(count), "parameters": parameters}
    return Fact(kind, activity.seconds, "step", rank=activity.rank, values=values)


def _dropped_graph(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a graph of which no backward is called, as a validation loss builds it without torch.no_grad."""
    dropped = in_most_steps(facts, "dropped graph")
    nodes = facts.activities.get("graph")
    if dropped is None or nodes is None:
        return None
    # both by nodes and by time: a few metrics have nodes too, and take no time
    is_large = dropped.count >= max(MANY, DROPPED * nodes.count)
    if not is_large or dropped.seconds < DROPPED * nodes.seconds:
        return None
    values = {"count": round(dropped.count), "nodes": round(nodes.count)}
    return Fact(kind, dropped.seconds, "step", rank=dropped.rank, values=values)


def _forwards_without_graph(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report forwards of the model that is trained, while it trains, under torch.no_grad in each step."""
    count = facts.observed.get("forwards_without_graph")
    products = in_most_steps(facts, "products without a graph")
    if not count or products is None or products.seconds < WORTH_SAYING * facts.step_s:
        return None
    values = {"count": plural(count, "forward"), "products": round(products.count)}
    return Fact(kind, products.seconds, "step", rank=products.rank, values=values)


def _many_forwards(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a model that runs many times for each backward, as for one sample after the other."""
    forwards = facts.observed.get("forwards") or 0
    times = forwards / backwards(facts)
    if times < MANY_FORWARDS:
        return None
    return Fact(kind, 0.0, "step", values={"times": round(times)})


def _idle_steps(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report an optimizer that steps again although no backward was called since its last step."""
    backward = facts.activities.get("backward")
    if backward is None or backward.regular > NEARLY_ALL or backward.regular * MANY < 1:
        return None
    cost = facts.optimizer.seconds if facts.optimizer is not None else 0.0
    # a backward in every fourth step: 4 steps of the optimizer each, 75 % of them without new gradients
    values = {"times": round(1 / backward.regular), "without": percent(1 - backward.regular)}
    return Fact(kind, cost, "step", values=values)


def _in_eval_mode(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a model that is set to evaluate while it trains, and has layers to which that matters."""
    layers = facts.observed.get("asleep")
    if not layers:
        return None
    listed = " and ".join(f"{name} ({count})" for name, count in layers.items())
    return Fact(kind, 0.0, "step", values={"layers": listed})


def _anomaly_mode(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report that autograd's anomaly detection is on."""
    return Fact(kind, 0.0, "step") if facts.observed.get("anomaly_mode") else None


def _double_precision(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report parameters of a job in fp64."""
    if facts.spec.get("precision") != "fp64" or not facts.spec.get("job"):
        return None
    return Fact(kind, 0.0, "step")


def _grows(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a rank that holds more memory after each step than after the one before."""
    last_profiled = max(facts.steps, default=0)  # steps that are profiled hold the profile
    after = []
    for row in facts.record.table("activities"):
        if row["name"] == "resident" and row["step"] > last_profiled:
            after.append(row)
    peak = facts.record.summary.peak_memory_bytes.total or 0
    for rank, rows in grouped(after, itemgetter("rank")).items():
        held = [row["nbytes"] for row in sorted(rows, key=itemgetter("step"))]
        # steady growth, and enough of it: a cache that fills up grows for a few steps, and allocators scatter
        more = [later - earlier for earlier, later in pairwise(held)]
        growing_steps = sum(growth > 0 for growth in more)
        if len(more) < MANY or growing_steps < GROWING * len(more):
            continue
        grown = held[-1] - held[0]
        # what is kept for good grows as much in the later steps as in the first ones
        grown_later = held[-1] - held[len(held) // 2]
        if grown < max(GROWN_BYTES, GROWN * peak) or grown_later < STEADY * grown:
            continue
        values = {
            "more": size(statistics.median(more)),
            "first": size(held[0]),
            "last": size(held[-1]),
            "steps": len(more),
        }
        return Fact(kind, 0.0, "memory", rank=rank, values=values)
    return None


def _more_work(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Claim the waiting for a CPU rank that uses more CPU time than the others, which use none while they wait."""
    means = by_rank(facts.cpu_s)
    if len(means) < 2 or facts.record.environment.get("device") != "cpu":
        return None
    # CPU time of all threads: a rank that waits uses none, so the one that uses most has the work
    rank = max(means, key=means.__getitem__)
    own, others = beside(facts.cpu_s, rank)
    steps = {step for of_rank, step in facts.cpu_s if of_rank == rank}
    if own < MORE_WORK * others or len(steps) < MANY:
        return None
    # in nearly every step, not in a few that were long by chance
    longer_steps = sum(ahead(facts.cpu_s, rank, step) >= (MORE_WORK - 1) * others for step in steps)
    if longer_steps < NEARLY_ALL * len(steps):
        return None
    cost = left.claim("waiting_ns", at_most=own - others).seconds
    values = {"own": seconds(own), "others": seconds(others), "times": f"{own / others:.1f}"}
    return Fact(kind, cost, rank=rank, values=values)


def _loading(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report that every rank waits for its data in most of the steps; waiting for a core is no part of it."""
    loading = in_most_steps(facts, "loading")
    if loading is None or loading.seconds < LOADING * facts.step_s:
        return None
    return Fact(kind, min(loading.seconds, facts.step_s), "step")


def _preparing(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report that the loop of every rank runs code before each forward while nothing computes, in nearly all steps."""
    busy = _of_profiled_steps(facts, PREPARING)
    alone = _of_profiled_steps(facts, BEFORE_FORWARD)
    # on a machine with too few cores all work takes longer by the clock than by CPU time, and the step does too
    share = facts.record.summary.cpu_share or 1.0
    long_enough = max(PREPARING_S, LOADING * facts.step_s)
    usually = []
    for rank in {rank for rank, _ in facts.compute_s}:
        took, stretched = [], []
        for step in facts.steps:
            # operators may run meanwhile, as for an average of the weights
            cpu_s, alone_s = busy.get((rank, step), 0.0), alone.get((rank, step), 0.0)
            took.append(min(cpu_s, alone_s))
            stretched.append(min(cpu_s / share, alone_s))
        # of 8 steps the third shortest: 6 of them are at least as long
        if sorted(stretched)[int((1 - NEARLY_ALL) * len(stretched))] < long_enough:
            return None
        usually.append(statistics.median(took))
    cost = min(*usually, facts.other_s)
    if cost < max(PREPARING_S, share * LOADING * facts.step_s):
        return None
    has_loader = in_most_steps(facts, "loading") is not None
    what = "The loop prepares each batch itself, which takes" if has_loader else _WITHOUT_LOADER
    since = "the loader's batch is there" if has_loader else "the optimizer's step has ended"
    return Fact(kind, cost, "step", values={"what": what, "since": since})


def _of_profiled_steps(facts: StepFacts, name: str) -> dict[tuple[int, int], float]:
    """Seconds of an activity by rank and profiled step."""
    seconds_of = {}
    for row in facts.record.table("activities"):
        if row["name"] == name:
            seconds_of[row["rank"], row["step"]] = row["took_ns"] / 1e9
    return seconds_of


# without a loader other work of the loop's, such as a log, lies between the same two instants
_WITHOUT_LOADER = "The loop runs code of its own before each forward, such as what prepares each batch, which takes"


def _retained_graphs(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report graphs that are retained after every backward of a step, so after the last one too."""
    retained = in_most_steps(facts, "retained graph")
    backward = facts.activities.get("backward")
    if retained is None or backward is None or retained.count < backward.count:
        return None
    peak = facts.record.summary.peak_memory_bytes
    return Fact(kind, 0.0, "memory", values={"activations": size(peak.split.get("activations", 0))})


LOOP_FAULTS = (
    fault_rule(
        "loader_begun",
        _done_each_step("loader begun"),
        "A data loader is begun {times} in each step, which takes {took} before the first batch is loaded",
        "iter(loader) makes a new sampler, and new workers where it has some.",
        "Begin it once: batches = iter(loader) before the loop and next(batches) in it, or for batch in loader;"
        " persistent_workers=True keeps the workers from one epoch to the next.",
    ),
    fault_rule(
        "slow_loading",
        _loading,
        "Loading data takes {seconds} of a step of {step_s} ({share})",
        "Nothing computes meanwhile: the loop waits for its next batch.",
        "Load while the step computes. {loader}",
        unless=["slow_loading", "loader_begun"],
    ),
    fault_rule(
        "more_work",
        _more_work,
        "Rank {rank} works {times} times as much as the others: {own} of CPU time a step, the others {others}",
        "The others wait for it at their next collective, which costs no CPU time.",
        "Look at rank {rank}'s data (more or longer samples than the others'), and at what else it does in a step:"
        " files, logging, preparing batches.",
        unless=["slow_rank", "late_rank", "slow_loading"],
    ),
    fault_rule(
        "evaluation",
        _done_each_step("evaluation"),
        "An evaluation in each step takes {took}, beside {step_s} of training ({of_both} of both)",
        "The model is set to evaluate, and to train again, in most of the steps.",
        "{evaluate_less}",
    ),
    fault_rule(
        "gathered_whole",
        _gathered_whole,
        "Whole tensors are gathered in each step: {calls}, {took} of each step",
        "Each is an all-gather of its own, and is in memory as a whole on every rank.",
        "Compute on the shards: norms and sums of DTensors need no full_tensor, and to_local() gives a rank's own part;"
        " or do it every hundredth step. {save_less}",
    ),
    fault_rule(
        "state_dict",
        _done_each_step("saving", "state_dict", "full_tensor"),
        "The model's state is gathered or saved in each step: {calls}, {took} of each step",
        "A state dict of sharded parameters that is asked for as a whole gathers all of them.",
        "{save_less}",
        unless=["gathered_whole"],
    ),
    fault_rule(
        "compiled_anew",
        _done_each_step("compiled"),
        "torch.compile compiles anew {times} in each step, which takes {took}",
        "What is compiled depends on something that changes: a shape, a number, a function that is made in the loop.",
        "TORCH_LOGS=recompiles says what changed. Call torch.compile once, before the loop; for lengths that differ"
        " take dynamic=True, or pad them to a few; make numbers that change tensors.",
    ),
    fault_rule(
        "wrapped_anew",
        _done_each_step("wrapped"),
        "The model is wrapped in DistributedDataParallel {times} in each step, which takes {took}",
        "Each time it compares the ranks' models, broadcasts all parameters, and makes buckets and hooks anew.",
        "Wrap it once, before the loop: model = DistributedDataParallel(model).",
    ),
    fault_rule(
        "groups_made",
        _done_each_step("group made"),
        "A group of processes is made {times} in each step (torch.distributed.new_group), which takes {took}",
        "All ranks meet for it; and each group has connections, threads and buffers of its own, until it is destroyed.",
        "Make it once, before the loop, and pass it on: group = dist.new_group(...).",
    ),
    fault_rule(
        "garbage_collection",
        _done_each_step("garbage_collection"),
        "Python's garbage collector runs {times} in each step, for {took}",
        "A full collection looks at every object of the process, of which torch alone has some hundred thousand.",
        "Take gc.collect() out of the loop, or call it every hundredth step; gc.freeze() before the loop leaves out"
        " what stays anyway.",
        unless=["compiled_anew"],
    ),
    fault_rule(
        "deep_copy",
        _done_each_step("deep copy"),
        "The whole model is copied {times} in each step (copy.deepcopy), which takes {took}",
        "A copy allocates everything anew, hooks and buffers too.",
        "Keep one copy, and average into it in place: torch.optim.swa_utils.AveragedModel, or torch._foreach_lerp_ of"
        " both lists of parameters under torch.no_grad().",
        unless=["state_dict", "compiled_anew"],
    ),
    fault_rule(
        "emptied_cache",
        _done_each_step("cache emptied"),
        "torch.cuda.empty_cache is called {times} in each step, for {took}",
        "It waits for the device, and gives memory back that the next step has to ask the driver for again.",
        "Take it out of the loop: memory that is freed is used again without it.",
    ),
    fault_rule(
        "dropped_graph",
        _dropped_graph,
        "Operators build a graph that no backward uses: {count} of the {nodes} nodes of a step, {seconds} ({share})",
        "Such a forward keeps all its activations, and computes as much as one that is trained.",
        "Put with torch.no_grad() around what is not trained (a validation loss, metrics, an average of the weights),"
        " and compute it every hundredth step.",
        unless=["evaluation"],
    ),
    # a loss may need both of the next two: who owns the job knows
    Rule(
        "forwards_without_graph",
        _forwards_without_graph,
        "The model that is trained also runs without a graph in each step ({count}): products take {seconds} ({share})",
        "{products} products of matrices a step are computed under torch.no_grad().",
        "If that is for metrics, take them from the output of the forward that is trained (output.detach()), or every"
        " hundredth step. If the loss needs it, it is no fault.",
        unless=("evaluation",),
    ),
    Rule(
        "many_forwards",
        _many_forwards,
        "The model runs {times} times for each backward",
        "Each forward of a sharded model gathers all units anew, and small batches take as long as larger ones.",
        "If it runs for one sample after the other, put them into one batch (padded, or packed into one sequence); or"
        " call backward after each, with the reduction in the last one.",
    ),
    fault_rule(
        "idle_steps",
        _idle_steps,
        "The optimizer steps {times} times for each backward: {without} of its steps have no new gradients",
        "A step without a backward applies the gradients of the step before again, or none.",
        "Call optimizer.step() once, after the last backward of a step.",
    ),
    fault_rule(
        "in_eval_mode",
        _in_eval_mode,
        "The model is trained in eval mode: its layers {layers} work as in an evaluation",
        "model.eval() was called, and no model.train() after it: Dropout drops nothing, BatchNorm keeps its means.",
        "Call model.train() before the loop, and after each evaluation.",
    ),
    fault_rule(
        "anomaly_mode",
        _anomaly_mode,
        "Autograd's anomaly detection is on in each step",
        "Every operator of the backward is checked for NaN, and every operator of the forward notes its stack.",
        "torch.autograd.set_detect_anomaly(True) only while you look for the origin of a NaN.",
    ),
    fault_rule(
        "double_precision",
        _double_precision,
        "Parameters are fp64: memory, messages and products are twice those of fp32",
        "Few cards compute fp64 at more than a fraction of their rate of fp32.",
        "model.float(), and inputs of torch.float32: arrays of NumPy are fp64 unless they are told otherwise.",
    ),
    fault_rule(
        "growing",
        _grows,
        "Memory grows in each step, by {more}: rank {rank} holds {first}, and {last} {steps} steps later",
        "Something keeps the tensors of every step.",
        "Add up loss.detach() (or loss.item()) and not the loss, which keeps its whole graph; look for lists and"
        " dicts to which tensors, or samples, are added.",
    ),
    fault_rule(
        "retained_graphs",
        _retained_graphs,
        "Every backward retains its graph (retain_graph=True), the last one of a step too",
        "What the graph has saved stays until the next loss takes its name, beside the next forward's: at the peak"
        " there are {activations} of activations.",
        "loss.backward() without retain_graph; it is needed only where another backward goes through the same graph."
        " Of a state that is carried on to the next step, state.detach().",
        unless=["growing"],
    ),
    fault_rule(
        "clipped_apart",
        _clipped_apart,
        "Gradients are clipped one parameter after the other: {count} norms a step of {parameters} parameters",
        "Each norm of a sharded gradient is a collective of its own, and the clipped step is not the usual one: the"
        " norm is meant of all gradients together.",
        "Once for all: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).",
    ),
    fault_rule(
        "clipped_again",
        _done_each_step("clipped again"),
        "Gradients whose norm was taken already are clipped again in each step ({times}, {took})",
        "Each call goes over all gradients, and between ranks that shard them it is a collective.",
        "Once a step: clip_grad_norm_ returns the norm, which can be logged.",
        unless=["clipped_apart"],
    ),
    fault_rule(
        "norms_apart",
        _norms_apart,
        "Norms are taken one parameter after the other: {count} a step of {parameters} parameters",
        "Each is an operator (or several) of its own, and of a sharded tensor a collective.",
        "Take them every hundredth step, and all at once: torch.nn.utils.get_total_norm, or torch._foreach_norm.",
        unless=["clipped_apart", "gathered_whole"],
    ),
    fault_rule(
        "read_whole",
        _read_whole,
        "The host reads {count} tensors whole in each step (.numpy(), .tolist()), as histograms do",
        "Each read waits until all that was queued on the device is done, and copies the tensor.",
        "Take statistics of tensors every hundredth step, and on the device (torch.histc, quantile, norms).",
        unless=["evaluation", "state_dict", "gathered_whole"],
    ),
    fault_rule(
        "reads",
        _reads,
        "The host reads {count} numbers out of tensors in each step (.item(), bool(), print)",
        "Each read waits until all that was queued on the device is done, so nothing is queued meanwhile.",
        "Take .item() and conditions on tensors out of the step and out of hooks: add up on the device, and read once"
        " every hundredth step.",
        unless=["evaluation", "state_dict", "gathered_whole", "anomaly_mode"],
    ),
    # a log of histograms is work of the loop's too
    fault_rule(
        "preparing",
        _preparing,
        "{what} {seconds} of a step of {step_s} ({share})",
        "The main thread is busy from when {since} until the forward, and nothing computes meanwhile: tokenising,"
        " decoding, augmenting or collating in the loop, or a log in Python.",
        "Do it in the Dataset's __getitem__ or the loader's collate_fn, which workers run ahead of the loop,"
        " DataLoader(..., num_workers=4); or prepare the data once, before training.",
        unless=["slow_loading", "loader_begun", "read_whole"],
    ),
)
