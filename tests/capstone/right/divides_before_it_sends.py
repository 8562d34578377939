"""Divided by n first, as FSDP1 does for large n."""


def averaged(mine, unit):
    return mine


def to_lines(item, unit):
    gradient, item.full.grad = item.full.grad, None
    if gradient is None:
        gradient = torch.zeros(item.shape)
    gradient = gradient / unit.n
    return pad(gradient.flatten(), (0, unit.n * item.each - item.numel)).view(unit.n, item.each)
