"""20.special: a frozen one too

The end of a unit's backward is told by its own gradients.
"""


def after_backward(unit):
    if unit.whole and any(item.full.grad is not None for item in unit.items):
        release(unit)
        reduce(unit)


def end_of_backward(shared):
    for unit in shared.forward:
        after_backward(unit)
        release(unit)
    finish_reduction(shared)
    shared.now_backward = False
