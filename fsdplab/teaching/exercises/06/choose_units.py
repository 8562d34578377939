"""Meet a memory target

Choose units for gpt-20m so that at most 6.5 MB are unsharded at any moment, with at most 80 collectives a step.

1. Two forces: large units hold much memory at once, small ones need many messages. The figure shows where the blocks
   stand.
2. A block has two halves that run one after the other. Look at the names in the table above.
3. Units named "...attention" and "...feed_forward": test `name.endswith(...)`, which takes a tuple of endings.
"""


def choose_units(name, module):
    """True where `module`, called `name` in the model, is to be a unit of its own."""
    ### BEGIN SOLUTION  name: such as "blocks.3.feed_forward.up"; type(module).__name__: "GPTBlock", "Linear", ...
    return name.endswith((".attention", ".feed_forward"))
    ### END SOLUTION


# ---- check: on 2 ranks, in 60 s, facts only

TARGET, LIMIT = 6_500_000, 80  # bytes unsharded, collectives a step


def cases(rank, n):
    yield "gpt-20m, one step", "gpt-20m"


def observe(choose_units, model):
    from fsdplab.teaching.lessons.nb06_whole_model.on_ranks import largest_gathered, one_backward

    engine = one_backward(choose_units, model)
    peak, collectives = largest_gathered(engine.log.rows), sum(row["what"] != "reshard" for row in engine.log.rows)
    return {
        "bytes over the target": max(0, peak - TARGET),
        "collectives over the limit": max(0, collectives - LIMIT),
        "_seen": f"{chosen_in(engine)}; {peak:,} bytes unsharded at the peak, {collectives} collectives",
        "_units": len(engine.units),
    }


def chosen_in(engine):
    """How many units there are, which of them lie in the first block, and which is the largest."""
    inside = [unit.name for unit in reversed(engine.units) if f"{unit.name}.".startswith("blocks.0.")]
    names = [name.removeprefix("blocks.0.") for name in inside]
    largest = max(engine.units, key=lambda unit: unit.whole.nbytes)
    return (
        f"{len(engine.units)} units, in the first block {', '.join(names) or 'none'}; the largest is {largest.name},"
        f" {largest.whole.nbytes:,} bytes"
    )


def too_large(got, right):
    if got["_units"] == 1:
        return (
            "everything is one unit, the root: the whole model is unsharded at once. Return True for some modules; your"
            ' function says no to all of them, to the name "blocks.0.attention" of a "CausalAttention" too'
        )
    return (
        f"at most {TARGET:,} bytes unsharded: a unit is unsharded while it runs, and with it the root and every unit"
        " around it; what no unit claims belongs to the root. The largest unit must be smaller"
        f" ({got['_seen']})"
    )


EXPECTED = {"bytes over the target": 0, "collectives over the limit": 0}
SAYS = {
    "bytes over the target": too_large,
    "collectives over the limit": lambda got, right: (
        f"at most {LIMIT} collectives a step: units this small send many small messages; join what is used together"
        f" ({got['_seen']})"
    ),
}
