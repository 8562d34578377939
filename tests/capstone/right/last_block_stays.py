"""The last block stays whole from its forward to its backward."""


def after_forward(unit, output):
    if unit.shared.now_backward:
        return
    if unit not in unit.shared.backward:
        unit.shared.backward.insert(0, unit)
    last = unit.shared.forward[-1:] == [unit] and len(unit.shared.forward) > 1
    settled = any(each.root for each in unit.shared.backward)
    if not torch.is_grad_enabled() or not (unit.root or last and settled):
        release(unit)
    if output.requires_grad:
        output.register_hook(lambda gradient: before_backward(unit))
