"""A module's own hook before its backward."""


def after_forward(unit, output):
    if unit.shared.now_backward:
        return
    if not hasattr(unit, "hooked"):
        unit.hooked = unit.module.register_full_backward_pre_hook(lambda module, gradients: before_backward(unit))
    if not unit.root or not torch.is_grad_enabled():
        release(unit)
    if unit not in unit.shared.backward:
        unit.shared.backward.insert(0, unit)
    if output.requires_grad:
        output.register_hook(lambda gradient: before_backward(unit))
