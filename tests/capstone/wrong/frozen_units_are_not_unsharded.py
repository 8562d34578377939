"""20.special: a frozen unit's too"""


def before_backward(unit):
    if not unit.shared.now_backward:
        unit.shared.now_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(lambda: end_of_backward(unit.shared))
    if any(item.train for item in unit.items):
        finish_gather(unit)
