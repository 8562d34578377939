"""Order a step

Order unshards, reshards and reductions: at most 3 blocks in memory, and no time beyond the first unshard, the
computation and the last reduction.

1. A message that is listed before a computation travels while it runs. Which unshard could you list earlier?
2. Forward: list `unshard i + 1` before `forward i`. Backward: `unshard i - 1` before `backward i`. The link sends in
   the order of the list, and a gradient is in memory until its reduction has ended.
3. Keep the last block from its forward to its backward. Before `backward i` list `reduce i + 1` first, then
   `unshard i - 1`; `reduce 0` ends the list.
"""


def schedule(n):
    """One step of n blocks as a list of (action, block), in order."""
    ### BEGIN SOLUTION
    ## steps = []
    ## for i in range(n):
    ##     steps += [("unshard", i), ("forward", i), ("reshard", i)]
    ## for i in reversed(range(n)):
    ##     steps += [("unshard", i), ("backward", i), ("reshard", i), ("reduce", i)]
    ## return steps
    steps = [("unshard", 0)]
    for i in range(n - 1):
        steps += [("unshard", i + 1), ("forward", i), ("reshard", i)]
    steps += [("forward", n - 1)]  # its backward comes at once: it stays
    for i in reversed(range(n)):
        if i < n - 1:
            steps += [("reduce", i + 1)]
        if i > 0:
            steps += [("unshard", i - 1)]
        steps += [("backward", i), ("reshard", i)]
    return [*steps, ("reduce", 0)]
    ### END SOLUTION


# ---- check: pure, facts only

NOTHING = "nothing: every entry can run"


def cases(rank, n):
    yield "4 and 6 blocks", (4, 6)


def observe(schedule, sizes):
    from fsdplab.teaching.lessons.nb06_whole_model.schedules import MEMORY_TARGET, ScheduleError, play, shortest, waits

    problem, late, large, held, waited = NOTHING, {}, {}, {}, {}
    for blocks in sizes:
        try:
            played = play(schedule(blocks), blocks)
        except ScheduleError as error:
            problem = f"{blocks} blocks, {error}"
            break
        late[f"{blocks} blocks"] = max(0, played.milliseconds - shortest(blocks))
        large[f"{blocks} blocks"] = max(0, played.peak - MEMORY_TARGET)
        held[f"{blocks} blocks"] = sorted((span.what, span.block) for span in played.held_at_peak)
        waited[f"{blocks} blocks"] = [(span.block, span.start, span.end) for span in waits(played)[1:]]
    return {
        "what cannot run": problem,
        "blocks over the memory target": large,
        "ms over the time target": late,
        "_held": held,
        "_waits": waited,
    }


def too_many_blocks(got, right):
    blocks, over = next((name, more) for name, more in got["blocks over the memory target"].items() if more)
    held = got["_held"][blocks]
    listed = ", ".join(f"{'block' if what == 'unsharded' else 'gradient'} {block}" for what, block in held)
    many = sum(what == "unsharded" for what, _ in held) > 2
    return f"of {blocks}, {3 + over} are in memory at once, the target is 3 ({listed}): " + (
        "reshard a block after its forward, and unshard one block ahead and not more"
        if many
        else "send a finished gradient's reduction before the next unshard, or it waits in memory"
    )


def too_late(got, right):
    blocks, over = next((name, ms) for name, ms in got["ms over the time target"].items() if ms)
    where = "the link sends reductions to the end"
    if got["_waits"][blocks]:
        where = "the rank waits for block {} from {} to {} ms".format(*got["_waits"][blocks][0])
    return (
        f"{blocks} take {over} ms more than the target: {where}; look for the red pieces in the figure. An unshard"
        " hides behind the computation that is listed after it; and what is resharded and unsharded again at once costs"
        " a message"
    )


MET = {"4 blocks": 0, "6 blocks": 0}
EXPECTED = {"what cannot run": NOTHING, "blocks over the memory target": MET, "ms over the time target": MET}
SAYS = {
    "what cannot run": lambda got, right: got["what cannot run"],
    "blocks over the memory target": too_many_blocks,
    "ms over the time target": too_late,
}
