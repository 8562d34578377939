"""20.forward: the root is resharded too"""


def after_forward(unit, output):
    if unit.shared.now_backward:
        return
    if not unit.root:
        release(unit)
    if unit not in unit.shared.backward:
        unit.shared.backward.insert(0, unit)
    if output.requires_grad:
        output.register_hook(lambda gradient: before_backward(unit))
