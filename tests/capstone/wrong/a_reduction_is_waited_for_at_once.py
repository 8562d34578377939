"""20.overlap: wait for it when the next one begins"""


def after_backward(unit):
    if unit.whole:
        release(unit)
        reduce(unit)
        finish_reduction(unit.shared)
