"""20.backward: at the end of a backward by a callback

The root has no input with a gradient.
"""


def end_of_backward(shared):
    finish_reduction(shared)
    shared.now_backward = False
