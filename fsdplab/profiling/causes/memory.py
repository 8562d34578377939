"""The memory's peak: what is most of it, and how a run makes that smaller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdplab.common.names import CATEGORY_ROWS, SAVES_MOST, STRATEGY_ROWS, category_titles
from fsdplab.common.sizes import percent, size
from fsdplab.profiling.rules import Fact, Rule
from fsdplab.profiling.step_facts import StepFacts, Unclaimed
from fsdplab.profiling.vocabulary import words_of


def _peak(kind: str, facts: StepFacts, left: Unclaimed) -> Fact | None:
    """Report the largest category at the memory's peak."""
    summary = facts.record.summary
    split = {name: nbytes for name, nbytes in summary.peak_memory_bytes.split.items() if name in CATEGORY_ROWS}
    total = sum(split.values())
    if not total:
        return None
    # the remedies are those of the category with most bytes
    category = max(split, key=split.__getitem__)
    besides = ""
    if summary.workspace_bytes:
        scratch = size(summary.workspace_bytes)
        besides = f" cuBLAS keeps {scratch} of scratch memory besides, which is not counted."
    values = {
        "total": size(total),
        "bytes": size(split[category]),
        "part": percent(split[category] / total),
        "category": category_titles([facts.spec])[category],
        "smaller": ways_to_lower(facts.spec, category),
        "besides": besides,
    }
    return Fact(kind, 0.0, "memory", values=values)


def ways_to_lower(spec: Mapping[str, Any], category: str) -> str:
    """Ways to make a category smaller that a run does not follow already: what is sharded can be sharded further."""
    words = words_of(spec)
    strategy = STRATEGY_ROWS.get(str(spec.get("strategy")))
    sharded = strategy.cuts if strategy else ()
    # what the run does already is no way to do better
    recomputes = spec.get("checkpoint") not in (None, "none")
    recompute = "" if recomputes else words["recompute"]
    smaller_batch = "" if spec.get("batch_size") == 1 else words["smaller_batch"]
    offloads = spec.get("offload", "none") != "none"
    offload = "" if offloads else words["offload"]
    offload_state = "" if offloads else words["offload_state"]
    reshard = "" if spec.get("strategy") in SAVES_MOST else words["reshard"]
    gather_fewer = "gather fewer ahead" if spec.get("prefetch") else ""
    shard_state = words["shard_further" if "optimizer" in sharded else "shard_state"]
    shard_gradients = words["smaller_units" if "gradients" in sharded else "shard_gradients"]
    shard_parameters = words["shard" if "parameters" in sharded else "shard_more"]
    # by the largest category; "" is a way that the run follows already, or that its engine does not have
    ways = {
        "activations": (recompute, smaller_batch, words["shorter"]),
        "optimizer_state": (shard_state, offload_state),
        "unsharded_gradients": (shard_gradients,),
        "unsharded_parameters": (reshard, words["smaller_units"], gather_fewer),
        "sharded_parameters": (shard_parameters, offload),
        "sharded_gradients": (words["shard"], words["reduce_low"]),
        "communication_buffers": (words["smaller_units"], words["fewer_in_flight"]),
        "other": (words["other"],),
    }
    return ", or ".join(filter(None, ways[category]))


PEAK = Rule(
    "peak",
    _peak,
    "Peak memory is {total}, of which {bytes} ({part}) is {category}",
    "It is the worst rank's, split at the instant of the peak.{besides}",
    "To lower it: {smaller}.",
)
