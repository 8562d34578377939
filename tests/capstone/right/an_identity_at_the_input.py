"""The end of a backward by an identity function at the input, as FSDP2 has it."""


class Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, unit):
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        after_backward(ctx.unit)
        return gradient, None


def before_forward(unit, args):
    finish_gather(unit)
    if unit.shared.now_backward:
        return None
    ahead(unit, unit.shared.forward)
    if unit not in unit.shared.forward:
        unit.shared.forward.append(unit)
    return tuple(Ends.apply(each, unit) if each.requires_grad else each for each in args)
