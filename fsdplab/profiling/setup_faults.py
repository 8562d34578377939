"""Faults of how a job is set up: its optimizer, its threads and cores, what it recomputes, and how gradients are kept.

Each is read once, around the step whose memory is measured (recording/observed.py).
"""

from __future__ import annotations

import statistics

from fsdplab.common.sizes import percent, seconds, size
from fsdplab.common.words import plural
from fsdplab.profiling.loop_faults import MANY, in_most_steps
from fsdplab.profiling.rules import Fact, fault_rule
from fsdplab.profiling.step_facts import StepFacts, Unclaimed

SLOW_OPTIMIZER = 0.02  # part of a step that an optimizer may take which steps one tensor after the other
INTERPRETER_KEPT_S = 0.004  # of the 5 ms after which Python asks a thread that computes to let another one run
BUSY_THREAD = 0.1  # part of a step for which such a thread runs
ENOUGH_MEMORY = 0.5  # part of the device's memory below which the peak leaves room


def _looping_optimizer(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report an optimizer that steps one tensor after the other."""
    optimizer = facts.optimizer
    if not facts.observed.get("optimizer_loops") or optimizer is None:
        return None
    # of two optimizers one may loop; earlier records have one name for all
    looping = facts.observed.get("looping") or {facts.observed["optimizer"]: facts.observed.get("parameters") or 0}
    parameters = sum(looping.values())
    if parameters < MANY:
        return None
    # a loop that costs next to nothing is worth a word only where somebody asked for it
    if optimizer.seconds < SLOW_OPTIMIZER * facts.step_s and not facts.observed.get("told_to_loop"):
        return None
    implementations = "have implementations that take" if len(looping) > 1 else "has an implementation that takes"
    values = {
        "optimizer": " and ".join(looping),
        "implementations": implementations,
        "calls": " and ".join(f"torch.optim.{name}(..., fused=True)" for name in looping),
        "parameters": parameters,
    }
    return Fact(kind, optimizer.seconds, "step", values=values)


def _many_groups(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report an optimizer that has about a group for each parameter, though most groups have the same options."""
    parameters = facts.observed.get("parameters") or 0
    groups = facts.observed.get("groups") or 0
    kinds = facts.observed.get("kinds_of_groups") or 0
    # an optimizer that steps one tensor after the other takes as long in one group
    if facts.observed.get("optimizer_loops"):
        return None
    # groups of many parameters are stepped at once, and those with options of their own are needed
    if groups < max(MANY, 0.5 * parameters) or 2 * kinds > groups:
        return None
    # the host's time, since launching the many small kernels takes longer than they do; the median, as a few of these
    # steps are profiled
    took_ns = [row["took_ns"] for row in facts.record.table("activities") if row["name"] == "optimizer"]
    took_s = statistics.median(took_ns) / 1e9 if took_ns else 0.0
    if took_s < SLOW_OPTIMIZER * facts.step_s:
        return None
    values = {"groups": groups, "parameters": parameters, "kinds": plural(kinds, "group")}
    return Fact(kind, took_s, "step", values=values)


def _too_many_threads(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report ranks whose threads are more than the cores that they share."""
    threads = int(facts.observed.get("threads") or 0)
    cores = int(facts.observed.get("cores") or 0)
    ranks = int(facts.observed.get("ranks_of_a_node") or 0)
    # up to half more threads than cores are no fault
    has_enough = 2 * threads * ranks <= 3 * cores
    if facts.record.environment.get("device") != "cpu" or threads < 2 or has_enough:
        return None
    values = {
        "threads": threads,
        "ranks": ranks,
        "cores": plural(cores, "core"),
        "fewer": max(1, cores // max(1, ranks)),
    }
    return Fact(kind, 0.0, "machine", values=values)


def _busy_thread(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report a thread that runs Python beside the loop, which waits for it whenever it gives the interpreter up."""
    wait_s = facts.observed.get("interpreter_wait_s") or 0.0
    thread_s = facts.observed.get("thread_s") or 0.0
    if wait_s < INTERPRETER_KEPT_S or thread_s < BUSY_THREAD * facts.step_s:
        return None
    values = {"thread": facts.observed["thread"], "ran": seconds(thread_s), "wait": seconds(wait_s)}
    cost = min(thread_s, facts.other_s)  # what it costs at most; only orders the findings
    return Fact(kind, cost, "step", rank=facts.observed["thread_rank"], values=values)


def _bound_together(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report ranks that are bound to fewer cores than they are, on a machine that has more."""
    cores = int(facts.observed.get("cores") or 0)
    ranks = int(facts.observed.get("ranks_of_a_node") or 0)
    machine = int(facts.observed.get("cores_of_the_machine") or 0)
    if not cores or cores >= min(ranks, machine):
        return None
    values = {"ranks": ranks, "cores": plural(cores, "core"), "machine": machine}
    return Fact(kind, 0.0, "machine", values=values)


def _recomputed(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report activations that are recomputed though memory is not short."""
    recomputed = in_most_steps(facts, "recomputed")
    memory = _device_memory(facts)
    peak = facts.record.summary.peak_memory_bytes.total
    if recomputed is None or not memory or not peak or peak > ENOUGH_MEMORY * memory:
        return None
    values = {"count": round(recomputed.count), "peak": size(peak), "memory": size(memory)}
    return Fact(kind, recomputed.seconds, "step", values=values)


def _device_memory(facts: StepFacts) -> float | None:
    """Bytes of memory that a rank may use."""
    gpus = facts.record.environment.get("gpus")
    if isinstance(gpus, list) and gpus:
        return float(gpus[0].get("memory_bytes") or 0) or None
    # the ranks of a node share its memory
    cpu = facts.record.environment.get("cpu") or {}
    of_machine = cpu.get("memory_bytes")
    if not of_machine:
        return None
    return of_machine / max(1, facts.observed.get("ranks_of_a_node") or 1)


def _kept_gradients(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report gradients of the step before that are there when the first backward of a step begins."""
    kept = facts.observed.get("kept_gradient_bytes")
    peak = facts.record.summary.peak_memory_bytes.total
    if not kept or not peak or kept < 0.01 * peak:
        return None
    return Fact(kind, 0.0, "memory", values={"kept": size(kept), "peak": size(peak), "part": percent(kept / peak)})


SETUP_FAULTS = (
    fault_rule(
        "looping_optimizer",
        _looping_optimizer,
        "The optimizer steps {parameters} tensors one after the other: {seconds} of each step ({share})",
        "{optimizer} {implementations} all of them at once, and that is not the default here.",
        "{calls}, or foreach=True.",
    ),
    fault_rule(
        "many_groups",
        _many_groups,
        "The optimizer has {groups} groups of parameters for {parameters} parameters, and takes {seconds} of each step"
        " ({share}): it steps one group after the other",
        "Kernels that step many tensors at once (fused, foreach) do so within a group; by their options {kinds} would"
        " do.",
        "Put all parameters with the same options into one group, as {{'params': [...], 'weight_decay': 0.1}}: two are"
        " usual, with weight decay and without.",
    ),
    fault_rule(
        "recomputed",
        _recomputed,
        "Activations are recomputed ({count} blocks a step, {seconds}), although memory is not short: the peak is"
        " {peak} of {memory}",
        "Recomputation pays with time for memory.",
        "{recompute_less}",
    ),
    fault_rule(
        "busy_thread",
        _busy_thread,
        "A thread beside the loop keeps Python busy: {thread} of rank {rank} runs for {ran} of a step of {step_s}",
        "Only one thread at a time runs Python. The loop gives it up in each operator, and waited {wait} each time to"
        " get it back.",
        "Let a process do what the thread does (multiprocessing, with a queue), or do it in the loop every hundredth"
        " step.",
    ),
    fault_rule(
        "bound_together",
        _bound_together,
        "{ranks} ranks are bound to {cores} of the machine's {machine}: they take turns on it",
        "Each rank's affinity allows it no other core.",
        "Bind each rank to cores of its own, or none: look for taskset, numactl, sched_setaffinity and KMP_AFFINITY or"
        " GOMP_CPU_AFFINITY where the job is started, and at the cores that its container or Slurm step was given.",
    ),
    fault_rule(
        "threads",
        _too_many_threads,
        "{ranks} ranks with {threads} threads each compute on {cores}: threads wait for each other's cores",
        "Threads that compute side by side are as slow as the one that has no core.",
        "Fewer threads: OMP_NUM_THREADS={fewer}, or torch.set_num_threads({fewer}) in each rank.",
        unless=["bound_together"],
    ),
    fault_rule(
        "kept_gradients",
        _kept_gradients,
        "Gradients of the step before are kept through the forward: {kept} of a peak of {peak} ({part})",
        "They are there when the first backward begins, although it does not add to them.",
        "optimizer.zero_grad(set_to_none=True), the default, right after the optimizer's step.",
        unless=["never_zeroed"],
    ),
)
