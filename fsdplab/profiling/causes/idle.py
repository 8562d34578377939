"""What makes a step longer without communication: loading on every rank, the optimizer's step, and idle time.

Nothing of it is exposed time, so these rules claim from the step beside the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.sizes import percent, seconds
from fsdplab.profiling.rules import FEWER_RANKS, WORTH_SAYING, Fact, Rule
from fsdplab.profiling.step_facts import StepFacts, Unclaimed, by_rank, of_ranks

LOADING = 0.05  # part of a step that all ranks wait for their data from which on the loader is slow
IDLE = 0.1  # part of a step below which idle time is usual
OPTIMIZER = 0.2  # part of a step from which on the optimizer's step is worth a remedy
_WORTH_LISTING = 0.001  # part of a step from which on another cause of idle time is listed


def _loading_everywhere(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report that all ranks wait for their data: no exposed time, but a part of every step."""
    medians = [statistics.median(of_step.values()) for of_step in of_ranks(facts.loading).values()]
    if min(medians, default=0.0) < LOADING * facts.step_s:
        return None
    means = by_rank(facts.loading)
    who = "Every rank" if len(means) > 1 else "The rank"
    return Fact(kind, min(means.values()), "step", values={"who": who})


# ---- the optimizer's step


def _optimizer_step(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """A large part of each step is the optimizer's; what it exposes of its exchange is claimed by the rules above."""
    optimizer = facts.optimizer
    if optimizer is None or optimizer.seconds < OPTIMIZER * facts.step_s:
        return None
    exchanging = ""
    if optimizer.exchange_s >= WORTH_SAYING * optimizer.seconds:
        exchanging = f", {percent(optimizer.exchanging)} of it exchanging matrices"
    what = "one pass over parameters and state"
    if facts.spec.get("optimizer") == "muon":
        what = "Newton-Schulz's products"
    return Fact(kind, optimizer.seconds, "step", values={"exchanging": exchanging, "what": what})


def _shorter_optimizer_step(facts: StepFacts) -> str:
    optimizer = facts.spec.get("optimizer")
    strategy = STRATEGY_ROWS.get(str(facts.spec.get("strategy")))
    ways = []
    if optimizer == "muon" and facts.spec.get("engine") != "lab":
        ways.append("let each matrix have one owner (fsdplab.engine.whole_matrices): here every rank steps all of them")
    if optimizer == "adamw-foreach":
        ways.append("take the fused AdamW (fused=True), one pass instead of several")
    if strategy and not strategy.cuts and optimizer != "muon":
        ways.append(facts.words["shard_state"])
    ways.append(f"give each step more work, of which it is a smaller part ({facts.words['larger_batch']})")
    remedy = ", or ".join(ways)
    return f"{remedy[0].upper()}{remedy[1:]}."


# ---- idle time

_IDLE_COLUMNS = {  # kind of finding -> column of the table `idle`
    "host_bound": "host_bound_ns",
    "data_loading": "data_loading_ns",
    "synchronisation": "synchronisation_ns",
    "device_copies": "copies_ns",
    "copies_inside": "device_copies_ns",
    "kernel_gaps": "kernel_gap_ns",
    "waiting_for_a_core": "no_core_ns",
    "idle": "rest_ns",
}


def _idle(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report idle time of which this kind is the largest cause; for `idle` it is unknown."""
    by_column = facts.idle_s or {"rest_ns": facts.other_s}  # a record of before does not tell
    causes = {name: by_column.get(column, 0.0) for name, column in _IDLE_COLUMNS.items()}
    # a rule for each cause, of which only that of the largest one reports
    if kind != max(causes, key=causes.__getitem__) or facts.other_s < IDLE * facts.step_s:
        return None
    others = []
    for name, cost in causes.items():
        if name != kind and cost >= _WORTH_LISTING * facts.step_s:
            others.append(f"{name.replace('_', ' ')} {seconds(cost)}")
    values = {"other": seconds(facts.other_s), "whole": percent(facts.other_s / facts.step_s)}
    values["rest"] = f"The rest of it: {', '.join(others)}." if others else ""
    values["of_it"] = f"for {seconds(causes[kind])} " if others else ""
    return Fact(kind, causes[kind], "step", values=values)


_ON_A_DEVICE = (
    "Profile with ProfilerActivity.CPU and ProfilerActivity.CUDA, so that launches are in the trace; where they are,"
    " look in Perfetto for what the queued work waited for: another stream, an event, a peer."
)
_ON_A_CPU = (
    "No operator ran: Python between the operators, work outside of PyTorch, or a thread without a core. A sampling"
    " profiler (py-spy) tells which."
)


def _where_to_look(facts: StepFacts) -> str:
    return _ON_A_DEVICE if facts.record.environment.get("device") == "cuda" else _ON_A_CPU


# ---- the rules


def _idle_rule(kind: str, why: str, remedy: str | Callable[[StepFacts], str], unless: tuple[str, ...] = ()) -> Rule:
    title = f"Nothing ran for {{other}} of each step ({{whole}}): {{of_it}}{why}"
    return Rule(kind, _idle, title, "Neither computing nor communication ran. {rest}", remedy, unless)


OF_THE_STEP = (
    Rule(
        "slow_loading",
        _loading_everywhere,
        "Loading data takes {seconds} of a step of {step_s} ({share})",
        "{who} waits for its data before it computes, in most of the steps.",
        "Load while the step computes. {loader}",
        unless=("slow_loading",),
    ),
    Rule(
        "optimizer_step",
        _optimizer_step,
        "The optimizer's step takes {share} of the step ({seconds}){exchanging}",
        "It is {what}, as long for a small batch as for a large one.",
        _shorter_optimizer_step,
    ),
    _idle_rule(
        "host_bound",
        "the host launched its next work too late",
        "Give the device more work a launch (larger batch, torch.compile, fused operators, CUDA graphs), and keep"
        " Python out of the step.",
    ),
    _idle_rule(
        "data_loading",
        "the host was waiting for its DataLoader",
        "Load ahead: more workers (num_workers), a larger prefetch_factor, pin_memory=True; or prepare the data once"
        " before training.",
        unless=("slow_loading",),
    ),
    _idle_rule(
        "synchronisation",
        "the host was blocked in a synchronising call, so nothing was queued",
        "Take .item(), .cpu() and print of tensors out of the step, or do them every hundredth step; copy with"
        " non_blocking=True.",
    ),
    _idle_rule(
        "copies_inside",
        "data was copied inside the device, and nothing ran beside it",
        "The table of operators says of which units (--tables). Of the model's own copies (.contiguous(), .clone(),"
        " cat) torch.compile leaves fewer; others are an engine's, which packs what it sends.",
    ),
    _idle_rule(
        "device_copies",
        "data was copied between the host and the device, and nothing ran beside it",
        "Copy the next batch on a stream of its own while this one computes (pin_memory=True, non_blocking=True).",
    ),
    _idle_rule(
        "kernel_gaps",
        "many short kernels followed each other, with a gap before each",
        "Fuse them: torch.compile, fused optimizers, CUDA graphs.",
    ),
    _idle_rule("waiting_for_a_core", "the rank waited for a core", FEWER_RANKS),
    _idle_rule("idle", "the reason is unknown", _where_to_look, unless=("preparing",)),
)
