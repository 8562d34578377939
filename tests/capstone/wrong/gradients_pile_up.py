"""20.backward: something is left over

The whole parameter keeps its gradient, and autograd adds to it in the next step.
"""


def to_lines(item, unit):
    gradient = item.full.grad
    return pad(gradient.flatten(), (0, unit.n * item.each - item.numel)).view(unit.n, item.each)
