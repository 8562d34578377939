"""20.forward: put the shards back

Nothing is resharded before backward.
"""


def after_forward(unit, output):
    if output.requires_grad:
        output.register_hook(lambda gradient: before_backward(unit))
