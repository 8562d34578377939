"""Four hooks make an engine

Write the bodies of the four hooks. With your five functions they train a GPT as the unsharded twin does.

1. Follow one block through a step in the figure of 05: at which of the four moments is it unsharded, and at which
   resharded?
2. Before each use `unshard(unit.mine, unit.whole)`, after it `reshard(unit.whole)`. The optimizer updates `unit.mine`
   and reads `unit.mine.grad`. The root (`unit.is_root`) stays from forward to backward.
3. after_backward is two lines: `reshard(unit.whole)` and `unit.mine.grad = reduce(unit.take_gradient())`; the other
   three have one call each, two of them under `if not unit.is_root:`.
"""


def hooks(unit, unshard, reshard, reduce):
    """Four functions for one unit: before and after its forward, before and after its backward."""

    def before_forward():  # the module is about to read its parameters
        ### BEGIN SOLUTION
        unshard(unit.mine, unit.whole)
        ### END SOLUTION

    def after_forward():  # nobody reads them until backward; but the root's backward begins at once
        ### BEGIN SOLUTION
        if not unit.is_root:
            reshard(unit.whole)
        ### END SOLUTION

    def before_backward():  # autograd is about to read them again
        ### BEGIN SOLUTION
        if not unit.is_root:
            unshard(unit.mine, unit.whole)
        ### END SOLUTION

    def after_backward():  # the unsharded gradient is there: unit.take_gradient() hands it over, flat
        ### BEGIN SOLUTION
        reshard(unit.whole)
        unit.mine.grad = reduce(unit.take_gradient())
        ### END SOLUTION

    return before_forward, after_forward, before_backward, after_backward


# ---- check: on 3 ranks, in 60 s, facts only

WORK = {"ranks": 3, "model": "gpt-tiny", "steps": 3, "batch_size": 2, "sequence_length": 32, "seed": 1}
SGD = {"optimizer": "SGD", "learning_rate": 0.13}  # Adam hides a gradient's wrong factor


def cases(rank, n):
    yield "gpt-tiny, 3 steps", {**WORK, **SGD}


def observe(hooks, work):
    from fsdplab.teaching.lessons.nb06_whole_model.on_ranks import beside_the_twin

    return beside_the_twin(hooks, work)


LOSSES = "loss minus the twin's, by step"
EXPECTED = {
    LOSSES: [0.0, 0.0, 0.0],
    "unshards in a step": 5,  # two of each block, one of the root
    "reductions in a step": 3,
    "bytes unsharded after a step": 0,
    "bytes unsharded at the peak": 364_288,  # the root and a block
    "parameters that differ from the twin's": [],
}


def wrong_loss(got, right):
    step = next(number for number, apart in enumerate(got[LOSSES]) if apart != 0)
    if step == 0:
        return (
            "already the first forward is wrong, before any update: parameters changed, or were read before they were"
            " unsharded"
        )
    reduced, units = got["reductions in a step"], right["reductions in a step"]
    if not reduced:
        return (
            "the first loss is right and no gradient was reduced, so the ranks' gradients stayed apart: after_backward"
            " hands the unsharded gradient to `reduce`, and sets `unit.mine.grad` to what it returns"
        )
    if reduced < units:
        return (
            f"the first loss is right, but only {reduced} of {units} units reduced a gradient: every unit does in"
            " after_backward, the root too"
        )
    if step > 1:
        return (
            f"losses are right up to step {step - 1}: something is left over from one step to the next; set"
            " `unit.mine.grad` to what `reduce` returns, each time"
        )
    return (
        "the first loss is right, the first update is not: the optimizer reads `unit.mine.grad`; set it to what"
        " `reduce` returns"
    )


KEPT = (
    "blocks stay unsharded from forward to backward, so the whole model is in memory: reshard every unit but the root"
    " in after_forward"
)
SAYS = {
    LOSSES: wrong_loss,
    "unshards in a step": lambda got, right: (
        "a unit is unsharded more than twice: the two functions that come before a use call `unshard`, and no other"
        if got["unshards in a step"] > right["unshards in a step"] + 1
        else "one unshard too many: after its forward the root stays, because its backward begins at once; so it is"
        " neither resharded there nor unsharded again"
        if got["unshards in a step"] > right["unshards in a step"]
        else KEPT
    ),
    "reductions in a step": "every unit reduces once a step, in after_backward",
    "bytes unsharded after a step": "something stays unsharded after the step: after_backward reshards the unit as"
    " well, the root too",
    "bytes unsharded at the peak": KEPT,
    "parameters that differ from the twin's": "losses agree and parameters do not: what after_backward leaves in"
    " `unit.mine.grad` is not this rank's shard of the mean gradient",
    "hung": "the ranks unshard or reduce different units at the same time: call the same functions in the same order on"
    " every rank",
}
